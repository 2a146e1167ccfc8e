"""A mistake in the command line of our own trainer ends a run at once, with what it said on the screen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from unbroken.progress import RunDir
from unbroken.progress.records.incident import read_incidents


@pytest.mark.slow
@pytest.mark.integration
def test_an_unknown_option_stops_the_run_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    training = ["-m", "unbroken.train", "--data", "text", "--preset", "tiny", "--tenser", "2"]
    argv = [
        sys.executable,
        "-m",
        "unbroken",
        "run",
        "--run-dir",
        str(folder),
        "--nproc",
        "2",
        "--",
        *training,
    ]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 10, done.stdout + done.stderr
    assert "unknown option '--tenser'. Did you mean '--tensor'?" in done.stderr.splitlines()[-1]
    (incident,) = read_incidents(RunDir(folder))
    assert (incident["verdict"]["decided_by"], incident["action"]) == ("unbroken-refused", "stop")
    status = subprocess.run([sys.executable, "-m", "unbroken", "status", str(folder)], capture_output=True, text=True, timeout=60)  # fmt: skip
    assert "--tenser" in status.stdout, status.stdout
