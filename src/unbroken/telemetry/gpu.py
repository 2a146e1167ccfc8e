"""Readings of NVIDIA GPUs from NVML, and from GPM (the profiling counters) on Hopper and newer.

Everything is probed once: what a GPU or driver does not support is left out and named, so that a tick makes only
calls that answer. Values that change slowly (ECC, remapped rows, NVLink errors, memory clock) are read every
`SLOW` ticks. GPM needs two samples more than 100 ms apart: each tick keeps the last sample of each GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError, MissingExtra
from .reading import Coverage, Reading

SLOW = 10
MIB = 2**20
GIB = 2**30
GPM_LEAST_S = 0.1

GPM_METRICS: tuple[tuple[str, str, float], ...] = (
    # Schema metric, NVML's constant, factor into the schema's unit (NVML gives percent and MiB/s).
    ("sm_active_pct", "NVML_GPM_METRIC_SM_UTIL", 1.0),
    ("sm_occupancy_pct", "NVML_GPM_METRIC_SM_OCCUPANCY", 1.0),
    ("tensor_active_pct", "NVML_GPM_METRIC_ANY_TENSOR_UTIL", 1.0),
    ("dram_active_pct", "NVML_GPM_METRIC_DRAM_BW_UTIL", 1.0),
    ("fp64_active_pct", "NVML_GPM_METRIC_FP64_UTIL", 1.0),
    ("fp32_active_pct", "NVML_GPM_METRIC_FP32_UTIL", 1.0),
    ("fp16_active_pct", "NVML_GPM_METRIC_FP16_UTIL", 1.0),
    ("pcie_tx_bytes_per_s", "NVML_GPM_METRIC_PCIE_TX_PER_SEC", MIB),
    ("pcie_rx_bytes_per_s", "NVML_GPM_METRIC_PCIE_RX_PER_SEC", MIB),
    ("nvlink_tx_bytes_per_s", "NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC", MIB),
    ("nvlink_rx_bytes_per_s", "NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC", MIB),
)

FAST_FIELDS: tuple[tuple[str, tuple[str, ...], float], ...] = (
    ("gpu_mem_temp_c", ("NVML_FI_DEV_MEMORY_TEMP",), 1.0),
    ("gpu_energy_j", ("NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION",), 1e-3),
)
SLOW_FIELDS: tuple[tuple[str, tuple[str, ...], float], ...] = (
    ("ecc_corrected_total", ("NVML_FI_DEV_ECC_SBE_VOL_TOTAL",), 1.0),
    ("ecc_uncorrected_total", ("NVML_FI_DEV_ECC_DBE_VOL_TOTAL",), 1.0),
    ("remapped_rows_total", ("NVML_FI_DEV_REMAPPED_COR", "NVML_FI_DEV_REMAPPED_UNC"), 1.0),
    (
        "nvlink_errors_total",
        (
            "NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
            "NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
            "NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
            "NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
        ),
        1.0,
    ),
)
"""Metric, the fields whose sum it is, factor. One driver call reads all fields of a GPU."""

_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


def load_nvml() -> Any:
    """The `pynvml` module, initialised. Raises MissingExtra without it and InputError without a driver."""
    try:
        import pynvml
    except ImportError:
        raise MissingExtra("nvidia-ml-py", "telemetry", what="reading GPUs") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as e:
        raise InputError(f"NVML cannot be started: {e}", todo="Is the NVIDIA driver loaded here?") from e
    return pynvml


Call = Callable[[], list[tuple[str, float]]]
"""One driver call: the metrics it gives and their values."""


@dataclass
class _Gpu:
    index: int
    handle: Any
    fast: list[Call] = field(default_factory=list)
    slow: list[Call] = field(default_factory=list)
    samples: list[Any] = field(default_factory=list)
    """Two GPM samples, the older first; empty where GPM is not supported."""
    sampled: float | None = None
    lost: bool = False


class GpuSampler:
    """Reads every GPU of this node through an NVML (the `pynvml` module or its fake)."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._tick = 0
        self._missing: dict[str, str] = {}
        self._metrics: set[str] = set()
        self._lost_errors = {
            getattr(nvml, n)
            for n in ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED")
            if hasattr(nvml, n)
        }
        self._gpus = [self._open(i) for i in range(nvml.nvmlDeviceGetCount())]
        self._by_bus = {self._bus(g.handle): g.index for g in self._gpus}
        self._gpm: Any = self._gpm_request() if any(g.samples for g in self._gpus) else None
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
        """The readings of every GPU; a lost GPU gives `gpu_lost` once a tick and nothing else."""
        out: list[Reading] = []
        slow = self._tick % SLOW == 0
        self._tick += 1
        for g in self._gpus:
            self._read_gpu(g, now, slow, out)
        self._read_events(out)
        return out

    def close(self) -> None:
        """Frees the samples and the event set."""
        with contextlib.suppress(self._nvml.NVMLError):
            for g in self._gpus:
                for s in g.samples:
                    self._nvml.nvmlGpmSampleFree(s)
                g.samples = []
            if self._events is not None:
                self._nvml.nvmlEventSetFree(self._events)
                self._events = None
            self._nvml.nvmlShutdown()

    def _read_gpu(self, g: _Gpu, now: float, slow: bool, out: list[Reading]) -> None:
        index = g.index
        for call in (*g.fast, *g.slow) if slow else g.fast:
            try:
                out.extend([Reading(index, None, metric, value) for metric, value in call()])
            except self._nvml.NVMLError as e:
                if e.value in self._lost_errors:
                    out.append(Reading(index, None, "gpu_lost", 1.0))
                    return
        if g.samples:
            try:
                self._read_gpm(g, now, out)
            except self._nvml.NVMLError:
                g.sampled = None

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

        named = [("gpu_util_pct", utilisation), ("gpu_mem_used_gib", memory), ("gpu_power_w", power)]
        named += [("gpu_temp_c", temperature), ("sm_clock_mhz", sm_clock), ("throttle_reasons", reasons)]
        for metric, call in named:
            self._keep_if_it_answers(g.fast, metric, call)
        self._keep_if_it_answers(g.slow, "mem_clock_mhz", mem_clock)
        for calls, wanted in ((g.fast, FAST_FIELDS), (g.slow, SLOW_FIELDS)):
            fields = self._fields(h, wanted)
            if fields is not None:
                self._keep_if_it_answers(calls, wanted[0][0], fields)
        if "nvlink_errors_total" not in self._metrics:
            links = self._link_errors(h)
            if links is not None:
                self._keep_if_it_answers(g.slow, "nvlink_errors_total", links)
        g.samples = self._gpm_samples(h)
        return g

    def _keep_if_it_answers(self, calls: list[Call], metric: str, call: Call) -> None:
        try:
            given = [m for m, _ in call()]
        except (self._nvml.NVMLError, AttributeError) as e:
            self._missing.setdefault(metric, str(e))
            return
        calls.append(call)
        self._metrics.update(given)
        for m in given:
            self._missing.pop(m, None)

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
                    values[a.fieldId] = getattr(a.value, _TYPES[a.valueType])
            return [
                (metric, factor * sum(values[i] for i in mine if i in values))
                for metric, mine, factor in plan
                if any(i in values for i in mine)
            ]

        return read

    def _link_errors(self, handle: Any) -> Call | None:
        """Sums the error counters of the links that are up, one call for each: the way of older drivers."""
        n = self._nvml
        counters = [
            getattr(n, f"NVML_NVLINK_ERROR_DL_{k}")
            for k in ("REPLAY", "RECOVERY", "CRC_FLIT", "CRC_DATA")
            if hasattr(n, f"NVML_NVLINK_ERROR_DL_{k}")
        ]
        pairs = []
        for link in range(getattr(n, "NVML_NVLINK_MAX_LINKS", 0)):
            try:
                if n.nvmlDeviceGetNvLinkState(handle, link) != n.NVML_FEATURE_ENABLED:
                    continue
            except n.NVMLError:
                break
            for c in counters:
                with contextlib.suppress(n.NVMLError):
                    n.nvmlDeviceGetNvLinkErrorCounter(handle, link, c)
                    pairs.append((link, c))
        if not pairs:
            return None

        def read() -> list[tuple[str, float]]:
            total = sum(n.nvmlDeviceGetNvLinkErrorCounter(handle, link, c) for link, c in pairs)
            return [("nvlink_errors_total", float(total))]

        return read

    def _gpm_samples(self, handle: Any) -> list[Any]:
        n = self._nvml
        try:
            if not n.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                raise n.NVMLError(n.NVML_ERROR_NOT_SUPPORTED)
            samples = [n.nvmlGpmSampleAlloc(), n.nvmlGpmSampleAlloc()]
            n.nvmlGpmSampleGet(handle, samples[0])
        except (n.NVMLError, AttributeError) as e:
            for metric, _, _ in GPM_METRICS:
                self._missing.setdefault(metric, f"no GPM counters (Hopper and newer have them): {e}")
            return []
        self._metrics.update(m for m, _, _ in GPM_METRICS)
        return samples

    def _gpm_request(self) -> Any:
        request = self._nvml.c_nvmlGpmMetricsGet_t()
        request.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(GPM_METRICS)
        for i, (_, constant, _) in enumerate(GPM_METRICS):
            request.metrics[i].metricId = getattr(self._nvml, constant)
        return request

    def _read_gpm(self, g: _Gpu, now: float, out: list[Reading]) -> None:
        n = self._nvml
        old, new = g.samples
        if g.sampled is not None and now - g.sampled < GPM_LEAST_S:
            return
        n.nvmlGpmSampleGet(g.handle, new)
        g.samples = [new, old]
        first, g.sampled = g.sampled is None, now
        if first:
            return
        request = self._gpm
        request.sample1, request.sample2 = old, new
        n.nvmlGpmMetricsGet(request)
        for i, (metric, _, factor) in enumerate(GPM_METRICS):
            answer = request.metrics[i]
            # Not a number: the counter was not scheduled in this interval.
            if answer.nvmlReturn == n.NVML_SUCCESS and answer.value == answer.value:
                out.append(Reading(g.index, None, metric, answer.value * factor))

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
