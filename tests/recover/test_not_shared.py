"""A run directory that a node has not got: refused before training where it was said to be shared, else told what follows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from unbroken.errors import RunStopped
from unbroken.recover.supervise.nodes.node import Node
from unbroken.testing.fake_cluster.simulated_run import SimulatedRun

from .simulating import reach, simulate_in


@pytest.mark.parametrize("record", ["shared", "own-disk"])
def test_a_run_directory_that_is_not_on_every_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: str
) -> None:
    monkeypatch.setattr(Node, "has_folder", property(lambda node: node.name != "node-00001"))

    async def act(run: SimulatedRun) -> None:
        run.supervisor._spec = replace(run.spec, record=record)
        if record == "own-disk":
            await reach(run, 1, 1)
            assert any(
                "node-00001 has not got the run directory: its logs come" in x for x in run.screen.lines
            )
            return
        await run.until(run.task.done)
        with pytest.raises(RunStopped, match="every host has the run directory, and node-00001 has not") as e:
            run.task.result()
        assert "--record own-disk" in (e.value.hint or "") and not run.journal("attempt")

    simulate_in(tmp_path)(act, 2)
