"""Whole numbers as runs `[first, count]`: the ranks of a node are one run, whatever their number.

What is said of many ranks travels so, that messages grow with the nodes and not with the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .bounds import Malformed, whole

_FIRST = 1 << 31


def pack(numbers: Iterable[int]) -> list[list[int]]:
    """The numbers, sorted and each once, as runs."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and runs[-1][0] + runs[-1][1] == n:
            runs[-1][1] += 1
        else:
            runs.append([n, 1])
    return runs


def unpack(runs: Any, what: str, most: int) -> list[int]:
    """The numbers of these runs, `most` of them at most; plain numbers between them count too. Raises Malformed."""
    if not isinstance(runs, list):
        raise Malformed(f"'{what}' is no list of runs")
    numbers: list[int] = []
    for run in runs:
        if type(run) is int:
            run = [run, 1]
        if not isinstance(run, list) or len(run) != 2:
            raise Malformed(f"a run of '{what}' is no list of two")
        first, count = whole(run[0], what, 0, _FIRST), whole(run[1], what, 1, most)
        if len(numbers) + count > most:
            raise Malformed(f"'{what}' names more than {most} numbers")
        numbers.extend(range(first, first + count))
    return numbers
