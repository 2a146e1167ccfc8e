"""`unbroken run --standby`: nobody is superseded who lives, a run that lost its supervisor goes on, and one that has ended stays ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.run_folder import RunFolder
from unbroken.errors import RunDirMismatch, RunStopped, StorageError, UsageError
from unbroken.progress import RunDir, Term
from unbroken.recover import standby
from unbroken.recover.start import make_spec

from ..integration.conftest import SCRIPT, RunUnderTest
from .test_cluster_away import COMMAND, Said, begun


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(standby, "_EVERY_S", 0.001)
    (tmp_path / "train.py").touch()
    return begun(tmp_path)


def stand_by(run: RunFolder, said: Said, *command: str) -> str:
    return standby.stand_by(
        run.run_dir, make_spec(list(command) or COMMAND), view=said, cwd=run.run_dir.path.parent
    )


@pytest.mark.parametrize("status", ["completed", "interrupted"])
def test_a_run_that_has_ended_is_not_begun_again(run: RunFolder, status: str) -> None:
    run.record("status", status=status, step=7)
    said = Said()
    assert stand_by(run, said) == status and said.lines == [f"the run is {status} after step -1"]


def test_a_run_that_was_stopped_by_a_verdict_waits_for_a_person(run: RunFolder) -> None:
    run.record("status", status="stopped", why="a bug in the script")
    with pytest.raises(RunStopped, match="a bug in the script"):
        stand_by(run, Said())


def test_there_is_a_run_to_stand_by_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run to stand by for"):
        standby.stand_by(RunDir(tmp_path / "run"), make_spec(COMMAND), view=Said(), cwd=tmp_path)


def test_what_is_wrong_with_the_command_is_told_at_once(run: RunFolder) -> None:
    with pytest.raises(RunDirMismatch):
        stand_by(run, Said(), "train.py", "--lr", "1")


def test_who_cannot_be_reached_and_still_writes_has_the_run(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, took = [], []

    async def nobody(run_dir: RunDir, term: Term) -> bool:
        looks.append(1)
        if len(looks) < 20:
            run_dir.metrics.write_text(str(len(looks)))
            os.utime(run_dir.metrics, ns=(len(looks), len(looks)))
        return False

    monkeypatch.setattr(standby, "_answers", nobody)
    monkeypatch.setattr(standby, "_SILENT_S", 0.1)
    monkeypatch.setattr(Term, "supervisor_is_gone", lambda self: False)
    monkeypatch.setattr(standby, "run_supervised", lambda *args, **_: took.append(args[1]) or "completed")
    said = Said()
    assert stand_by(run, said) == "completed" and len(took) == 1
    assert len(looks) > 20, "not while it wrote"
    assert "cannot be reached from here, and still writes" in said.lines[0]


def test_a_record_that_cannot_be_read_for_a_while_ends_no_standby(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.record("status", status="completed", step=7)
    left, read = (
        [StorageError("stale file handle"), OSError(5, "Input/output error")],
        standby._Watch._read_end,
    )

    def flaky(self: standby._Watch) -> str | None:
        if left:
            raise left.pop()
        return read(self)

    monkeypatch.setattr(standby._Watch, "_read_end", flaky)
    monkeypatch.setattr(Term, "supervisor_is_gone", lambda self: True)
    assert stand_by(run, Said()) == "completed"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[RunUnderTest, subprocess.Popen[str]]]:
    """A run, and a standby beside it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    made = RunUnderTest(tmp_path, ["script.py", "400", "0.02"], ["--nproc", "2", "--lease", "20s"]).start()
    waiting: subprocess.Popen[str] | None = None
    try:
        made.until_step(5)
        argv = [
            sys.executable,
            "-m",
            "unbroken",
            "run",
            "--standby",
            "--run-dir",
            str(made.run_dir.path),
            *made.options,
        ]
        waiting = subprocess.Popen(
            [*argv, "--", *made.command], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )  # fmt: skip
        assert waiting.stdout is not None
        assert "standing by" in waiting.stdout.readline()
        yield made, waiting
    finally:
        if waiting is not None:
            waiting.kill()
            waiting.wait()
        made.end()


@pytest.mark.slow
def test_a_standby_takes_a_run_over_whose_supervisor_died_and_no_rank_stops(
    pair: tuple[RunUnderTest, subprocess.Popen[str]],
) -> None:
    run, waiting = pair
    ranks = {r: p.pid for r, p in run.faults.ranks().items()}
    assert waiting.poll() is None
    run.faults.kill_supervisor()
    run.wait()
    said = waiting.communicate(timeout=120)[0]
    assert waiting.returncode == 0, said
    assert "it is taken over" in said and "2 ranks never stopped" in said
    assert len(run.journal("attempt")) == 1 and len(ranks) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("sig", "code"), [(signal.SIGTERM, 11), (None, 0)])
def test_a_standby_ends_as_the_run_ends_and_begins_nothing(
    pair: tuple[RunUnderTest, subprocess.Popen[str]], sig: signal.Signals | None, code: int
) -> None:
    run, waiting = pair
    assert run.process is not None
    if sig is not None:
        run.process.send_signal(sig)
    assert run.wait(120) == code, run.output
    said = waiting.communicate(timeout=60)[0]
    assert waiting.returncode == code, said
    assert "taken over" not in said and len(run.journal("epoch")) == 1


@pytest.mark.slow
def test_a_stop_of_a_standby_leaves_the_run_alone(pair: tuple[RunUnderTest, subprocess.Popen[str]]) -> None:
    run, waiting = pair
    waiting.send_signal(signal.SIGTERM)
    said = waiting.communicate(timeout=60)[0]
    assert waiting.returncode == 11 and "the run is as it was" in said
    assert run.wait(120) == 0 and run.attempts() == 1
