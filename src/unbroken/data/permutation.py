"""A keyed permutation of range(size), any part of it in constant time and without memory.

A Feistel network over the next power of four, walked until it falls below the size (Black and Rogaway, "Ciphers with
arbitrary finite domains", 2002); its rounds use the finalizer of SplitMix64 (Steele, Lea, Flood 2014). numpy, no torch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
_MASK = (1 << 64) - 1
ROUNDS = 6


def mix(value: int) -> int:
    """64 well-mixed bits of a number."""
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
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    keys = [np.uint64(mix(key + i)) for i in range(1, ROUNDS + 1)]
    out = np.empty(len(offsets), np.uint64)
    value, places = offsets.astype(np.uint64), None
    while True:  # on average fewer than four turns: the domain is less than four times the size
        left, right = value >> half, value & low
        for k in keys:
            left, right = right, left ^ (mix_all(right ^ k) & low)
        value = left << half | right
        inside = value < size
        if places is None:
            if inside.all():
                return value.astype(np.int64)
            out[inside] = value[inside]
            places = np.flatnonzero(~inside)
        else:
            out[places[inside]] = value[inside]
            places = places[~inside]
        value = value[~inside]
        if not len(value):
            return out.astype(np.int64)
