"""From the chronicle of a job, and what the supervisor knows, to the verdict."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from .chronology import Chronicle, same_kind
from .course import Course, course, silent_for, worst_stretch
from .events import Event, FileScan, Progress, Topology
from .facts import Facts, RankExit
from .flight_recorder import Flight
from .rules import defaults
from .verdict import (
    HANG,
    LOSS_SPIKE,
    REASONS,
    UNKNOWN,
    Action,
    Cascade,
    Category,
    Faulty,
    Outcome,
    Root,
    Verdict,
)

_PEER_ADDRESS = re.compile(r"\bpeer ([\d.]+|[A-Za-z][\w.\-]*)<\d+>")
_NOT_THERE = re.compile(
    r"[Rr]anks? \[?(\d+)\]? (?:failed to (?:pass|reach|join|enter)|did not|has not|have not|hasn't|is missing|are missing)|[Mm]issing ranks?:? [\[{(]?(\d+)[\])}]?(?:$|[^,\d])"
)
_PEER = re.compile(r"(?:remote peer|peer) ([A-Za-z][\w.\-]*\d[\w\-]*)<")
_SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}


def decide(
    chron: Chronicle,
    scans: Sequence[FileScan],
    topology: Topology,
    facts: Facts | None,
    now: float | None = None,
) -> Verdict:
    """The verdict. `now` (seconds since the epoch) lets a log that is still being written count as running."""
    trained = course(chron.progress)
    if facts is not None:
        known = _from_facts(chron, scans, topology, facts, trained)
        if known is not None:
            return known
    ending = chron.endings[-1] if chron.endings else None
    completed = next((e for e in reversed(chron.endings) if e.rule.outcome == "completed"), None)
    root = chron.root
    if completed is not None and (root is None or _after(completed, root, scans) or root.weight < 0.5):
        return _ended(Outcome.COMPLETED, completed, scans, chron, "the scheduler or the trainer says so")
    if ending is not None and (root is None or _tear_down(root, ending, scans)):
        verdict = _by_ending(ending, chron, scans, topology, trained)
        if verdict is not None:
            return verdict
    if trained.spike is not None and (root is None or root.reason == LOSS_SPIKE):
        return _loss_spike(trained, root, scans, chron, topology)
    if root is not None and root.rule.id == "loss-spike-said":
        bad = worst_stretch(chron.progress, root)
        if bad is not None:
            return _loss_spike(replace(trained, spike=bad), root, scans, chron, topology)
    if root is not None:
        return failed(root, chron, scans, topology)
    if trained.last is not None and _last_step(trained.last) and not chron.cascades:
        return Verdict(
            Outcome.COMPLETED, root=_line(trained.last, scans), confidence=0.7, decided_by="last-step", notes=("the last step of the run was reached",)
        )  # fmt: skip
    return _nothing_known(chron, scans, topology, trained, now)


def failed(root: Event, chron: Chronicle, scans: Sequence[FileScan], topology: Topology) -> Verdict:
    """The verdict of a root event."""
    reason = root.reason or UNKNOWN
    base = defaults()[reason]
    faulty = _faulty(root, chron, topology, scans)
    source = root.xid or root.rule
    cordon = base.cordon if source.cordon is None else source.cordon
    recoverable = base.recoverable if source.recoverable is None else source.recoverable
    action = source.action or base.action
    if cordon and faulty is not None and faulty.node is None:
        action = "restart"
    outcome = {HANG: Outcome.HUNG, LOSS_SPIKE: Outcome.LOSS_SPIKE}.get(reason, Outcome.FAILED)
    if root.duplicates:
        root = replace(root, text=root.text)
    confidence = (0.95 if root.xid else root.rule.confidence) * (1.0 if root.weight >= 0.8 else 0.6)
    if root.role == "either":
        confidence *= 0.9
    return Verdict(
        outcome=outcome,
        category=REASONS.get(reason),
        reason=reason,
        root=_root(root, scans),
        evidence=tuple(_root(e, scans) for e in _evidence(root, chron)),
        cascade=_cascade(root, chron),
        faulty=faulty,
        recoverable=recoverable,
        cordon=(faulty.node,) if cordon and faulty and faulty.node else (),
        action=Action(action),
        mitigation=source.mitigation or base.mitigation,
        confidence=round(min(1.0, confidence), 3),
        decided_by=root.id,
        notes=(chron.why,) if chron.why and root is chron.root else (),
    )


def _faulty(root: Event, chron: Chronicle, topology: Topology, scans: Sequence[FileScan]) -> Faulty | None:
    reason = root.reason
    if reason == "NodeFailure" and root.xid is None and root.rule.scope != "gpu":
        return Faulty(node=root.node) if root.node else None
    if root.xid is not None:
        return Faulty(root.node, root.rank, root.gpu if root.gpu is not None else topology.gpu_of(root.rank))
    if reason == "NCCLTimeoutError":
        missing = _missing_rank(chron, topology, scans)
        return (
            None if missing is None else Faulty(topology.node_of(missing), missing, topology.gpu_of(missing))
        )
    if reason == "NCCLRemoteError":
        peers = Counter(m.group(1) for e in chron.cascades if (m := _PEER.search(e.text)))
        return Faulty(node=next(iter(peers))) if len(peers) == 1 else None
    if root.rule.id == "ib-completion-error":
        peer = _common_peer(chron, topology)
        if peer is not None:
            return Faulty(node=peer)
    alike = [e for e in same_kind(root, chron.candidates) if e.rule.id == root.rule.id]
    ranks = {e.rank for e in alike if e.rank is not None}
    nodes = {e.node for e in alike if e.node is not None}
    if root.rule.scope in ("gpu", "rank"):
        rank, node, gpu = root.rank, root.node, root.gpu
        if rank is None:
            rank, node, gpu = _reported(topology, node, gpu)
        if reason != "CUDAError" and topology.size and len(ranks) > max(1, topology.size // 3):
            return None
        if rank is None and node is None:
            return None
        return Faulty(node, rank, gpu if root.rule.scope == "gpu" else None)
    if root.rule.scope == "node":
        return Faulty(node=root.node, rank=root.rank if len(ranks) == 1 else None) if root.node else None
    if not ranks:
        return _soft_report(topology)
    if len(ranks) == 1:
        (rank,) = ranks
        return Faulty(root.node or topology.node_of(rank), rank) if rank != 0 else None
    if len(nodes) == 1 and len(topology.nodes) > 1:
        (node,) = nodes
        if node != topology.nodes[0] and ranks and ranks <= set(topology.ranks_on(node)):
            return Faulty(node=node)
    return None


def _soft_report(topology: Topology) -> Faulty | None:
    """The place of a program's error whose lines name no rank, by torchrun's summary: one rank, or one node of many."""
    entries = [x for x in topology.reported if x[1] is not None]
    alike = [x for x in entries if x[3] == entries[0][3]] if entries else []
    ranks, hosts = {x[1] for x in alike}, {x[0] for x in alike}
    if len(ranks) == 1 and 0 not in ranks:
        return Faulty(alike[0][0], alike[0][1])
    if len(hosts) == 1 and len(topology.nodes) > 1:
        (host,) = hosts
        if host is not None and host in topology.nodes[1:]:
            return Faulty(node=host)
    return None


def _reported(
    topology: Topology, node: str | None, gpu: int | None
) -> tuple[int | None, str | None, int | None]:
    """Rank, node, GPU of the failure that torchrun observed first, where an event names no rank itself."""
    for host, rank, local, _, _ in topology.reported:
        if rank is not None and (gpu is None or local is None or local == gpu):
            return rank, host or node, gpu if gpu is not None else local
    return (topology.rank_at(node, gpu) if gpu is not None else None), node, gpu


def _missing_rank(chron: Chronicle, topology: Topology, scans: Sequence[FileScan]) -> int | None:
    """The one rank that did not report the time-out, or whose collective lags behind the others'."""
    reports = [
        e
        for e in (*chron.candidates, *chron.cascades)
        if e.reason == "NCCLTimeoutError" and e.rank is not None
    ]
    ranks = {e.rank for e in reports}
    size = topology.size
    named = {
        m.group(1) or m.group(2)
        for e in (*chron.candidates, *chron.cascades)
        if (m := _NOT_THERE.search(e.text))
    }
    if len(named) == 1:
        return int(named.pop())
    if size and len(ranks) >= 2 and len(ranks) < size:
        silent = set(range(size)) - ranks
        if len(silent) == 1:
            return silent.pop()
    lag = lagging_rank(scans)
    if lag is not None:
        return lag
    numbers = {e.rank: e.seq for e in reports if e.seq is not None}
    if len(numbers) >= 3:
        low = min(s for s in numbers.values() if s is not None)
        behind = [r for r, s in numbers.items() if s == low]
        if len(behind) == 1 and max(s for s in numbers.values() if s is not None) > low:
            return behind[0]
    return None


