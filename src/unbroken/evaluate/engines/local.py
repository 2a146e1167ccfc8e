"""Workers as processes of this machine: one per GPU, or CPU workers that share the cores."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..preparation.prepare import child_env
from ..processes.imports import Forked, Imports, Process
from . import Slot, WorkerEnded


class LocalEngine:
    """One process per slot, its output in logs/NAME.log."""

    remote = False

    def __init__(self, logs: Path, *, threads: int | None = None, imports: Imports | None = None) -> None:
        """`imports`: a fork server, which may outlive this engine: whoever made it closes it."""
        self.logs = logs
        self.imports = imports
        self.threads = threads
        """CPU threads per worker; None: as the libraries choose (GPU workers)."""
        self.processes: dict[str, Process] = {}
        self.warm: dict[Slot, Process] = {}

    def stand_by(self, slots: Sequence[Slot], cluster: Path, backend: str) -> None:
        """Starts processes that import, and wait for a word on their standard input; without one they end with us."""
        for slot in slots:
            self.warm[slot] = self._spawn(slot, cluster, ["--stand-by", backend])

    def take_devices(self) -> None:
        """A word to each of them; one that has died is replaced when it is started."""
        for process in self.warm.values():
            with contextlib.suppress(OSError):
                _tell(process, b"device\n")

    def start(self, slot: Slot, cluster: Path) -> None:
        """Starts a worker; its GPUs, as the worker sees them, are counted from 0."""
        process = self.warm.pop(slot, None)
        if process is None or not _let_go(process):
            process = self._spawn(slot, cluster, [])
        self.processes[slot.name] = process

    def _spawn(self, slot: Slot, cluster: Path, more: Sequence[str]) -> Process:
        self.logs.mkdir(parents=True, exist_ok=True)
        env = child_env(CUDA_VISIBLE_DEVICES=",".join(str(g) for g in visible(slot.gpus)), CUDA_DEVICE_ORDER="PCI_BUS_ID",
                        TOKENIZERS_PARALLELISM="false")  # fmt: skip
        if self.threads:
            env |= {"OMP_NUM_THREADS": str(self.threads), "MKL_NUM_THREADS": str(self.threads)}
        argv = ["unbroken.evaluate.engines.worker.process", "--cluster", str(cluster), "--name", slot.name]
        if slot.gpus:
            argv += ["--gpus", ",".join(str(i) for i in range(len(slot.gpus)))]
        if self.imports is not None and self.imports.usable:
            with contextlib.suppress(OSError):
                log_file = self.logs / f"{slot.name}.log"
                return self.imports.fork([*argv, *more], env, log_file, with_input=bool(more))
        command = [sys.executable, "-m", *argv]
        with open(self.logs / f"{slot.name}.log", "ab") as log:
            return subprocess.Popen(
                [*command, *more],
                stdin=subprocess.PIPE if more else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )

    def ended(self) -> Sequence[WorkerEnded]:
        """By their exit codes."""
        gone = [(n, code) for n, p in self.processes.items() if (code := p.poll()) is not None]
        for name, _ in gone:
            del self.processes[name]
        return [WorkerEnded(n, _explain(code)) for n, code in gone]

    def running(self) -> int:
        """Processes that were alive at the last look."""
        return len(self.processes)

    def end(self, name: str) -> None:
        """SIGKILL to its session."""
        process = self.processes.get(name)
        if process is not None:
            _kill(process)

    def close(self, within_s: float = 10.0) -> None:
        """Waits, then SIGKILL."""
        for p in self.warm.values():
            _kill(p)
            p.wait()
            _close_input(p)
        self.warm.clear()
        deadline = time.monotonic() + within_s
        for p in self.processes.values():
            try:
                p.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _kill(p)
                p.wait()
        self.processes.clear()


def imports_for(backend: str, slots: Sequence[Slot], logs: Path, threads: int | None) -> Imports:
    """A fork server for the workers of these slots: it sees the GPUs of all of them, and touches none."""
    seen = visible(sorted({g for s in slots for g in s.gpus}))
    env = child_env(CUDA_VISIBLE_DEVICES=",".join(map(str, seen)), CUDA_DEVICE_ORDER="PCI_BUS_ID", TOKENIZERS_PARALLELISM="false")  # fmt: skip
    if threads:
        env |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return Imports(backend, env, logs / "imports.log")


def imports_for_harnesses(harnesses: Sequence[str], logs: Path) -> Imports:
    """A fork server for the processes that prepare and score tasks of these harnesses: one thread, no GPU."""
    from ..scoring.pool import ONE_THREAD

    return Imports("", child_env(**ONE_THREAD), logs / "imports-cpu.log", harnesses)


def _let_go(process: Process) -> bool:
    """Tells a process that stood by to go on; False if it has died meanwhile."""
    try:
        _tell(process, b"go\n")
    except OSError:
        _kill(process)  # it may live, and only have lost its input
        process.wait()
        return False
    finally:
        _close_input(process)
    return True


def _tell(process: Process, words: bytes) -> None:
    assert process.stdin is not None  # it was made with a pipe
    process.stdin.write(words)
    process.stdin.flush()


def _close_input(process: Process) -> None:
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()


def visible(gpus: Sequence[int]) -> list[str]:
    """The names of these GPUs inside what this process may see (a scheduler may have given it some only)."""
    outer = [g for g in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if g]
    return [outer[g] if g < len(outer) else str(g) for g in gpus]


def count_gpus() -> int:
    """GPUs that this process may use, without importing torch or making a context."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return len([g for g in given.split(",") if g and g != "-1"])
    try:
        import pynvml
    except ImportError:
        return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0


def _kill(process: Process) -> None:
    if isinstance(process, Forked):
        process.kill()
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _explain(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = "; the kernel's out-of-memory killer does this" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"
