"""Verdicts from what was seen directly: the supervisor's facts, and flight-recorder dumps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...detect.stacks import Doing
from ...progress.records.verdict import HANG, UNKNOWN, Action, Category, Faulty, Outcome, Root, Verdict
from ..judge.chronology import Timeline
from ..judge.decide import failed
from ..judge.exits import by_exit_code
from ..judge.facts import Facts, HangFact, RankExit, first_of
from ..judge.roots import all_cascade, root_of
from ..judge.training_curve import read_curve
from ..match.events import FileScan, LogEvent, Topology
from ..match.rules import defaults
from ..read.flight_recorder import Flight
from .first_failure import find_first_ends, lost_others, uncertain, weigh_rivals

_NAMED = 8
_LEFT_BEHIND = 0.6
"""How sure an end without a word is the first failure, where the others report that they lost a peer."""


def from_facts(
    chron: Timeline, scans: Sequence[FileScan], topology: Topology, facts: Facts
) -> Verdict | None:
    """What the supervisor saw itself, where that is stronger than any log."""
    if facts.completed:
        end = chron.endings[-1] if chron.endings else None
        return Verdict(
            Outcome.COMPLETED,
            root=root_of(end, scans) if end else None,
            confidence=0.98,
            decided_by="exit-code",
            notes=("every rank ended with code 0",),
        )
    if facts.lost_nodes:
        return _lost_node(chron, scans, facts)
    own = _own_failure(chron, facts)
    if facts.oom_kills and (
        own is None or own.role == "either" or own.reason in ("DataloaderKilled", "NCCLRemoteError")
    ):
        return _oom_killed(chron, scans, topology, facts)
    first = find_first_ends(chron, facts)
    left = own is not None and lost_others(own, first, chron, facts)
    if own is not None and own.role == "root" and not left:
        return _with_exits(weigh_rivals(own, chron, scans, topology, facts), topology)
    signalled = bool(first) and first[0].died_of is not None
    if facts.hang is not None and not signalled:
        return _hung(facts, topology)
    if signalled or left:
        verdict = _of_exits(first, scans, facts, topology)
        if left and not signalled and len(first) == 1:
            # Whose end it was is all but certain; why it ended is not.
            verdict = replace(verdict, confidence=max(verdict.confidence, _LEFT_BEHIND))
        return replace(
            verdict, evidence=(*verdict.evidence, *(root_of(e, scans) for e in chron.candidates[:4])), cascade=all_cascade(chron)
        )  # fmt: skip
    if own is not None:
        return _with_exits(failed(own, chron, scans, topology), topology)
    if first and chron.root is None and read_curve(chron.progress).spike is None:
        return _of_exits(first, scans, facts, topology)
    return None


def _of_exits(
    first: Sequence[RankExit], scans: Sequence[FileScan], facts: Facts, topology: Topology
) -> Verdict:
    """What the ends that may have been the first say by themselves."""
    verdicts = [by_exit_code(-e.died_of if e.died_of else e.code or 0, e.rank, e.node) for e in first]
    words = [_last_words(e, scans) for e in first]
    if len(first) == 1:
        return _with_exits(replace(verdicts[0], root=words[0]), topology)
    return uncertain(verdicts, first, [w for w in words if w is not None])


def _own_failure(chron: Timeline, facts: Facts) -> LogEvent | None:
    """The root by the logs, unless it belongs to a rank that we ended ourselves and a rank died before."""
    root = chron.root
    if root is None or root.rank is None:
        return root
    ours = {e.rank for e in facts.exits if e.killed_by_agent}
    signalled = [e for e in facts.failures() if e.died_of]
    if (
        signalled
        and root.rank in ours
        and root.role == "root"
        and root.reason in ("RuntimeError", "ConnectionError", "NCCLRemoteError")
    ):
        return None
    return root


def _lost_node(chron: Timeline, scans: Sequence[FileScan], facts: Facts) -> Verdict:
    base, node = defaults()["NodeFailure"], facts.lost_nodes[0]
    said = next((e for e in chron.candidates if e.node == node or e.reason == "NodeFailure"), None)
    return Verdict(
        Outcome.FAILED, Category.INFRASTRUCTURE, "NodeFailure", root_of(said, scans) if said else None,
        evidence=tuple(root_of(e, scans) for e in chron.candidates[:4]), cascade=all_cascade(chron), faulty=Faulty(node=node), recoverable=True,
        cordon=facts.lost_nodes, action=Action.RESTART_ELSEWHERE, mitigation=base.mitigation, confidence=0.95, decided_by="lost-node",
        notes=(f"{', '.join(facts.lost_nodes)} did not answer within the lease",),
    )  # fmt: skip


_COUNTED = (
    ", by the count of such kills in its cgroup, which rose as it ended: the count does not say whom it was"
)


def _oom_killed(chron: Timeline, scans: Sequence[FileScan], topology: Topology, facts: Facts) -> Verdict:
    ranks = facts.oom_kills
    first = first_of([e for e in facts.failures() if e.rank in ranks])
    rank = ranks[0] if len(ranks) == 1 else first[0].rank if len(first) == 1 else None
    nodes = {n for r in ranks if (n := topology.node_of(r)) is not None}
    node = topology.node_of(rank) if rank is not None else next(iter(nodes)) if len(nodes) == 1 else None
    said = next((e for e in chron.candidates if e.reason in ("OutOfMemoryError", "DataloaderKilled")), None)
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{' and others' if len(ranks) > 8 else ''}"
    counted = bool(first) and all(e.oom_counted for e in facts.failures() if e.rank in ranks)
    return Verdict(
        Outcome.FAILED, Category.FRAMEWORK, "OutOfMemoryError", root_of(said, scans) if said else None, cascade=all_cascade(chron),
        faulty=Faulty(node, rank) if node is not None or rank is not None else None, recoverable=True, action=Action.RESTART,
        confidence=0.8 if counted else 0.9, decided_by="oom-kill-count",
        mitigation=f"The kernel killed {who} because {'memory of its cgroup' if counted else 'host memory'} ran out. Restart; ask for more memory, use fewer loader workers, or find the leak.",
        notes=(f"the kernel killed {who} for memory{_COUNTED if counted else ''}",),
    )  # fmt: skip


def _hung(facts: Facts, topology: Topology) -> Verdict:
    hang = facts.hang
    assert hang is not None
    late = hang.late[0] if len(hang.late) == 1 else None
    faulty = Faulty(topology.node_of(late), late, topology.gpu_of(late)) if late is not None else None
    nodes = {topology.node_of(r) for r in hang.late}
    if faulty is None and len(nodes) == 1 and len(topology.nodes) > 1:
        faulty = Faulty(nodes.pop())
    at = f"at step {hang.step}" if hang.step >= 0 else "before the first step"
    notes = [f"no progress for {hang.idle_s:.0f} s in phase {hang.phase} {at}"]
    if hang.late:
        notes.append(f"late: rank {', '.join(map(str, hang.late))}")
    if hang.why:
        notes.append(hang.why)
    notes += [c.describe() for c in hang.named[:_NAMED]]
    if len(hang.named) > _NAMED:
        notes.append(f"and {len(hang.named) - _NAMED} more ranks: waiting.json beside the stacks has all")
    if hang.stacks:
        notes.append(f"stacks: {hang.stacks}")
    return Verdict(
        Outcome.HUNG, None, HANG, faulty=faulty, recoverable=True, action=Action.RESTART, mitigation=_advise_hang(hang),
        root=Root(text=hang.named[0].describe(), rank=hang.named[0].rank, node=topology.node_of(hang.named[0].rank)) if hang.named else None,
        confidence=0.9 if late is not None else 0.8, decided_by="hang-detector", notes=tuple(notes),
    )  # fmt: skip


_ADVICE = {
    Doing.STOPPED: "A signal stopped it: see who sent one, and whether its job was suspended.",
    Doing.KERNEL: "It waits in the kernel: see the device or the file system that it uses, and the node's kernel log.",
    Doing.LOCK_HELD: "C code waits without letting go of the interpreter's lock: its stack with the frames of C is in the evidence folder.",
    Doing.LOADER: "See the worker's stack and what it reads; `timeout=` of the DataLoader makes an error of it.",
    Doing.CHECKPOINT: "See the storage that it writes to.",
    Doing.EVALUATION: "See what the evaluation waits for; a deadline of its own keeps it from holding the training up.",
    Doing.CHILD: "See that process's stack in the evidence folder.",
    Doing.COLLECTIVE: "Every rank has to call the same collectives in the same order, as often: look for a branch, a shorter data set, or a filter that only some ranks take.",
    Doing.FINISHED: "Every rank has to make the same steps: look for a shorter data set on it.",
}
"""By what the first rank that holds the others up was doing: what to look at."""


def _advise_hang(hang: HangFact) -> str:
    """What to do about a hang: what to look at, where that is known."""
    advice = next((_ADVICE[d] for d in _ADVICE if hang.named and hang.named[0].doing == d), "")
    return f"{defaults()[HANG].mitigation} {advice}".strip()


def _with_exits(verdict: Verdict, topology: Topology) -> Verdict:
    """The verdict with what the exits add: a place where the log names none."""
    if verdict.faulty is None or verdict.faulty.node is not None or verdict.faulty.rank is None:
        return verdict
    return replace(verdict, faulty=replace(verdict.faulty, node=topology.node_of(verdict.faulty.rank)))


def _last_words(exit_: RankExit, scans: Sequence[FileScan]) -> Root | None:
    """The last line of the log of the rank that ended."""
    for s in scans:
        if s.log_end.last_text and (f"rank-{exit_.rank}." in s.name or f"rank{exit_.rank}." in s.name):
            return Root(
                s.name,
                s.log_end.last_line,
                s.log_end.last_text,
                exit_.rank,
                exit_.node,
                s.log_end.last_time,
            )
    return None


def _flight_place(flight: Flight, topology: Topology) -> Faulty | None:
    """The place of the rank that is missing; of several only the node, where they share one: none is singled out."""
    if len(flight.suspects) == 1:
        (late,) = flight.suspects
        return Faulty(topology.node_of(late), late, topology.gpu_of(late))
    nodes = {topology.node_of(r) for r in flight.suspects}
    only = next(iter(nodes)) if len(nodes) == 1 else None
    return Faulty(node=only) if only is not None and len(topology.nodes) > 1 else None


def with_flight(verdict: Verdict, flight: Flight, topology: Topology) -> Verdict:
    """The verdict with what flight-recorder dumps say: who was missing, where nothing else explains the stop."""
    if not flight.suspects:
        return verdict
    late = flight.suspects[0]
    wait = next((w for w in flight.waits if late in w.members and w.rank != late), None)
    where = f" from {wait.op} {wait.seq} of {wait.group.replace('|', ' ').strip()}" if wait else ""
    note = f"flight recorder: rank {', '.join(map(str, flight.suspects))} missing{where}"
    faulty = _flight_place(flight, topology)
    silent = verdict.reason in (None, UNKNOWN) and verdict.outcome in (Outcome.UNKNOWN, Outcome.FAILED)
    if silent:
        base = defaults()[HANG]
        return replace(
            verdict, outcome=Outcome.HUNG, reason=HANG, category=None, faulty=faulty, recoverable=True, action=Action.RESTART, cordon=(),
            mitigation=base.mitigation, confidence=0.8, decided_by="flight-recorder", notes=(*verdict.notes, note),
        )  # fmt: skip
    if verdict.reason in ("NCCLTimeoutError", HANG):
        return replace(
            verdict,
            faulty=verdict.faulty
            if verdict.faulty and verdict.faulty.gpu is not None and verdict.cordon
            else faulty,
            notes=(*verdict.notes, note),
        )
    return verdict