def lagging_rank(scans: Sequence[FileScan]) -> int | None:
    """The one rank whose own log stops at an earlier step than all others', where ranks have logs of their own."""
    last: dict[int, float] = {}
    for s in scans:
        steps = [p.step for p in s.progress[-50:] if p.step is not None]
        if s.rank is not None and steps:
            last[s.rank] = max(last.get(s.rank, 0.0), *steps)
    if len(last) < 3:
        return None
    low, *others = sorted(last.values())
    behind = [r for r, x in last.items() if x == low]
    return behind[0] if len(behind) == 1 and others[0] > low else None


def _common_peer(chron: Chronicle, topology: Topology) -> str | None:
    """The one node that is an end of every link that failed, where several links did."""
    links: set[frozenset[str]] = set()
    for e in chron.candidates:
        m = _PEER_ADDRESS.search(e.text) if e.rule.id == "ib-completion-error" else None
        if m and e.node:
            links.add(frozenset((e.node, topology.addresses.get(m.group(1), m.group(1)))))
    common = frozenset.intersection(*links) if len(links) >= 2 else frozenset()
    return next(iter(common)) if len(common) == 1 and common <= set(topology.nodes) else None


def _evidence(root: Event, chron: Chronicle) -> list[Event]:
    out: list[Event] = []
    seen = {(root.rule.id, root.reason)}
    for e in (*chron.context, *chron.candidates, *chron.endings):
        key = (e.rule.id, e.reason)
        if key not in seen and len(out) < 6:
            seen.add(key)
            out.append(e)
    return out


