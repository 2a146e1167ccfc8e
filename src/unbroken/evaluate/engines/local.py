"""Workers as processes of this machine: one per GPU, or CPU workers that share the cores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..prepare import child_env
from . import Ended, Slot


class LocalEngine:
    """One process per slot, its output in logs/NAME.log."""

    remote = False

    def __init__(self, logs: Path, *, threads: int | None = None) -> None:
        self.logs = logs
        self.threads = threads
        """CPU threads per worker; None: as the libraries choose (GPU workers)."""
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, slot: Slot, cluster: Path) -> None:
        """Starts a worker; its GPUs, as the worker sees them, are counted from 0."""
        self.logs.mkdir(parents=True, exist_ok=True)
        env = child_env(CUDA_VISIBLE_DEVICES=",".join(str(g) for g in visible(slot.gpus)), CUDA_DEVICE_ORDER="PCI_BUS_ID",
                        TOKENIZERS_PARALLELISM="false")  # fmt: skip
        if self.threads:
            env |= {"OMP_NUM_THREADS": str(self.threads), "MKL_NUM_THREADS": str(self.threads)}
        command = [
            sys.executable,
            "-m",
            "unbroken.evaluate.worker",
            "--cluster",
            str(cluster),
            "--name",
            slot.name,
        ]
        if slot.gpus:
            command += ["--gpus", ",".join(str(i) for i in range(len(slot.gpus)))]
        with open(self.logs / f"{slot.name}.log", "ab") as log:
            self.processes[slot.name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )

    def ended(self) -> Sequence[Ended]:
        """By their exit codes."""
        gone = [(n, p.returncode) for n, p in self.processes.items() if p.poll() is not None]
        for name, _ in gone:
            del self.processes[name]
        return [Ended(n, _explain(code)) for n, code in gone]

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
        deadline = time.monotonic() + within_s
        for p in self.processes.values():
            try:
                p.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _kill(p)
                p.wait()
        self.processes.clear()


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


def _kill(process: subprocess.Popen[bytes]) -> None:
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
