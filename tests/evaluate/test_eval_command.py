"""`unbroken eval` as a user types it."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unbroken.cli.eval.evaluating import AGAIN_S
from unbroken.cli.main import dispatch
from unbroken.errors import MissingExtra
from unbroken.evaluate.engines.live import EvaluationProgress
from unbroken.evaluate.run.screen import line
from unbroken.testing.evaluation import BACKEND, HARNESS, fake_model

SUITE = f"""
[suite]
name = "demo"
[defaults]
harness = "{HARNESS}"
[[task]]
name = "a"
options = {{samples = 40, seconds = 0.01}}
[task.prior]
samples = 40
seconds = 20
[[task]]
name = "b"
licence = "MIT"
options = {{samples = 20}}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "s.toml").write_text(SUITE)
    fake_model(tmp_path / "m")
    return tmp_path


def whole_checkpoint(root: Path) -> None:
    """A committed checkpoint of one rank: a model of six parameters, and two numbers of its optimizer."""
    torch = pytest.importorskip("torch")
    from unbroken.checkpoint.capture import direct
    from unbroken.checkpoint.format.manifest import Sharding
    from unbroken.checkpoint.format.position import Position
    from unbroken.checkpoint.storage.posix import PosixStorage

    state = {"model.w": torch.ones(2, 3), "optimizer.m": torch.ones(2)}
    records = {
        n: ("float32", Sharding(tuple(t.shape), (), (), (), (((0,) * t.ndim, tuple(t.shape)),)))
        for n, t in state.items()
    }
    stamp = direct.Stamp("run", 1, 10, 0, 1, Position(0, ((0, 10),)))
    storage = PosixStorage(root)
    direct.commit(storage, [direct.write_pieces(storage, records, state.__getitem__, {}, stamp)])


RUN = ["eval", "run", "s.toml", "-m", "m", "--backend", BACKEND, "--workers", "2", "--block", "8"]


