"""What led to a verdict is kept with the incident: the run directory alone gives the same verdict again."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unbroken.diagnose import Facts, diagnose
from unbroken.diagnose.engine import examine
from unbroken.diagnose.judge.facts import HangFact, RankExit, RankPlace
from unbroken.diagnose.observed.stored import SCHEMA, read_facts, write_facts
from unbroken.errors import InputError
from unbroken.progress import RunDir
from unbroken.progress.spec import Timeouts
from unbroken.testing.fake_cluster import Script, SimulatedLoop, run_simulated
from unbroken.testing.fake_cluster.simulated_run import SimulatedRun
from unbroken.units import Duration

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "data" / "2026-11"


def until_incident(folder: Path, break_it: Callable[[SimulatedRun], Any]) -> dict[str, Any]:
    """A run of two nodes and a spare that is broken once and whose supervisor dies in the attempt after; the incident."""

    async def main(loop: SimulatedLoop) -> dict[str, Any]:
        timeouts = Timeouts(suspect=Duration(30), hang=Duration(60), lease=Duration(15))
        script = Script(start_s=20, step_s=5, save_every=4)
        run = SimulatedRun(loop, folder, 2, spares=1, nproc=2, script=script, timeouts=timeouts)
        await run.until(lambda: run.step() >= 9)
        break_it(run)
        await run.until(lambda: run.journal("resumed"))
        run.kill_supervisor()
        await asyncio.sleep(0)
        return run.incidents()[-1]

    incident = run_simulated(main)
    for later in RunDir(folder).attempt_numbers()[incident["attempt"] :]:
        shutil.rmtree(RunDir(folder).attempt(later))
    return incident


@pytest.mark.parametrize(
    "break_it",
    [
        lambda run: run.faults.fail_rank("node-00001", 2, code=3),
        lambda run: run.faults.hang_rank("node-00001", 3),
        lambda run: run.faults.lose("node-00001"),
    ],
    ids=["a failed rank", "a hang", "a lost node"],
)
def test_a_run_directory_gives_the_verdict_that_the_run_came_to(tmp_path: Path, break_it: Any) -> None:
    folder = tmp_path / "run"
    incident = until_incident(folder, break_it)
    again = json.loads(json.dumps(diagnose([folder]).as_json()))
    assert again == incident["verdict"]
    RunDir(folder).facts(incident["attempt"]).unlink()
    assert diagnose([folder]).as_json() != again, "the ranks wrote nothing: it was the facts"


ALL = Facts(
    exits=(RankExit(3, "n1", None, 9, 100.0, earliest=99.5, oom=False),), hang=HangFact(7, "training", 3.5, (1,), where="x"),
    nodes=((3, "n1"),), oom_kills=(3,), step=7, silent={"n1": "gone"}, places={3: RankPlace(7, ("f",), "running")},
    lease_expired=RankExit(0, "n0", 1, None, 5.0),
)  # fmt: skip


def test_facts_of_the_golden_set_are_read() -> None:
    assert read_facts(GOLDEN / "facts.json") == ALL


def test_facts_come_back_and_those_of_a_newer_version_too(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.attempt(2).mkdir(parents=True)
    write_facts(run, 2, ALL)
    path = run.facts(2)
    assert read_facts(path) == ALL
    value = json.loads(path.read_text())
    value["facts"]["of a later version"] = 1
    path.write_text(json.dumps(value))
    with pytest.raises(InputError, match="facts"):
        read_facts(path)
    path.write_text(json.dumps(value | {"schema": SCHEMA + 1}))
    assert read_facts(path) == ALL


@pytest.mark.parametrize("torn", [b"", b"{}", b"[1]", b'{"schema": 1, "attempt": 1, "facts": {"step": "x"}}'])
def test_facts_that_cannot_be_read_are_said_and_the_logs_are_judged(tmp_path: Path, torn: bytes) -> None:
    run = RunDir(tmp_path)
    run.create()
    (tmp_path / "run.toml").write_text("")
    log = run.rank_log(1, "node-000", 0)
    log.parent.mkdir(parents=True)
    log.write_text(
        "Traceback (most recent call last):\n  File \"a.py\", line 1, in <module>\nKeyError: 'x'\n"
    )
    run.facts(1).write_bytes(torn)
    found = examine([tmp_path])
    assert found.verdict.reason == "KeyError" and "cannot be read" in found.notes[0]
