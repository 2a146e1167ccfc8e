"""The data position as a checkpoint holds it: read and checked, and merged over the ranks. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ...data.position import Position, Ranges, normalize
from ...errors import CheckpointCorrupt, CheckpointError, UsageError
from ...journal.checksummed import Fields

__all__ = ["Position", "Ranges", "merged", "position_of", "read_position"]


def read_position(value: object, where: str) -> Position:
    """Reads `Position.as_json`; raises CheckpointCorrupt."""
    f = Fields(value, where)
    return Position(f.natural("epoch"), _ranges(f, "samples"), _ranges(f, "skips"), f.text("fingerprint"))


def merged(positions: Iterable[Position], *, where: str) -> Position:
    """The global position from every rank's: the union, whether each rank knows all or only its own samples.

    Raises CheckpointCorrupt if the ranks stand in different epochs or data.
    """
    known = set(positions)
    first = next(iter(known))
    if len(known) == 1:
        return first
    if len({(p.epoch, p.fingerprint) for p in known}) > 1:
        raise CheckpointCorrupt("the ranks stand in different epochs or datasets", where=where)
    return replace(
        first,
        samples=normalize(r for p in known for r in p.samples),
        skips=normalize(r for p in known for r in p.skips),
    )


def _ranges(f: Fields, key: str) -> Ranges:
    out, last = [], -1
    for r in f.items(key):
        if not isinstance(r, list) or len(r) != 2 or not all(type(n) is int for n in r):
            raise CheckpointCorrupt(f"'{key}' is not a list of [start, stop]", where=f.where)
        start, stop = r
        if not last < start < stop < 2**63:
            raise CheckpointCorrupt(
                f"'{key}' is not sorted and disjoint at {start}-{stop}"[:300], where=f.where
            )
        out.append((start, stop))
        last = stop
    return tuple(out)


def position_of(value: Any) -> Position:
    """The position that a script gives: a mapping, an object with `as_json`, or None. Raises UsageError."""
    if value is None:
        return Position()
    if isinstance(value, Position):
        return value
    if not isinstance(value, Mapping):
        value = getattr(value, "as_json", lambda: value)()
    try:
        return read_position({"epoch": 0, "samples": [], "skips": [], "fingerprint": "", **value}, "position")
    except (TypeError, CheckpointError) as e:
        raise UsageError(
            f"the data position cannot be saved: {e}",
            hint="Give {'epoch': 0, 'samples': [[start, stop]], 'skips': []} in absolute sample numbers",
        ) from None
