"""Pods of Kubernetes keep the contract, with real processes: the API is a fake one, the client and the pods' programs are not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip(
    "kubernetes_asyncio", reason="needs kubernetes_asyncio: pip install -r requirements/all.txt"
)
pytest.importorskip("kmock", reason="needs kmock: pip install -r requirements/all.txt")
pytest.importorskip(
    "kubernetes_validate", reason="needs kubernetes-validate: pip install -r requirements/all.txt"
)

from ..contract import ClusterContract
from .bench import KubernetesBench, clear_memory

pytestmark = pytest.mark.slow


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[KubernetesBench]:
    made = KubernetesBench(tmp_path)
    with made.site:
        yield made
    clear_memory(made.run_id)


class TestKubernetes(ClusterContract):
    pass
