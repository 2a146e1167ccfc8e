"""Registering the keeper's memory with CUDA, piece by piece and behind the start-up. Needs torch.

Registered memory is copied to at the speed of the bus and without the processor; registering blocks launches
meanwhile, so it is done in pieces of at most 128 MiB, of pages that the keeper has filled before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

import torch

from ..errors import CheckpointError
from .memory import PIECE_BYTES
from .rank_memory import Slab

logger = logging.getLogger("unbroken.checkpoint")

READY_S = 120.0


class Pinning:
    """Registers buffers in a thread, in their order; `registered_s` is the time that registering took so far."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.registered_s = 0.0
        self.bytes = 0
        self._one = threading.Lock()

    def begin(self, slabs: Iterable[Slab]) -> None:
        """Registers these in the background."""
        todo = [s for s in slabs if not s.pinned]
        if todo:
            threading.Thread(target=self._all, args=(todo,), name="unbroken-pinning", daemon=True).start()

    def ensure(self, slab: Slab) -> None:
        """Registers this buffer now unless it is. Raises CheckpointError if the system refuses."""
        if slab.pinned:
            return
        slab.ready.wait(READY_S)
        with self._one:
            if not slab.pinned:
                self.register(slab, pause_s=0.0)

    def _all(self, slabs: list[Slab]) -> None:
        torch.cuda.set_device(self.device)
        for slab in slabs:
            slab.ready.wait(READY_S)
            try:
                with self._one:
                    if not slab.pinned and not slab.gone:
                        self.register(slab, pause_s=0.002)
            except CheckpointError as e:
                logger.warning("%s", e)
                return

    def register(self, slab: Slab, *, pause_s: float) -> None:
        """Registers one buffer; between pieces the trainer may launch."""
        cuda = torch.cuda.cudart()
        address = slab.tensor.data_ptr()
        for start in range(0, slab.bytes, PIECE_BYTES):
            size = min(PIECE_BYTES, slab.bytes - start)
            began = time.monotonic()
            code = int(cuda.cudaHostRegister(address + start, size, 0))
            self.registered_s += time.monotonic() - began
            if code != 0:
                for back in range(0, start, PIECE_BYTES):
                    cuda.cudaHostUnregister(address + back)
                raise CheckpointError(
                    f"CUDA cannot register {size >> 20} MiB of host memory (error {code}): copies will be slow",
                    todo="Raise the limit of locked memory (ulimit -l), or give the keeper a smaller budget",
                )
            self.bytes += size
            if pause_s:
                time.sleep(pause_s)
        slab.pinned = True
        slab.unpin = lambda: self.unregister(slab)

    def unregister(self, slab: Slab) -> None:
        """Before the memory is unmapped."""
        if not slab.pinned:
            return
        slab.pinned = False
        cuda = torch.cuda.cudart()
        address = slab.tensor.data_ptr()
        for start in range(0, slab.bytes, PIECE_BYTES):
            cuda.cudaHostUnregister(address + start)
            self.bytes -= min(PIECE_BYTES, slab.bytes - start)
