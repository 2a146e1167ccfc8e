"""A stand-in for the `pynvml` module: GPUs whose readings, faults and age of driver a test chooses.

nvml = FakeNvml([FakeGpu(power_w=350), FakeGpu(gpm=False)])
nvml.gpus[0].xids.append(79)
nvml.gpus[1].lost = True
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass
class FakeGpu:
    """One GPU's state; change it between ticks."""

    name: str = "NVIDIA H100 80GB HBM3"
    util_pct: int = 97
    mem_used: int = 60 << 30
    mem_total: int = 80 << 30
    power_w: float = 400.0
    energy_j: float = 1e6
    temp_c: int = 55
    mem_temp_c: int | None = 65
    """None: this GPU has no such sensor."""
    sm_clock_mhz: int = 1980
    mem_clock_mhz: int = 2619
    throttle: int = 0
    ecc_corrected: int = 0
    ecc_uncorrected: int = 0
    remapped: int = 0
    remap_pending: bool = False
    remap_failed: bool = False
    nvlink_replays: int = 0
    nvlink_recoveries: int = 0
    nvlink_crc: int = 0
    """Each counted on link 0."""
    nvlink_by: str = "link"
    """How the driver gives them: a field for each "link", fields of the "total", or one "call" each."""
    links: int = 18
    links_down: tuple[int, ...] = ()
    gpm: bool = True
    gpm_values: dict[str, float] = field(default_factory=lambda: {"SM_UTIL": 88.5, "ANY_TENSOR_UTIL": 41.25})
    """By the end of NVML's constant; others are 0."""
    xids: list[int] = field(default_factory=list)
    """Events that wait to be read."""
    lost: bool = False
    split: bool = False
    """By MIG."""
    processes: tuple[int, ...] = ()
    """Which have work on it."""


_GPM = ["SM_UTIL", "SM_OCCUPANCY", "ANY_TENSOR_UTIL", "DRAM_BW_UTIL", "FP64_UTIL", "FP32_UTIL", "FP16_UTIL", "PCIE_TX_PER_SEC", "PCIE_RX_PER_SEC", "NVLINK_TOTAL_TX_PER_SEC", "NVLINK_TOTAL_RX_PER_SEC"]  # fmt: skip
_FIELDS: dict[str, Callable[[FakeGpu], int | None]] = {
    "MEMORY_TEMP": lambda g: g.mem_temp_c,
    "TOTAL_ENERGY_CONSUMPTION": lambda g: int(g.energy_j * 1000),
    "ECC_SBE_VOL_TOTAL": lambda g: g.ecc_corrected,
    "ECC_DBE_VOL_TOTAL": lambda g: g.ecc_uncorrected,
    "REMAPPED_COR": lambda g: g.remapped,
    "REMAPPED_UNC": lambda g: 0,
    "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": lambda g: g.nvlink_crc if g.nvlink_by == "total" else None,
    "NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": lambda g: 0 if g.nvlink_by == "total" else None,
    "NVLINK_REPLAY_ERROR_COUNT_TOTAL": lambda g: g.nvlink_replays if g.nvlink_by == "total" else None,
    "NVLINK_RECOVERY_ERROR_COUNT_TOTAL": lambda g: g.nvlink_recoveries if g.nvlink_by == "total" else None,
    "NVLINK_ERROR_DL_REPLAY": lambda g: g.nvlink_replays if g.nvlink_by == "link" else None,
    "NVLINK_ERROR_DL_RECOVERY": lambda g: g.nvlink_recoveries if g.nvlink_by == "link" else None,
    "NVLINK_ERROR_DL_CRC": lambda g: g.nvlink_crc if g.nvlink_by == "link" else None,
}


