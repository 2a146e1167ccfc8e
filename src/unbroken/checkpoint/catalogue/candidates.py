"""Which checkpoints an attempt may restore, newest first: from the seals and from the keepers' inventories."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from ...progress.records.candidate import CandidateMessage, folder_name, parse_folder_name
from ...progress.records.state import Brought


def candidates(
    seals: Mapping[int, Sequence[str]],
    inventories: Mapping[str, Sequence[Mapping[str, Any]]],
    slots: Mapping[int, str],
    *,
    brought: Sequence[Brought] = (),
    places: Mapping[int, str] | None = None,
) -> list[CandidateMessage]:
    """`[{attempt, step, name, folder, place, memory: {rank: node}}]`, newest step first.

    `seals` maps attempts to the checkpoint folders accepted from them; `inventories` maps each reachable node to
    its keeper's `[{attempt, step, rank, complete}]`; `slots` maps each rank to the node where it will run. A
    snapshot that is in memory for every rank counts without a folder; one that is there for some counts only
    where its folder was sealed. `name` is None without a folder. Of equal steps the newest attempt comes first.
    `brought` is what came from elsewhere (an import, say): it comes after what attempts made since, and before
    all that is older, whatever the steps. `places` tells where an attempt's checkpoints lie.
    """
    memory: dict[tuple[int, int], dict[int, str]] = {}
    for node, entries in sorted(inventories.items()):
        for e in entries:
            if not e.get("complete", False) or e["rank"] not in slots:
                continue
            held = memory.setdefault((e["step"], e["attempt"]), {})
            # The node where the rank will run is nearer than a peer that holds a copy.
            if e["rank"] not in held or slots[e["rank"]] == node:
                held[e["rank"]] = node
    sealed: dict[tuple[int, int], str] = {}
    for attempt, names in seals.items():
        for name in names:
            key = parse_folder_name(name)
            if key is not None and key[1] == attempt:
                sealed[key] = name
    whole = {key for key, held in memory.items() if len(held) == len(slots)}
    since = sorted({b.before for b in brought})
    found: list[tuple[tuple[int, int, int, int], CandidateMessage]] = []
    for step, attempt in whole | set(sealed):
        found.append((
            (bisect_right(since, attempt), 1, step, attempt),
            {
                "attempt": attempt, "step": step, "name": sealed.get((step, attempt)),
                "folder": folder_name(step, attempt), "place": (places or {}).get(attempt, ""), "brought": False,
                "memory": {str(r): n for r, n in sorted(memory.get((step, attempt), {}).items())},
            },
        ))  # fmt: skip
    for b in brought:
        for name in b.names:
            key = parse_folder_name(name)
            if key is not None:
                found.append((
                    (bisect_right(since, b.before), 0, key[1], key[0]),
                    {
                        "attempt": key[1], "step": key[0], "name": name, "folder": name, "place": b.place,
                        "brought": True, "memory": {},
                    },
                ))  # fmt: skip
    return [c for _, c in sorted(found, key=lambda f: f[0], reverse=True)]
