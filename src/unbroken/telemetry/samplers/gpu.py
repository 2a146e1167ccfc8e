"""Readings of NVIDIA GPUs from NVML, and from GPM (the profiling counters) on Hopper and newer.

Everything is probed once: what a GPU or driver does not support is left out and named, so that a tick makes only
calls that answer, six for each GPU. What changes slowly is asked seldom: temperatures, energy and throttle reasons
after `MEDIUM_S`, error counters and the memory clock after `SLOW_S`, and less often where the driver takes long over
them (`Paced`). GPM needs two samples more than 100 ms apart: each tick keeps the last sample of each GPU.

All GPUs together are paid from one account of CPU time, filled at `GPU_SHARE` of a core: where a driver takes long, or
there are many GPUs, they take turns, and what a tick held back is counted. GPM's values are means since the GPU's last
sample, so that turns cost resolution and lose nothing.

`gpu_util_pct` counts the time with any work on the GPU, copies by its copy engines too; `sm_active_pct`,
`sm_occupancy_pct` and `tensor_active_pct` count SM cycles. A copy between GPUs or from the host therefore shows as 99
beside 0: both are right, and the second is the one that says whether the GPU computes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...errors import InputError, MissingExtra
from . import links
from .gpm import GPM_METRICS, GpmCounters
from .links import VALUE_TYPES
from .reading import Coverage, Reading

MEDIUM_S = 5.0
SLOW_S = 20.0
SLOWEST_S = 300.0
SLOW_SHARE = 0.0005
"""Of a core, that all slow calls of a node may take together: 0.05 %, a tenth of the promise."""
GPU_SHARE = 0.004
"""Of a core, that reading the GPUs of a node may take: 0.4 %; the rest of the promised 0.5 % is for host and files."""
PREPAID_S = 10.0
"""CPU time that is not used is kept for so many seconds."""
GIB = 2**30

MEDIUM_FIELDS: tuple[tuple[str, tuple[str, ...], float], ...] = (
    ("gpu_mem_temp_c", ("NVML_FI_DEV_MEMORY_TEMP",), 1.0),
    ("gpu_energy_j", ("NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION",), 1e-3),
)
SLOW_FIELDS: tuple[tuple[str, tuple[str, ...], float], ...] = (
    ("ecc_corrected_total", ("NVML_FI_DEV_ECC_SBE_VOL_TOTAL",), 1.0),
    ("ecc_uncorrected_total", ("NVML_FI_DEV_ECC_DBE_VOL_TOTAL",), 1.0),
    ("remapped_rows_total", ("NVML_FI_DEV_REMAPPED_COR", "NVML_FI_DEV_REMAPPED_UNC"), 1.0),
)
"""Metric, the fields whose sum it is, factor. One driver call reads all fields of a GPU."""


def load_nvml() -> Any:
    """The `pynvml` module, initialised. Raises MissingExtra without it and InputError without a driver."""
    try:
        import pynvml
    except ImportError:
        raise MissingExtra("nvidia-ml-py", "telemetry", what="reading GPUs") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as e:
        raise InputError(f"NVML cannot be started: {e}", hint="Is the NVIDIA driver loaded here?") from e
    return pynvml


Call = Callable[[], list[tuple[str, float]]]
"""One driver call: the metrics it gives and their values."""


@dataclass
class Paced:
    """A call that is due again after `period_s`, or later: it may take no more than `share` of the time."""

    call: Call
    period_s: float
    share: float = 1.0
    due: float = float("-inf")

    def took(self, now: float, seconds: float) -> None:
        """Sets when it is due next; `seconds` of CPU time are what it cost."""
        self.due = now + max(self.period_s, min(SLOWEST_S, seconds / self.share))


@dataclass
class Account:
    """CPU time that may be spent: filled at `share` of the time that passes, never above `PREPAID_S` of it."""

    share: float
    left_s: float = 0.0
    filled: float | None = None

    def fill(self, now: float) -> None:
        """Adds what has come since the last call; the first finds it full."""
        most = self.share * PREPAID_S
        came = most if self.filled is None else self.share * (now - self.filled)
        self.left_s, self.filled = min(most, self.left_s + came), now

    def covers(self, spent_s: float) -> bool:
        """Whether something is left after `spent_s`: the last spender may overdraw, and all wait until it is paid."""
        return spent_s < self.left_s

    def pay(self, spent_s: float) -> None:
        """Takes what was spent."""
        self.left_s -= spent_s


@dataclass
class _Gpu:
    index: int
    handle: Any
    fast: list[Call] = field(default_factory=list)
    paced: list[Paced] = field(default_factory=list)
    gpm: GpmCounters | None = None
    """None where GPM is not supported."""
    lost: bool = False


class GpuSampler:
    """Reads every GPU of this node through an NVML (the `pynvml` module or its fake)."""

    def __init__(
        self, nvml: Any, timer: Callable[[], float] = time.thread_time, share: float = GPU_SHARE
    ) -> None:
        self._nvml = nvml
        self._timer = timer
        self._account = Account(share)
        self._next = 0
        self.turns = 0
        """Readings of a GPU that were due: ticks times GPUs."""
        self.held_back = 0
        """How many of them were left out to stay within the share."""
        self._missing: dict[str, str] = {}
        self._metrics: set[str] = set()
        self._lost_errors = {
            getattr(nvml, n)
            for n in ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED")
            if hasattr(nvml, n)
        }
        self._gpus = [self._open(i) for i in range(nvml.nvmlDeviceGetCount())]
        slow = [p for g in self._gpus for p in g.paced if p.period_s >= SLOW_S]
        for p in slow:
            p.share = SLOW_SHARE / len(slow)
        self._by_bus = {self._bus(g.handle): g.index for g in self._gpus}
        self._events = self._register_events()

    @property
    def count(self) -> int:
        """GPUs of this node."""
        return len(self._gpus)

    def names(self) -> list[str]:
        """The model of each GPU."""
        return [_text(self._nvml.nvmlDeviceGetName(g.handle)) for g in self._gpus]

    def coverage(self) -> Coverage:
        """What the GPUs here can be asked."""
        return Coverage(tuple(sorted(self._metrics)), tuple(sorted(self._missing.items())))

    def read(self, now: float) -> list[Reading]:
        """The readings of every GPU whose turn it is; a lost GPU gives `gpu_lost` and nothing else.

        Events are read at every tick.
        """
        out: list[Reading] = []
        began = self._timer()
        self._account.fill(now)
        self._read_events(out)
        read = 0
        while read < len(self._gpus) and self._account.covers(self._timer() - began):
            self._read_gpu(self._gpus[self._next], now, out)
            self._next = (self._next + 1) % len(self._gpus)
            read += 1
        self._account.pay(self._timer() - began)
        self.turns += len(self._gpus)
        self.held_back += len(self._gpus) - read
        return out

    def close(self) -> None:
        """Frees the samples and the event set."""
        with contextlib.suppress(self._nvml.NVMLError):
            for g in self._gpus:
                if g.gpm is not None:
                    g.gpm.close()
                    g.gpm = None
            if self._events is not None:
                self._nvml.nvmlEventSetFree(self._events)
                self._events = None
            self._nvml.nvmlShutdown()

    def _read_gpu(self, g: _Gpu, now: float, out: list[Reading]) -> None:
        for call in g.fast:
            if not self._read_call(g, call, out):
                return
        for p in g.paced:
            if now < p.due:
                continue
            began = self._timer()
            there = self._read_call(g, p.call, out)
            p.took(now, self._timer() - began)
            if not there:
                return
        if g.gpm is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                _, means = g.gpm.read(now) or (0.0, {})
                out.extend([Reading(g.index, None, metric, value) for metric, value in means.items()])

    def _read_call(self, g: _Gpu, call: Call, out: list[Reading]) -> bool:
        """Adds what a call gives; False if the GPU is lost."""
        try:
            out.extend([Reading(g.index, None, metric, value) for metric, value in call()])
        except self._nvml.NVMLError as e:
            if e.value in self._lost_errors:
                out.append(Reading(g.index, None, "gpu_lost", 1.0))
                return False
        return True

    def _open(self, index: int) -> _Gpu:
        n = self._nvml
        g = _Gpu(index, n.nvmlDeviceGetHandleByIndex(index))
        h = g.handle

        def utilisation() -> list[tuple[str, float]]:
            return [("gpu_util_pct", float(n.nvmlDeviceGetUtilizationRates(h).gpu))]

        def memory() -> list[tuple[str, float]]:
            m = n.nvmlDeviceGetMemoryInfo(h)
            return [("gpu_mem_used_gib", m.used / GIB), ("gpu_mem_used_pct", 100.0 * m.used / m.total)]

        def power() -> list[tuple[str, float]]:
            return [("gpu_power_w", n.nvmlDeviceGetPowerUsage(h) / 1e3)]

        def temperature() -> list[tuple[str, float]]:
            return [("gpu_temp_c", float(n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU)))]

        def sm_clock() -> list[tuple[str, float]]:
            return [("sm_clock_mhz", float(n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM)))]

        def mem_clock() -> list[tuple[str, float]]:
            return [("mem_clock_mhz", float(n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM)))]

        def reasons() -> list[tuple[str, float]]:
            return [("throttle_reasons", float(n.nvmlDeviceGetCurrentClocksEventReasons(h)))]

        fast = [("gpu_util_pct", utilisation), ("gpu_mem_used_gib", memory)]
        fast += [("gpu_power_w", power), ("sm_clock_mhz", sm_clock)]
        for metric, call in fast:
            if self._answers(metric, call):
                g.fast.append(call)
        medium = self._fields(h, MEDIUM_FIELDS)
        slow = self._fields(h, SLOW_FIELDS)
        counters = links.link_counters(n, h)
        if counters is None:
            for metric in links.METRICS:
                self._missing.setdefault(metric, "no NVLink of this GPU is up, or the driver does not count")
        for metric, paced, period in (
            ("gpu_temp_c", temperature, MEDIUM_S),
            ("throttle_reasons", reasons, MEDIUM_S),
            (MEDIUM_FIELDS[0][0], medium, MEDIUM_S),
            ("mem_clock_mhz", mem_clock, SLOW_S),
            (SLOW_FIELDS[0][0], slow, SLOW_S),
            (links.METRICS[0], counters, SLOW_S),
        ):
            if paced is not None and self._answers(metric, paced):
                g.paced.append(Paced(paced, period))
        g.gpm = self._open_gpm(h)
        return g

    def _answers(self, metric: str, call: Call) -> bool:
        try:
            given = [m for m, _ in call()]
        except (self._nvml.NVMLError, AttributeError) as e:
            self._missing.setdefault(metric, str(e))
            return False
        self._metrics.update(given)
        for m in given:
            self._missing.pop(m, None)
        return True

    def _fields(self, handle: Any, wanted: tuple[tuple[str, tuple[str, ...], float], ...]) -> Call | None:
        """A call that reads all wanted fields of a GPU at once; those that do not answer are left out and named."""
        n = self._nvml
        ids = [getattr(n, name) for _, names, _ in wanted for name in names]
        try:
            answers = n.nvmlDeviceGetFieldValues(handle, ids)
        except n.NVMLError as e:
            for metric, _, _ in wanted:
                self._missing.setdefault(metric, str(e))
            return None
        good = {i for i, a in zip(ids, answers, strict=True) if a.nvmlReturn == n.NVML_SUCCESS}
        plan: list[tuple[str, list[int], float]] = []
        for metric, names, factor in wanted:
            mine = [i for i in (getattr(n, name) for name in names) if i in good]
            if mine:
                plan.append((metric, mine, factor))
            else:
                self._missing.setdefault(metric, "the driver does not give this field")
        ask = [i for _, mine, _ in plan for i in mine]
        if not ask:
            return None

        def read() -> list[tuple[str, float]]:
            values = {}
            for a in n.nvmlDeviceGetFieldValues(handle, ask):
                if a.nvmlReturn == n.NVML_SUCCESS:
                    values[a.fieldId] = getattr(a.value, VALUE_TYPES[a.valueType])
            return [
                (metric, factor * sum(values[i] for i in mine if i in values))
                for metric, mine, factor in plan
                if any(i in values for i in mine)
            ]

        return read

    def _open_gpm(self, handle: Any) -> GpmCounters | None:
        try:
            counters = GpmCounters(self._nvml, handle)
        except (self._nvml.NVMLError, AttributeError) as e:
            for metric, _, _ in GPM_METRICS:
                self._missing.setdefault(metric, f"no GPM counters (Hopper and newer have them): {e}")
            return None
        self._metrics.update(m for m, _, _ in GPM_METRICS)
        return counters

    def _register_events(self) -> Any:
        n = self._nvml
        if not self._gpus:
            return None
        try:
            events = n.nvmlEventSetCreate()
            for g in self._gpus:
                n.nvmlDeviceRegisterEvents(g.handle, n.nvmlEventTypeXidCriticalError, events)
        except n.NVMLError as e:
            self._missing["xid"] = str(e)
            return None
        self._metrics.add("xid")
        return events

    def _read_events(self, out: list[Reading]) -> None:
        n = self._nvml
        if self._events is None:
            return
        for _ in range(64):  # a GPU that falls off the bus can send a flood; the rest waits for the next tick
            try:
                event = n.nvmlEventSetWait_v2(self._events, 0)
            except n.NVMLError as e:
                if e.value != n.NVML_ERROR_TIMEOUT:
                    self._events = None
                return
            if event.eventType == n.nvmlEventTypeXidCriticalError:
                out.append(Reading(self._index_of(event.device), None, "xid", float(event.eventData)))

    def _index_of(self, handle: Any) -> int | None:
        try:
            return self._by_bus.get(self._bus(handle))
        except self._nvml.NVMLError:
            return None

    def _bus(self, handle: Any) -> str:
        return _text(self._nvml.nvmlDeviceGetPciInfo(handle).busId)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
