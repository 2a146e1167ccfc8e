"""Fixtures of the trace tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from unbroken.trace.readers import ReadOptions, load
from unbroken.trace.store import Store
from unbroken.trace.synthetic import generate

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def fixtures() -> Path:
    """The folder of small trace files."""
    return FIXTURES


@pytest.fixture
def read() -> Iterator[object]:
    """read(name, **options): a store with one fixture (or path) in it; closed at the end."""
    stores: list[Store] = []

    def go(name: str | Path, **options: object) -> Store:
        store = load([FIXTURES / name], ReadOptions(**options))  # type: ignore[arg-type]
        stores.append(store)
        return store

    yield go
    for s in stores:
        s.close()


@pytest.fixture(scope="session")
def seren(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 150,000 synthetic jobs of Seren, incidents, nodes and samples."""
    folder = tmp_path_factory.mktemp("seren")
    plan = generate.TracePlan("Seren", 150_000, seed=7)
    generate.write_jobs(plan, folder / "jobs.parquet")
    generate.write_incidents(plan, folder / "incidents.parquet")
    generate.write_nodes(plan, folder / "nodes.parquet")
    generate.write_samples(plan, folder / "samples.parquet", nodes=24, hours=24, every_s=300)
    return folder


@pytest.fixture(scope="session")
def kalos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with 120,000 synthetic GPU jobs of Kalos."""
    path = tmp_path_factory.mktemp("kalos") / "jobs.parquet"
    generate.write_jobs(generate.TracePlan("Kalos", 120_000, seed=7, cpu_jobs=False), path)
    return path
