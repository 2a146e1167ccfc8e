"""Where tensors go in a buffer, as views of it, and how their copies are cut at the ends of registered pieces. Needs torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from ..format.layout import Layout
from .host_memory import PIECE_BYTES


@dataclass(frozen=True)
class Target:
    """Where a tensor goes: bytes [start, stop) of a buffer, and those as a view of the type and shape of `real(tensor)`."""

    start: int
    stop: int
    view: torch.Tensor
    parts: tuple[torch.Tensor, ...]
    """Its bytes, cut where a registered piece of the buffer ends; empty where it lies in one."""


class Targets:
    """The targets of a state's tensors in each of the few buffers: made once, since a save must not take long."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._known: dict[int, dict[str, Target]] = {}

    def of(self, buffer: torch.Tensor, layout: Layout, like: Mapping[str, torch.Tensor]) -> dict[str, Target]:
        """By name, where the layout has it; `like` are tensors of the state that the layout was planned for."""
        if layout is not self._layout or len(self._known) > 8:
            self._known, self._layout = {}, layout
        address = buffer.data_ptr()
        found = self._known.get(address)
        if found is None:
            found = {}
            # Made in inference mode they could not be written outside of it, by any later save.
            with torch.inference_mode(False), torch.no_grad():
                for name, t in like.items():
                    start, stop = layout.span(name)
                    as_real = real(t)
                    view = typed_view(buffer[start:stop], as_real.dtype, as_real.shape)
                    ends = [*range((start // PIECE_BYTES + 1) * PIECE_BYTES, stop, PIECE_BYTES), stop]
                    sizes = tuple(b - a for a, b in itertools.pairwise([start, *ends]))
                    parts = buffer[start:stop].split(sizes) if len(sizes) > 1 else ()
                    found[name] = Target(start, stop, view, parts)
            self._known[address] = found
        return found

    def clear(self) -> None:
        """Lets go of the buffers."""
        self._known.clear()


def batches(
    pairs: Iterable[tuple[Target, torch.Tensor]],
    limit: Callable[[], float] = lambda: float("inf"),
    copies: float = float("inf"),
) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """(targets, sources) to be copied, at most `limit()` bytes and `copies` copies at a time. `limit` is asked each time, so that it
    may change on the way. A copy ends where a registered piece of the buffer ends: none may reach over that."""
    size = 0
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for target, source in pairs:
        for part, piece in _cut(target, source, limit):
            if targets and (size + part.nbytes > limit() or len(targets) >= copies):
                yield targets, sources
                targets, sources, size = [], [], 0
            targets.append(part)
            sources.append(piece)
            size += part.nbytes
    if targets:
        yield targets, sources


def _cut(
    target: Target, source: torch.Tensor, limit: Callable[[], float]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if not target.parts and target.stop - target.start <= limit():
        yield target.view, source
        return
    flat, at = flat_bytes(source), 0
    for part in target.parts or (flat_bytes(target.view),):
        done, size = 0, part.numel()
        while done < size:
            n = int(min(size - done, limit()))
            yield part[done : done + n], flat[at : at + n]
            done, at = done + n, at + n


def real(t: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of reals (a view): the arena aligns them as such."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def typed_view(raw: torch.Tensor, dtype: torch.dtype, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    """These bytes as a tensor; a copy of them only for complex numbers that are aligned as reals."""
    if raw.numel() == 0:
        return torch.empty(shape, dtype=dtype, device=raw.device)
    if dtype.is_complex and raw.storage_offset() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).reshape(shape)


def to_device(live: torch.Tensor, stored: torch.Tensor, base: int) -> None:
    """Copies landed memory, whose buffer begins at address `base`, into live memory, without waiting.

    No copy may reach from one registered piece of the buffer into the next.
    """
    start, size = stored.data_ptr() - base, stored.numel() * stored.element_size()
    if live.device.type != "cuda" or start // PIECE_BYTES == (start + max(size, 1) - 1) // PIECE_BYTES:
        live.copy_(stored, non_blocking=True)
        return
    flat = flat_bytes(live)
    source, at = flat_bytes(stored), 0
    while at < size:
        n = min(PIECE_BYTES - (start + at) % PIECE_BYTES, size - at)
        flat[at : at + n].copy_(source[at : at + n], non_blocking=True)
        at += n
    if flat.data_ptr() != live.data_ptr():  # it does not lie in rows: what was filled is a copy of it
        live.copy_(flat.view(live.dtype).reshape(live.shape))


def flat_bytes(t: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as one row of bytes; a copy in row-major order where it does not lie so."""
    return real(t).contiguous().view(-1).view(torch.uint8)
