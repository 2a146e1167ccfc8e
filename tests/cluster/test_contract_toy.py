"""A new backend is one file (`toy`) and one registration: then it keeps the contract like any other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from unbroken.cluster import registry
from unbroken.cluster.contract import AgentCommand, Cluster
from unbroken.cluster.local_events import LocalCluster
from unbroken.errors import RunError, UnknownKey

from .contract import Bench, ClusterContract, eventually
from .toy import SITES, Site, ToyCluster


class ToyBench(Bench):
    def __init__(self) -> None:
        self.site = SITES["bench"] = Site()

    def wall(self) -> float:
        return time.time()

    def open(self) -> Cluster:
        return registry.make_cluster("toy", "run-1", {"site": "bench"})

    def command(self) -> AgentCommand:
        return AgentCommand("toy.agent")

    async def seen_by(self, node: str) -> AgentCommand:
        await eventually(lambda: node in self.site.agents)
        return self.site.agents[node].command

    def end(self, node: str, code: int) -> None:
        self.site.end(node, code)

    def kill(self, node: str) -> None:
        self.site.end(node, signal=9)

    def left(self, node: str) -> bool:
        return node in self.site.agents


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    registry.register("toy", ToyCluster)


class TestToyCluster(ClusterContract):
    @pytest.fixture
    def bench(self, registered: None) -> Iterator[ToyBench]:
        yield ToyBench()


def test_a_name_stands_for_one_cluster(registered: None) -> None:
    assert {"local", "toy"} <= set(registry.names())
    registry.register("toy", ToyCluster)
    for taken in ("toy", "local"):
        with pytest.raises(ValueError, match=f"'{taken}' already"):
            registry.register(taken, LocalCluster)
    with pytest.raises(UnknownKey, match=r"unknown cluster 'locl'.* Did you mean 'local'"):
        registry.make_cluster("locl", "run-1")


def test_a_package_that_is_installed_adds_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "toys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[unbroken.clusters]\ntoy = tests.cluster.toy:ToyCluster\nbroken = tests.cluster.toy:NoSuchCluster\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert {"broken", "local", "toy"} <= set(registry.names())
    assert isinstance(registry.make_cluster("toy", "run-1"), ToyCluster)
    with pytest.raises(RunError, match="'broken' cannot be loaded"):
        registry.make_cluster("broken", "run-1")