def _cascade(root: Event, chron: Chronicle) -> tuple[Cascade, ...]:
    counts: Counter[str] = Counter()
    for e in (*chron.candidates, *chron.cascades):
        if e is not root and e.reason and e.reason != root.reason:
            counts[e.reason] += 1 + e.duplicates
    return tuple(Cascade(reason, n) for reason, n in counts.most_common(8))


def _root(event: Event, scans: Sequence[FileScan]) -> Root:
    return Root(scans[event.file].name, event.line, event.text, event.rank, event.node, event.time)


def _line(p: Progress, scans: Sequence[FileScan]) -> Root:
    return Root(scans[p.file].name, p.line, p.text, time=p.time)


def _after(later: Event, earlier: Event, scans: Sequence[FileScan]) -> bool:
    if later.file == earlier.file:
        return later.line > earlier.line
    if later.time is None or earlier.time is None:
        return (
            later.rule.outcome == "completed"
        )  # nothing orders the two: who says that all is well knows the end
    return later.time >= earlier.time


def _tear_down(root: Event, ending: Event, scans: Sequence[FileScan]) -> bool:
    """Whether a failure is only what an ordered end (time limit, cancel, preemption) did to the processes."""
    if ending.rule.outcome == "completed":
        return False
    if _after(root, ending, scans):
        return True
    if root.time is not None and ending.time is not None and root.role == "either":
        return 0 <= ending.time - root.time <= 30.0 and ending.rule.outcome != "cancelled"
    return False


