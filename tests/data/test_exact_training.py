"""A plain PyTorch loop with seven lines of ours: exact, bit for bit, after kill -9 in the first and in the second epoch."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BEFORE, AFTER = (ROOT / "examples" / "exact_data" / f"{n}.py" for n in ("before", "after"))
pytestmark = pytest.mark.integration


def losses(text: str) -> dict[int, str]:
    return {int(m[1]): m[2] for m in re.finditer(r"^step (\d+) loss (\S+)", text, re.M)}


def train(folder: Path, *options: str, kill_at: int = 0) -> dict[int, str]:
    """The losses that it printed; killed with signal 9 when it has printed that of step `kill_at`."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("UNBROKEN_RUN")}
    log = folder / f"log-{time.monotonic_ns()}"
    with open(log, "wb") as out:
        p = subprocess.Popen(
            [sys.executable, "-u", str(AFTER), "--checkpoints", str(folder / "checkpoints"), *options],
            env={**env, "PYTHONPATH": str(ROOT / "src")}, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 240
        while p.poll() is None and time.monotonic() < deadline:
            if kill_at and kill_at in losses(log.read_text()):
                p.send_signal(signal.SIGKILL)
                break
            time.sleep(0.005)
        code = p.wait(60)
    finally:
        if p.poll() is None:
            p.kill()
            p.wait()
    text = log.read_text()
    assert code == (-9 if kill_at else 0), text[-3000:]
    return losses(text)


def test_at_most_seven_lines_make_a_plain_loop_exact() -> None:
    before = [line.strip() for line in BEFORE.read_text().splitlines()]
    added = [line.strip() for line in AFTER.read_text().splitlines() if line.strip() not in before]
    start = next(i for i, line in enumerate(added) if line.startswith("import "))
    code = [
        line for line in added[start:] if line and not line.startswith("#") and "--checkpoints" not in line
    ]
    assert len(code) <= 7, code


@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.soak), 2])
def test_exact_after_kill_nine_in_the_first_and_in_the_second_epoch(tmp_path: Path, workers: int) -> None:
    """Shuffled, with dropout, workers, accumulation and random augmentation."""
    options = ("--workers", str(workers))
    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    undisturbed = train(tmp_path / "one", *options)
    assert sorted(undisturbed) == list(range(1, 37)), "three epochs of twelve steps"
    found: dict[int, str] = {}
    for kill_at in (8, 19):
        some = train(tmp_path / "two", *options, kill_at=kill_at)
        assert min(some) == 1 or min(some) > 4, "it went on from a checkpoint"
        found.update(some)
        assert {k: undisturbed[k] for k in some} == some
    last = train(tmp_path / "two", *options)
    assert min(last) > 12
    found.update(last)
    assert found == undisturbed
