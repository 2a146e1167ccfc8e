"""Whether a card was full because another process held it: then the same job fits elsewhere."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

_PROCESS = re.compile(r"Process (\d+) has ([\d.]+) ([KMG]i?B) memory in use")
_THIS = re.compile(r"this process has ([\d.]+) ([KMG]i?B) memory in use")
_TORCH = re.compile(r"([\d.]+) ([KMG]i?B) (?:is allocated by PyTorch|already allocated)")
_CAPACITY = re.compile(r"total capacity of ([\d.]+) ([KMG]i?B)|([\d.]+) ([KMG]i?B) total capacity")
_FREE = re.compile(r"of which ([\d.]+) ([KMG]i?B) is free|([\d.]+) ([KMG]i?B) free")
_SIBLINGS = 64
_UNITS = {"K": 2**-20, "M": 2**-10, "G": 1.0}


@dataclass(frozen=True)
class Neighbour:
    """A process that is not the one that failed, on its card. `gib` is what it holds; `same_job` says that it is
    another rank of the same job, which a restart would put there again."""

    pid: int | None
    gib: float
    same_job: bool = False


def neighbour(text: str, own: Collection[int] = ()) -> Neighbour | None:
    """The process that holds much of the card, by the allocator's message; None where the program itself filled it.

    `own` are the processes of the job, as far as they are known."""
    capacity, this, torch_ = _first(_CAPACITY, text), _first(_THIS, text), _first(_TORCH, text)
    listed = [(int(m.group(1)), float(m.group(2)) * _UNITS[m.group(3)[0]]) for m in _PROCESS.finditer(text)]
    if listed and this is None:
        # One of those listed is the process itself: the one that holds what PyTorch allocated, and not much more.
        known = [p for p in listed if p[0] in own]
        fits = [p for p in listed if torch_ is None or p[1] >= 0.95 * torch_]
        itself = min(known or fits or listed, key=lambda p: abs(p[1] - (torch_ or p[1])))
        listed.remove(itself)
        this = itself[1]
    if listed:
        pid, size = max(listed, key=lambda p: p[1])
        alike = this is not None and 0.75 <= size / this <= 1.33 if this else False
        if alike and any(0 < abs(pid - p) <= _SIBLINGS for p in own):
            return Neighbour(pid, size, same_job=True)  # started with this one, and as large: another rank
        total = sum(p[1] for p in listed)
        if total > max(this or 0.0, 0.25 * (capacity or 0.0)):
            return Neighbour(pid, size, pid in own)
        return None
    used = this if this is not None else torch_
    free = _first(_FREE, text)
    if (
        capacity is not None
        and used is not None
        and free is not None
        and capacity - used - free > max(used, 0.4 * capacity)
    ):
        return Neighbour(None, capacity - used - free)
    return None


def _first(pattern: re.Pattern[str], text: str) -> float | None:
    m = pattern.search(text)
    if m is None:
        return None
    groups = [g for g in m.groups() if g is not None]
    return float(groups[0]) * _UNITS[groups[1][0]]
