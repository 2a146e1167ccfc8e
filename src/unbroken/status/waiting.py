"""Who waited for whom in a hang, as its incident keeps it (`waiting.json`), for the page."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..link.bounds import Malformed
from ..link.runs import unpack
from ..progress import RunDir
from ..progress.records.incident import Incident
from ..progress.rundir import WAITING

_MOST_RANKS = 1 << 20
_FRAMES = 12
_GROUPS = 12
"""So many are shown: the odd ones and the smallest come first."""
_NAMED = 8


@dataclass(frozen=True)
class WaitingRow:
    """Ranks in one place: how many, which (in words), what they did, and the innermost frames; `odd` where they held the
    others up."""

    count: int
    ranks: str
    relation: str
    text: str
    frames: tuple[str, ...]
    odd: bool


@dataclass(frozen=True)
class WaitingTable:
    """`why` says how the odd ones were found; `missed` what collective they missed; `more` groups are not shown."""

    rows: tuple[WaitingRow, ...]
    why: str
    missed: tuple[str, ...]
    more: int = 0


def read_waiting(incident: Incident, run_dir: RunDir) -> WaitingTable | None:
    """The groups of a hang; None where there are none, or they cannot be read."""
    try:
        value = json.loads((run_dir.evidence(incident.number) / WAITING).read_bytes())
        groups = [_read(g) for g in value["groups"]]
        missed = dict.fromkeys(str(c["missed"]) for c in value["culprits"] if c["missed"])
        return WaitingTable(
            tuple(groups[:_GROUPS]), str(value["why"]), tuple(missed)[:4], max(0, len(groups) - _GROUPS)
        )
    except (OSError, ValueError, KeyError, TypeError, Malformed):
        return None


def _read(group: dict[str, Any]) -> WaitingRow:
    runs = group["ranks"]
    count = len(unpack(runs, "ranks", _MOST_RANKS))
    named = [str(first) if n == 1 else f"{first}-{first + n - 1}" for first, n in runs[:_NAMED]]
    more = f" and {len(runs) - _NAMED} more runs" if len(runs) > _NAMED else ""
    frames = group["frames"]
    return WaitingRow(
        count,
        ", ".join(named) + more,
        str(group["relation"]),
        str(group["text"]),
        tuple(str(f) for f in frames[:_FRAMES]),
        bool(group["odd"]),
    )
