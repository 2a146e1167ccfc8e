"""How long a rank's GPU worked in a step before it had to wait for other ranks: what tells a slow one from those that wait for it."""

from __future__ import annotations

import math
from types import TracebackType

import torch


class BusyTime:
    """Measures what is launched inside `with`, by CUDA events: nothing waits for it. Without a GPU it measures nothing: there the
    agent reads the processor's time from outside."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._began: torch.cuda.Event | None = None
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        self._began = self._record()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended = self._record()
        if self._began is not None and ended is not None:
            self._pairs.append((self._began, ended))

    def take(self) -> float:
        """Seconds since the last call; NaN without a GPU, or before it has come so far: it is not waited for."""
        pairs, self._pairs = self._pairs, []
        if not pairs or not all(ended.query() for _, ended in pairs):
            return math.nan
        milliseconds: float = sum(began.elapsed_time(ended) for began, ended in pairs)
        return milliseconds / 1e3

    def _record(self) -> torch.cuda.Event | None:
        if self._device is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
