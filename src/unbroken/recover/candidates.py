"""Which checkpoints an attempt may restore, newest first: from the seals and from the keepers' inventories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..checkpoint.manifest import folder_name, parse_folder_name

Candidate = dict[str, Any]


def candidates(
    seals: Mapping[int, Sequence[str]],
    inventories: Mapping[str, Sequence[Mapping[str, Any]]],
    slots: Mapping[int, str],
) -> list[Candidate]:
    """`[{attempt, step, name, memory: {rank: node}}]`, newest step first.

    `seals` maps attempts to the checkpoint folders accepted from them; `inventories` maps each reachable node to
    its keeper's `[{attempt, step, rank, complete}]`; `slots` maps each rank to the node where it will run. A
    snapshot that is in memory for every rank counts without a folder; one that is there for some counts only
    where its folder was sealed. `name` is None without a folder. Of equal steps the newest attempt comes first.
    """
    memory: dict[tuple[int, int], dict[int, str]] = {}
    for node, entries in sorted(inventories.items()):
        for e in entries:
            if not e.get("complete", False) or e["rank"] not in slots:
                continue
            places = memory.setdefault((e["step"], e["attempt"]), {})
            # The node where the rank will run is nearer than a peer that holds a copy.
            if e["rank"] not in places or slots[e["rank"]] == node:
                places[e["rank"]] = node
    sealed: dict[tuple[int, int], str] = {}
    for attempt, names in seals.items():
        for name in names:
            key = parse_folder_name(name)
            if key is not None and key[1] == attempt:
                sealed[key] = name
    whole = {key for key, places in memory.items() if len(places) == len(slots)}
    return [
        {
            "attempt": attempt,
            "step": step,
            "name": sealed.get((step, attempt)),
            "folder": folder_name(step, attempt),
            "memory": {str(r): n for r, n in sorted(memory.get((step, attempt), {}).items())},
        }
        for step, attempt in sorted(whole | set(sealed), reverse=True)
    ]
