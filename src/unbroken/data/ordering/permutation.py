"""A keyed permutation of range(size), any part of it in constant time and without memory.

Up to a million the numbers are sorted by a hash, once an epoch, which makes a batch's part of it nearly free. Above that
it is a Feistel network over the next power of two, walked until it falls below the size (Black and Rogaway, "Ciphers with
arbitrary finite domains", 2002). The order must be the same with every version of every library, for as long as a
checkpoint lives: a shuffle of numpy or torch does not promise that. numpy, no torch.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
_MASK = (1 << 64) - 1
ROUNDS = 8
LISTED = 1 << 20
"""Up to this size a permutation is kept as a list: 4 MB, made in less time than torch's."""


def mix(value: int) -> int:
    """64 well-mixed bits of a number: the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def mix_all(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`mix` of each."""
    v = values + np.uint64(0x9E3779B97F4A7C15)
    v ^= v >> np.uint64(30)
    v *= np.uint64(0xBF58476D1CE4E5B9)
    v ^= v >> np.uint64(27)
    v *= np.uint64(0x94D049BB133111EB)
    v ^= v >> np.uint64(31)
    return v


def key_of(seed: int, epoch: int) -> int:
    """The key of an epoch: another seed or epoch, another order."""
    return mix(mix(seed & _MASK) ^ (epoch & _MASK))


def permute(size: int, key: int, offsets: Numbers) -> Numbers:
    """Where the permutation of range(size) with this key takes each of the offsets (all in [0, size))."""
    if size <= LISTED:
        found: Numbers = _listed(size, key)[offsets].astype(np.int64)
        return found
    return walk(size, key, offsets)


@lru_cache(maxsize=16)
def _listed(size: int, key: int) -> NDArray[np.int32]:
    """The whole permutation: the numbers sorted by a hash of each, which stands in the upper bits."""
    numbers = np.arange(size, dtype=np.uint64)
    low = np.uint64(LISTED - 1)
    hashed = mix_all(numbers ^ np.uint64(mix(key))) & ~low | numbers
    hashed.sort()
    return (hashed & low).astype(np.int32)


def walk(size: int, key: int, offsets: Numbers) -> Numbers:
    """`permute` without memory, whatever the size."""
    bits = max(2, max(size - 1, 1).bit_length())
    widths = (bits // 2, bits - bits // 2)
    keys = [np.uint32(mix(key + i) & 0xFFFFFFFF) for i in range(1, ROUNDS + 1)]
    value = offsets.astype(np.uint64)
    out, places = value, None
    while True:  # on average fewer than two turns: the domain is less than twice the size
        value = _rounds(value, keys, widths)
        outside = np.flatnonzero(value >= size)
        if places is None:
            out, places = value, outside
        else:
            out[places] = value
            places = places[outside]
        if not len(outside):
            return out.astype(np.int64)
        value = value[outside]


def _rounds(value: NDArray[np.uint64], keys: list[np.uint32], widths: tuple[int, int]) -> NDArray[np.uint64]:
    """The Feistel network once: of the two parts, of 32 bits at most, each is changed by the other in turn."""
    low, high = widths[1], widths[0]
    right = (value & np.uint64((1 << low) - 1)).astype(np.uint32)
    left = (value >> np.uint64(low)).astype(np.uint32)
    masks = np.uint32((1 << high) - 1), np.uint32((1 << low) - 1)
    mixed = np.empty_like(right)
    for i, k in enumerate(keys):
        other, changed, mask = (right, left, masks[0]) if i % 2 == 0 else (left, right, masks[1])
        np.bitwise_xor(other, k, out=mixed)
        _mix32(mixed)
        mixed &= mask
        changed ^= mixed
    return left.astype(np.uint64) << np.uint64(low) | right.astype(np.uint64)


def _mix32(v: NDArray[np.uint32]) -> None:
    """The 32-bit finalizer of MurmurHash3 (Appleby), in place: twice as many numbers at once as with 64 bits."""
    shifted = v >> np.uint32(16)
    v ^= shifted
    v *= np.uint32(0x85EBCA6B)
    np.right_shift(v, np.uint32(13), out=shifted)
    v ^= shifted
    v *= np.uint32(0xC2B2AE35)
    np.right_shift(v, np.uint32(16), out=shifted)
    v ^= shifted
