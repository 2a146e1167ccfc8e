"""Copying live tensors into a buffer of the keeper, on the CPU at once, on a GPU behind the trainer's back. Needs torch.

On a GPU an event on the training stream marks the state of the call; a copy stream waits for it and copies; before
the next mutation the training *stream* waits for the copies that still run. The processor waits for nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import UnbrokenError
from .layout import Layout


class TornSnapshot(UnbrokenError):
    """A tensor was changed while it was being copied, without `fence()` before."""


def arena_views(
    buffer: torch.Tensor, layout: Layout, like: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """A view of the buffer for each tensor, of its own type and shape, where the layout has it."""
    views = {}
    for name, t in like.items():
        start, stop = layout.span(name)
        views[name] = typed_view(buffer[start:stop], t.dtype, t.shape)
    return views


def typed_view(raw: torch.Tensor, dtype: torch.dtype, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    """These bytes as a tensor; complex128 as pairs of float64, which is how it is aligned."""
    if raw.numel() == 0:
        return torch.empty(shape, dtype=dtype)
    if dtype is torch.complex128:
        return torch.view_as_complex(raw.view(torch.float64).reshape(*shape, 2))
    return raw.view(dtype).reshape(shape)


@dataclass(eq=False)
class Copying:
    """A copy under way. `finished` is set when the buffer is whole, or with `error` when it never will be."""

    on_done: Callable[[Copying], None]
    began: float = field(default_factory=time.monotonic)
    staged: threading.Event = field(default_factory=threading.Event)
    error: UnbrokenError | None = None
    seconds: float = 0.0
    device_copy: bool = False


class CpuStager:
    """Copies at the call: on the CPU forward and backward would compete with a copy for the same cores."""

    def copy(
        self,
        pieces: Mapping[str, torch.Tensor],
        views: Mapping[str, torch.Tensor],
        protected: frozenset[str],
        on_done: Callable[[Copying], None],
    ) -> Copying:
        """Copies everything, then calls `on_done`."""
        copying = Copying(on_done)
        with torch.no_grad():
            for name, t in pieces.items():
                views[name].copy_(t)
        copying.seconds = time.monotonic() - copying.began
        copying.staged.set()
        on_done(copying)
        return copying

    def fence(self) -> None:
        """Nothing is ever under way."""

    def drain(self) -> None:
        """As `fence`."""

    def close(self) -> None:
        """There is nothing to end."""

    def figures(self) -> dict[str, Any]:
        """What was measured of the copies."""
        return {}