class FakeNvml:
    """Answers the calls that samplers of GPUs and agents make, and counts them in `calls`."""

    NVML_SUCCESS, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_TIMEOUT, NVML_ERROR_GPU_IS_LOST = 0, 3, 10, 15
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_FEATURE_ENABLED = 0, 1, 2, 1
    NVML_NVLINK_MAX_LINKS = 18
    NVML_NVLINK_ERROR_DL_REPLAY, NVML_NVLINK_ERROR_DL_RECOVERY, NVML_NVLINK_ERROR_DL_CRC_FLIT = 0, 1, 2
    NVML_GPM_METRICS_GET_VERSION = 1
    nvmlEventTypeXidCriticalError = 8

    class NVMLError(Exception):
        """NVML's error, with its code in `value`."""

        def __init__(self, value: int) -> None:
            super().__init__({3: "Not Supported", 10: "Timeout", 15: "GPU is lost"}.get(value, str(value)))
            self.value = value

    def __init__(self, gpus: list[FakeGpu]) -> None:
        self.gpus = gpus
        self.events_supported = True
        self.calls = 0
        self.live_samples = 0
        self._gpm_ids = {f"NVML_GPM_METRIC_{n}": i for i, n in enumerate(_GPM)}
        self._field_ids = {f"NVML_FI_DEV_{n}": 100 + i for i, n in enumerate(_FIELDS)}
        for name, number in (*self._gpm_ids.items(), *self._field_ids.items()):
            setattr(self, name, number)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def _gpu(self, handle: int) -> FakeGpu:
        self.calls += 1
        gpu = self.gpus[handle]
        if gpu.lost:
            raise self.NVMLError(self.NVML_ERROR_GPU_IS_LOST)
        return gpu

    def nvmlShutdown(self) -> None:
        """Nothing to free."""

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, h: int) -> str:
        return f"GPU-{h:08d}"

    def nvmlDeviceGetMigMode(self, h: int) -> list[int]:
        return [int(self._gpu(h).split)] * 2

    def nvmlDeviceGetComputeRunningProcesses(self, h: int) -> list[Any]:
        return [SimpleNamespace(pid=pid) for pid in self._gpu(h).processes]

    def nvmlDeviceGetName(self, h: int) -> str:
        return self.gpus[h].name

    def nvmlDeviceGetPciInfo(self, h: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{h:02X}:00.0".encode())

    def nvmlDeviceGetUtilizationRates(self, h: int) -> Any:
        return SimpleNamespace(gpu=self._gpu(h).util_pct, memory=0)

    def nvmlDeviceGetMemoryInfo(self, h: int) -> Any:
        g = self._gpu(h)
        return SimpleNamespace(used=g.mem_used, total=g.mem_total)

    def nvmlDeviceGetPowerUsage(self, h: int) -> int:
        return int(self._gpu(h).power_w * 1000)

    def nvmlDeviceGetTemperature(self, h: int, sensor: int) -> int:
        return self._gpu(h).temp_c

    def nvmlDeviceGetClockInfo(self, h: int, kind: int) -> int:
        g = self._gpu(h)
        return g.sm_clock_mhz if kind == self.NVML_CLOCK_SM else g.mem_clock_mhz

    def nvmlDeviceGetCurrentClocksEventReasons(self, h: int) -> int:
        return self._gpu(h).throttle

    def nvmlDeviceGetFieldValues(self, h: int, ids: list[int | tuple[int, int]]) -> list[Any]:
        g = self._gpu(h)
        getters = {self._field_ids[f"NVML_FI_DEV_{n}"]: f for n, f in _FIELDS.items()}
        out = []
        for asked in ids:
            i, link = asked if isinstance(asked, tuple) else (asked, 0)
            value = getters[i](g) if i in getters else None
            if value is not None and link > 0:
                value = 0
            code = self.NVML_SUCCESS if value is not None else self.NVML_ERROR_NOT_SUPPORTED
            out.append(
                SimpleNamespace(
                    fieldId=i,
                    nvmlReturn=code,
                    valueType=3,
                    latencyUsec=1,
                    value=SimpleNamespace(ullVal=value),
                )
            )
        return out

    def nvmlDeviceGetNvLinkState(self, h: int, link: int) -> int:
        if link >= self._gpu(h).links:
            raise self.NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return self.NVML_FEATURE_ENABLED if link not in self.gpus[h].links_down else 0

    def nvmlDeviceGetRemappedRows(self, h: int) -> tuple[int, int, int, int]:
        g = self._gpu(h)
        return g.remapped, 0, int(g.remap_pending), int(g.remap_failed)

    def nvmlDeviceGetNvLinkErrorCounter(self, h: int, link: int, counter: int) -> int:
        g = self._gpu(h)
        return 0 if link else (g.nvlink_replays, g.nvlink_recoveries, g.nvlink_crc)[counter]

    def nvmlGpmQueryDeviceSupport(self, h: int) -> Any:
        return SimpleNamespace(isSupportedDevice=int(self._gpu(h).gpm))

    def nvmlGpmSampleAlloc(self) -> Any:
        self.live_samples += 1
        return SimpleNamespace(gpu=None)

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self.live_samples -= 1

    def nvmlGpmSampleGet(self, h: int, sample: Any) -> Any:
        self._gpu(h)
        sample.gpu = h
        return sample

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        metrics = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(64)]
        return SimpleNamespace(version=0, numMetrics=0, sample1=None, sample2=None, metrics=metrics)

    def nvmlGpmMetricsGet(self, request: Any) -> Any:
        g = self._gpu(request.sample2.gpu)
        if request.sample1 is request.sample2 or request.sample1.gpu != request.sample2.gpu:
            raise self.NVMLError(2)
        names = {i: n.removeprefix("NVML_GPM_METRIC_") for n, i in self._gpm_ids.items()}
        for m in request.metrics[: request.numMetrics]:
            m.nvmlReturn, m.value = self.NVML_SUCCESS, g.gpm_values.get(names[m.metricId], 0.0)
        return request

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlEventSetFree(self, events: object) -> None:
        """Nothing to free."""

    def nvmlDeviceRegisterEvents(self, h: int, kinds: int, events: object) -> None:
        if not self.events_supported:
            raise self.NVMLError(self.NVML_ERROR_NOT_SUPPORTED)

    def nvmlEventSetWait_v2(self, events: object, timeout_ms: int) -> Any:
        self.calls += 1
        for h, g in enumerate(self.gpus):
            if g.xids:
                number = g.xids.pop(0)
                return SimpleNamespace(
                    device=h, eventType=self.nvmlEventTypeXidCriticalError, eventData=number
                )
        raise self.NVMLError(self.NVML_ERROR_TIMEOUT)
