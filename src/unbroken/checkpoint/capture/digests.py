"""A digest of each tensor that other ranks hold too, taken where the tensor lies: on a GPU behind what it does already.

What lies in memory is read once, as rows of 64-bit integers that are added up; the sums, each times an odd number of its own,
give the digest modulo 2**64. Integers add up to the same in any order, so that cards of different kinds agree; and one flipped
bit always shows, as an odd multiple of a power of two is never 0. Needs torch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..format.manifest import Sharding, stored_name
from ..format.replicas import NOT_COVERED
from .state import Captured

COLUMNS = 1024
_ROW = COLUMNS * 8
_MODULUS = 1 << 64


@dataclass(frozen=True, eq=False)
class Digests:
    """Digests under way. `rows` says of each tensor of the state which pieces are its own, () where it has no replica; `parts`
    are the pieces of each device, their digests on the host, and the event after which they are there."""

    rows: tuple[tuple[int, ...], ...]
    parts: tuple[tuple[list[int], torch.Tensor, Any], ...]

    def read(self) -> str:
        """16 characters a tensor, in the order of the state: hex digits, or `NOT_COVERED` where it has no replica. Waits for the GPU."""
        values: dict[int, int] = {}
        for pieces, found, event in self.parts:
            if event is not None:
                event.synchronize()
            values.update(zip(pieces, found.tolist(), strict=True))
        return "".join(_combine([values[i] for i in own]) if own else NOT_COVERED for own in self.rows)


def begin_digests(captured: Captured, world_size: int) -> Digests | None:
    """Starts the digests of what other ranks should have bit for bit: parameters and optimizer state. None where this rank
    has nothing of the kind (a run of one rank, or one that is sharded only)."""
    if world_size < 2:
        return None
    pieces: list[torch.Tensor] = []
    rows: list[tuple[int, ...]] = []
    for name, (_, sharding) in captured.tensors.items():
        own = [captured.pieces[stored_name(name, i)] for i in range(len(sharding.boxes))]
        is_covered = own and has_replicas(sharding) and _is_trained(captured, name) and _is_float(own)
        rows.append(tuple(range(len(pieces), len(pieces) + len(own))) if is_covered else ())
        pieces += own if is_covered else []
    if not pieces:
        return None
    devices: dict[torch.device, list[int]] = {}
    for i, piece in enumerate(pieces):
        devices.setdefault(piece.device, []).append(i)
    with torch.no_grad():
        parts = [(mine, *_to_host(digest_tensors([pieces[i] for i in mine]))) for mine in devices.values()]
    return Digests(tuple(rows), tuple(parts))


def _to_host(values: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """The same on the host, once the event has passed; nothing is waited for here."""
    if not values.is_cuda:
        return values, None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    with torch.cuda.device(values.device):
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return host, event


def has_replicas(sharding: Sharding) -> bool:
    """Whether other ranks hold the same elements, as far as the tensor itself tells."""
    if not sharding.placements:
        return True
    spread = zip(sharding.placements, sharding.mesh, strict=True)
    return any(p == "Replicate()" and size > 1 for p, size in spread)


def digest_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One int64 a tensor, all on one device, where they lie: int64[len(tensors)]."""
    device = tensors[0].device
    whole = torch.zeros(len(tensors), COLUMNS, dtype=torch.int64, device=device)
    rest = torch.zeros_like(whole)
    targets, sources = [], []
    for i, t in enumerate(tensors):
        data = _bytes_of(t)
        full = data.numel() // _ROW * _ROW
        if full:
            torch.sum(_aligned(data[:full]).view(-1, COLUMNS), dim=0, out=whole[i])
        if full < data.numel():
            targets.append(rest[i].view(torch.uint8)[: data.numel() - full])
            sources.append(data[full:])
    if targets:
        torch._foreach_copy_(targets, sources)
    return ((whole + rest) * _weights(device)).sum(1)


def _bytes_of(t: torch.Tensor) -> torch.Tensor:
    return t.detach().contiguous().view(-1).view(torch.uint8)


def _aligned(data: torch.Tensor) -> torch.Tensor:
    """The bytes as int64: a copy of them where they begin in the middle of one."""
    start = data.storage_offset()
    return (data if start % 8 == 0 and data.data_ptr() % 8 == 0 else data.clone()).view(torch.int64)


@functools.lru_cache(16)
def _weights(device: torch.device) -> torch.Tensor:
    """Odd numbers (Knuth's linear congruential generator, The Art of Computer Programming, volume 2, 3.3.4)."""
    state, found = 0x9E3779B97F4A7C15, []
    for _ in range(COLUMNS):
        state = (state * 6364136223846793005 + 1442695040888963407) % _MODULUS
        value = (state >> 11 | state << 53 & (_MODULUS - 1)) | 1
        found.append(value - _MODULUS if value >= _MODULUS // 2 else value)
    with torch.inference_mode(False):
        return torch.tensor(found, dtype=torch.int64, device=device)


def _combine(values: Sequence[int]) -> str:
    """The digest of a tensor of several pieces."""
    total = 0
    for value in values:
        total = (total * 0x9E3779B97F4A7C15 + value) % _MODULUS
    return f"{total:016x}"


def _is_trained(captured: Captured, name: str) -> bool:
    """Whether it is a parameter or optimizer state: buffers of a module may well differ (running means). Of a state of plain
    tensors nothing tells which is which, so all count."""
    return not captured.protected or name in captured.protected


def _is_float(pieces: Sequence[torch.Tensor]) -> bool:
    return all(p.is_floating_point() for p in pieces)
