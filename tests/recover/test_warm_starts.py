"""What a run says of ranks that start cold: which node, and whether its agent is another one by now."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

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
