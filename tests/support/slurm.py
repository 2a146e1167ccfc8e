"""A real Slurm on this machine for tests (scripts/slurm_testbed.sh): started once a module, nothing is left of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "scripts" / "slurm_testbed.sh"
_CANNOT = 77


@dataclass(frozen=True)
class Testbed:
    """One that runs. `contained` says whether a step's processes are held by a cgroup."""

    __test__ = False
    folder: Path
    prefix: str
    nodes: tuple[str, ...]
    contained: bool

    @property
    def environment(self) -> dict[str, str]:
        """For its commands, and for whoever runs them: nothing of another Slurm."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
        return clean | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *argv: str, check: bool = True, within_s: float = 30, user: str = "") -> str:
        """Runs a command of Slurm; returns what it printed."""
        if user:
            argv = ("runuser", "-u", user, "--", *argv)
        done = subprocess.run(
            argv, env=self.environment, capture_output=True, text=True, timeout=within_s, check=False, cwd="/"
        )
        assert done.returncode == 0 or not check, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def allocate(self, *options: str) -> str:
        """A job that holds nodes for a test, of as many as asked for with -N; returns its id once it runs."""
        job = self.call(
            "sbatch", "--parsable", "--no-kill", "-o", "/dev/null", *options, "--wrap", "sleep 600"
        )
        wait_for(lambda: self.state(job) == "RUNNING", f"job {job} to run")
        return job

    def end_steps(self, word: str) -> None:
        """Ends all steps with this word in their name, and those that begin meanwhile."""

        def none_is_left() -> bool:
            found = [line.split() for line in self.call("squeue", "-s", "-h", "-o", "%i %j").splitlines()]
            steps = [step for step, name in found if word in name]
            for step in steps:
                self.call("scancel", "--signal=KILL", step, check=False)
            starting = subprocess.run(["pgrep", "-f", f"srun .*{word}"], capture_output=True, check=False)
            return not steps and not starting.stdout.strip()

        wait_for(none_is_left, f"the steps of {word} to end")

    def undrain(self) -> None:
        """Gives drained nodes back; the controller has to hear of each again."""
        for line in self.call("sinfo", "-h", "-p", "main", "-N", "-o", "%N %T").splitlines():
            name, state = line.split()
            if "drain" in state:
                self.call("scontrol", "update", f"nodename={name}", "state=undrain", check=False)
        wait_for(
            lambda: "NOT_RESPONDING" not in self.call("scontrol", "-o", "show", "node"), "nodes to respond"
        )

    def share_job(self) -> str:
        """A job on all nodes that has them all: the one that there is, or a new one."""
        for line in self.call("squeue", "-h", "-t", "running", "-o", "%i %D").splitlines():
            job, count = line.split()
            if int(count) == len(self.nodes):
                return job
        self.clear()
        return self.allocate(f"-N{len(self.nodes)}")

    def state(self, job: str) -> str:
        return self.call("squeue", "-h", "-j", job, "-o", "%T", check=False)

    def set_down(self, node: str, reason: str = "a test") -> None:
        self.call("scontrol", "update", f"nodename={node}", "state=down", f"reason={reason}")

    def signal_daemon(self, node: str, signal: int) -> None:
        os.kill(int((self.folder / "run" / f"slurmd.{node}.pid").read_text()), signal)

    def clear(self) -> None:
        """Ends all jobs, and gives all nodes back."""
        self.call("scancel", "--quiet", "-u", "root", check=False)
        self.call("scancel", "--quiet", "--full", "--signal=KILL", "-u", "root", check=False)
        wait_for(lambda: not self.call("squeue", "-h"), "all jobs to end")

        def idle() -> bool:
            states = self.call("sinfo", "-h", "-p", "main", "-N", "-o", "%N %T").splitlines()
            for name, state in (line.split() for line in states):
                if state.rstrip("*") in ("down", "drained", "draining"):
                    self.call("scontrol", "update", f"nodename={name}", "state=resume", check=False)
            return all(line.split()[1] == "idle" for line in states)

        wait_for(idle, "all nodes to be idle")


def wait_for(condition: Callable[[], object], what: str, within_s: float = 60.0) -> None:
    """Waits until it is so; fails with `what` where it does not become so."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {within_s:g} s for {what}"
        time.sleep(0.05)


@contextlib.contextmanager
def testbed(*, nodes: int = 4, contain: str = "auto") -> Iterator[Testbed]:
    """Starts one; skips the test, with the reason, where this machine cannot have it."""
    # Not below pytest's folder, which other users (munge, and those without rights) cannot enter.
    folder = Path(tempfile.mkdtemp(prefix="unbroken-slurm-"))
    folder.chmod(0o755)
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    prefix = f"t{worker.removeprefix('gw')}x"
    port = _free_ports(nodes + 1)
    argv = ["bash", str(SCRIPT), "up", str(folder), str(nodes), prefix, str(port), contain]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)
    try:
        if done.returncode == _CANNOT:
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, done.stderr
        names = tuple(f"{prefix}{i + 1}" for i in range(nodes))
        held = (folder / "containment").read_text().strip()
        if contain not in ("auto", held):
            pytest.skip(f"this machine holds steps by {held}")
        yield Testbed(folder, prefix, names, held == "cgroup")
    finally:
        subprocess.run(["bash", str(SCRIPT), "down", str(folder)], check=False, timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


testbed.__test__ = False  # type: ignore[attr-defined]


def _free_ports(count: int) -> int:
    """The first of so many ports that nobody listens on."""
    for first in range(16817, 30000, count + 3):
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + count):
                    s = held.enter_context(socket.socket())
                    s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no ports are free")