def _by_ending(
    ending: Event, chron: Chronicle, scans: Sequence[FileScan], topology: Topology, trained: Course
) -> Verdict | None:
    outcome = Outcome(ending.rule.outcome or "unknown")
    if outcome in (Outcome.TIME_LIMIT, Outcome.CANCELLED):
        stop = ending.time or max((s.ending.last_time or 0.0 for s in scans), default=0.0)
        at = trained.last.file if trained.last else ending.file
        before = ending.line if at == ending.file else scans[at].ending.lines + 1
        idle = silent_for(trained, scans[at].ending, before, stop)
        if trained.spike is not None:
            return _loss_spike(trained, None, scans, chron, topology)
        if outcome is Outcome.CANCELLED and _BAD_LOSS.search(ending.text):
            bad = worst_stretch(chron.progress, ending)
            if bad is not None:
                return _loss_spike(replace(trained, spike=bad), ending, scans, chron, topology)
        if idle is not None:
            return _hang(ending, idle, chron, scans, topology)
    return _ended(outcome, ending, scans, chron, "the scheduler says so")


def _ended(outcome: Outcome, ending: Event, scans: Sequence[FileScan], chron: Chronicle, why: str) -> Verdict:
    notes = [why]
    if chron.overcome:
        notes.append(f"{len(chron.overcome)} errors before it were overcome")
    return Verdict(
        outcome, root=_root(ending, scans), recoverable=outcome in (Outcome.TIME_LIMIT, Outcome.PREEMPTED),
        action=Action.RESTART if outcome in (Outcome.PREEMPTED, Outcome.TIME_LIMIT) else Action.NONE,
        mitigation="" if outcome is Outcome.COMPLETED else "No failure: start again from the last checkpoint where the run is to go on.",
        confidence=0.9, decided_by=ending.rule.id, notes=tuple(notes),
    )  # fmt: skip


def _hang(
    ending: Event | None, idle: float, chron: Chronicle, scans: Sequence[FileScan], topology: Topology
) -> Verdict:
    faulty: Faulty | None = None
    cordon: tuple[str, ...] = ()
    evidence: list[Root] = []
    root = _root(ending, scans) if ending else None
    idle_gpus = [(g, s) for s in scans for g in s.idle_gpus]
    if idle_gpus and sum(s.busy_gpus for s in scans):
        places = {(g[0], g[1]) for g, _ in idle_gpus}
        if len(places) == 1:
            (node, gpu), (first, scan) = next(iter(places)), idle_gpus[-1]
            rank = topology.rank_at(node, gpu)
            faulty = Faulty(node, rank, gpu)
            cordon = (node,) if node else ()
            if root is not None:
                evidence.append(root)
            root = Root(scan.name, first[3], first[4].rstrip(), rank, node, first[2] or None)
    if faulty is None and (lag := lagging_rank(scans)) is not None:
        faulty = Faulty(topology.node_of(lag), lag, topology.gpu_of(lag))
    base = defaults()[HANG]
    return Verdict(
        Outcome.HUNG, None, HANG, root, tuple(evidence), faulty=faulty, recoverable=True, cordon=cordon,
        action=Action.RESTART_ELSEWHERE if cordon else Action.RESTART, mitigation=base.mitigation, confidence=0.85,
        decided_by="silence", notes=(f"no step for {idle / 60:.0f} minutes, and no error",),
    )  # fmt: skip


def _loss_spike(
    trained: Course, said: Event | None, scans: Sequence[FileScan], chron: Chronicle, topology: Topology
) -> Verdict:
    base = defaults()[LOSS_SPIKE]
    assert trained.spike is not None
    root = _line(trained.spike, scans)
    evidence = [_root(e, scans) for e in ((said,) if said else ()) + chron.endings[-1:]]
    return Verdict(
        Outcome.LOSS_SPIKE, None, LOSS_SPIKE, root, tuple(evidence), recoverable=True,
        action=Action.ROLLBACK_SKIP, mitigation=base.mitigation, confidence=0.85, decided_by="loss-course",
        notes=(f"loss {trained.spike.loss} after about {trained.base:.4g}" if trained.base is not None else "loss is not finite",),
    )  # fmt: skip


