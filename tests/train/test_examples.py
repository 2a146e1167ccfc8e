"""The examples of the trainer's page do what it says."""

from __future__ import annotations

import difflib
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from unbroken.progress import RunDir
from unbroken.testing.faults import RunFaults

REPO = Path(__file__).resolve().parents[2]
FIVE = REPO / "examples" / "five_lines"


def without_docstring(path: Path) -> list[str]:
    return path.read_text().split('"""', 2)[2].splitlines()


def test_five_added_lines_and_nothing_else() -> None:
    before, after = without_docstring(FIVE / "before.py"), without_docstring(FIVE / "after.py")
    changes = [d for d in difflib.ndiff(before, after) if d[0] in "+-" and d[1:].strip()]
    assert [d[0] for d in changes] == ["+"] * 5, changes
    page = (REPO / "docs" / "train.md").read_text()
    assert all(d[2:].strip() in page for d in changes), "the page shows other lines"


def run(folder: Path, script: str, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "unbroken", "run", "--run-dir", str(folder), "--nodes", "2", *more]
    return subprocess.Popen(
        [*command, "--", str(FIVE / script), "--steps", "600"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def said(folder: Path) -> dict[int, str]:
    """The last line of each rank that ended."""
    lines = [line for log in folder.glob("attempts/*/*/rank-*.log") for line in log.read_text().splitlines()]
    return {
        int(w[1]): w[4]
        for line in lines
        if (w := line.split())[:1] == ["rank"] and w[2:4] == ["ends", "with"]
    }


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_five_lines_make_a_killed_run_end_like_an_undisturbed_one(
    tmp_path: Path, eventually: Callable[..., None]
) -> None:
    plain = run(tmp_path / "plain", "before.py")
    out, _ = plain.communicate(timeout=110)
    assert plain.returncode == 0, out
    killed = run(tmp_path / "killed", "after.py")
    eventually((tmp_path / "killed" / "run.toml").exists, within=30)
    faults = RunFaults(RunDir(tmp_path / "killed"))
    faults.wait_for_step(random.Random(5).randint(60, 250), within=60, alive=lambda: killed.poll() is None)
    faults.kill_rank(1)
    out, _ = killed.communicate(timeout=110)
    assert killed.returncode == 0, out
    assert "attempt 2" in out and "from the beginning" not in out.split("attempt 2")[1], out
    assert said(tmp_path / "plain") == said(tmp_path / "killed") != {}


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_from_nothing_to_an_aligned_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = [
        sys.executable,
        str(REPO / "examples" / "train_small.py"),
        str(tmp_path / "out"),
        "--steps",
        "9",
    ]
    small = "--size=--dim 32 --layers 2 --heads 2 --kv-heads 2 --hidden 64"
    done = subprocess.run([*command, small], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "attempt 2" in done.stdout and (tmp_path / "out" / "scores" / "curves.txt").exists()
    assert "2 + 3 =" in done.stdout
