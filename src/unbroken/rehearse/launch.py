"""Starting a rehearsed training, killed or not: under `unbroken run`, or as plain processes that are started again. No torch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from .plan import RehearsalPlan, as_json

PROBE = Path(__file__).with_name("probe.py")


@dataclass(frozen=True)
class Trial:
    """One training from its beginning to the last step, whatever happens in between."""

    folder: Path
    """Its own, empty."""
    command: tuple[str, ...]
    """script.py and its arguments, or -m module and its arguments; `{dir}` stands for the folder of its output."""
    source: Path
    """The folder that the command is given in."""
    plan: RehearsalPlan
    nproc: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0

    @property
    def traces(self) -> Path:
        return self.folder / "trace"

    def prepare(self) -> tuple[Path, list[str]]:
        """(working folder, words after the interpreter): a folder in which everything of `source` is to be found."""
        work, output = self.folder / "work", self.folder / "output"
        for place in (self.traces, work, output):
            place.mkdir(parents=True)
        for entry in self.source.iterdir():
            if entry.resolve() != self.folder.resolve() and not self.folder.resolve().is_relative_to(
                entry.resolve()
            ):
                (work / entry.name).symlink_to(entry.absolute())
        plan = self.folder / "plan.json"
        plan.write_text(as_json(self.plan))
        words = [w.replace("{dir}", str(output)) for w in self.command]
        return work, [str(PROBE), str(plan), *words]


@dataclass(frozen=True)
class Ended:
    """How a trial ended."""

    ok: bool
    output: str
    """The last lines of what it printed, of all ranks."""
    seconds: float


class Launcher(Protocol):
    """Runs a trial to its end; a killed rank is started again, all others with it."""

    def run(self, trial: Trial) -> Ended:
        """Blocks until the training is over."""
        ...


@dataclass(frozen=True)
class Supervised:
    """`unbroken run`, as the real training will be started; the run's folder lies in the trial's."""

    options: Sequence[str] = ()
    """More options of `unbroken run`."""

    def run(self, trial: Trial) -> Ended:
        work, words = trial.prepare()
        command = [
            sys.executable, "-m", "unbroken", "run", "--run-dir", str(trial.folder / "run"), "--nproc", str(trial.nproc),
            *self.options, "--", *words,
        ]  # fmt: skip
        began = time.monotonic()
        with open(trial.folder / "supervisor.log", "wb") as log:
            process = subprocess.Popen(
                command, cwd=work, env={**os.environ, **trial.env}, stdout=log, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
            try:
                code = process.wait(trial.timeout_s)
            except BaseException as e:  # an interrupt too: no training is left behind
                process.send_signal(signal.SIGTERM)  # it ends its ranks itself
                try:
                    process.wait(90)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                if not isinstance(e, subprocess.TimeoutExpired):
                    raise
                code = -1
        logs = sorted((trial.folder / "run" / "attempts").rglob("rank-*.log"))
        text = _tail([trial.folder / "supervisor.log", *logs[-2:]])
        return Ended(code == 0, text, time.monotonic() - began)


@dataclass(frozen=True)
class Plain:
    """Plain processes with torchrun's environment, started again when one was killed. For scripts that resume by themselves."""

    restarts: int = 3

    def run(self, trial: Trial) -> Ended:
        work, words = trial.prepare()
        began = time.monotonic()
        deadline = began + trial.timeout_s
        codes: list[int] = []
        for attempt in range(self.restarts + 1):
            codes = self._attempt(trial, work, words, attempt, deadline)
            if -signal.SIGKILL not in codes or time.monotonic() > deadline:
                break
        return Ended(
            all(c == 0 for c in codes),
            _tail(sorted(trial.folder.glob("rank-*.log"))[-2:]),
            time.monotonic() - began,
        )

    def _attempt(
        self, trial: Trial, work: Path, words: list[str], attempt: int, deadline: float
    ) -> list[int]:
        port = _free_port()
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(trial.nproc):
                with open(trial.folder / f"rank-{rank}.{attempt + 1}.log", "wb") as log:
                    env = {
                        **_outside_of_a_run(os.environ), "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(trial.nproc),
                        "LOCAL_WORLD_SIZE": str(trial.nproc), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                        "UNBROKEN_RUN_DIR": str(trial.folder / "run"), **trial.env,
                    }  # fmt: skip
                    processes.append(subprocess.Popen(
                        [sys.executable, "-u", *words], cwd=work, env=env, stdout=log, stderr=subprocess.STDOUT,
                        stdin=subprocess.DEVNULL,
                    ))  # fmt: skip
            while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
                if any(p.poll() not in (None, 0) for p in processes):
                    break
                time.sleep(0.02)
        finally:
            codes = [p.poll() for p in processes]
            for p in processes:
                if p.poll() is None:
                    p.kill()
                    p.wait()
        return [c if c is not None else 1 for c in codes]


_OF_A_RUN = ("UNBROKEN_KEEPER", "UNBROKEN_ATTEMPT", "UNBROKEN_PAGE", "UNBROKEN_OUTPUT", "UNBROKEN_NODE")
_OF_TORCHRUN = ("TORCHELASTIC_", "GROUP_", "ROLE_")


def _outside_of_a_run(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without what a run of ours, or torchrun, says of a rank of it.

    A rehearsal that was started by a rank would save into that run's keeper and its folder for output, report its steps
    on the rank's page, and meet at torchrun's store. The run's id stays: by that mark its end finds us too.
    """
    return {k: v for k, v in env.items() if k not in _OF_A_RUN and not k.startswith(_OF_TORCHRUN)}


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _tail(paths: Sequence[Path], lines: int = 15) -> str:
    found: list[str] = []
    for path in paths:
        if path.exists():
            found += path.read_text(errors="replace").splitlines()[-lines:]
    return "\n".join(found)
