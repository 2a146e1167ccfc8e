"""Times of logs of several hosts, put on the supervisor's clock: lines of two hosts have no order before that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..judge.facts import Facts
from ..match.events import FileScan
from ..read.sources import Source

_WORTH_S = 0.01
"""A clock that is off by less changes no order that whole seconds in logs could show."""


def put_on_one_clock(scans: Sequence[FileScan], logs: Sequence[Source], facts: Facts) -> None:
    """Moves all times of each log by what its node's clock is off, as far as that is known."""
    nodes = dict(facts.nodes)
    for scan, log in zip(scans, logs, strict=True):
        node = log.node or (nodes.get(scan.rank) if scan.rank is not None else None)
        offset = facts.wall_clocks.get(node) if node is not None else None
        if offset is not None and abs(offset.offset_s) > max(_WORTH_S, offset.uncertainty_s):
            _move(scan, -offset.offset_s)


def _move(scan: FileScan, by: float) -> None:
    def moved(time: float | None) -> float | None:
        return None if time is None else time + by

    scan.events = [replace(e, time=moved(e.time)) for e in scan.events]
    scan.progress = [replace(p, time=moved(p.time)) for p in scan.progress]
    scan.complaints = [(line, text, moved(t), *rest) for line, text, t, *rest in scan.complaints]  # type: ignore[misc]
    scan.last_lines = [(line, text, moved(t)) for line, text, t in scan.last_lines]
    scan.log_end.last_time = moved(scan.log_end.last_time)
    scan.log_end.stamps = [(line, t + by) for line, t in scan.log_end.stamps]
    scan.idle_gpus = [(n, g, t + by if t else t, line, text) for n, g, t, line, text in scan.idle_gpus]