def test_run_then_again_then_status_and_compare(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch([*RUN, "-o", "out"]) == 0
    text = capsys.readouterr().out
    assert "40/40" in text and "times the lower bound" in text
    assert (place / "out" / "table.txt").read_text() in text
    page = (place / "out" / "report.html").read_text()
    assert "<svg" in page and "demo" in page
    assert dispatch([*RUN, "-o", "out", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    kept = json.loads((place / "out" / "report.json").read_text())
    assert found["asked_now"] is False and [s["scored"] for s in found["scores"]] == [40, 20]
    assert (
        found["makespan_s"] == kept["ended"] - kept["started"] and found["workers"] == kept["workers"] != []
    )
    assert (place / "out" / "report.html").read_text() == page  # how it went stays to be seen
    assert (place / "out" / "table.txt").read_text() in text
    assert dispatch(["eval", "status", "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["progress"]["phase"] == "finished"
    assert dispatch(["eval", "compare", "out", "out/report.json"]) == 0
    shown = capsys.readouterr().out
    checkpoint = found["checkpoint"][:12]
    assert "same" in shown and f"before  demo of m ({checkpoint})" in shown
    assert dispatch([*RUN, "-o", "few", "--limit", "10"]) == 0
    capsys.readouterr()
    assert dispatch(["eval", "compare", "out", "few", "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert compared["after"] == {"suite": "demo", "model": "m", "checkpoint": checkpoint}
    assert {d["verdict"] for d in compared["differences"]} == {"not comparable"}
    assert compared["differences"][0]["why"] == "40 against 10 samples"
    assert (place / "state" / "unbroken" / "eval-priors.json").exists()


def test_plan(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["eval", "plan", "s.toml", "--gpus", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["lower_bound_s"] <= found["makespan_s"] <= 1.1 * found["lower_bound_s"]
    assert found["tasks"]["a"] == {"seconds": 20.0, "spread": 2.0, "score_s": 0.0, "source": "suite"}
    assert {s["task"] for p in found["parcels"] for s in p["shards"]} == {"a", "b"}
    assert dispatch(["eval", "plan", "core63", "--gpus", "8"]) == 0
    assert "lower bound" in capsys.readouterr().out


@pytest.mark.parametrize(
    "full",
    [
        pytest.param("progress.json", marks=pytest.mark.slow),
        "report.json",
        pytest.param("table.txt", marks=pytest.mark.slow),
        "evaluation.json",
        pytest.param("prepared.json", marks=pytest.mark.slow),
        pytest.param("cluster.json", marks=pytest.mark.slow),
        pytest.param("eval-priors.json", marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_is_no_defect_and_the_same_command_goes_on(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    replaced = os.replace

    def replace(source: Any, target: Any, **more: Any) -> None:
        if Path(target).name == full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replaced(source, target, **more)

    with monkeypatch.context() as m:
        m.setattr(os, "replace", replace)
        code = dispatch([*RUN, "-o", "out"])
    said = capsys.readouterr().err
    assert "defect" not in said and "Traceback" not in said
    assert (code, "cannot be written: No space left" in said) == (
        (0, False) if full in ("progress.json", "eval-priors.json") else (50, True)
    )
    assert dispatch([*RUN, "-o", "out"]) == 0


@pytest.mark.slow
def test_a_plan_takes_the_size_of_a_task_that_was_evaluated_whole(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def b() -> dict[str, Any]:
        capsys.readouterr()
        assert dispatch(["eval", "plan", "s.toml", "--gpus", "2", "--json"]) == 0
        return dict(json.loads(capsys.readouterr().out)["tasks"]["b"])

    assert b()["source"].endswith("1000 samples assumed")
    assert dispatch([*RUN, "-o", "few", "--limit", "5"]) == 0
    few = b()
    assert few["source"].endswith("1000 samples assumed")
    assert dispatch([*RUN, "-o", "whole"]) == 0
    whole = b()
    assert "assumed" not in whole["source"] and whole["seconds"] < few["seconds"] / 10


def test_a_plan_knows_how_many_rows_there_are_after_a_part_was_evaluated(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "made").mkdir()
    rows = "def rows():\n    return [{'i': i} for i in range(300)]\n"
    (place / "made" / "infer.py").write_text(f"{rows}def prompt(row):\n    return str(row['i'])\n")
    (place / "made" / "score.py").write_text("def score(row, output):\n    return 1\n")
    (place / "m.toml").write_text('[suite]\nname = "m"\n[[task]]\nname = "made"\nharness = "plain"\n')
    run = [a if a != "s.toml" else "m.toml" for a in RUN]
    fake = "unbroken.testing.fake_models:FakeBackend"
    run = [fake if i and run[i - 1] == "--backend" else a for i, a in enumerate(run)]
    assert dispatch([*run, "-o", "part", "--limit", "0.1"]) == 0
    capsys.readouterr()
    assert dispatch(["eval", "plan", "m.toml", "--gpus", "1", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert "assumed" not in plan["tasks"]["made"]["source"]
    assert sum(s["blocks"] for p in plan["parcels"] for s in p["shards"]) == 10, "of 32 rows each"


def test_a_plan_counts_the_rows_of_a_plain_task(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "sums").mkdir()
    (place / "sums" / "infer.py").write_text("def prompt(row):\n    return 'x'\n")
    (place / "sums" / "score.py").write_text("def score(row, output):\n    return 1\n")
    text = '[suite]\nname = "t"\n[[task]]\nname = "sums"\nharness = "plain"\n'
    (place / "t.toml").write_text(text)
    assert dispatch(["eval", "plan", "t.toml"]) == 52
    assert "the data of task 'sums' are not on this machine" in capsys.readouterr().err
    (place / "sums" / "data.jsonl").write_text("{}\n" * 96)
    for more in ("", "[task.prior]\nseconds = 40\n"):
        (place / "t.toml").write_text(text + more)
        assert dispatch(["eval", "plan", "t.toml", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert "assumed" not in found["tasks"]["sums"]["source"]
        assert sum(s["blocks"] for p in found["parcels"] for s in p["shards"]) == 3


def test_a_plan_says_what_it_could_not_look_up(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Absent:
        def expand(self, task: object, suite: object) -> None:
            raise MissingExtra("lm_eval", "eval", what="the harness")

    monkeypatch.setattr("unbroken.evaluate.run.forecast.get_harness", lambda name: Absent())
    (place / "t.toml").write_text('[suite]\nname = "t"\n[[task]]\nname = "arc"\nharness = "lm_eval"\n')
    assert dispatch(["eval", "plan", "t.toml"]) == 0
    assert "not looked up: arc: the harness needs lm_eval" in capsys.readouterr().out


@pytest.mark.slow
def test_a_watch_that_evaluated_nothing_ends_with_the_first_error(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole_checkpoint(place / "r" / "checkpoints")
    broken = ["eval", "watch", "r", "--suite", "s.toml", "--once", "--backend", BACKEND, "--workers", "1"]
    assert dispatch([*broken, "--option", "broken=true", "--json"]) == 53
    said = capsys.readouterr()
    assert json.loads(said.out)["points"][0]["tries"] == 2 and said.err.count("evaluating") == 1
    assert "no checkpoint was evaluated. step-00000010.a0001: " in said.err
    assert dispatch([*broken, "--tasks", "a", "-o", "whole"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["run", "nowhere.toml", "-m", "m", "-o", "o"], 3, "cannot be read"),
        (["run", "cor63", "-m", "m", "-o", "o"], 2, "Did you mean 'core63'"),
        (["run", "s.toml", "-m", "gone", "-o", "o", "--backend", BACKEND], 53, "cannot be read"),
        (
            ["run", "s.toml", "-m", "m", "-o", "o", "--backend", "transfomers"],
            2,
            "Did you mean 'transformers'",
        ),
        (["run", "s.toml", "-m", "m", "-o", "o", "--backend", "no.such:Thing"], 2, "no backend"),
        (["run", "s.toml", "-m", "m", "-o", "o", "--engine", "slurm"], 2, "local, ray or none"),
        (["run", "s.toml", "-m", "m", "-o", "o", "--gpus", "64"], 2, "this machine has"),
        (["run", "s.toml", "-m", "m", "-o", "o", "--gpus", "-1"], 2, "--gpus -1"),
        (["run", "s.toml", "-m", "m", "-o", "o", "--workers", "0"], 2, "at least 1"),
        (["run", "s.toml", "-m", "m", "-o", "s.toml", "--backend", BACKEND], 2, "a file, not a folder"),
        (["run", "noise.toml", "-m", "m", "-o", "o"], 3, "the suite is no text"),
        (["compare", "noise.toml", "noise.toml"], 3, "no report of an evaluation"),
        (["watch", "r", "--suite", "s.toml", "-o", "s.toml"], 2, "a file, not a folder"),
        (["watch", "r", "--suite", "s.toml", "--once"], 0, "no committed checkpoint"),
        (["watch", "m", "--suite", "s.toml", "--once"], 3, "no run directory, and it holds no checkpoints"),
        (["watch", "r", "--suite", "s.toml", "--like", "nosuch"], 2, "--like names no folder"),
        (["run", "s.toml", "-m", "m", "-o", "o", "--tasks", "aa"], 51, "'a'"),
        (["run", "s.toml", "-m", "m", "-o", "o", "--limit", "0"], 2, "at least 1"),
        (["run", "s.toml", "-m", "m", "-o", "o", "--option", "x"], 2, "KEY=VALUE"),
        (["run", "s.toml", "-m", "m", "-o", "o", "--block", "0"], 2, "at least 1"),
        (["run", f"{HARNESS}:unknown_one", "-m", "m", "-o", "o"], 2, ""),
        (["plan", "s.toml", "--gpus", "0"], 2, "at least 1"),
        (["plan", "s.toml", "--block", "0"], 2, "--block 0"),
        (["plan", "s.toml", "--block", "-1"], 2, "--block -1"),
        (["plan", "s.toml", "--cpu-workers", "0"], 2, "--cpu-workers 0"),
        (["plan", "s.toml", "--load-seconds", "nan"], 2, "--load-seconds nan"),
        (["plan", "s.toml", "--load-seconds", "-5"], 2, "--load-seconds -5"),
        (["plan", "s.toml", "--model-b", "-1"], 2, "--model-b -1"),
        (["plan", "s.toml", "--model-b", "inf"], 2, "--model-b inf"),
        (["plan", "typo.toml"], 51, "there is no task 'sms'"),
        (["status", "nothing"], 3, "no evaluation"),
        (["status", "s.toml"], 3, "no evaluation"),
        (["compare", "a", "b"], 3, "no finished evaluation"),
        (["watch", "nowhere", "--suite", "s.toml", "--once"], 3, "no such run directory"),
        (["watch", "s.toml", "--suite", "s.toml"], 3, "this is a file"),
        (["tasks", "plain", "--folder", "nosuch"], 3, "there is no such folder (nosuch)"),
        (["tasks", "plain", "--folder", "m"], 3, "finds no task here"),
        (["tasks", "plain", "--find", "summs"], 51, "none of the 1 names contains it). Did you mean 'sums'?"),
        (["tasks", "plain", "--find", "summs", "--json"], 51, "Did you mean 'sums'?"),
        (["join", "nothing", "--gpus", "a"], 2, "not a list of numbers"),
        (["join", "nothing", "--wait", "0"], 50, "no coordinator answers"),
    ],
)
def test_mistakes_are_told(
    place: Path, capsys: pytest.CaptureFixture[str], args: list[str], code: int, says: str
) -> None:
    (place / "noise.toml").write_bytes(b"\xff\xfe\x00")
    (place / "typo.toml").write_text('[suite]\nname = "t"\n[[task]]\nname = "sms"\nharness = "plain"\n')
    (place / "r" / "checkpoints").mkdir(parents=True)
    (place / "sums").mkdir()
    (place / "sums" / "infer.py").touch()
    (place / "sums" / "score.py").touch()
    assert dispatch(["eval", *args]) == code
    err = capsys.readouterr().err
    assert says in err
    assert code == 0 or not list(place.glob("*/evaluations"))
    assert "Traceback" not in err and "defect" not in err


def test_a_folder_that_cannot_be_written_is_said_first(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = os.access  # as root every folder can be written
    monkeypatch.setattr("os.access", lambda path, mode: not mode & os.W_OK and reading(path, mode))
    assert dispatch([*RUN, "-o", "out"]) == 50
    err = capsys.readouterr().err
    assert "Permission denied (out)" in err and err.count("\n") == 1


def test_no_time_is_promised_before_a_worker_is_there() -> None:
    p = EvaluationProgress(
        "running", 1.0, 0.0, {"a": {"state": "waiting", "done": 0, "blocks": 4}}, {}, 0.01, 0.01, {}
    )
    assert line(p).endswith("0/0 workers busy")
    there = replace(p, workers={"w0": {"state": "busy"}})
    assert "about 10ms left" in line(there)


def test_a_score_that_is_not_whole_is_not_success(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "s.toml").write_text(
        SUITE + '[[task]]\nname = "c"\noptions = {samples = 16, problem = {"3" = ""}}\n'
    )
    assert dispatch([*RUN, "-o", "out", "-q"]) == 56
    out = capsys.readouterr()
    assert "15/16" in out.out and "scored in part: c" in out.err
    assert dispatch(["eval", "status", "out"]) == 0
    status = capsys.readouterr().out
    assert "3/3 tasks scored (1 in part)" in status and "scored, 1 missing" in status and "left" not in status
    assert dispatch([*RUN, "-o", "out", "-q", "--json"]) == 56
    out = capsys.readouterr()
    assert [s["scored"] for s in json.loads(out.out)["scores"]] == [40, 20, 15], "one object"
    assert "scored in part: c" in out.err


@pytest.mark.slow
def test_status_tells_a_killed_evaluation_from_one_that_runs(
    place: Path, eventually: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "s.toml").write_text(
        SUITE.replace("samples = 40, seconds = 0.01", "samples = 400, seconds = 0.05")
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "unbroken", *RUN, "-o", "out", "-q"], start_new_session=True
    )

    def status() -> dict[str, Any]:
        capsys.readouterr()
        if dispatch(["eval", "status", "out", "--json"]) != 0:
            return {"live": None, "progress": {"workers": {}}}
        return dict(json.loads(capsys.readouterr().out))

    def busy() -> int:
        return sum(w["state"] == "busy" for w in status()["progress"]["workers"].values())

    eventually(lambda: busy() == 2, within=40)
    running = status()
    assert running["live"] and running["progress"]["phase"] == "running"
    assert running["title"] == "demo of m"
    assert running["progress"]["remaining_s"] < running["progress"]["remaining_worker_s"], "two workers"
    process.kill()
    process.wait(10)
    eventually(lambda: status()["live"] is False, within=20)
    dead = status()["progress"]
    assert (dead["phase"], dead["workers"], dead["remaining_s"]) == ("stopped", {}, None)
    assert dispatch(["eval", "status", "out"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("not running now; the same command goes on") and "left" not in text
    (place / "s.toml").write_text(SUITE)
    assert dispatch([*RUN, "-o", "again", "-q"]) == 0
    capsys.readouterr()
    assert dispatch(["eval", "status", "again"]) == 0
    assert "the same command shows the scores" in capsys.readouterr().out


def test_ctrl_c_ends_it_and_the_same_command_goes_on(place: Path, eventually: Callable[..., None]) -> None:
    slow = SUITE.replace("samples = 40, seconds = 0.01", "samples = 160, seconds = 0.02")
    (place / "s.toml").write_text(slow)
    command = [sys.executable, "-m", "unbroken", *RUN, "-o", "out", "-q"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    eventually(
        lambda: sum(p.read_bytes().count(b"\n") for p in (place / "out").rglob("answers/*/*/*.jsonl")) >= 2,
        within=40,
    )
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=40)
    assert process.returncode == 11
    assert "stopped: SIGINT" in err and "goes on where it was" in err and "Traceback" not in err
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert [s["scored"] for s in json.loads(done.stdout)["scores"]] == [160, 20]


@pytest.mark.slow
def test_a_second_ctrl_c_ends_it_even_where_a_store_does_not_answer(
    place: Path, eventually: Callable[..., None]
) -> None:
    pytest.importorskip("obstore")
    with socket.create_server(("127.0.0.1", 0)) as hole:
        env = {
            **os.environ,
            "AWS_ENDPOINT": f"http://127.0.0.1:{hole.getsockname()[1]}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_REGION": "nowhere",
        }
        command = [*RUN, "-o", "out"]
        command[command.index("m")] = "s3://bucket/model"
        process = subprocess.Popen(
            [sys.executable, "-m", "unbroken", *command], env=env, stderr=subprocess.PIPE, text=True
        )
        hole.settimeout(30)
        connection, _ = hole.accept()  # it asks, and gets no answer
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(AGAIN_S + 0.5)  # a thread waits for the store
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
        connection.close()
    assert process.returncode == 11
    assert "another SIGINT" in said and "Traceback" not in said
