"""Rows of several tensors dealt to the ranks of a group, as torch's chunk does, and packed for one collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """Tensors of these shapes, cut along their first dimension in `size` parts of equal length, the last ones shorter."""

    shapes: tuple[tuple[int, ...], ...]
    size: int
    longest: tuple[int, ...] = ()
    """Rows to reckon with for each tensor, where other groups hold more of it than this one."""

    @cached_property
    def each(self) -> tuple[int, ...]:
        """Rows of a whole part of each tensor."""
        return tuple(-(-s[0] // self.size) for s in self.shapes)

    @cached_property
    def _room(self) -> tuple[int, ...]:
        rows = self.longest or tuple(s[0] for s in self.shapes)
        return tuple(-(-n // self.size) * _columns(s) for n, s in zip(rows, self.shapes, strict=True))

    @cached_property
    def total(self) -> int:
        """Elements of a packed part, its padding among them."""
        return sum(self._room)

    def rows(self, index: int) -> list[tuple[int, int]]:
        """(first, last + 1) of the rows of each tensor that part `index` has."""
        return [
            (min(index * e, s[0]), min((index + 1) * e, s[0]))
            for e, s in zip(self.each, self.shapes, strict=True)
        ]

    def views(self, flat: Tensor, index: int) -> list[Tensor]:
        """Part `index` of each tensor, as views of a packed part."""
        out, at = [], 0
        for (a, b), shape, room in zip(self.rows(index), self.shapes, self._room, strict=True):
            columns = _columns(shape)
            out.append(flat[at : at + (b - a) * columns].view(b - a, *shape[1:]))
            at += room
        return out

    @cached_property
    def even(self) -> bool:
        """Whether all parts of each tensor are as long: then nothing has to be packed."""
        return all(n and n % self.size == 0 for n in (*self.longest, *(s[0] for s in self.shapes)))

    def pack(self, tensors: Sequence[Tensor], into: Tensor) -> Tensor:
        """Copies the tensors to `into` (size, total): row i is what part i gets. Padding is left as it is."""
        for whole, packed in self._pairs(tensors, into):
            packed.copy_(whole)
        return into

    def unpack(self, parts: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copies what `pack` laid out back."""
        for whole, packed in self._pairs(tensors, parts):
            whole.copy_(packed)

    def _pairs(self, tensors: Sequence[Tensor], packed: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Views of the same elements on both sides: of each tensor its whole parts, and the part that is shorter."""
        pairs, at = [], 0
        for t, each, room in zip(tensors, self.each, self._room, strict=True):
            n, columns = t.shape[0], _columns(t.shape)
            full, rest = divmod(n, each) if each else (0, 0)
            if full:
                here = packed[:full, at : at + each * columns].view(full, each, columns)
                pairs.append((t[: full * each].reshape(full, each, columns), here))
            if rest:
                pairs.append(
                    (t[full * each :].reshape(rest * columns), packed[full, at : at + rest * columns])
                )
            at += room
        return pairs


def _columns(shape: Sequence[int]) -> int:
    n = 1
    for s in shape[1:]:
        n *= s
    return n


def split_of(tensors: Sequence[Tensor], size: int, longest: tuple[int, ...] = ()) -> Split:
    """The split of these tensors' rows in `size` parts."""
    return Split(tuple(tuple(t.shape) for t in tensors), size, longest)


def empty_parts(split: Split, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeroed room for what `split.pack` lays out."""
    return torch.zeros(split.size, split.total, dtype=dtype, device=like.device)