def _nothing_known(
    chron: Chronicle, scans: Sequence[FileScan], topology: Topology, trained: Course, now: float | None
) -> Verdict:
    base = defaults()[UNKNOWN]
    last = max(scans, key=lambda s: (s.ending.last_time or 0.0, s.ending.bytes), default=None)
    when = max((s.ending.last_time or 0.0 for s in scans), default=0.0)
    if now is not None and when and now - when < max(300.0, 8 * (trained.interval or 30.0)):
        return Verdict(
            Outcome.RUNNING,
            action=Action.NONE,
            confidence=0.7,
            decided_by="recent-progress",
            notes=("the log is still being written",),
        )
    if now is not None and trained.last is not None and not chron.cascades:
        idle = silent_for(
            trained, scans[trained.last.file].ending, scans[trained.last.file].ending.lines + 1, now
        )
        if idle is not None:
            verdict = _hang(None, idle, chron, scans, topology)
            return replace(verdict, root=verdict.root or _line(trained.last, scans))
    if last is None or not any(s.ending.bytes for s in scans):
        return Verdict(
            Outcome.UNKNOWN,
            None,
            UNKNOWN,
            recoverable=True,
            action=Action.RESTART,
            mitigation=base.mitigation,
            confidence=0.2,
            decided_by="empty-log",
            notes=("the logs are empty",),
        )
    by_code = _from_report(chron, scans, topology)
    if by_code is not None:
        return by_code
    if last.ending.cut_off or trained.last is not None:
        with_steps = [s for s in scans if s.progress]
        last = (
            max(with_steps, key=lambda s: (s.ending.last_time or 0.0, s.ending.bytes)) if with_steps else last
        )
    root = Root(last.name, last.ending.last_line, last.ending.last_text, time=last.ending.last_time)
    why = (
        "the log breaks off in the middle of a line, without any error"
        if last.ending.cut_off
        else "the log ends without any error"
    )
    return Verdict(
        Outcome.FAILED if last.ending.cut_off or chron.cascades else Outcome.UNKNOWN, None, UNKNOWN, root, recoverable=True,
        action=Action.RESTART, mitigation=base.mitigation, confidence=0.5, decided_by="end-of-log", notes=(why,),
    )  # fmt: skip


_BAD_LOSS = re.compile(r"(?i)\bloss\b|\bgrad|diverg|spike|\bnan\b")
_OF_ALL = re.compile(r"(?:iteration|step|\|)\s*[:=]?\s*(\d+)\s*/\s*(\d+)\b")


def _last_step(p: Progress) -> bool:
    """Whether a metric line counts the last step of all (`iteration 500/ 500`)."""
    m = _OF_ALL.search(p.text)
    return bool(m and int(m.group(1)) == int(m.group(2)) > 0)


_EXITED = re.compile(
    r"exitcode: (-?\d+)|exit(?:ed with exit)? code:? (-?\d+)|Signal (\d+) \(SIG|return code = (-?\d+)"
    r"|: (Killed|Segmentation fault|Bus error|Aborted)|(?:with signal|<Signals\.)\s?(SIG[A-Z]+)"
)
_WORDS = {
    "Killed": -9, "Segmentation fault": -11, "Bus error": -7, "Aborted": -6,
    "SIGKILL": -9, "SIGSEGV": -11, "SIGBUS": -7, "SIGABRT": -6, "SIGILL": -4, "SIGFPE": -8, "SIGTERM": -15,
}  # fmt: skip


def _from_report(chron: Chronicle, scans: Sequence[FileScan], topology: Topology) -> Verdict | None:
    """A verdict from exit codes that launchers report, where no other line says more."""
    for e in chron.cascades:
        m = _EXITED.search(e.text)
        if not m:
            continue
        said = m.group(5) or m.group(6)
        code = _WORDS.get(said or "") or (
            -int(m.group(3)) if m.group(3) else int(m.group(1) or m.group(2) or m.group(4) or 0)
        )
        if code in (0, -15, 143):
            continue
        rank, node, _gpu = (
            (e.rank, e.node, e.gpu) if e.rank is not None else _reported(topology, e.node, None)
        )
        verdict = by_exit_code(code, rank, node)
        return replace(verdict, root=_root(e, scans))
    return None


