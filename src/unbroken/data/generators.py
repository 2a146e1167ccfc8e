"""The global generators of Python, numpy and torch (CPU): whether they moved, seeding them, putting them back.

To look at a generator through its own functions takes longer than to load a batch from memory. Python's and numpy's keep
their Mersenne twister as 2,500 bytes at a known place; those are read there, after a check, once, that they are what
the functions say. Where the check fails, the functions are used. Needs torch.
"""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

_BYTES = 2500  # 624 words of 32 bits and a place
_MARK = (
    24  # the place and five words beside it: a draw moves the place, and after 624 draws all words are others
)
_KINDS = ("python", "numpy", "torch")
_MASK = (1 << 64) - 1
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Seen(NamedTuple):
    """The generators at one moment."""

    python: Any
    next_gauss: float | None
    numpy: Any
    gauss: tuple[int, float]
    """Whether numpy holds the second of a pair of normal numbers, and that number: drawing it moves nothing else."""
    torch: torch.Tensor
    python_mark: Any
    numpy_mark: Any


class Generators:
    """The generators of this process. Make one in each process that uses it."""

    def __init__(self) -> None:
        self._python = random.random.__self__  # type: ignore[attr-defined]
        self._numpy: Any = np.random.mtrand._rand
        self._torch = torch.default_generator
        self._python_at = _python_address(self._python)
        self._numpy_at = _numpy_address(self._numpy)
        # What was seen last, whole, with its mark: a training that does not draw from them costs a look at the marks.
        self._python_last: tuple[Any, Any] = (None, None)
        self._numpy_last: tuple[Any, Any, tuple[int, float]] = (None, None, (0, 0.0))

    def see(self) -> Seen:
        """What they are now."""
        mark = self._python_mark()
        if mark != self._python_last[0]:
            whole = ctypes.string_at(self._python_at, _BYTES) if self._python_at else mark
            self._python_last = (mark, whole)
        marked = self._numpy_mark()
        # One that held a normal number may have lost it since, and shows no trace.
        if marked != self._numpy_last[0] or self._numpy_last[2][0]:
            state = self._numpy.get_state()
            whole = ctypes.string_at(self._numpy_at, _BYTES) if self._numpy_at else state
            self._numpy_last = (marked, whole, (state[3], state[4]))
        return Seen(
            self._python_last[1], self._python.gauss_next, self._numpy_last[1], self._numpy_last[2],
            self._torch.get_state(), mark, marked,
        )  # fmt: skip

    def moved(self, before: Seen) -> set[str]:
        """Which of them were drawn from, or set, since then."""
        found = set()
        if self._python.gauss_next is not before.next_gauss or self._python_mark() != before.python_mark:
            found.add("python")
        if self._numpy_mark() != before.numpy_mark:
            found.add("numpy")
        now = self._torch.get_state()
        if _memcmp(now.data_ptr(), before.torch.data_ptr(), now.numel()):
            found.add("torch")
        return found

    def hide_gauss(self, before: Seen) -> None:
        """Puts numpy's second normal number aside, so that who draws one is seen; `put_back` returns it."""
        if before.gauss[0]:
            state = self._numpy.get_state()
            self._numpy.set_state((*state[:3], 0, 0.0))

    def put_back(self, before: Seen, kinds: Collection[str] = _KINDS) -> None:
        """Makes these generators what they were."""
        if "python" in kinds:
            if self._python_at:
                ctypes.memmove(self._python_at, before.python, _BYTES)
            else:
                self._python.setstate(before.python)
            self._python.gauss_next = before.next_gauss
        if "numpy" in kinds:
            if self._numpy_at:
                ctypes.memmove(self._numpy_at, before.numpy, _BYTES)
                state = self._numpy.get_state()
            else:
                state = before.numpy
            self._numpy.set_state((*state[:3], *before.gauss))
        if "torch" in kinds:
            self._torch.set_state(before.torch)

    def seed(self, value: int, kinds: Collection[str] = _KINDS) -> None:
        """Seeds these generators with a number of 64 bits; GPUs are left alone."""
        if "python" in kinds:
            self._python.seed(value)
        if "numpy" in kinds:
            self._numpy.seed((value ^ value >> 32) & 0xFFFFFFFF)
        if "torch" in kinds:
            self._torch.manual_seed(value & _MASK >> 1)

    def seeder(self, kinds: Collection[str]) -> Callable[[int], object]:
        """`seed` for these kinds, as fast as it can be where it is torch's alone."""
        if tuple(kinds) == ("torch",):
            manual_seed, low = self._torch.manual_seed, _MASK >> 1
            return lambda value: manual_seed(value & low)
        return lambda value: self.seed(value, kinds)

    def _python_mark(self) -> Any:
        return ctypes.string_at(self._python_at, _MARK) if self._python_at else self._python.getstate()

    def _numpy_mark(self) -> Any:
        if self._numpy_at:
            return ctypes.string_at(self._numpy_at + _BYTES - _MARK, _MARK)
        state = self._numpy.get_state()
        return (state[0], state[1].tobytes(), state[2])


def _python_address(generator: random.Random) -> int:
    """Where its place (an int) and its 624 words lie; 0 if they are not there."""
    if type(generator) is not random.Random:
        return 0
    at = id(generator) + object.__basicsize__
    found = struct.unpack("<625I", ctypes.string_at(at, _BYTES))
    return at if (*found[1:], found[0]) == generator.getstate()[1] else 0


def _numpy_address(generator: Any) -> int:
    """Where its 624 words and its place lie; 0 if they are not there."""
    bits = generator._bit_generator
    if type(bits) is not np.random.MT19937:
        return 0
    at = int(bits.ctypes.state_address)
    found = struct.unpack("<625I", ctypes.string_at(at, _BYTES))
    state = generator.get_state()
    return at if (*state[1].tolist(), state[2]) == found else 0


@contextmanager
def seeded(value: int) -> Iterator[None]:
    """All generators seeded inside the block, and as before after it."""
    generators = Generators()
    before = generators.see()
    generators.seed(value)
    try:
        yield
    finally:
        generators.put_back(before)
