"""A stop that is asked for while a disk refuses is a stop: the run is interrupted, and nothing is lost by it."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from unbroken.errors import RunInterrupted, StorageError
from unbroken.progress import JournalWriter, RunDir
from unbroken.progress.records.incident import Incident
from unbroken.progress.records.state import RunState
from unbroken.recover.supervise.accept import placing
from unbroken.recover.supervise.accept.placing import CheckpointPlace
from unbroken.testing.fake_cluster.simulated_run import SimulatedRun

from .simulating import Simulate, reach


def refuse(*_: Any, **__: Any) -> None:
    raise StorageError("No space left on device", where="checkpoints")


def refuse_writes(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def told(run: SimulatedRun, words: str) -> bool:
    return any(words in line for line in run.screen.lines)


def save(run: SimulatedRun, step: int) -> None:
    """A checkpoint of the first attempt, on disk."""
    run.hardware.storage.write(run.run_dir.checkpoints, 1, step, {0, 1, 2, 3}, 4)


@pytest.mark.parametrize("what", ["listing", "survey", "claim"])
def test_a_stop_while_a_start_waits_for_the_checkpoints(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        save(run, 7)
        with monkeypatch.context() as m:
            m.setattr(placing, what, refuse)
            run.faults.fail_rank("node-00001", 2, code=None, signal=9)
            await run.until(lambda: told(run, "cannot be reached"))
            await asyncio.sleep(60)
            run.supervisor.request_stop()
            asked = run.loop.time()
            assert await run.task == "interrupted" and run.loop.time() - asked < 30
        assert run.journal("status")[-1]["status"] == "interrupted"
        assert len(run.journal("attempt")) == 1
        run.restart_supervisor()
        await reach(run, 2, 10)
        assert max(c["step"] for c in run.journal("attempt")[-1]["candidates"]) == 7

    simulate(act, 2)


def test_a_stop_while_the_record_is_refused(simulate: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of an incident too: what could not be written is taken for the end of a lost supervisor."""

    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        save(run, 7)
        with monkeypatch.context() as m:
            m.setattr(JournalWriter, "append", refuse_writes)
            run.faults.fail_rank("node-00001", 2, code=None, signal=9)
            await run.until(lambda: told(run, "record cannot be written"))
            run.supervisor.request_stop()
            assert await run.task == "interrupted"
        run.restart_supervisor()
        await reach(run, 2, 10)
        assert max(c["step"] for c in run.journal("attempt")[-1]["candidates"]) == 7

    simulate(act, 2)


def test_a_stop_whose_end_is_refused_is_one_all_the_same(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where news is kept meanwhile that could not be written: it had been waited for without end."""

    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        with monkeypatch.context() as m:
            m.setattr(JournalWriter, "append", refuse_writes)
            run.supervisor.request_stop()
            assert await run.task == "interrupted"
        assert not run.journal("ended")

    simulate(act, 2)


def test_what_an_attempt_went_on_from_is_not_given_up_for_a_stop(tmp_path: Path) -> None:
    """Its seal is left to the next start, which reads it: once sealed, nobody would look again."""
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()

    async def record(kind: str, **fields: Any) -> None: ...

    place = CheckpointPlace(run_dir, "r1", RunState, record, lambda _: None, lambda: True)

    async def read() -> None:
        with pytest.MonkeyPatch.context() as m:
            m.setattr(placing, "open_storage", refuse)
            with pytest.raises(RunInterrupted) as caught:
                await place.read_went_on(1, [("step-00000007.a0001", str(tmp_path))])
            assert caught.value.exit_code == 11

    asyncio.run(read())


async def fail_without_a_file(run: SimulatedRun, m: pytest.MonkeyPatch) -> None:
    """Until the incident is journalled, and its file is not written."""
    await reach(run, 1, 9)
    m.setattr(Incident, "write", refuse_writes)
    run.faults.fail_rank("node-00001", 2, code=None, signal=9)
    await run.until(lambda: run.journal("incident"))


def test_an_incident_that_found_no_room_is_written_at_the_end(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(run: SimulatedRun) -> None:
        with monkeypatch.context() as m, monkeypatch.context() as other:
            m.setattr(placing, "listing", refuse)
            await fail_without_a_file(run, other)
            await run.until(lambda: told(run, "cannot be reached"))
            assert not run.incidents()
            other.undo()
            run.supervisor.request_stop()
            assert await run.task == "interrupted"
        (incident,) = run.incidents()
        assert incident["verdict"]["decided_by"] == "signal", "as it was, not as the journal has it"

    simulate(act, 2)


def test_an_incident_that_never_found_room_is_made_of_the_journal(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(run: SimulatedRun) -> None:
        with monkeypatch.context() as m:
            await fail_without_a_file(run, m)
            run.supervisor.request_stop()
            assert await run.task == "interrupted"
        assert not run.incidents()
        run.restart_supervisor()
        await run.until(lambda: run.incidents())
        (incident,) = run.incidents()
        (record,) = run.journal("incident")
        assert (incident["number"], incident["kind"], incident["step"]) == (1, "failed", record["step"])
        assert incident["why"] == record["why"] and "could not be written" in incident["verdict"]["notes"][0]
        assert "SIGKILL" in incident["verdict"]["root"]["text"]
        await run.until(lambda: run.journal("resumed"))
        await asyncio.sleep(1)
        assert run.incidents()[0]["resumed"] is not None and not told(run, "stays open")

    simulate(act, 2)


def test_a_record_of_an_incident_that_is_over_says_when(tmp_path: Path) -> None:
    made = Incident.from_record(
        {"kind": "incident", "incident": 3, "attempt": 2, "what": "hung", "step": 5, "t": 100.0}
    )
    made.take_resumed({"kind": "resumed", "seconds": 11.0, "first_step": 4, "steps_lost": 2, "attempt": 3})
    assert (made.resumed_s, made.resumed_step, made.steps_lost, made.next_attempt) == (11.0, 4, 2, 3)
    assert Incident.from_json(made.as_json()) == made
