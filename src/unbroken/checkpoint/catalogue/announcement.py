"""What a keeper is told of an attempt, in few bytes: its ranks as runs, and of each candidate what its own ranks need.

A candidate is a row `[attempt, step, flags, place]` (with its folder's name behind where that is not the usual one);
`memory` tells, for the candidates that are in some keeper's memory, which node holds each of this node's ranks.
So the message to a node grows with its own ranks, never with those of the whole run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...progress.records.candidate import folder_name

_ON_DISK, _BROUGHT = 1, 2
_MOST_RANKS = 1 << 16

Message = dict[str, Any]


def pack(ranks: Mapping[int, int], candidates: Sequence[Mapping[str, Any]]) -> Message:
    """`{ranks, places, offers, memory}` for the node on which `ranks` ({rank: local rank}) run."""
    places: dict[str, int] = {}
    offers, memory = [], []
    for i, c in enumerate(candidates):
        name, folder = c.get("name"), folder_name(c["step"], c["attempt"])
        flags = (_ON_DISK if name is not None else 0) | (_BROUGHT if c.get("brought") else 0)
        row = [c["attempt"], c["step"], flags, places.setdefault(str(c.get("place") or ""), len(places))]
        offers.append(row if name in (None, folder) else [*row, name])
        held = [c["memory"].get(str(rank), "") for rank in ranks]
        if any(held):
            memory.append([i, held[0] if len(set(held)) == 1 else held])
    runs: list[list[int]] = []
    for rank, local in ranks.items():
        if runs and [rank, local] == [runs[-1][0] + runs[-1][1], runs[-1][2] + runs[-1][1]]:
            runs[-1][1] += 1
        else:
            runs.append([rank, 1, local])
    return {"ranks": runs, "places": list(places), "offers": offers, "memory": memory}


def unpack(message: Mapping[str, Any]) -> tuple[dict[int, int], list[Message]]:
    """({rank: local rank}, candidates) of a message, also of one by an earlier version. Raises ValueError, TypeError,
    KeyError or IndexError for what is none."""
    if "offers" not in message:
        return {int(r): int(local) for r, local in dict(message["ranks"]).items()}, list(
            message["candidates"]
        )
    ranks: dict[int, int] = {}
    for first, count, local in message["ranks"]:
        if not 0 < int(count) <= _MOST_RANKS - len(ranks):
            raise ValueError(f"{count} ranks on one node")
        ranks |= {int(first) + i: int(local) + i for i in range(int(count))}
    candidates: list[Message] = []
    for attempt, step, flags, place, *name in message["offers"]:
        folder = folder_name(int(step), int(attempt))
        candidates.append({
            "attempt": int(attempt), "step": int(step), "name": (name[0] if name else folder) if flags & _ON_DISK else None,
            "folder": folder, "place": str(message["places"][place]), "brought": bool(flags & _BROUGHT), "memory": {},
        })  # fmt: skip
    for i, held in message["memory"]:
        each = [held] * len(ranks) if isinstance(held, str) else list(held)
        candidates[i]["memory"] = {str(r): str(n) for r, n in zip(ranks, each, strict=True) if n}
    return ranks, candidates


def as_before(message: Mapping[str, Any]) -> Message:
    """The same announcement as an earlier version of the keeper reads it."""
    ranks, candidates = unpack(message)
    rest = {k: v for k, v in message.items() if k not in ("ranks", "places", "offers", "memory")}
    return {**rest, "ranks": {str(r): local for r, local in ranks.items()}, "candidates": candidates}
