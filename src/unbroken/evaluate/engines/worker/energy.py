"""What a worker's GPUs take from its start on: their own counters of energy, through NVML, where there are any."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any


class EnergyCounter:
    """Counts from when it is made. Reading costs one call for each GPU, and is done twice in a worker's life."""

    def __init__(self, gpus: Sequence[int]) -> None:
        self._handles: list[Any] = []
        self._began: float | None = None
        if not gpus:
            return
        with contextlib.suppress(Exception):  # no NVML, no such counter (before Volta), no right to read it
            import pynvml

            pynvml.nvmlInit()
            self._handles = [_handle(pynvml, i) for i in _physical(gpus)]
            self._began = self._read()

    @property
    def joules(self) -> float | None:
        """Since the start; None where the GPUs do not count."""
        if self._began is None:
            return None
        with contextlib.suppress(Exception):
            return max(0.0, self._read() - self._began)
        return None

    def _read(self) -> float:
        import pynvml

        return float(sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(h) for h in self._handles)) / 1e3


def _physical(gpus: Sequence[int]) -> list[str]:
    """The GPUs as the driver names them: the engine may have hidden all others from this process."""
    shown = [x.strip() for x in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if x.strip()]
    return shown if len(shown) == len(gpus) else [str(g) for g in gpus]


def _handle(pynvml: Any, name: str) -> Any:
    if name.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name.encode())
