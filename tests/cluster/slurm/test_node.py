"""This package's program on a node: what it takes for its own node's."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import uuid

import pytest

from unbroken.cluster.contract import Event, Lost
from unbroken.cluster.slurm.node import ThisNode


def start_marked(run_id: str, node: str) -> subprocess.Popen[bytes]:
    marks = {"UNBROKEN_RUN_ID": run_id, "UNBROKEN_NODE": node, "UNBROKEN_ROLE": "agent"}
    return subprocess.Popen(["sleep", "60"], env={**os.environ, **marks})


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found by /proc")
def test_another_node_on_the_same_machine_is_not_taken_for_this_one() -> None:
    """Where several daemons run on one machine, a node set down made the others report that they were lost."""
    run_id = uuid.uuid4().hex[:8]
    mine, others = start_marked(run_id, "n1"), start_marked(run_id, "n2")

    async def follow() -> list[Event]:
        cluster, seen = ThisNode(run_id, "n1"), []
        events = cluster.events()
        assert [launch.partition("/")[0] for launch in cluster.launches()] == ["n1"]
        others.kill()
        others.wait()
        mine.kill()
        mine.wait()
        async with asyncio.timeout(10):
            async for event in events:
                seen.append(event)
                if isinstance(event, Lost):
                    break
        await cluster.close()
        return seen

    try:
        seen = asyncio.run(follow())
    finally:
        for process in (mine, others):
            process.kill()
            process.wait()
    assert {e.node for e in seen} == {"n1"}  # type: ignore[attr-defined]
