"""Slurm's lists of nodes: `gpu[001-004,007],login` and the names that it stands for."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from ....errors import InputError

_MOST = 1 << 20
_PART = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand(text: str) -> list[str]:
    """The names of a list, in its order; none for "" and for what Slurm writes where there is none. Raises InputError."""
    if text.strip() in ("", "(null)", "None assigned", "N/A"):
        return []
    return [name for word in _split(text.strip()) for name in _expand_word(word)]


def join(names: Iterable[str]) -> str:
    """A list that every command of Slurm reads."""
    return ",".join(names)


def _split(text: str) -> list[str]:
    """At the commas that stand in no brackets."""
    words, depth = [""], 0
    for letter in text:
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            words.append("")
        else:
            words[-1] += letter
    if depth or "" in words:
        raise InputError(f"{text!r} is no list of nodes")
    return words


def _expand_word(word: str) -> list[str]:
    pieces = _PART.split(word)
    ranges = [_expand_ranges(p, word) if i % 2 else [p] for i, p in enumerate(pieces)]
    count = 1
    for r in ranges:
        count *= len(r)
    if count > _MOST:
        raise InputError(f"{word!r} names more than {_MOST} nodes")
    return ["".join(p) for p in itertools.product(*ranges)]


def _expand_ranges(text: str, word: str) -> list[str]:
    names = []
    for part in text.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise InputError(f"{word!r} is no list of nodes")
        first, last = found[1], found[2] or found[1]
        if int(last) - int(first) > _MOST:
            raise InputError(f"{word!r} names more than {_MOST} nodes")
        names += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return names
