"""Whether the next attempt may start beside what is not proven gone."""

from __future__ import annotations

from pathlib import Path

from unbroken.cluster import EndedProcesses
from unbroken.progress import RunDir
from unbroken.recover.supervise.fence.proof import Unproven, of_message

LOST = EndedProcesses(proven=False, why="marks only")


def test_what_an_agent_says() -> None:
    assert of_message({}).gone
    assert of_message({"gone": False, "survivors": [7], "proven": True}).survivors == (7,)
    assert of_message(
        {"gone": False, "survivors": [], "proven": False, "unproven_why": "x"}
    ) == EndedProcesses((), False, "x")


def test_it_is_said_once_and_forgotten_when_proven() -> None:
    u = Unproven()
    assert u.take("node-000", LOST, 1) == "marks only"
    assert u.take("node-000", LOST, 2) == ""
    assert "[7] survived kill -9" in u.take("node-001", EndedProcesses((7,)), 2)
    assert u.take("node-000", EndedProcesses(), 3) == "" and list(u.nodes) == ["node-001"]


def test_the_next_attempt_waits_only_where_an_old_process_could_overwrite(tmp_path: Path) -> None:
    run_dir, u = RunDir(tmp_path), Unproven()
    assert u.in_the_way(run_dir, accepted=False) == ""
    u.take("node-000", LOST, 1)
    assert u.in_the_way(run_dir, accepted=True) == "", "checkpoints of ours are accepted by name"
    assert u.in_the_way(run_dir, accepted=False) == "node-000: marks only"
    assert u.in_the_way(run_dir, accepted=False, asked={2}), "of another attempt nothing is known by that"
    assert u.in_the_way(run_dir, accepted=False, asked={1}) == "", (
        "it saves by our Checkpointer, and has not yet"
    )
    run_dir.output(1).mkdir(parents=True)
    assert u.in_the_way(run_dir, accepted=False), "an empty folder is no sign that the script uses it"
    (run_dir.output(1) / "model.pt").write_text("x")
    assert u.in_the_way(run_dir, accepted=False) == ""


def test_a_person_makes_sure(tmp_path: Path) -> None:
    run_dir, u = RunDir(tmp_path), Unproven()
    u.take("node-000", LOST, 3)
    file = run_dir.made_sure(3, "node-000")
    assert str(file) in u.what_to_do(run_dir) and u.confirmed(run_dir) == []
    file.parent.mkdir(parents=True)
    file.touch()
    assert u.confirmed(run_dir) == ["node-000"]
    u.forget("node-000")
    assert u.in_the_way(run_dir, accepted=False) == ""


def test_another_way_of_holding_proves_nothing_of_what_was_held_before() -> None:
    """Marks, then a cgroup in the same run: that the cgroup is empty says nothing of who shed his marks."""
    u = Unproven()
    assert u.take("node-000", LOST, 1, "marks")
    assert u.take("node-000", EndedProcesses(), 2, "cgroup") == "" and u.nodes["node-000"].attempt == 1
    assert (
        u.take("node-000", EndedProcesses((7,)), 2, "cgroup") == "marks only; processes [7] survived kill -9"
    )
    assert u.take("node-000", EndedProcesses((7,)), 3, "cgroup") == "", "said once"
    assert u.nodes["node-000"].held == "marks"
    u.take("node-001", EndedProcesses((7,)), 2, "cgroup")
    u.take("node-001", EndedProcesses(), 3, "cgroup")
    assert list(u.nodes) == ["node-000"]
