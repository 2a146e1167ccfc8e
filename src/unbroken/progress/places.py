"""Where a run's checkpoints lie, from its journal: its own folder, or the place that its script names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import UnbrokenError
from .journal import read_journal
from .rundir import RunDir


def places(run_dir: RunDir, records: Iterable[dict[str, Any]]) -> list[str]:
    """Every place (absolute path or address) of the run's checkpoints, that of the newest attempt first."""
    found = {str(run_dir.checkpoints): None}
    for r in records:
        if r["kind"] in ("attempt", "place", "accepted") and isinstance(r.get("place"), str):
            place = r["place"] or str(run_dir.checkpoints)
            found.pop(place, None)
            found[place] = None
    return list(reversed(found))


def newest_place(run_dir: RunDir) -> str:
    """The place of the newest attempt; the run's own folder where the journal says nothing."""
    try:
        records = read_journal(run_dir).records
    except (UnbrokenError, OSError):
        records = []
    return places(run_dir, [r for r in records if r["kind"] != "accepted"])[0]
