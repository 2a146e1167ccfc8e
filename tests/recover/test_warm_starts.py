"""What a run says of ranks that start cold: which node, and whether its agent is another one by now."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from unbroken.progress import RunDir
from unbroken.recover.node.logs.folder import NodeFolder
from unbroken.recover.node.ranks.process import LaunchOrder, describe_start
from unbroken.recover.node.warm.pool import NOT_TOLD
from unbroken.recover.node.warm.warming import _LAUNCH
from unbroken.recover.supervise.launch.warm_starts import WarmStarts
from unbroken.recover.supervise.nodes.node import Node


def test_a_cold_rank_is_told_with_what_became_of_its_agent() -> None:
    """Its warm processes went with the agent: who reads that none was made would look for a fault of theirs."""
    nodes = {"b1": Node("b1"), "b3": Node("b3", agent_before="was ended by signal 9")}
    noted: dict[str, Any] = {}
    said: list[str] = []

    async def record(kind: str, **fields: Any) -> None:
        noted.update(fields, kind=kind)

    def start(work: Any) -> None:
        if "record" in work.__name__:
            asyncio.run(work)
        work.close()

    starts = WarmStarts(
        SimpleNamespace(warm="auto"), SimpleNamespace(nodes=nodes), SimpleNamespace(record_soft=record),  # type: ignore[arg-type]
        SimpleNamespace(start=start), said.append, lambda _: True,  # type: ignore[arg-type]
    )  # fmt: skip
    attempt: Any = SimpleNamespace(number=2, ranks=[0, 1], warm=None, cold_why="", first_step=None)
    answers = {"b1": {"cold": {}}, "b3": {"cold": {"1": "none was made"}}}
    starts.note_launch(attempt, SimpleNamespace(restarts=1), answers)  # type: ignore[arg-type]
    why = "none was made (b3 has a new agent: the one before was ended by signal 9)"
    assert (attempt.warm, attempt.cold_why) == (1, why)
    assert noted == {"kind": "launched", "attempt": 2, "warm": 1, "cold": {why: 1}}
    assert said == [f"1 of 2 ranks start cold: {why}"]
    assert nodes["b3"].agent_before == "", "said once"


def test_a_command_given_again_does_not_say_that_its_new_agents_have_nothing_warm() -> None:
    """It is so at every stop and start, and nobody can do anything about it; later it would be news."""
    said: list[str] = []
    noted: list[Any] = []

    async def record(kind: str, **fields: Any) -> None:
        noted.append(fields["cold"])

    def start(work: Any) -> None:
        if "record" in work.__name__:
            asyncio.run(work)
        work.close()

    starts = WarmStarts(
        SimpleNamespace(warm="auto"), SimpleNamespace(nodes={"b1": Node("b1")}), SimpleNamespace(record_soft=record),  # type: ignore[arg-type]
        SimpleNamespace(start=start), said.append, lambda _: True,  # type: ignore[arg-type]
    )  # fmt: skip
    attempt: Any = SimpleNamespace(number=2, ranks=[0, 1], warm=None, cold_why="", first_step=None)
    for _ in range(2):
        starts.note_launch(
            attempt, SimpleNamespace(restarts=1), {"b1": {"cold": {"0": NOT_TOLD, "1": NOT_TOLD}}}  # type: ignore[arg-type]
        )  # fmt: skip
    assert said == [f"all ranks start cold: {NOT_TOLD}"], "of the second launch alone"
    assert noted == [{NOT_TOLD: 2}] * 2, "the journal has it"


def test_a_warm_process_may_become_the_rank_of_the_next_attempt_on_a_gpu_too(tmp_path: Path) -> None:
    """Whatever an order changes from attempt to attempt has to be among what may change: one more variable of the flight recorder had
    all ranks with GPUs start cold, and nothing but a measurement said so."""

    def describe(attempt: int, port: int, resume: str, skips: str) -> dict[str, str]:
        order = LaunchOrder(
            attempt=attempt, run_id="r", command=("train.py",), cwd="/", ranks={0: 0}, world_size=2, slot=0, slots=2, nproc=1,
            master_addr=f"10.0.0.{attempt}", master_port=port, restarts=attempt - 1, devices="0", interface="eth0", resume_from=resume,
            skips=skips,
        )  # fmt: skip
        folder = NodeFolder(RunDir(tmp_path), RunDir(tmp_path))
        start = describe_start(order, 0, 0, folder, "n0", tmp_path / "pages", tmp_path / "keeper.sock")
        return dict(start.env)

    before, after = describe(1, 29501, "", ""), describe(2, 29502, "/own/step-9", "3:5")
    changed = {k for k in {**before, **after} if before.get(k) != after.get(k)}
    assert "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" in changed and "MASTER_PORT" in changed
    refused = {k for k in changed if k not in _LAUNCH and not k.startswith(("UNBROKEN_", "TORCHELASTIC_"))}
    assert not refused
