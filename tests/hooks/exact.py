"""Trains an example of examples/hooks under torchrun and under `unbroken run`, with kills, and reads every loss of it."""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "hooks"
LOSS = re.compile(r"^rank (\d+) step (\d+) loss (\S+)$", re.M)
DEADLINE_S = float(os.environ.get("UNBROKEN_TEST_DEADLINE_S", "240"))

KILLS = [
    pytest.param((9,), id="second epoch"),
    pytest.param((4, 9), id="both epochs", marks=pytest.mark.soak),
]
"""The steps at which a training is killed, where an epoch is six."""

Losses = dict[tuple[int, int], list[str]]
"""The losses of each (rank, step), one for each batch of the step."""


def environment() -> dict[str, str]:
    """What a user's terminal would have."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("UNBROKEN_", "PYTEST"))}
    return env | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def losses(text: str) -> Losses:
    found: Losses = defaultdict(list)
    for m in LOSS.finditer(text):
        found[int(m[1]), int(m[2])].append(m[3])
    return dict(found)


def torchrun(folder: Path, script: Path, *options: str, ranks: int = 2, code: int = 0) -> tuple[Losses, str]:
    """The losses of a training by plain torchrun, which has to end with `code`, and what its ranks printed."""
    logs = folder / f"torchrun-{time.monotonic_ns()}"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    out = subprocess.run(
        [*launcher, "--log-dir", str(logs), "--redirects", "3", str(script), *options],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    # Each rank has a file of its own: in one stream their lines run into each other.
    text = "\n".join(f.read_text() for f in sorted(logs.rglob("std*.log")))
    assert out.returncode == code, (out.stderr + text)[-4000:]
    return losses(text), text


def attempts(run: Path) -> list[Losses]:
    """The losses of each attempt of a run."""
    return [_losses_of(a) for a in _folders(run)]


def _folders(run: Path) -> list[Path]:
    return sorted(run.glob("attempts/*"))


def _losses_of(attempt: Path) -> Losses:
    return losses("\n".join(_log(attempt, rank) for rank in (0, 1)))


def _log(attempt: Path, rank: int) -> str:
    """What a rank printed, also where the log of an attempt that is over was compressed."""
    found = ""
    for path in attempt.glob(f"node-*/rank-{rank}.log*"):
        with contextlib.suppress(FileNotFoundError):  # just compressed: the other one has it all
            found = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    return found


def supervised(
    folder: Path,
    script: Path,
    *options: str,
    ranks: int = 2,
    kill_at: tuple[int, ...] = (),
    stop_at: int = 0,
    amend: bool = False,
) -> tuple[list[Losses], int]:
    """The losses of each attempt under `unbroken run`, and its exit code. The last rank is killed with signal 9 once it is in each of these
    steps, in an attempt of its own; at step `stop_at` of an attempt after those the run is asked to stop."""
    run = folder / "run"
    log = folder / f"log-{time.monotonic_ns()}"
    command = [sys.executable, "-u", "-m", "unbroken", "run", "--nproc", str(ranks), "--run-dir", str(run)]
    command += ["--amend"] if amend else []
    with open(log, "wb") as out:
        p = subprocess.Popen([*command, "--", str(script), *options], cwd=folder, env=environment(), stdout=out, stderr=out)  # fmt: skip
    left, asked = list(kill_at), False
    over = len(_folders(run))  # so many have ended before, or by our hand
    try:
        deadline = time.monotonic() + DEADLINE_S
        while p.poll() is None and time.monotonic() < deadline:
            found = _folders(run)
            # What the attempt before has left, lines of its log and processes, is not taken for the next one's.
            seen = {step for _, step in _losses_of(found[-1])} if len(found) > over else set()
            if left and left[0] in seen and (pid := _rank(run, ranks - 1)):
                os.kill(pid, signal.SIGKILL)
                over = len(found)
                left.pop(0)
            elif stop_at and not left and stop_at in seen and not asked:
                p.send_signal(signal.SIGINT)
                asked = True
            time.sleep(0.01)
        code = p.wait(60)
    finally:
        if p.poll() is None:
            p.send_signal(signal.SIGTERM)
            p.wait(60)
    assert not left, log.read_text()[-4000:]
    return attempts(run), code


def _rank(run: Path, rank: int) -> int:
    """The process of a rank; 0 where there is none."""
    for p in psutil.process_iter():
        try:
            env = p.environ()
            if env.get("UNBROKEN_RUN_DIR") == str(run) and env.get("RANK") == str(rank):
                above = p.parent()
                if above is None or above.environ().get("RANK") is None:
                    return int(p.pid)
        except (psutil.Error, OSError):
            continue
    return 0


def check_exact(undisturbed: Losses, made: list[Losses], kills: int) -> None:
    """Each loss that any attempt reported is the undisturbed training's, every step was made, and no attempt began again. One makes
    no step only where the kill came after the last of them was saved."""
    assert len(made) == kills + 1, f"{len(made)} attempts"
    begun = [min((step for _, step in a), default=0) for a in made]
    assert begun[0] == 1 and all(b == 0 or b > 2 for b in begun[1:]), f"attempts began at steps {begun}"
    for number, attempt in enumerate(made, 1):
        before = {at for a in made[: number - 1] for at in a}
        assert attempt or before == set(undisturbed), (
            f"attempt {number} made no step, and there were some left"
        )
        for at, found in attempt.items():
            assert found == undisturbed[at][: len(found)], f"attempt {number}, (rank, step) {at}"
    assert {at for a in made for at in a} == set(undisturbed), "every step was made"
