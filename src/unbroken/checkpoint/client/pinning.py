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

from ...errors import CheckpointError
from ..device.beside import beside_captures
from ..device.host_memory import PIECE_BYTES, populate
from .rank_buffer import RankBuffer

logger = logging.getLogger("unbroken.checkpoint")

READY_S = 120.0


class Pinning:
    """Registers buffers in a thread, in their order; `registered_s` is the time that registering took so far."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.registered_s = 0.0
        self.bytes = 0
        self._one = threading.Lock()

    def begin(self, buffers: Iterable[RankBuffer]) -> None:
        """Registers these in the background."""
        waiting = [s for s in buffers if not s.pinned]
        if waiting:
            threading.Thread(target=self._all, args=(waiting,), name="unbroken-pinning", daemon=True).start()

    def ensure(self, buffer: RankBuffer) -> None:
        """Registers this buffer now unless it is. Raises CheckpointError if the system refuses."""
        if buffer.pinned:
            return
        buffer.ready.wait(READY_S)
        with self._one, torch.cuda.device(self.device):
            if not buffer.pinned:
                self._register(buffer, pause_s=0.0)

    def wait(self) -> None:
        """Waits until the GPU has taken everything that was copied to it."""
        torch.cuda.synchronize(self.device)

    def _all(self, buffers: list[RankBuffer]) -> None:
        beside_captures()
        torch.cuda.set_device(self.device)
        for buffer in buffers:
            buffer.ready.wait(READY_S)
            try:
                with self._one:
                    if not buffer.pinned:
                        self._register(buffer, pause_s=0.002)
            except CheckpointError as e:
                logger.warning("%s", e)
                return

    def _register(self, buffer: RankBuffer, *, pause_s: float) -> None:
        """Registers one buffer; between pieces the trainer may launch, and the buffer may go."""
        cuda = torch.cuda.cudart()
        if buffer.gone:
            return
        buffer.unpin = lambda: self._retire(buffer)
        address, done = buffer.tensor.data_ptr(), 0
        while done < buffer.bytes and not buffer.gone:
            size = min(PIECE_BYTES, buffer.bytes - done)
            began = time.monotonic()
            if not buffer.unfilled:
                populate(address + done, size)
            code = int(cuda.cudaHostRegister(address + done, size, 0))
            self.registered_s += time.monotonic() - began
            if code != 0:
                self._unregister(address, done)
                raise CheckpointError(
                    f"CUDA cannot register {size >> 20} MiB of host memory (error {code}): copies will be slow",
                    hint="Raise the limit of locked memory (ulimit -l), or give the keeper a smaller budget",
                )
            done += size
            self.bytes += size
            if pause_s:
                time.sleep(pause_s)
        if buffer.gone:
            self._unregister(address, done)
        else:
            buffer.pinned = True

    def _retire(self, buffer: RankBuffer) -> None:
        """Before the memory is unmapped: waits for a registration under way, and takes it back."""
        with self._one:
            if buffer.pinned:
                buffer.pinned = False
                self._unregister(buffer.tensor.data_ptr(), buffer.bytes)

    def _unregister(self, address: int, size: int) -> None:
        for start in range(0, size, PIECE_BYTES):
            torch.cuda.cudart().cudaHostUnregister(address + start)
            self.bytes -= min(PIECE_BYTES, size - start)
