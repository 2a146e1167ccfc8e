from __future__ import annotations

from pathlib import Path

import pytest

from unbroken import machine
from unbroken.machine import (
    available_memory,
    cgroup_headroom,
    find_kill_count,
    read_kill_count,
    usable_cpus,
    usable_memory,
)


def test_the_tightest_limit_of_all_cgroups_above_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "cg" / "job" / "step"
    group.mkdir(parents=True)
    (tmp_path / "proc").write_text("0::/job/step\n")
    assert cgroup_headroom(tmp_path / "proc", tmp_path / "cg") is None
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("100\n")
    (group.parent / "memory.max").write_text("1000\n")
    (group.parent / "memory.current").write_text("400\n")
    (group.parent / "memory.stat").write_text("anon 1\ninactive_file 50\n")
    assert cgroup_headroom(tmp_path / "proc", tmp_path / "cg") == 650
    v1 = tmp_path / "cg" / "memory" / "job"
    v1.mkdir(parents=True)
    (tmp_path / "proc1").write_text("4:memory:/job\n")
    (v1 / "memory.limit_in_bytes").write_text("500")
    (v1 / "memory.usage_in_bytes").write_text("300")
    (v1 / "memory.stat").write_text(
        "inactive_file 1\nactive_file 2\ntotal_inactive_file 150\ntotal_active_file 50\n"
    )
    assert cgroup_headroom(tmp_path / "proc1", tmp_path / "cg") == 400
    whole = usable_memory()
    monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cg")
    assert usable_memory() == 1000 < whole


def test_this_machine() -> None:
    free = available_memory()
    assert free is not None
    assert 0 < free <= usable_memory()
    assert usable_cpus() >= 1


def test_kills_for_memory_are_counted_where_the_controller_is_on(tmp_path: Path) -> None:
    def process(number: int, groups: str) -> int:
        (tmp_path / "proc" / str(number)).mkdir(parents=True)
        (tmp_path / "proc" / str(number) / "cgroup").write_text(groups)
        return number

    def find(pid: int) -> Path | None:
        return find_kill_count(pid, tmp_path / "proc", tmp_path / "cg")

    held = tmp_path / "cg" / "job" / "unbroken" / "attempt-0001"
    held.mkdir(parents=True)
    rank = process(7, "0::/job/unbroken/attempt-0001\n")
    assert find(rank) is None and find(8) is None
    events = tmp_path / "cg" / "job" / "memory.events"
    events.write_text("low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\noom_group_kill 0\n")
    assert find(rank) == events and read_kill_count(events) == 2, "the nearest above it: ours only hold"
    container = process(9, "0::/\n")
    (tmp_path / "cg" / "memory.events").write_text("oom_kill 5\n")
    assert find(container) == tmp_path / "cg" / "memory.events", "its own root, as a container sees it"
    assert find(process(11, "0::/../ranks\n")) is None, "of another container of the pod"
    v1 = tmp_path / "cg" / "memory" / "job"
    v1.mkdir(parents=True)
    old = process(10, "4:memory:/job\n0::/\n")
    (v1 / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert find(old) == v1 / "memory.oom_control"
    (v1 / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\n")
    assert read_kill_count(v1 / "memory.oom_control") is None, "older than Linux 4.13"
    assert read_kill_count(tmp_path / "none") is None
