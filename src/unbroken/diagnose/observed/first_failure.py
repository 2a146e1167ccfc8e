"""Which of several failures came first: named where that is certain or a log says so, else all that it may have been.

Times of two hosts are compared as the intervals that they lie in (`cluster.clocks`), never as two numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...cluster.clocks import Moment, find_first
from ...progress.records.verdict import Action, Faulty, Root, Verdict
from ..judge.chronology import Timeline
from ..judge.decide import failed
from ..judge.facts import Facts, RankExit, first_of
from ..judge.peers import OF_PEERS, is_of_peers
from ..judge.roots import root_of
from ..match.events import FileScan, LogEvent, Topology
from .kills import describe_end

_STAMP_S = 1.0
"""Many logs write whole seconds."""
_TEAR_DOWN_S = 5.0
"""A process ends so long after its error, at most: it frees devices, waits for threads, writes a dump."""
_LISTED = 8
_PREFIX = re.compile(r"^(?:\[?rank ?\d+\]?:?\s*)+", re.IGNORECASE)
"""What torch puts before each line of a rank."""
NOT_OF_SEVERAL = ("nothing earlier explains it", "it came first", "only consequences were logged")
"""Notes on a first failure that are not true where another one may have been, or was, the first."""


def find_first_ends(chron: Timeline, facts: Facts) -> tuple[RankExit, ...]:
    """The ends that may have been the first, the likeliest in front.

    One that its rank's own log explains by another's end (a lost connection) was not the first. Of those that may have
    been, one by a signal is the likeliest: others end by themselves because of it.
    """
    ends = facts.failures()
    told = _find_left(chron)
    first = first_of([e for e in ends if e.rank not in told] or ends)
    return tuple(sorted(first, key=lambda e: e.died_of is None))


def lost_others(own: LogEvent, first: Sequence[RankExit], chron: Timeline, facts: Facts) -> bool:
    """Whether the failure that logs name as the first is that of a rank which lost another, and the supervisor saw that
    other one end: of itself, with an error, and without a word."""
    if own.rank is None or not is_of_peers(own) or not first:
        return False
    end = next((e for e in facts.failures() if e.rank == own.rank), None)
    silent = {e.rank for e in first} - {e.rank for e in (*chron.candidates, *chron.cascades)}
    if len(silent) < len(first):
        return False
    return end is None or not any(end.moment.is_before(e.moment) for e in first)


def _find_left(chron: Timeline) -> set[int | None]:
    """The ranks whose logs tell of others that are gone, and of nothing that they did themselves."""
    every = (*chron.candidates, *chron.cascades)
    told = {e.rank for e in every if e.role == "cascade" or e.reason in OF_PEERS or is_of_peers(e)}
    return told - {
        e.rank
        for e in chron.candidates
        if e.role == "root" and e.reason not in OF_PEERS and not is_of_peers(e)
    }


def uncertain(verdicts: Sequence[Verdict], ends: Sequence[RankExit], words: Sequence[Root]) -> Verdict:
    """The verdict where several ends may have been the first: each is named, and none is blamed."""
    nodes = {e.node for e in ends}
    node = nodes.pop() if len(nodes) == 1 else None
    texts = [describe_end(e) for e in sorted(ends, key=lambda e: e.rank)]
    return _list_all(verdicts, texts, Faulty(node=node) if node else None, words)


def weigh_rivals(
    own: LogEvent, chron: Timeline, scans: Sequence[FileScan], topology: Topology, facts: Facts
) -> Verdict:
    """The verdict of the failure that logs name as the first (`own`); of another rank's, where that certainly came before;
    of all that may have been, where nobody can say."""
    rivals = _find_rivals(own, chron)
    if not rivals:
        return failed(own, chron, scans, topology)
    ends = {e.rank: e for e in facts.failures()}
    moments = {rank: _find_moment(e, ends.get(rank), facts, topology) for rank, e in rivals.items()}
    first = find_first(moments)
    kinds: dict[tuple[str | None, str], LogEvent] = {}
    for rank in sorted(first, key=lambda r: r != own.rank):
        kinds.setdefault(_kind_of(rivals[rank]), rivals[rank])
    found = list(kinds.values())
    verdicts = [failed(e, chron, scans, topology) for e in found]
    if len(found) == 1:
        same = sorted(r for r in first if _kind_of(rivals[r]) == _kind_of(found[0]))
        return _same_on_many(verdicts[0], same, topology)
    ordered = sorted(found, key=lambda e: e.rank if e.rank is not None else -1)
    texts = [
        f"rank {e.rank} on {topology.node_of(e.rank)}: {_PREFIX.sub('', e.text.strip())[:160]}"
        for e in ordered
    ]
    nodes = {topology.node_of(e.rank) for e in found}
    (node,) = nodes if len(nodes) == 1 else (None,)
    return _list_all(
        verdicts, texts, Faulty(node=node) if node else None, [root_of(e, scans) for e in ordered]
    )


def _find_rivals(own: LogEvent, chron: Timeline) -> Mapping[int, LogEvent]:
    """rank -> the failure that it reports as its own, of all ranks that report one; empty where `own` is no rank's."""
    if own.rank is None or own.exception is None:
        return {}
    found = {own.rank: own}
    for e in chron.candidates:
        mine = e.role == "root" and e.exception is not None and e.reason not in OF_PEERS and e.weight >= 0.9
        if mine and e.rank is not None and not is_of_peers(e):
            found.setdefault(e.rank, e)
    if len(found) > 1 and is_of_peers(own):
        del found[own.rank]  # it lost another: one of these
    return found