def by_exit_code(code: int, rank: int | None, node: str | None) -> Verdict:
    """What an exit code (negative: a signal) says by itself: little, and with the confidence that it deserves."""
    number = -code if code < 0 else code - 128 if 128 < code < 160 else 0
    faulty = Faulty(node, rank) if rank is not None or node is not None else None
    name = _SIGNALS.get(number) or (
        signal.Signals(number).name if number in {s.value for s in signal.Signals} else f"signal {number}"
    )
    if number in (11, 7, 4, 8, 6):
        return Verdict(
            Outcome.FAILED, None, UNKNOWN, faulty=faulty, recoverable=True, action=Action.RESTART, confidence=0.4,
            mitigation=f"The process crashed in native code ({name}). Restart; if it returns, look at its core dump, /dev/shm (SIGBUS) and library versions.",
            decided_by="exit-code", notes=(f"ended by {name}, without a word in the logs",),
        )  # fmt: skip
    if code == 2:
        return Verdict(
            Outcome.FAILED, None, UNKNOWN, faulty=faulty, recoverable=False, action=Action.STOP, confidence=0.4, decided_by="exit-code",
            mitigation="Exit code 2 mostly means a wrong command line.", notes=("exit code 2, without a word in the logs",),
        )  # fmt: skip
    what = f"ended by {name}" if number else f"ended with exit code {code}"
    return Verdict(
        Outcome.FAILED, None, UNKNOWN, faulty=faulty, recoverable=True, action=Action.RESTART, confidence=0.4 if number else 0.3,
        mitigation=defaults()[UNKNOWN].mitigation, decided_by="exit-code", notes=(f"{what}, without a word in the logs",),
    )  # fmt: skip


