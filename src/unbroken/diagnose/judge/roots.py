"""Events and metric lines as the parts of a verdict: roots, and what they caused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...progress.records.verdict import Cascade, Root
from ..match.events import FileScan, LogEvent, MetricLine
from .chronology import Timeline


def root_of(event: LogEvent, scans: Sequence[FileScan]) -> Root:
    return Root(scans[event.file].name, event.line, event.text, event.rank, event.node, event.time)


def line_of(p: MetricLine, scans: Sequence[FileScan]) -> Root:
    return Root(scans[p.file].name, p.line, p.text, time=p.time)


def cascade_of(root: LogEvent, chron: Timeline) -> tuple[Cascade, ...]:
    counts: Counter[str] = Counter()
    for e in (*chron.candidates, *chron.cascades):
        if e is not root and e.reason and e.reason != root.reason:
            counts[e.reason] += 1
    return tuple(Cascade(reason, n) for reason, n in counts.most_common(8))


def all_cascade(chron: Timeline) -> tuple[Cascade, ...]:
    counts = Counter(e.reason for e in (*chron.candidates, *chron.cascades) if e.reason)
    return tuple(Cascade(r, n) for r, n in counts.most_common(8))
