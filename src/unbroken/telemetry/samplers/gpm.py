"""GPM, the profiling counters of an NVIDIA GPU (Hopper and newer): means between two samples of them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

MIB = 2**20
GPM_LEAST_S = 0.1
"""Two samples lie so far apart, at least."""

Metric = tuple[str, str, float]
"""Schema metric, NVML's constant, factor into the schema's unit (NVML gives percent and MiB/s)."""
GPM_METRICS: tuple[Metric, ...] = (
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


class GpmCounters:
    """One GPU's, from one reading to the next."""

    def __init__(self, nvml: Any, handle: Any, metrics: Sequence[Metric] = GPM_METRICS) -> None:
        """`nvml` is the `pynvml` module or its fake, `handle` the GPU in it. Raises NVMLError where the GPU has no such counters or
        they may not be read, AttributeError where the module is too old."""
        self._nvml, self._handle, self._metrics = nvml, handle, tuple(metrics)
        if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        self._request = nvml.c_nvmlGpmMetricsGet_t()
        self._request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(self._metrics)
        for i, (_, constant, _) in enumerate(self._metrics):
            self._request.metrics[i].metricId = getattr(nvml, constant)
        self._samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
        self._at: float | None = None
        try:
            nvml.nvmlGpmSampleGet(handle, self._samples[0])
        except nvml.NVMLError:
            self.close()
            raise

    def read(self, now: float) -> tuple[float, dict[str, float]] | None:
        """How many seconds passed since the last reading, and the means over them by metric; None at the first, and where less than
        `GPM_LEAST_S` did. Two calls of the driver. Raises NVMLError, and then the next reading is a first one."""
        n, (old, new) = self._nvml, self._samples
        if self._at is not None and now - self._at < GPM_LEAST_S:
            return None
        before, self._at = self._at, None
        n.nvmlGpmSampleGet(self._handle, new)
        self._samples = [new, old]
        if before is not None:
            self._request.sample1, self._request.sample2 = old, new
            n.nvmlGpmMetricsGet(self._request)
        self._at = now
        if before is None:
            return None
        found = {}
        for i, (metric, _, factor) in enumerate(self._metrics):
            answer = self._request.metrics[i]
            # Not a number: the counter was not scheduled in this interval.
            if answer.nvmlReturn == n.NVML_SUCCESS and answer.value == answer.value:
                found[metric] = answer.value * factor
        return now - before, found

    def close(self) -> None:
        """Frees the samples."""
        with contextlib.suppress(self._nvml.NVMLError):
            for sample in self._samples:
                self._nvml.nvmlGpmSampleFree(sample)
        self._samples = []
