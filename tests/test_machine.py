from __future__ import annotations

from pathlib import Path

import pytest

from unbroken import machine
from unbroken.machine import available_memory, cgroup_headroom, usable_cpus, usable_memory


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
