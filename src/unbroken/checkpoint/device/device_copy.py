"""Copying a snapshot on the GPU first, where that costs the training less than waiting for the bus. Needs torch.

What it would save is the stall: by how much the copies over the bus outlast the window until the next update, measured
at every save. What it costs is measured too: at first by copying a little, then from each copy that was made.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import torch

from .targets import Target, flat_bytes, typed_view

logger = logging.getLogger("unbroken.checkpoint")

_GIB = 1 << 30
_ALIGN = 512  # the allocator's own; keeps every copy on the device aligned
_SHORT_S = 0.005
"""A stall that is not worth a thought."""
_REMEMBERED = 3
_MARGIN = 1.25
"""What is estimated to be no better than this is not begun; what is under way is left only for less."""
_PROBE_BYTES = 64 << 20

Pairs = list[tuple[Target, torch.Tensor]]


class Choice:
    """Whether the copy on the device is worth it: from the last stalls, and what such a copy takes (seconds)."""

    def __init__(self, wanted: bool | str) -> None:
        self.wanted = wanted
        self.on = False
        self.cost_s: float | None = None
        """Of one copy on the device; None: not known yet."""
        self._stalls: deque[float] = deque(maxlen=_REMEMBERED)

    def stalled(self, seconds: float) -> None:
        """What the last copy over the bus cost, or would have cost without the copy on the device."""
        self._stalls.append(seconds)

    @property
    def usual_s(self) -> float:
        """The median of the last stalls."""
        return statistics.median(self._stalls) if self._stalls else 0.0

    @property
    def worth_a_look(self) -> bool:
        """Whether training was held up so much that a copy on the device might be better."""
        return self.wanted == "auto" and self.usual_s > _SHORT_S

    def decide(self) -> bool:
        """For the next save; the result is also in `on`."""
        if self.wanted != "auto":
            self.on = bool(self.wanted)
        elif self.cost_s is None or not self.worth_a_look:
            self.on = False
        else:
            self.on = self.usual_s > self.cost_s * (1.0 if self.on else _MARGIN)
        return self.on


class DeviceCopy:
    """The memory on the GPU for such copies, and making them. Used by one thread at a time."""

    def __init__(self, device: torch.device, wanted: bool | str) -> None:
        self.device = device
        self.choice = Choice(wanted)
        self._scratch: torch.Tensor | None = None
        self._rows: list[_Row] = []

    def make(self, gpu: Pairs, busy: bool, began: torch.cuda.Event) -> Pairs | None:
        """The same targets, with sources that are copies on the device, made on the current stream, on which `began` is
        recorded before; None: it is not wanted, there is no room, or (`busy`) the memory for it is still in use."""
        if busy:
            return None
        total = sum(_padded(target) for target, _ in gpu)
        if not self.choice.decide() or not total:
            self.release()
            return None
        if not self._provide(total):
            return None
        rows = self._rows_of(gpu)
        began.record()
        words: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        odd: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        with torch.inference_mode(False), torch.no_grad():
            for row, (_, t) in zip(rows, gpu, strict=True):
                # As whole numbers, for one kernel for 16-bit floats goes by way of float32, which makes all NaNs alike;
                # and as long ones, which the memory moves faster than bytes.
                flat = flat_bytes(t)
                even = flat.numel() % 8 == 0 and flat.data_ptr() % 8 == 0 and flat.storage_offset() % 8 == 0
                targets, sources = words if even else odd
                targets.append(row.words if even and row.words is not None else row.raw)
                sources.append(flat.view(torch.int64) if even else flat)
            for targets, sources in (words, odd):
                if targets:
                    torch._foreach_copy_(targets, sources)
        return [(target, row.view) for row, (target, _) in zip(rows, gpu, strict=True)]

    def release(self) -> None:
        """Gives the memory back; no copy may read it any more."""
        self._scratch, self._rows = None, []

    def probe(self, sources: Sequence[torch.Tensor], total: int, stream: torch.cuda.Stream) -> None:
        """Estimates what copying `total` bytes would take, by copying a little on this stream; waits for it."""
        largest = max(sources, key=lambda t: t.nbytes, default=None)
        if largest is None or not largest.nbytes:
            return
        with (
            suppress(RuntimeError),
            torch.cuda.device(self.device),
            torch.cuda.stream(stream),
            torch.no_grad(),
        ):
            source = flat_bytes(largest)[:_PROBE_BYTES]
            target = torch.empty_like(source)
            took = []
            for _ in range(3):
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                began.record(stream)
                target.copy_(source)
                ended.record(stream)
                ended.synchronize()
                took.append(began.elapsed_time(ended) / 1e3)
            self.choice.cost_s = min(took) * total / source.numel()

    def _provide(self, total: int) -> bool:
        if self._scratch is not None and self._scratch.numel() >= total:
            return True
        self.release()
        free = torch.cuda.mem_get_info(self.device)[0]
        reserved = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        if free + reserved < total + _GIB:
            if self.choice.wanted is True:
                logger.warning("no room on the GPU to copy %.1f GB there first", total / 1e9)
            return False
        try:
            with torch.inference_mode(False):
                self._scratch = torch.empty(total, dtype=torch.uint8, device=self.device)
        except torch.cuda.OutOfMemoryError:
            self.choice.cost_s = None  # asked again after the next stall
            return False
        return True

    def _rows_of(self, gpu: Pairs) -> list[_Row]:
        if len(self._rows) != len(gpu) or not all(
            row.fits(*pair) for row, pair in zip(self._rows, gpu, strict=True)
        ):
            assert self._scratch is not None  # provided before
            self._rows, at = [], 0
            with torch.inference_mode(False), torch.no_grad():
                for target, t in gpu:
                    self._rows.append(_Row(self._scratch[at : at + target.stop - target.start], target, t))
                    at += _padded(target)
        return self._rows


class _Row:
    """Where one tensor lies in the scratch memory."""

    __slots__ = ("dtype", "raw", "shape", "start", "stop", "view", "words")

    def __init__(self, raw: torch.Tensor, target: Target, t: torch.Tensor) -> None:
        self.start, self.stop, self.dtype, self.shape = target.start, target.stop, t.dtype, t.shape
        self.raw = raw
        self.words = raw.view(torch.int64) if raw.numel() % 8 == 0 else None
        self.view = typed_view(raw, t.dtype, t.shape)

    def fits(self, target: Target, t: torch.Tensor) -> bool:
        return (self.start, self.stop, self.dtype, self.shape) == (
            target.start,
            target.stop,
            t.dtype,
            t.shape,
        )


def _padded(target: Target) -> int:
    return -(-(target.stop - target.start) // _ALIGN) * _ALIGN
