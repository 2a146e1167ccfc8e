"""Keepers for the tests of checkpoints; each ends with its test."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.keepers import FakeAgent, end_keepers


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Callable[..., FakeAgent]]:
    """Starts fake agents with a keeper each: agents(node="node-001", ...)."""
    started: list[FakeAgent] = []

    def start(**how: Any) -> FakeAgent:
        agent = FakeAgent(tmp_path, **how)
        started.append(agent)
        return agent

    yield start
    for agent in started:
        agent.end()


@pytest.fixture
def agent(agents: Callable[..., FakeAgent]) -> FakeAgent:
    """One fake agent with its keeper."""
    return agents()


@pytest.fixture
def own_keepers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A scratch folder of its own for the keepers that Checkpointers start; they end with the test."""
    scratch = Path(tempfile.mkdtemp(prefix="ub-"))
    monkeypatch.setenv("UNBROKEN_SCRATCH", str(scratch))
    monkeypatch.setenv("UNBROKEN_ORPHAN_GRACE", "5")
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "UNBROKEN_KEEPER",
        "UNBROKEN_ATTEMPT",
        "UNBROKEN_RUN_DIR",
    ):
        monkeypatch.delenv(name, raising=False)
    yield scratch
    end_keepers(scratch)
    shutil.rmtree(scratch, ignore_errors=True)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    import torch.distributed as dist

    before = dict(os.environ)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
