"""What this machine offers to virtual nodes: what fits, memory for keepers, names and folders."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from unbroken.cluster import local, local_events
from unbroken.cluster.contract import Request
from unbroken.errors import DoesNotFit


def memory(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    monkeypatch.setattr(local, "available_memory", lambda: int(gib * 2**30))


def test_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    memory(monkeypatch, 16)
    local.check_fits(2, 4, 1)
    with pytest.raises(DoesNotFit, match=r"100 ranks on 10 nodes need at least .* 16 GiB is free") as e:
        local.check_fits(10, 10, 0)
    assert e.value.exit_code == 14
    memory(monkeypatch, 1e6)
    monkeypatch.setattr(local.os, "cpu_count", lambda: 2)
    with pytest.raises(DoesNotFit, match="2 cores"):
        local.check_fits(129, 1, 0)


def test_a_run_that_has_its_nodes_may_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Who takes it over while it trains is not told that it does not fit beside itself."""
    monkeypatch.setattr(local_events, "find_root", lambda run_id: tmp_path / run_id)
    memory(monkeypatch, 16)
    request = Request(2, 1, 1)
    asyncio.run(local_events.LocalCluster("mine").acquire(request))
    memory(monkeypatch, 0.1)
    local_events.LocalCluster("mine").check(request)
    for other in (local_events.LocalCluster("new"), local_events.LocalCluster("mine")):
        with pytest.raises(DoesNotFit):
            other.check(request if other.run_id == "new" else Request(3, 1, 1))


def test_keepers_share_half_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    memory(monkeypatch, 12)
    assert local.share_memory(3) == 2 * 2**30
    assert local.share_memory(0) == 6 * 2**30


def test_each_run_and_node_has_a_place_of_its_own() -> None:
    assert [local.name_node(i) for i in (0, 12, 1000)] == ["node-000", "node-012", "node-1000"]
    assert local.find_root("a") != local.find_root("b") and local.find_root("a") == local.find_root("a")
