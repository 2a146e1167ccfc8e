"""`unbroken rehearse` from a shell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.keepers import until
from unbroken.cli.runs.rehearse import rehearse as rehearse_command
from unbroken.errors import RunError, UsageError
from unbroken.rehearse.rehearsal import Rehearsal
from unbroken.rehearse.trace import read_traces

ROOT = Path(__file__).resolve().parents[2]


def rehearse(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "unbroken", "rehearse", *words], cwd=cwd, capture_output=True, text=True, timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, check=False,
    )  # fmt: skip


def test_what_cannot_be_rehearsed_is_said(tmp_path: Path) -> None:
    for words in ((), ("--", "ls")):
        done = rehearse(*words, cwd=tmp_path)
        assert done.returncode == 2 and "unbroken rehearse -- train.py" in done.stderr


@pytest.mark.parametrize("launcher", ["unbroken", "torch.distributed.run"])
def test_what_starts_the_training_elsewhere_is_refused_at_once(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="other processes") as e:
        rehearse_command(["-m", launcher, "run", "--", "train.py"])
    assert "--nproc 2 -- train.py" in str(e.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_rehearsal_that_is_ended_takes_its_training_and_its_folder_with_it(
    tmp_path: Path, how: signal.Signals
) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "train.py").write_text("while True: pass")
    process = subprocess.Popen(
        [sys.executable, "-m", "unbroken", "rehearse", "--plain", "--", "train.py"], cwd=tmp_path, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(tmp_path / "scratch")},
    )  # fmt: skip
    try:
        until(lambda: psutil.Process(process.pid).children())
        training = psutil.Process(process.pid).children()
        process.send_signal(how)
        said = process.communicate(timeout=60)[1]
        assert "stopped on request" in said and process.returncode not in (0, -how)
        assert not psutil.wait_procs(training, timeout=20)[1]
        assert not list((tmp_path / "scratch").iterdir())
    finally:
        for p in psutil.Process(process.pid).children() if process.poll() is None else ():
            p.kill()
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize(
    ("script", "ranks"),
    [("five_lines/after.py", 2), pytest.param("exact_data/after.py", 1, marks=pytest.mark.soak)],
)
def test_the_examples_are_exact_on_two_ranks_and_with_data(tmp_path: Path, script: str, ranks: int) -> None:
    done = rehearse("--nproc", str(ranks), "--json", "--", script, cwd=ROOT / "examples")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["exact"] and len(report["kills"]) == 2 and report["saved_by"] == "unbroken"
    assert report["snapshot_bytes"] > 0 and report["notes"] == []


@pytest.mark.parametrize(("where", "kept"), [("{folder}/trial-01", True), ("train.py", False)])
def test_a_folder_that_a_message_names_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, kept: bool
) -> None:
    def run(self: Rehearsal) -> Any:
        (self.folder / "trial-01").mkdir()
        raise RunError("the training failed", where=where.format(folder=self.folder))

    monkeypatch.setattr(Rehearsal, "run", run)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RunError, match="the training failed"):
        rehearse_command(["train.py"], steps=4, nproc=1, plain=True, limit="1m")
    assert [p.name for f in tmp_path.iterdir() for p in f.iterdir()] == (["trial-01"] if kept else [])
    assert len(list(tmp_path.iterdir())) == kept


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize(("ranks", "options"), [(2, ("--tensor", "2")), (1, ())], ids=["plan", "reference"])
def test_our_own_trainer_is_counted_as_it_reports_its_steps(
    tmp_path: Path, ranks: int, options: tuple[str, ...]
) -> None:
    (tmp_path / "text").mkdir()
    text = "".join(f"line {i} of a small text, {i * i * 7919}\n" for i in range(400))
    (tmp_path / "text" / "a.txt").write_text(text)
    words = ("-m", "unbroken.train", "--data", "text", "--cache", "{dir}", *options)
    done = rehearse(
        "--nproc", str(ranks), "--steps", "9", "--json", "--keep", "kp", "--", *words, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["exact"] and report["steps"] == 9 and report["saved_by"] == "unbroken"
    assert report["warnings"] == report["notes"] == []
    assert all(k["resumed_at"] > 0 for k in report["kills"]), "it did not just begin again"
    first = read_traces(tmp_path / "kp" / "trial-01" / "trace")[0, 1].steps
    assert [s.weights for s in first] == [f"step {n}" for n in range(1, 11)]
    assert len({s.batches for s in first}) == len({s.losses for s in first}) == 10
    for kind in ("parameter ", "optimizer exp_avg"):
        assert len({str([v for k, v in s.state.items() if k.startswith(kind)]) for s in first}) == 10


@pytest.mark.slow
@pytest.mark.integration
def test_a_plain_script_that_saves_nothing_begins_again(tmp_path: Path) -> None:
    done = rehearse("--", "exact_data/before.py", cwd=ROOT / "examples")
    assert done.returncode in (0, 24), done.stderr
    assert "nothing was saved within 20 steps" in done.stdout
    assert not [p for p in (ROOT / "examples").rglob("*") if p.name in ("runs", "checkpoints")]
