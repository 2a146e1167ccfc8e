"""Many runs on one page of text, and what their ranks print."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.run_folder import RunFolder
from unbroken.cli import logs
from unbroken.cli.main import dispatch
from unbroken.cli.runs import ls
from unbroken.errors import InputError
from unbroken.progress import RunDir, Timeouts, write_spec
from unbroken.progress.journal import JournalWriter
from unbroken.status import rank_logs as following
from unbroken.status.rank_logs import RankLog, Wanted, follow_logs, rank_logs, read_tail
from unbroken.status.runs import find_runs, summarize_run
from unbroken.units import Duration

GOLDEN = Path(__file__).parents[1] / "golden" / "data" / "2026-11" / "runs"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The golden runs, deeper than one folder, beside things that are none."""
    folder = tmp_path / "runs"
    shutil.copytree(GOLDEN / "finished", folder / "mine" / "finished")
    shutil.copytree(GOLDEN / "killed", folder / "killed")
    (folder / "notes").mkdir()
    (folder / "broken").mkdir()
    (folder / "broken" / "run.toml").write_text("schema = ")
    return folder


def test_each_run_is_listed_once_with_its_state(runs: Path) -> None:
    result = CliRunner().invoke(ls.app, [str(runs), "--json"])
    assert result.exit_code == 0, result.output
    found = {Path(r["run_dir"]).name: r for r in json.loads(result.output)["runs"]}
    assert set(found) == {"finished", "killed", "broken"}
    assert found["finished"]["status"] == "completed" and found["finished"]["step"] > 0
    assert found["broken"]["status"] == "damaged" and found["broken"]["why"]
    only = CliRunner().invoke(ls.app, [str(runs), "--state", "completed"]).output.splitlines()
    assert len(only) == 2 and "finished" in only[1]


def test_no_run_is_no_error_and_a_missing_folder_is_one(tmp_path: Path) -> None:
    assert "No run lies in" in CliRunner().invoke(ls.app, [str(tmp_path)]).output
    with pytest.raises(InputError, match="no such folder"):
        list(find_runs(tmp_path / "none"))
    assert dispatch(["ls", str(tmp_path / "none")]) == 3


def test_a_run_is_named_itself_and_nothing_inside_it_is_looked_for(runs: Path) -> None:
    shutil.copytree(GOLDEN / "killed", runs / "mine" / "finished" / "attempts" / "inner")
    assert [r.path.name for r in find_runs(runs / "mine" / "finished")] == ["finished"]
    assert summarize_run(RunDir(runs / "mine" / "finished")).nodes >= 1


