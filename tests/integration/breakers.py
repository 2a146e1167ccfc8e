"""The stage of the breaker's list: one small training, put in any place and started by any launcher, and ways to hurt it.

A place is where its checkpoints lie: a folder of its own ("own"), the run's folder ("run"), a bucket ("store"). A
launcher is `unbroken run`, torchrun, or plain Python. What the training says lies in `said.txt` of its folder, so that
all launchers are read alike.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.keepers import end_keepers
from unbroken.checkpoint.catalogue import contents as catalogue
from unbroken.checkpoint.storage import open_storage
from unbroken.checkpoint.storage.base import Storage
from unbroken.cluster.holding.processes import end, marked
from unbroken.progress import RunDir
from unbroken.testing.faults import RunFaults

PLACES = ("own", "run", "store")
LAUNCHERS = ("run", "torchrun", "alone")

TRAINING = """
import os, sys, time
import torch, unbroken

folder, last, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

def say(*words):
    if rank == 0:
        with open("said.txt", "a") as f:
            print(*words, file=f, flush=True)

run = unbroken.attach(total_steps=last)
if world > 1:
    torch.distributed.init_process_group("gloo")
say("PID", os.getpid())
places = [] if folder == "-" else [folder]
checkpoints = unbroken.Checkpointer(*places, snapshot_every=2, persist_every=10, memory="64MiB", keep=3)
state = {"w": torch.zeros(4)}
restored = checkpoints.restore(state)
say("RESTORED", *((restored.step, restored.source) if restored else (0, "nothing")))
assert float(state["w"][0]) == (restored.step if restored else 0), state
for step in range(restored.step + 1 if restored else 1, last + 1):
    state["w"] += 1
    if checkpoints.due(step):
        checkpoints.save(step, state)
    run.step(step, loss=1.0)
    say("STEP", step)
    time.sleep(seconds)
    if run.should_stop(step) or os.path.exists("stop"):
        checkpoints.save(step, state, persist=True)
        checkpoints.close()
        sys.exit(unbroken.EXIT_STOPPED if run.active else 0)
