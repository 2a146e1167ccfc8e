"""SM, tensor and DRAM activity of this host's GPUs, and their NVLink and PCIe traffic, several times a second (NVML's GPM).

Utilisation as `nvidia-smi` shows it says only that some kernel ran; these count cycles of the SMs (Hopper and newer).
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...errors import UnbrokenError
from ...telemetry.samplers.gpm import GPM_LEAST_S, GPM_METRICS
from ...telemetry.samplers.gpu import GpuSampler, load_nvml

PERIOD_S = 0.125
"""8 samples a second; GPM needs more than 0.1 s between two."""
SHOWN = (
    "sm_active_pct", "sm_occupancy_pct", "tensor_active_pct", "dram_active_pct", "pcie_tx_bytes_per_s",
    "pcie_rx_bytes_per_s", "nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s", "gpu_power_w", "sm_clock_mhz",
)  # fmt: skip
"""Metrics of the shared schema (`unbroken.samples`) that a profile has."""


@dataclass(frozen=True)
class ActivitySample:
    """One GPU's means since the sample before."""

    at: float
    """Seconds of the monotonic clock."""
    gpu: int
    """NVML's index on this host."""
    values: dict[str, float]


@dataclass
class Activity:
    """What was measured, and why the rest was not."""

    samples: list[ActivitySample] = field(default_factory=list)
    not_measured: dict[str, str] = field(default_factory=dict)

    def between(self, begin: float, end: float) -> Activity:
        """The samples that lie within wholly: one covers the time since the one before."""
        kept = [s for s in self.samples if begin + PERIOD_S <= s.at <= end]
        return Activity(kept, self.not_measured)

    def means(self) -> dict[int, dict[str, float]]:
        """GPU -> metric -> mean over its samples."""
        found: dict[int, dict[str, list[float]]] = {}
        for s in self.samples:
            for metric, value in s.values.items():
                found.setdefault(s.gpu, {}).setdefault(metric, []).append(value)
        return {g: {m: statistics.fmean(v) for m, v in ms.items()} for g, ms in found.items()}


class ActivityRecorder:
    """Samples in a thread of its own between `start` and `stop`."""

    def __init__(self, nvml: Callable[[], Any] = load_nvml, period_s: float = PERIOD_S) -> None:
        self._period = max(period_s, 1.01 * GPM_LEAST_S)
        self.found = Activity()
        self.stopped = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            self._sampler: GpuSampler | None = GpuSampler(nvml(), share=1.0)
        except UnbrokenError as e:
            self._sampler = None
            self.found.not_measured = dict.fromkeys(SHOWN, str(e))
            return
        if not self._sampler.count:
            self.found.not_measured = dict.fromkeys(SHOWN, "no GPU here")
        else:
            missing = dict(self._sampler.coverage().missing)
            self.found.not_measured = {m: missing[m] for m in SHOWN if m in missing}

    def start(self) -> None:
        """Begins to sample."""
        if self._sampler is not None and self._sampler.count:
            self._thread = threading.Thread(target=self._run, name="activity", daemon=True)
            self._thread.start()

    def stop(self) -> Activity:
        """Ends it; what was measured."""
        self.stopped.set()
        if self._thread is not None:
            self._thread.join()
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None
        return self.found

    def _run(self) -> None:
        assert self._sampler is not None
        gpm = {m for m, _, _ in GPM_METRICS}
        while not self.stopped.wait(self._period):
            now = time.monotonic()
            of: dict[int, dict[str, float]] = {}
            for r in self._sampler.read(now):
                if r.metric in SHOWN:
                    of.setdefault(r.gpu if r.gpu is not None else 0, {})[r.metric] = r.value
            self.found.samples += [ActivitySample(now, g, v) for g, v in of.items() if v.keys() & gpm or not self._gpm]  # fmt: skip

    @property
    def _gpm(self) -> bool:
        """Whether the counters are there: the first reading of a GPU has none yet, and is left out then."""
        return "sm_active_pct" not in self.found.not_measured
