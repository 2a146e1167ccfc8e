"""`unbroken rehearse` from a shell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.keepers import until
from unbroken.cli.runs.rehearse import rehearse as rehearse_command
from unbroken.errors import UsageError

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


@pytest.mark.slow
@pytest.mark.integration
def test_a_plain_script_that_saves_nothing_begins_again(tmp_path: Path) -> None:
    done = rehearse("--", "exact_data/before.py", cwd=ROOT / "examples")
    assert done.returncode in (0, 24), done.stderr
    assert "nothing was saved within 20 steps" in done.stdout
    assert not [p for p in (ROOT / "examples").rglob("*") if p.name in ("runs", "checkpoints")]