@pytest.mark.parametrize("seed", range(5))
def test_the_last_lines_are_those_of_the_whole_file(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    text = b"".join(
        bytes(rng.choices(b"ab\xc3", k=rng.choice((0, 3, 70_000)))) + b"\n" for _ in range(rng.randrange(8))
    )
    text += rng.choice((b"", b"unfinished"))
    (tmp_path / "log").write_bytes(text)
    log = RankLog(1, "n", 0, tmp_path / "log")
    whole = list(read_tail(log, None))
    assert whole == [
        x.decode(errors="replace") for x in text.split(b"\n")[: None if text[-1:] != b"\n" and text else -1]
    ]
    for n in range(10):
        assert list(read_tail(log, n)) == whole[len(whole) - min(n, len(whole)) :]


def _log(run: RunDir, attempt: int, rank: int, text: str = "", node: str = "node-000") -> Path:
    path = run.rank_log(attempt, node, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as f:
        f.write(text)
    return path


def test_logs_of_one_rank_and_of_several(tmp_path: Path, runs: Path) -> None:
    run = RunDir(runs / "mine" / "finished")
    shutil.rmtree(run.attempts)
    for rank in (0, 1, 10):
        _log(run, 2, rank, "".join(f"line {i} of {rank}\n" for i in range(30)), f"node-00{rank % 2}")
    assert [x.rank for x in rank_logs(run, 2)] == [0, 1, 10]
    one = CliRunner().invoke(logs.app, [str(run.path), "--rank", "10"]).output.splitlines()
    assert one == [f"line {i} of 10" for i in range(30)]
    several = CliRunner().invoke(logs.app, [str(run.path), "--node", "node-000", "-n", "1"]).output
    assert several.splitlines() == ["rank 0 | line 29 of 0", "rank 10 | line 29 of 10"]
    for wrong in (["--rank", "3"], ["--attempt", "1"], ["--attempt", "2", "--follow"]):
        assert dispatch(["logs", str(run.path), *wrong]) == 3
    assert dispatch(["logs", str(tmp_path)]) == 3


def test_following_goes_over_restarts_and_ends_with_the_run(
    tmp_path: Path, runs: Path, eventually: Callable[..., None]
) -> None:
    """Nothing is shown twice or left out: lines in two pieces, a line without an end, a new attempt, the end."""
    run = RunDir(runs / "mine" / "finished")
    for folder in (run.attempts, run.journals, run.terms):
        shutil.rmtree(folder)
    run.create()
    _log(run, 1, 0, "old\nold too\nhalf")
    shown: list[tuple[str, int | None]] = []
    said: list[str] = []
    thread = threading.Thread(
        target=follow_logs,
        args=(run, Wanted(frozenset({0})), 2, lambda *x: shown.append(x), said.append),
        daemon=True,
    )
    thread.start()
    eventually(lambda: len(shown) == 1)
    _log(run, 1, 0, " and half\nunfinished")
    eventually(lambda: len(shown) == 2)
    _log(run, 2, 0, "second\n")
    _log(run, 2, 1, "of another rank\n")
    eventually(lambda: len(shown) == 4)
    journal = JournalWriter(run, 1)
    shutil.copy(GOLDEN / "finished" / "epochs" / "000001.json", run.term(1))
    journal.append("status", status="completed", step=3)
    journal.close()
    thread.join(10)
    assert not thread.is_alive()
    assert [x for x, _ in shown] == ["old too", "half and half", "unfinished", "second"]
    assert said == ["attempt 2", "the run is completed"]


def test_following_goes_on_without_a_supervisor_and_over_a_takeover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    """kill -9 of the supervisor: ranks print on, a successor comes and is killed too, and its ranks end with their lease."""
    monkeypatch.setattr(following, "_LEAVE_S", 0.0)
    made = RunFolder(RunDir(tmp_path / "run"), nodes=1, nproc=1, spares=0)
    run, spec = made.run_dir, replace(made.spec, timeouts=Timeouts(lease=Duration("2s")))
    write_spec(run, spec)
    made.attempt()
    kill_supervisor(made)
    shown: list[str] = []
    said: list[str] = []
    thread = threading.Thread(
        target=follow_logs,
        args=(run, Wanted(), 0, lambda line, _: shown.append(line), said.append),
        daemon=True,
    )
    thread.start()
    eventually(lambda: said)
    assert "ranks go on until their lease of 2s" in said[0], said
    for i in range(30):
        _log(run, 1, 0, f"alone {i}\n")
        time.sleep(0.1)
    eventually(lambda: len(shown) == 30)
    made.supervisor()
    eventually(lambda: said[1:] == ["another supervisor has taken over"])
    env = {**os.environ, "UNBROKEN_RUN_ID": spec.run_id, "UNBROKEN_NODE": "node-000", "UNBROKEN_ROLE": "rank"}
    rank = subprocess.Popen(["sleep", "60"], env=env)
    try:
        kill_supervisor(made)
        time.sleep(3.5)
        assert thread.is_alive(), "a rank that is silent is there"
        _log(run, 1, 0, "the last\n")
    finally:
        rank.kill()
        rank.wait()
    thread.join(20)
    assert not thread.is_alive() and shown[30:] == ["the last"]
    assert said[-1] == "the run is abandoned: its supervisor is gone"


def test_following_a_run_that_was_left_long_ago_ends_at_once(tmp_path: Path) -> None:
    made = RunFolder(RunDir(tmp_path / "run"), nodes=1, nproc=1, spares=0)
    made.attempt()
    kill_supervisor(made)
    log = made.run_dir.rank_log(1, "node-000", 0)
    os.utime(log, (1.75e9, 1.75e9))
    said: list[str] = []
    follow_logs(made.run_dir, Wanted(), None, lambda *_: None, said.append)
    assert said == ["the run is abandoned: its supervisor is gone"]


def kill_supervisor(made: RunFolder) -> None:
    """Makes the newest term that of a process that is not there."""
    path = made.run_dir.term(made.term)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid_started": 0.0}))
