"""One buffer of the keeper as the rank that fills it sees it. Needs torch only where it is looked at as a tensor."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..device.host_memory import populate

if TYPE_CHECKING:
    import torch

ENTER_BYTES = 16 << 20  # one to two milliseconds


@dataclass(eq=False)
class RankBuffer:
    """One buffer, mapped into this process. `content` is what a new keeper would have to know of its content."""

    id: int
    bytes: int
    fd: int
    map: mmap.mmap
    ready: threading.Event = field(default_factory=threading.Event)
    pinned: bool = False
    content: dict[str, Any] | None = None
    confirmed: bool = False
    """The keeper has said that it knows of `content`."""
    claimed: bool = False
    keeper: str = ""
    gone: bool = False
    unfilled: bool = False
    """The keeper could not, or did not, take its pages: touching them may cost memory that is not there."""
    entered: bool = False
    unpin: Callable[[], None] | None = None
    _tensor: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """All of it as bytes."""
        if self._tensor is None:
            import torch

            with torch.inference_mode(False):  # made in that mode it could not be written outside of it
                self._tensor = torch.frombuffer(self.map, dtype=torch.uint8)
        return self._tensor

    def enter(self, guard: AbstractContextManager[object]) -> None:
        """Enters its pages into this process's page table; with `guard` held it is not unmapped."""
        for start in range(0, self.bytes, ENTER_BYTES):
            with guard:
                if self.gone or self.unfilled:
                    return
                populate(self.tensor.data_ptr() + start, min(ENTER_BYTES, self.bytes - start))
            time.sleep(0.001)  # or nobody else would get the guard

    def unmap(self) -> None:
        """Gives the mapping and the descriptor back."""
        self.gone = True
        if self.unpin is not None:
            self.unpin()
        self._tensor = None
        try:
            self.map.close()
        except BufferError:
            pass  # a view of it lives on; the mapping goes with the view
        os.close(self.fd)
