"""Where a run stands in its data, in absolute sample numbers: independent of world size and of batch size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...errors import CheckpointCorrupt, CheckpointError, UsageError
from ...journal.checksummed import Fields

Ranges = tuple[tuple[int, int], ...]


def normalised(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same samples as sorted ranges [start, stop) that neither touch nor overlap; empty ones dropped."""
    out: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if stop <= start:
            continue
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return tuple(out)


@dataclass(frozen=True)
class Position:
    """The samples of `epoch` consumed so far, and those never to be used (`skips`), as ranges [start, stop).

    Sample numbers are those of the global order of the epoch. `fingerprint` names dataset and order (seed), so
    that a resume with other data is noticed; empty where the trainer gives none.
    """

    epoch: int = 0
    samples: Ranges = ()
    skips: Ranges = ()
    fingerprint: str = ""

    def consumed(self) -> int:
        """How many samples of this epoch were consumed."""
        return sum(stop - start for start, stop in self.samples)

    def advanced(self, start: int, stop: int) -> Position:
        """This position after the samples [start, stop) too."""
        return replace(self, samples=normalised([*self.samples, (start, stop)]))

    def skipping(self, start: int, stop: int) -> Position:
        """This position, never to use the samples [start, stop)."""
        return replace(self, skips=normalised([*self.skips, (start, stop)]))

    def as_json(self) -> dict[str, Any]:
        """Its place in a part and in the manifest."""
        return {
            "epoch": self.epoch,
            "samples": [list(r) for r in self.samples],
            "skips": [list(r) for r in self.skips],
            "fingerprint": self.fingerprint,
        }

    @classmethod
    def from_json(cls, value: object, where: str) -> Position:
        """Reads `as_json`; raises CheckpointCorrupt."""
        f = Fields(value, where)
        return cls(f.natural("epoch"), _ranges(f, "samples"), _ranges(f, "skips"), f.text("fingerprint"))


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
        samples=normalised(r for p in known for r in p.samples),
        skips=normalised(r for p in known for r in p.skips),
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
        return Position.from_json(
            {"epoch": 0, "samples": [], "skips": [], "fingerprint": "", **value}, "position"
        )
    except (TypeError, CheckpointError) as e:
        raise UsageError(
            f"the data position cannot be saved: {e}",
            hint="Give {'epoch': 0, 'samples': [[start, stop]], 'skips': []} in absolute sample numbers",
        ) from None
