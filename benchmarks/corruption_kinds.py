"""Kinds of corruption that `benchmarks/corruption.py` injects: each a function that hurts a tensor where it lies."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch


def flip(t: torch.Tensor, random: Random, bits: range) -> None:
    """One bit of one element."""
    words = t.view(-1).view(torch.int32)
    at, bit = random.randrange(len(words)), random.choice(bits)
    words[at] ^= -(1 << 31) if bit == 31 else 1 << bit


def cancel(t: torch.Tensor, random: Random) -> None:
    """Two words whose plain sum stays as it was."""
    words = t.view(-1).view(torch.int32)
    a, b = random.sample(range(len(words) // 2), 2)
    words[2 * a] += 4096
    words[2 * b] -= 4096


def zero_page(t: torch.Tensor, random: Random) -> None:
    """4 KiB that read as zero."""
    at = random.randrange(max(1, t.numel() - 1024))
    t.view(-1)[at : at + 1024] = 0


def swap(t: torch.Tensor, random: Random) -> None:
    """Two elements in each other's place."""
    flat = t.view(-1)
    a, b = random.sample(range(flat.numel()), 2)
    flat[a], flat[b] = flat[b].clone(), flat[a].clone()


def swap_same_column(t: torch.Tensor, random: Random) -> None:
    """The same, a multiple of 8 KiB apart: known to be invisible to these digests, and no fault of a card that anybody has seen."""
    words = t.view(-1).view(torch.int64)
    a = random.randrange(max(1, words.numel() - 1024))
    b = (a + 1024) % (words.numel() // 1024 * 1024)
    words[a], words[b] = words[b].clone(), words[a].clone()


Hurt = Callable[[torch.Tensor, Random], None]
STATE_KINDS: dict[str, tuple[str, Hurt]] = {
    "weight, lowest bit": ("w", lambda t, r: flip(t, r, range(1))),
    "weight, a bit of the mantissa": ("w", lambda t, r: flip(t, r, range(1, 23))),
    "weight, a bit of the exponent": ("w", lambda t, r: flip(t, r, range(23, 31))),
    "weight, sign": ("w", lambda t, r: flip(t, r, range(31, 32))),
    "first moment, any bit": ("m", lambda t, r: flip(t, r, range(32))),
    "second moment, any bit": ("v", lambda t, r: flip(t, r, range(32))),
    "two words that cancel in a plain sum": ("w", cancel),
    "a page of zeros": ("w", zero_page),
    "one update left out (a row)": ("w", lambda t, r: t[r.randrange(len(t))].mul_(1 - 1e-6)),
    "an all-reduced gradient that arrived otherwise on one rank": ("m", lambda t, r: t[r.randrange(len(t))].add_(1e-9)),
    "two elements swapped": ("w", swap),
}  # fmt: skip
BLIND_KINDS: dict[str, tuple[str, Hurt]] = {"two words of one column swapped": ("w", swap_same_column)}


def hurt_bits(g: torch.Tensor, random: Random, bits: range) -> None:
    flip(g, random, bits)


def no_number(g: torch.Tensor, random: Random) -> None:
    g[random.randrange(g.numel() - 2)] = float("nan")


def infinite(g: torch.Tensor, random: Random) -> None:
    g[random.randrange(g.numel() - 2)] = float("inf")


def tile(g: torch.Tensor, random: Random, factor: float = 1e4) -> None:
    """A tile of a product that is so many times the largest element (elements alone may be zero: nothing would change)."""
    at = random.randrange(max(1, g.numel() - 258))
    g[at : at + 256] = factor * g[:-2].abs().max()


def lost_tile(g: torch.Tensor, random: Random) -> None:
    at = random.randrange(max(1, g.numel() - 258))
    g[at : at + 256] = 0.0


STEP_KINDS: dict[str, Hurt] = {
    "gradient: not a number, once": no_number,
    "gradient: infinite, once": infinite,
    "gradient: highest bit of an exponent, once": lambda g, r: hurt_bits(g, r, range(30, 31)),
    "gradient: a tile of 10,000 times the largest element, once": tile,
}
SMALL_STEP_KINDS: dict[str, Hurt] = {
    "gradient: a lower bit of an exponent, once": lambda g, r: hurt_bits(g, r, range(23, 28)),
    "gradient: a sign, once": lambda g, r: hurt_bits(g, r, range(31, 32)),
    "gradient: a bit of the mantissa, once": lambda g, r: hurt_bits(g, r, range(23)),
    "gradient: a tile of the largest element, once": lambda g, r: tile(g, r, 1.0),
    "gradient: a tile of zeros, once": lost_tile,
}