def _find_moment(event: LogEvent, end: RankExit | None, facts: Facts, topology: Topology) -> Moment:
    """When a rank failed: not before the newest time that its log had shown, and not after its end."""
    latest = end.moment.latest if end is not None else math.inf
    if event.time is None:
        return Moment(end.moment.earliest - _TEAR_DOWN_S if end is not None else -math.inf, latest)
    clock = facts.wall_clocks.get(topology.node_of(event.rank) or "")
    unsure = _STAMP_S + (clock.uncertainty_s if clock is not None else 0.0)
    return Moment(min(event.time - unsure, latest), latest)


def _kind_of(event: LogEvent) -> tuple[str | None, str]:
    """Equal for the same failure on several ranks."""
    return event.reason, "".join(c for c in event.text if not c.isdigit()).strip()[:200]


def _same_on_many(verdict: Verdict, ranks: Sequence[int], topology: Topology) -> Verdict:
    """The same failure on several ranks: what it is is certain, which of them was first is not."""
    if len(ranks) < 2:
        return verdict
    shown = ", ".join(map(str, ranks[:_LISTED])) + (
        f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else ""
    )
    note = f"the same on {len(ranks)} ranks ({shown}); which of them was first is not known"
    return replace(verdict, notes=(*(n for n in verdict.notes if n not in NOT_OF_SEVERAL), note))


def _list_all(
    verdicts: Sequence[Verdict], texts: Sequence[str], faulty: Faulty | None, evidence: Sequence[Root]
) -> Verdict:
    """One verdict of several that may each be the true one: what they agree in, and no more."""
    n = len(texts)
    more = f"; and {n - _LISTED} more" if n > _LISTED else ""
    text = f"any of these {n} may have been the first: {'; '.join(texts[:_LISTED])}{more}"
    advice = dict.fromkeys(v.mitigation for v in verdicts if v.mitigation)
    same = all((v.reason, v.category, v.action) == (verdicts[0].reason, verdicts[0].category, verdicts[0].action) for v in verdicts)  # fmt: skip
    base = verdicts[0] if same else next((v for v in verdicts if v.action is not Action.STOP), verdicts[0])
    return replace(
        base,
        root=Root(text=text, node=faulty.node if faulty else None),
        evidence=tuple(evidence[:_LISTED]),
        faulty=faulty,
        cordon=(),
        action=Action.RESTART if base.action is Action.RESTART_ELSEWHERE else base.action,
        confidence=round(min(base.confidence, 1 / n), 3),
        mitigation=" Or: ".join(list(advice)[:3]),
        notes=(*(n for n in base.notes if n not in NOT_OF_SEVERAL), "which came first is not known"),
    )  # fmt: skip
