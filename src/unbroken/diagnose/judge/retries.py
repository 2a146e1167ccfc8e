"""A failure that a program repeated hundreds of times and outlived, against another one that came but once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..match.events import FileScan, LogEvent
from ..match.rules import builtin_set

OFTEN = 150
MOST_SURE = 0.6
_OF_THE_MACHINE = ("CUDAError", "ECCError", "NVLinkError", "NodeFailure")


def weigh_retries(
    root: LogEvent | None, why: str, candidates: Sequence[LogEvent], scans: Sequence[FileScan]
) -> tuple[LogEvent | None, str]:
    """The root and why, where one writer repeated the root's failure very often and another failure followed.

    Thirty failed retries can be what ends a run; so can three hundred, and their end may be told in other words. So
    the first failure stays the root, less sure. Only what no refused request can cause (a card, a link, a node) is
    taken instead of it."""
    if root is None or root.xid is not None or root.exception is None or root.reason in _OF_THE_MACHINE:
        return root, why
    times = _repeats(root, scans)
    if times < OFTEN:
        return root, why
    others = [
        e
        for e in candidates
        if e.role == "root" and e.weight >= 0.5 and e.reason is not None and e.reason != root.reason
    ]
    if not others:
        return root, why
    machine = next((e for e in others if e.reason in _OF_THE_MACHINE or e.rule.scope == "gpu"), None)
    if machine is not None:
        why = f"the {root.reason} before it was logged about {times:,} times, which the program outlived"
    else:
        last = others[-1]
        why = f"it came first, and about {times:,} times; the {last.reason} in line {last.line} may be the cause as well"
    chosen = machine or root
    return replace(chosen, rule=replace(chosen.rule, confidence=min(chosen.rule.confidence, MOST_SURE))), why


def _repeats(root: LogEvent, scans: Sequence[FileScan]) -> int:
    """How often one writer reported the root's failure in the root's own log: all lines of that reason, read or
    counted, by the number of ranks that they are from."""
    scan, rules = scans[root.file], builtin_set()
    read = [e for e in scan.events if e.reason == root.reason]
    counted = sum(
        n
        for name, n in scan.counted.lines.items()
        if (rule := rules.get(name)) is not None and rule.reason == root.reason
    )
    return (len(read) + counted) // max(1, len({(e.rank, e.node) for e in read}))
