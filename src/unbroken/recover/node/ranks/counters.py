"""The counters of the ranks' GPUs (GPM, Hopper and newer), read in a thread of their own: a driver that hangs stops nobody.

What a rank works is told by them where its script does not tell it (detect/work.py). They are asked at the two ends of a window of
steps, which costs three calls of the driver. There is no signal, and so no name, where a GPU has no such counters or they may not be
read, where it is split (MIG), and where several processes work on it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ....detect.work import GpuActivity
from ....errors import UnbrokenError
from ....telemetry.samplers.gpm import GPM_METRICS, GpmCounters
from ....telemetry.samplers.gpu import load_nvml

_log = logging.getLogger("unbroken.agent")
_METRICS = [m for m in GPM_METRICS if m[0] in ("sm_active_pct", "tensor_active_pct")]


class NodeCounters:
    """Of all GPUs of this node. Nothing is loaded before the first is asked for."""

    def __init__(
        self, nvml: Callable[[], Any] = load_nvml, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`nvml` gives the `pynvml` module, initialised, or its fake."""
        self._load, self._clock = nvml, clock
        self._asked: queue.SimpleQueue[RankCounters] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._nvml: Any = None
        self._open: dict[str, tuple[Any, GpmCounters]] = {}
        self.lacking: list[str] = []
        """Why of some GPU nothing can be read, each once."""

    def of_rank(self, env: Mapping[str, str]) -> RankCounters | None:
        """Those of the GPU of a rank with this environment; None where it has none for itself."""
        gpu = find_gpu(env)
        return RankCounters(self, gpu) if gpu else None

    def ask(self, rank: RankCounters) -> None:
        """Has a rank's counters read, in the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpu-counters", daemon=True)
            self._thread.start()
        self._asked.put(rank)

    def _run(self) -> None:
        while True:
            rank = self._asked.get()
            try:
                rank.take(self._read(rank.gpu))
            except Exception as e:  # noqa: BLE001  whatever a driver comes up with: the thread goes on, and that rank is not asked again
                self._open.pop(rank.gpu, None)
                self._note(str(e) or type(e).__name__)

    def _note(self, why: str) -> None:
        if why not in self.lacking:
            self.lacking.append(why)
            _log.info("no counters of GPUs (%s): who makes a training slow is told by `busy=` alone", why)

    def _read(self, gpu: str) -> GpuActivity | None:
        if self._nvml is None:
            self._nvml = self._load()
        if gpu not in self._open:
            handle = find_handle(self._nvml, gpu)
            self._open[gpu] = handle, open_counters(self._nvml, handle)
        handle, counters = self._open[gpu]
        found = counters.read(self._clock())
        if found is None or is_shared(self._nvml, handle):
            return None
        seconds, means = found
        if not {m for m, _, _ in _METRICS} <= means.keys():
            return None
        active, tensor = (min(1.0, means[m] / 100) for m in ("sm_active_pct", "tensor_active_pct"))
        return GpuActivity(seconds, active, tensor)


class RankCounters:
    """Those of one rank's GPU: what `detect.work.WorkMeter` asks."""

    def __init__(self, node: NodeCounters, gpu: str) -> None:
        self._node, self.gpu = node, gpu
        self._waits = False
        self._found: GpuActivity | None = None
        self._lock = threading.Lock()

    def ask(self) -> None:
        """Has them read; not while the driver still owes the answer before, or where it refused."""
        with self._lock:
            asks, self._waits, self._found = not self._waits, True, None
        if asks:
            self._node.ask(self)

    def take(self, found: GpuActivity | None) -> None:
        """Is given what was read."""
        with self._lock:
            self._waits, self._found = False, found

    def answer(self) -> GpuActivity | None:
        """What was read, once."""
        with self._lock:
            found, self._found = self._found, None
        return found


def find_gpu(env: Mapping[str, str]) -> str:
    """The GPU of a rank, as CUDA_VISIBLE_DEVICES names it: that of its local rank; "" where it has none, shares one, or has a part of one (MIG)."""
    gpus = [g.strip() for g in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if g.strip()]
    local, ranks = int(env.get("LOCAL_RANK", "0")), int(env.get("LOCAL_WORLD_SIZE", "1"))
    if len(set(gpus)) < max(ranks, len(gpus)) or gpus[local].startswith("MIG"):
        return ""
    return gpus[local]


def find_handle(nvml: Any, gpu: str) -> Any:
    """NVML's handle of a GPU that is named by its number or its UUID, or the beginning of that. Raises NVMLError, UnbrokenError where there is none."""
    if gpu.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(gpu))
    for i in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(i)
        uuid = nvml.nvmlDeviceGetUUID(handle)
        if (uuid.decode() if isinstance(uuid, bytes) else str(uuid)).startswith(gpu):
            return handle
    raise UnbrokenError(f"NVML knows no GPU {gpu}")


def is_shared(nvml: Any, handle: Any) -> bool:
    """Whether several processes work on a GPU, as far as the driver tells that here: in a container it may not."""
    try:
        return len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)) > 1
    except nvml.NVMLError:
        return False


def open_counters(nvml: Any, handle: Any) -> GpmCounters:
    """The counters that tell a rank's work. Raises NVMLError or AttributeError where there are none, UnbrokenError of a GPU that is split."""
    try:
        split = nvml.nvmlDeviceGetMigMode(handle)[0]
    except nvml.NVMLError:
        split = 0  # a GPU that cannot be split
    if split:
        raise UnbrokenError("this GPU is split (MIG)")
    return GpmCounters(nvml, handle, _METRICS)
