"""Where a run stands in its data, in absolute sample numbers: independent of world size and of batch size. No torch.

The *absolute number* of a sample grows for ever: epoch = number // samples of an epoch.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import InputError, UsageError

Ranges = tuple[tuple[int, int], ...]


def normalize(ranges: Iterable[Sequence[int]]) -> Ranges:
    """The same numbers as sorted ranges [start, stop) that neither touch nor overlap; empty ones dropped.

    Raises UsageError for a range that ends before it begins, or begins below 0.
    """
    out: list[tuple[int, int]] = []
    for start, stop in sorted((int(a), int(b)) for a, b in ranges):
        if start < 0 or stop < start:
            raise UsageError(
                f"[{start}, {stop}) is not a range of samples",
                hint="Write it as start, stop; stop not included",
            )
        if start == stop:
            continue
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return tuple(out)


def subtract(ranges: Iterable[Sequence[int]], gone: Ranges) -> Ranges:
    """The numbers of `ranges` that are not in `gone` (normalized)."""
    out: list[tuple[int, int]] = []
    starts = [a for a, _ in gone]
    for start, stop in normalize(ranges):
        at = start
        k = max(bisect.bisect_right(starts, at) - 1, 0)
        while at < stop and k < len(gone) and gone[k][0] < stop:
            a, b = gone[k]
            if at < a:
                out.append((at, a))
            at = max(at, b)
            k += 1
        if at < stop:
            out.append((at, stop))
    return tuple(out)


def count(ranges: Ranges) -> int:
    """How many numbers they hold."""
    return sum(b - a for a, b in ranges)


@dataclass(frozen=True)
class Position:
    """The samples consumed so far, and those never to be used (`skips`), as absolute ranges [start, stop).

    `epoch` is the one that the training is in. `fingerprint` names dataset and order, so that a resume with other
    data is noticed.
    """

    epoch: int = 0
    samples: Ranges = ()
    skips: Ranges = ()
    fingerprint: str = ""

    def consumed(self) -> int:
        """How many samples were consumed, over all epochs."""
        return count(self.samples)

    def skipping(self, start: int, stop: int) -> Position:
        """This position, never to use the samples [start, stop); what was consumed before stays consumed."""
        return replace(self, skips=normalize([*self.skips, (start, stop)]))

    def as_json(self) -> dict[str, Any]:
        """Its place in a checkpoint."""
        return {
            "epoch": self.epoch,
            "samples": [list(r) for r in self.samples],
            "skips": [list(r) for r in self.skips],
            "fingerprint": self.fingerprint,
        }

    @classmethod
    def from_json(cls, value: Any) -> Position:
        """Reads `as_json`. Raises InputError."""
        try:
            return cls(
                int(value["epoch"]),
                normalize(value["samples"]),
                normalize(value["skips"]),
                str(value["fingerprint"]),
            )
        except (KeyError, TypeError, ValueError, UsageError) as e:
            raise InputError(
                f"a data position cannot be read: {type(e).__name__}: {e}: {value!r}"[:300]
            ) from None