checkpoints.close()
say("DONE", float(state["w"][0]))
"""
"""Its state is its step: whatever is restored can be told right from wrong."""


def combinations(
    *,
    places: tuple[str, ...] = PLACES,
    launchers: tuple[str, ...] = LAUNCHERS,
    thin: tuple[tuple[str, str], ...] = (),
) -> Any:
    """Parametrises a test over (place, launcher), where that can be; all but those of `thin` are slow."""
    found = []
    for place in places:
        for launcher in launchers:
            if place == "run" and launcher != "run":
                continue  # there is no run whose folder it could be
            marks = () if (place, launcher) in thin else (pytest.mark.slow,)
            found.append(pytest.param(place, launcher, id=f"{place}-{launcher}", marks=marks))
    return pytest.mark.parametrize(("place", "launcher"), found)


class Stage:
    """One training in one place under one launcher. `steps` is its last one, `seconds` a step's length."""

    def __init__(
        self, folder: Path, place: str, launcher: str, *, steps: int = 600, seconds: float = 0.02
    ) -> None:
        self.folder, self.place, self.launcher = folder, place, launcher
        self.steps, self.seconds = steps, seconds
        self.ranks = 1
        self.options: list[str] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.run_name = "run"
        self.interpreter = [sys.executable]
        """What runs Python: `-m MODULE` or a script follow."""
        # A Unix socket's path is short, and a test's folder is not.
        self.scratch = Path(tempfile.mkdtemp(prefix="ub-"))
        self.server: Any = None
        self.environment = {
            "UNBROKEN_SCRATCH": str(self.scratch),
            "UNBROKEN_ORPHAN_GRACE": "5",
            "OMP_NUM_THREADS": "1",
        }
        if place == "store":
            from unbroken.testing.object_store import FakeS3

            self.server = FakeS3().__enter__()
            self.environment |= {
                "AWS_ENDPOINT_URL": self.server.endpoint, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y",
                "AWS_REGION": "us-east-1",
            }  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.py").write_text(TRAINING)

    def alter(self, old: str, new: str) -> None:
        """Changes the training's script."""
        script = self.folder / "train.py"
        text = script.read_text()
        assert old in text, f"the script has no {old!r}"
        script.write_text(text.replace(old, new))

    # --- starting and ending it

    @property
    def argument(self) -> str:
        """What the script gives to Checkpointer ("-" for nothing)."""
        return {"own": "checkpoints", "run": "-", "store": "s3://bucket/training"}[self.place]

    def command(self) -> list[str]:
        script = ["train.py", self.argument, str(self.steps), str(self.seconds)]
        if self.launcher == "alone":
            return [*self.interpreter, *script]
        if self.launcher == "torchrun":
            port = _free_port()
            at = ["--nnodes=1", f"--nproc-per-node={self.ranks}", f"--master-port={port}"]
            return [*self.interpreter, "-m", "torch.distributed.run", *at, *script]
        options = ["--run-dir", self.run_name, "--nproc", str(self.ranks), *self.options]
        return [*self.interpreter, "-m", "unbroken", "run", *options, "--", *script]

    def start(self) -> Stage:
        """Gives the command, once more if it was given before."""
        with contextlib.suppress(FileNotFoundError):
            (self.folder / "stop").unlink()
        with open(
            self.folder / "output.txt", "ab"
        ) as out:  # a pipe would be held open by whatever is left behind
            self.process = subprocess.Popen(
                self.command(), cwd=self.folder, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                env={**os.environ, **self.environment}, start_new_session=True,
            )  # fmt: skip
        return self

    def wait(self, within: float = 90) -> int:
        """Its exit code."""
        assert self.process is not None
        return self.process.wait(within)

    @property
    def output(self) -> str:
        """What its commands said on the terminal so far."""
        return (self.folder / "output.txt").read_text(errors="replace")

    def stop(self, within: float = 90) -> int:
        """Asks for a stop in good order and waits for it."""
        assert self.process is not None
        if self.launcher == "run":
            self.process.send_signal(signal.SIGTERM)
        else:
            (self.folder / "stop").touch()
        return self.wait(within)

    def kill_ranks(self) -> None:
        """kill -9 of the training processes; keepers stay."""
        if self.launcher == "run":
            for process in self.faults.ranks().values():
                _kill(process.pid)
            return
        _kill(int(self.said("PID")[-1][0]))

    def kill_everything(self) -> None:
        """kill -9 of the training, its launcher and the keepers with the snapshots in them."""
        assert self.process is not None
        _kill(self.process.pid)
        if self.launcher == "run":
            end(lambda: marked(self.faults.run_id))
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            for (pid,) in self.said("PID")[-1:]:
                _kill(int(pid))
            end_keepers(self.scratch)
        self.process.wait(30)

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.folder / self.run_name)

    @property
    def faults(self) -> RunFaults:
        return RunFaults(self.run_dir)

    # --- looking at it

    def said(self, kind: str) -> list[list[str]]:
        """The words after `kind` of each line that the training said, oldest first."""
        try:
            lines = (self.folder / "said.txt").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [line.split()[1:] for line in lines if line.split()[:1] == [kind]]

    def restored(self) -> list[tuple[int, str]]:
        """(step, source) of each restore so far."""
        return [(int(step), source) for step, source in self.said("RESTORED")]

    def step(self) -> int:
        return int(self.said("STEP")[-1][0]) if self.said("STEP") else 0

    def until(self, condition: Callable[[], object], what: str, within: float = 60) -> None:
        """Waits for a condition while the process lives."""
        assert self.process is not None
        deadline = time.monotonic() + within
        while not condition():
            if self.process.poll() is not None and not condition():
                raise AssertionError(f"it ended before: {what}\n{self.story()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {within} s: {what}\n{self.story()}")
            time.sleep(0.02)

    def goes_on(self, at_least: int) -> None:
        """Gives the command again: it must go on from this step or a later one, and make another step durable."""
        starts = len(self.restored())
        # An attempt that finds another's checkpoints in its place is started twice: two imports of torch.
        self.start().until(lambda: len(self.restored()) > starts, "another start", within=150)
        step, _ = self.restored()[starts]
        assert step >= at_least, (at_least, self.story())
        self.until_durable(step + 1)

    def until_said(self, words: str, within: float = 30, after: int = 0) -> float:
        """Seconds until the commands have said `words` on the terminal, `after` so many characters."""
        began = time.monotonic()
        self.until(lambda: words in self.output[after:], f"'{words}' on the terminal", within)
        return time.monotonic() - began

    def until_step(self, step: int) -> None:
        self.until(lambda: self.step() >= step, f"step {step}")

    def until_durable(self, step: int) -> None:
        self.until(lambda: max(self.durable(), default=0) >= step, f"step {step} on disk")

    @property
    def where(self) -> str:
        """Where its checkpoints lie, as it is shown."""
        if self.place == "store":
            return self.argument
        return str(self.run_dir.checkpoints if self.place == "run" else self.folder / "checkpoints")

    def storage(self) -> Storage:
        """The same, opened."""
        if self.place == "store":
            return self.server.storage("bucket/training")  # type: ignore[no-any-return]
        return open_storage(self.run_dir.checkpoints if self.place == "run" else self.folder / "checkpoints")

    def durable(self) -> list[int]:
        """The steps of the checkpoints that are committed there."""
        return [f.step for f in catalogue.listing(self.storage()) if f.committed]

    def story(self) -> str:
        """All that is left of it when its test has failed."""
        parts = [self.output, " ".join(map(str, self.restored()))]
        for file in sorted(p for kind in ("*.jsonl", "*.log") for p in self.folder.rglob(kind)):
            parts.append(f"--- {file.relative_to(self.folder)}\n{file.read_text(errors='replace')[-3000:]}")
        return re.sub(r"\n(STEP \d+\n)+", "\n", "\n".join(parts))

    def end(self) -> None:
        """Leaves nothing of it."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)
        if self.run_dir.spec.exists():
            self.faults.end_everything()
        for (pid,) in self.said("PID"):
            _kill_training(int(pid), self.folder)
        end_keepers(self.scratch)
        shutil.rmtree(self.scratch, ignore_errors=True)
        if self.server is not None:
            self.server.__exit__(None, None, None)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _kill_training(pid: int, folder: Path) -> None:
    """Not the number's next owner: only a process in the test's own folder."""
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/{pid}/cwd") == str(folder):
            _kill(pid)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port
