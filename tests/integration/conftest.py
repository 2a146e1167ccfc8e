"""Starts real runs with `unbroken run` as a child process, and ends them whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from unbroken.progress import RunDir, read_journal
from unbroken.progress.records.incident import read_incidents
from unbroken.recover.start import STOP_SIGNALS
from unbroken.testing.faults import RunFaults

from .breakers import Stage

SCRIPT = """
import os, sys, time
import unbroken

steps, seconds = int(sys.argv[1]), float(sys.argv[2])
run = unbroken.attach(total_steps=steps)
for step in range(1, steps + 1):
    time.sleep(seconds)
    run.step(step, loss=1.0 / step, tokens=100)
    if run.should_stop(step):
        sys.exit(unbroken.EXIT_STOPPED)
print("rank", os.environ["RANK"], "is done")
"""


class RunUnderTest:
    """One `unbroken run`: start it, hurt it, wait for it, read what it left."""

    def __init__(self, folder: Path, command: list[str], options: list[str]) -> None:
        self.folder, self.command, self.options = folder, command, options
        self.run_dir = RunDir(folder / "run")
        self.process: subprocess.Popen[str] | None = None
        self.output = ""

    def start(self, *, program: str = "", **env: str) -> RunUnderTest:
        """`program` is a file that does what `unbroken` does, in other surroundings."""
        argv = [
            sys.executable,
            *([program] if program else ["-m", "unbroken"]),
            "run",
            "--run-dir",
            str(self.run_dir.path),
            *self.options,
            "--",
        ]
        self.process = subprocess.Popen(
            [*argv, *self.command], cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, **env}, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return self

    @property
    def faults(self) -> RunFaults:
        return RunFaults(self.run_dir)

    def until_step(self, step: int, within: float = 60) -> int:
        assert self.process is not None
        process = self.process
        import time

        deadline = time.monotonic() + within
        while not self.run_dir.spec.exists() and time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.01)
        return self.faults.wait_for_step(step, within=within, alive=lambda: process.poll() is None)

    def wait(self, within: float = 90) -> int:
        assert self.process is not None
        if self.process.stdout is not None and not self.process.stdout.closed:
            try:
                self.output += self.process.communicate(timeout=within)[0]
            except subprocess.TimeoutExpired as e:
                said = e.output.decode(errors="replace") if isinstance(e.output, bytes) else e.output or ""
                logs = [
                    f"--- {p}\n{p.read_text()[-2000:]}"
                    for p in sorted(self.run_dir.path.glob("agents/*.log"))
                ]
                e.add_note("\n".join([f"what it said:\n{self.output}{said[-20000:]}", *logs]))
                raise
        return self.process.returncode

    def journal(self, kind: str | None = None) -> list[dict[str, Any]]:
        return [r for r in read_journal(self.run_dir).records if kind is None or r["kind"] == kind]

    def incidents(self) -> list[dict[str, Any]]:
        return read_incidents(self.run_dir)

    def attempts(self) -> int:
        return max((r["attempt"] for r in self.journal("attempt")), default=0)

    def story(self) -> str:
        """What the run said, its journal and its logs: all that is left of it when its test has failed."""
        parts = [self.output]
        for file in sorted(p for kind in ("*.jsonl", "*.log") for p in self.run_dir.path.rglob(kind)):
            parts.append(
                f"--- {file.relative_to(self.run_dir.path)}\n{file.read_text(errors='replace')[-3000:]}"
            )
        return "\n".join(parts)

    def end(self) -> None:
        if self.process is not None and self.process.stdout is not None and not self.process.stdout.closed:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
            try:
                self.output += self.process.communicate(timeout=30)[0]
            except subprocess.TimeoutExpired:
                self.process.kill()
        if self.run_dir.spec.exists():
            self.faults.end_everything()


@pytest.fixture(autouse=True, scope="session")
def default_signals() -> None:
    """What is started by tests that run in the background answers signals as anywhere else.

    `nohup` and `&` make this process ignore some, and its children would inherit that; what is caught is not inherited.
    """
    for sig in STOP_SIGNALS:
        if signal.getsignal(sig) is signal.SIG_IGN:
            signal.signal(sig, lambda *_: None)


@pytest.fixture
def new_run(tmp_path: Path) -> Iterator[Callable[..., RunUnderTest]]:
    made: list[RunUnderTest] = []

    def make(
        *options: str,
        steps: int = 40,
        seconds: float = 0.05,
        script: str = SCRIPT,
        args: list[str] | None = None,
    ) -> RunUnderTest:
        (tmp_path / "script.py").write_text(script)
        command = ["script.py", *(args if args is not None else [str(steps), str(seconds)])]
        run = RunUnderTest(tmp_path, command, list(options))
        made.append(run)
        return run

    yield make
    for run in made:
        run.end()
        print(run.story())  # pytest shows it where the test has failed
    for run in made:
        assert_understood(run.output)


@pytest.fixture
def stage(tmp_path: Path, place: str, launcher: str) -> Iterator[Stage]:
    """The training of the breaker's list in this place, under this launcher."""
    made = Stage(tmp_path, place, launcher)
    yield made
    made.end()
    print(made.story())
    assert_understood(made.output)


def assert_understood(output: str) -> None:
    """Whatever is done to a run, its parts understand each other."""
    assert "was passed over:" not in output and "could not be handled" not in output, output


def run_json(*args: str, cwd: Path) -> dict[str, Any]:
    """What `unbroken ARGS --json` prints."""
    out = subprocess.run(
        [sys.executable, "-m", "unbroken", *args, "--json"],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    value: dict[str, Any] = json.loads(out.stdout)
    return value