def _from_facts(
    chron: Chronicle, scans: Sequence[FileScan], topology: Topology, facts: Facts, trained: Course
) -> Verdict | None:
    """What the supervisor saw itself, where that is stronger than any log."""
    if facts.stopped_by_user:
        return Verdict(
            Outcome.CANCELLED, confidence=0.95, decided_by="supervisor", notes=("stopped on request",)
        )
    if facts.completed:
        end = chron.endings[-1] if chron.endings else None
        return Verdict(
            Outcome.COMPLETED,
            root=_root(end, scans) if end else None,
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
    if own is not None and own.role == "root":
        return _with_exits(failed(own, chron, scans, topology), own, facts, topology)
    died = sorted((e for e in facts.exits if not e.ours and (e.signal or e.code)), key=lambda e: e.time)
    first = next((e for e in died if e.signal), None) or next(iter(died), None)
    if facts.hang is not None and not (first and first.signal):
        return _hung(facts, topology)
    if first is not None and first.signal:
        verdict = _with_exits(by_exit_code(-first.signal, first.rank, first.node), None, facts, topology)
        return replace(
            verdict,
            root=_last_words(first, scans),
            evidence=tuple(_root(e, scans) for e in chron.candidates[:4]),
            cascade=_all_cascade(chron),
        )
    if own is not None:
        return _with_exits(failed(own, chron, scans, topology), own, facts, topology)
    if first is not None and first.code and chron.root is None and not trained.spike:
        verdict = by_exit_code(first.code, first.rank, first.node)
        return replace(verdict, root=_last_words(first, scans))
    return None


def _own_failure(chron: Chronicle, facts: Facts) -> Event | None:
    """The root by the logs, unless it belongs to a rank that we ended ourselves and a rank died before."""
    root = chron.root
    if root is None or root.rank is None:
        return root
    ours = {e.rank for e in facts.exits if e.ours}
    signalled = [e for e in facts.exits if not e.ours and e.signal]
    if (
        signalled
        and root.rank in ours
        and root.role == "root"
        and root.reason in ("RuntimeError", "ConnectionError", "NCCLRemoteError")
    ):
        return None
    return root


def _lost_node(chron: Chronicle, scans: Sequence[FileScan], facts: Facts) -> Verdict:
    base, node = defaults()["NodeFailure"], facts.lost_nodes[0]
    said = next((e for e in chron.candidates if e.node == node or e.reason == "NodeFailure"), None)
    return Verdict(
        Outcome.FAILED, Category.INFRASTRUCTURE, "NodeFailure", _root(said, scans) if said else None,
        evidence=tuple(_root(e, scans) for e in chron.candidates[:4]), cascade=_all_cascade(chron), faulty=Faulty(node=node), recoverable=True,
        cordon=facts.lost_nodes, action=Action.RESTART_ELSEWHERE, mitigation=base.mitigation, confidence=0.95, decided_by="lost-node",
        notes=(f"{', '.join(facts.lost_nodes)} did not answer within the lease",),
    )  # fmt: skip


def _oom_killed(chron: Chronicle, scans: Sequence[FileScan], topology: Topology, facts: Facts) -> Verdict:
    rank = facts.oom_kills[0]
    node = next((e.node for e in facts.exits if e.rank == rank), topology.node_of(rank))
    said = next((e for e in chron.candidates if e.reason in ("OutOfMemoryError", "DataloaderKilled")), None)
    return Verdict(
        Outcome.FAILED, Category.FRAMEWORK, "OutOfMemoryError", _root(said, scans) if said else None, cascade=_all_cascade(chron),
        faulty=Faulty(node, rank), recoverable=True, action=Action.RESTART, confidence=0.9, decided_by="oom-kill-count",
        mitigation="The kernel killed this rank because its host memory ran out. Restart; ask for more memory, use fewer loader workers, or find the leak.",
        notes=(f"the cgroup of rank {rank} counted an OOM kill",),
    )  # fmt: skip


def _hung(facts: Facts, topology: Topology) -> Verdict:
    hang = facts.hang
    assert hang is not None
    late = hang.late[0] if len(hang.late) == 1 else None
    faulty = Faulty(topology.node_of(late), late, topology.gpu_of(late)) if late is not None else None
    notes = [f"no progress for {hang.idle_s:.0f} s in phase {hang.phase} at step {hang.step}"]
    if hang.late:
        notes.append(f"late: rank {', '.join(map(str, hang.late))}")
    if hang.stacks:
        notes.append(f"stacks: {hang.stacks}")
    return Verdict(
        Outcome.HUNG, None, HANG, faulty=faulty, recoverable=True, action=Action.RESTART, mitigation=defaults()[HANG].mitigation,
        confidence=0.9 if late is not None else 0.8, decided_by="hang-detector", notes=tuple(notes),
    )  # fmt: skip


def _with_exits(verdict: Verdict, root: Event | None, facts: Facts, topology: Topology) -> Verdict:
    """The verdict with what the exits add: a place where the log names none."""
    if verdict.faulty is None or verdict.faulty.node is not None or verdict.faulty.rank is None:
        return verdict
    return replace(verdict, faulty=replace(verdict.faulty, node=topology.node_of(verdict.faulty.rank)))


def _all_cascade(chron: Chronicle) -> tuple[Cascade, ...]:
    counts = Counter(e.reason for e in (*chron.candidates, *chron.cascades) if e.reason)
    return tuple(Cascade(r, n) for r, n in counts.most_common(8))


def _last_words(exit_: RankExit, scans: Sequence[FileScan]) -> Root | None:
    """The last line of the log of the rank that ended."""
    for s in scans:
        if s.ending.last_text and (f"rank-{exit_.rank}." in s.name or f"rank{exit_.rank}." in s.name):
            return Root(
                s.name,
                s.ending.last_line,
                s.ending.last_text,
                exit_.rank,
                exit_.node,
                s.ending.last_time,
            )
    return None


def with_flight(verdict: Verdict, flight: Flight, topology: Topology) -> Verdict:
    """The verdict with what flight-recorder dumps say: who was missing, where nothing else explains the stop."""
    if not flight.suspects:
        return verdict
    late = flight.suspects[0]
    wait = next((w for w in flight.waits if late in w.members and w.rank != late), None)
    where = f" from {wait.op} {wait.seq} of {wait.group.replace('|', ' ').strip()}" if wait else ""
    note = f"flight recorder: rank {', '.join(map(str, flight.suspects))} missing{where}"
    faulty = Faulty(topology.node_of(late), late, topology.gpu_of(late))
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
