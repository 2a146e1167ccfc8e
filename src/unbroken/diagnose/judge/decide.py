"""From the timeline of a job to the verdict that its logs lead to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ...progress.records.verdict import (
    HANG,
    LOSS_SPIKE,
    MACHINE_ONLY,
    REASONS,
    UNKNOWN,
    Action,
    Faulty,
    Outcome,
    Root,
    Verdict,
)
from ..match.completion import OF_EPOCH
from ..match.events import FileScan, LogEvent, MetricLine, Topology
from ..match.rules import Xid, defaults
from .chronology import Timeline
from .exits import from_report
from .fault_location import lagging_rank, place_of
from .leavers import leaver
from .occupied import neighbour
from .roots import cascade_of, line_of, root_of
from .training_curve import TrainingCurve, read_curve, silent_for, worst_window


def decide(
    chron: Timeline,
    scans: Sequence[FileScan],
    topology: Topology,
    now: float | None = None,
) -> Verdict:
    """The verdict by the logs alone. `now` (seconds since the epoch) lets a log that is still being written count as running."""
    trained = read_curve(chron.progress)
    said = [e for e in chron.endings if e.rule.where != "tail"]
    ending = _first_word(said)
    completed = next((e for e in reversed(said) if e.rule.outcome == "completed"), None)
    if ending is not None and ending.rule.id == "interrupted-suspended" and chron.root is not None:
        ending = None  # an older job of that terminal; suspended, it does nothing more
    shown = next((e for e in chron.endings if e.rule.where == "tail"), None)
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
        bad = worst_window(chron.progress, root)
        if bad is not None:
            return _loss_spike(replace(trained, spike=bad), root, scans, chron, topology)
    if root is not None:
        return failed(root, chron, scans, topology)
    if (cancelled := _step_cancelled(chron)) is not None:
        verdict = _by_ending(cancelled, chron, scans, topology, trained)
        if verdict is not None:
            return verdict if verdict.outcome is not Outcome.CANCELLED else replace(verdict, confidence=0.75)
    if shown is not None and not [e for e in chron.cascades if e.weight >= 0.5]:
        return replace(
            _ended(Outcome.COMPLETED, shown, scans, chron, "its last lines say so, and nothing failed"),
            confidence=shown.rule.confidence,
        )
    if trained.last is not None and _last_step(trained.last) and not chron.cascades:
        return Verdict(
            Outcome.COMPLETED, root=line_of(trained.last, scans), confidence=0.7, decided_by="last-step", notes=("the last step of the run was reached",)
        )  # fmt: skip
    return _nothing_known(chron, scans, topology, trained, now)


def _first_word(endings: Sequence[LogEvent]) -> LogEvent | None:
    """The last ending; of an interrupt that many processes report, the first report."""
    if not endings:
        return None
    at = len(endings) - 1
    while at and endings[at].rule.id == endings[at - 1].rule.id == "interrupted":
        at -= 1
    return endings[at]


def _step_cancelled(chron: Timeline) -> LogEvent | None:
    """Slurm's word that a step was cancelled, or a signal that the program obeyed, where no task had ended by itself:
    then somebody cancelled it."""
    ended = [e for e in chron.cascades if e.rule.id not in _ASKED and not _PEACEFUL.search(e.text)]
    said = next((e for e in chron.cascades if e.rule.id in _ASKED and _STOP.search(e.text)), None)
    return (
        None
        if ended or said is None
        else replace(said, rule=replace(said.rule, role="ending", outcome="cancelled"))
    )


def failed(root: LogEvent, chron: Timeline, scans: Sequence[FileScan], topology: Topology) -> Verdict:
    """The verdict of a root event."""
    reason = root.reason or UNKNOWN
    base = defaults()[reason]
    faulty = place_of(root, chron, topology, scans)
    source = root.xid or root.rule
    cordon = base.cordon if source.cordon is None else source.cordon
    recoverable = base.recoverable if source.recoverable is None else source.recoverable
    action = source.action or base.action
    if cordon and faulty is not None and faulty.node is None:
        action = "restart"
    mitigation = source.mitigation or base.mitigation
    if root.xid is not None and _own_fault(root, root.xid, chron):
        recoverable, action, mitigation = False, "stop", root.xid.own_mitigation
    notes = (chron.why,) if chron.why and root is chron.root else ()
    if all(s.machine for s in scans if s.log_end.bytes) and not chron.progress:
        notes = (*notes, MACHINE_ONLY)
    if (
        reason == "OutOfMemoryError"
        and (other := neighbour(root.text, _pids(root, topology, chron))) is not None
    ):
        if other.same_job:
            mitigation = "Several ranks of this job share one card: give each its own (local rank, CUDA_VISIBLE_DEVICES)."
        else:
            recoverable, action = True, "restart_elsewhere"
            who = f"Process {other.pid}" if other.pid is not None else "Another process"
            mitigation = f"{who} holds {other.gib:.1f} GiB of that card and is none of this job's: end it there, or restart on another card or node."
        notes = (*notes, f"another process holds {other.gib:.1f} GiB of the card")
    outcome = {HANG: Outcome.HUNG, LOSS_SPIKE: Outcome.LOSS_SPIKE}.get(reason, Outcome.FAILED)
    confidence = (0.95 if root.xid else root.rule.confidence) * (
        1.0 if root.weight >= 0.9 else 0.88 if root.weight >= 0.8 else 0.6
    )
    if root.role == "either":
        confidence *= 0.9
    if root.id.startswith(("py-", "unbroken-")) and action == "stop" and _TRANSIENT.search(root.text):
        # Python's class says "bug", its words say that something did not answer: neither is sure.
        recoverable, action, confidence = True, "restart", min(confidence, 0.6)
        notes = (*notes, "its words speak of something that did not answer, though its class is a program's")
    left = None
    if reason == "NCCLTimeoutError":
        waiting = {
            e.rank for e in (*chron.candidates, *chron.cascades) if e.reason == reason and e.rank is not None
        }
        left = leaver(scans, topology, waiting)
    if left is not None:
        faulty, recoverable, action, confidence = (
            Faulty(left.node, left.rank, topology.gpu_of(left.rank)),
            False,
            "stop",
            0.7,
        )
        mitigation = f"Rank {left.rank} left the loop without an error, and the others waited for it: give all ranks the same number of batches (drop_last, a Join context), or let them stop together. A restart meets the same place."
        notes = (*notes, f"rank {left.rank} had ended in peace before")
    elif reason == "NCCLTimeoutError" and root.seq is not None and root.seq <= 1 and not chron.progress:
        action, confidence = "restart_elsewhere", min(confidence, 0.7)
        mitigation = "Not one collective ever completed: look at the network interface that NCCL chose (NCCL_SOCKET_IFNAME, NCCL_IB_HCA), the fabric and the firewall; try other nodes, and an nccl-tests run between these."
        notes = (*notes, "the first collective of all never completed")
    return Verdict(
        outcome=outcome,
        category=REASONS.get(reason),
        reason=reason,
        root=left or root_of(root, scans),
        evidence=(
            *((root_of(root, scans),) if left else ()),
            *(root_of(e, scans) for e in _evidence(root, chron)),
        ),
        cascade=cascade_of(root, chron),
        faulty=faulty,
        recoverable=recoverable,
        cordon=(faulty.node,) if cordon and faulty and faulty.node else (),
        action=Action(action),
        mitigation=mitigation,
        confidence=round(min(1.0, confidence), 3),
        decided_by=root.id,
        notes=notes,
    )


def _pids(root: LogEvent, topology: Topology, chron: Timeline) -> set[int]:
    """The processes of the job, as far as launchers and prefixes name them."""
    pids = {p.pid for p in topology.places.values() if p.pid} | {x[4] for x in topology.reported if x[4]}
    pids |= {int(m.group(1)) for e in chron.cascades if (m := _SIGNALLED.search(e.text))}
    return {p for p in (*pids, root.pid) if p is not None}


def _own_fault(root: LogEvent, xid: Xid, chron: Timeline) -> bool:
    """Whether the program itself is at fault, by a traceback of the rank that the XID names."""
    if not xid.own_fault or root.rank is None:
        return False
    return any(
        e.rank == root.rank and e.frames and re.search(xid.own_fault, e.text)
        for e in (*chron.candidates, *chron.cascades)
    )


def _evidence(root: LogEvent, chron: Timeline) -> list[LogEvent]:
    out: list[LogEvent] = []
    seen = {(root.rule.id, root.reason)}
    for e in (*chron.context, *chron.candidates, *chron.endings):
        key = (e.rule.id, e.reason)
        if key not in seen and len(out) < 6:
            seen.add(key)
            out.append(e)
    return out


def _after(later: LogEvent, earlier: LogEvent, scans: Sequence[FileScan]) -> bool:
    if later.file == earlier.file:
        return later.line > earlier.line
    if later.time is None or earlier.time is None:
        return (
            later.rule.outcome == "completed"
        )  # nothing orders the two: who says that all is well knows the end
    return later.time >= earlier.time


def _tear_down(root: LogEvent, ending: LogEvent, scans: Sequence[FileScan]) -> bool:
    """Whether a failure is only what an ordered end (time limit, cancel, preemption) did to the processes."""
    if ending.rule.outcome == "completed":
        return False
    if _after(root, ending, scans):
        return True
    if root.time is not None and ending.time is not None and root.role == "either":
        return 0 <= ending.time - root.time <= 30.0 and ending.rule.outcome != "cancelled"
    return False


def _by_ending(
    ending: LogEvent, chron: Timeline, scans: Sequence[FileScan], topology: Topology, trained: TrainingCurve
) -> Verdict | None:
    outcome = Outcome(ending.rule.outcome or "unknown")
    if outcome in (Outcome.TIME_LIMIT, Outcome.CANCELLED):
        stop = ending.time or max((s.log_end.last_time or 0.0 for s in scans), default=0.0)
        at = trained.last.file if trained.last else ending.file
        before = ending.line if at == ending.file else scans[at].log_end.lines + 1
        idle = silent_for(trained, scans[at].log_end, before, stop)
        if trained.spike is not None:
            return _loss_spike(trained, None, scans, chron, topology)
        if outcome is Outcome.CANCELLED and _BAD_LOSS.search(ending.text):
            bad = worst_window(chron.progress, ending)
            if bad is not None:
                return _loss_spike(replace(trained, spike=bad), ending, scans, chron, topology)
        if idle is not None and not ending.rule.id.startswith("interrupted"):
            return _hang(ending, idle, chron, scans, topology)
    if ending.rule.id == "interrupted-suspended":
        return replace(
            _ended(outcome, ending, scans, chron, "it was stopped at the terminal, and nothing failed"),
            recoverable=True,
            mitigation="Nothing failed: the process is suspended. `fg` lets it go on; it holds its GPUs meanwhile.",
        )
    if ending.rule.id == "asked-to-stop":
        return _ended(outcome, ending, scans, chron, "it was asked to stop, and nothing failed")
    if ending.rule.id == "interrupted":
        return _ended(outcome, ending, scans, chron, "somebody interrupted it")
    return _ended(outcome, ending, scans, chron, "the scheduler says so")


def _ended(
    outcome: Outcome, ending: LogEvent, scans: Sequence[FileScan], chron: Timeline, why: str
) -> Verdict:
    notes = [why]
    if chron.overcome:
        notes.append(f"{len(chron.overcome)} errors before it were overcome")
    return Verdict(
        outcome, root=root_of(ending, scans), recoverable=outcome in (Outcome.TIME_LIMIT, Outcome.PREEMPTED),
        action=Action.RESTART if outcome in (Outcome.PREEMPTED, Outcome.TIME_LIMIT) else Action.NONE,
        mitigation="" if outcome is Outcome.COMPLETED else "No failure: start again from the last checkpoint where the run is to go on.",
        confidence=0.9, decided_by=ending.rule.id, notes=tuple(notes),
    )  # fmt: skip


def _hang(
    ending: LogEvent | None, idle: float, chron: Timeline, scans: Sequence[FileScan], topology: Topology
) -> Verdict:
    faulty: Faulty | None = None
    cordon: tuple[str, ...] = ()
    evidence: list[Root] = []
    root = root_of(ending, scans) if ending else None
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
    trained: TrainingCurve,
    said: LogEvent | None,
    scans: Sequence[FileScan],
    chron: Timeline,
    topology: Topology,
) -> Verdict:
    base = defaults()[LOSS_SPIKE]
    assert trained.spike is not None
    root = line_of(trained.spike, scans)
    evidence = [root_of(e, scans) for e in ((said,) if said else ()) + chron.endings[-1:]]
    return Verdict(
        Outcome.LOSS_SPIKE, None, LOSS_SPIKE, root, tuple(evidence), recoverable=True,
        action=Action.ROLLBACK_SKIP, mitigation=base.mitigation, confidence=0.85, decided_by="loss-course",
        notes=(f"loss {trained.spike.loss} after about {trained.base:.4g}" if trained.base is not None else "loss is not finite",),
    )  # fmt: skip


def _nothing_known(
    chron: Timeline, scans: Sequence[FileScan], topology: Topology, trained: TrainingCurve, now: float | None
) -> Verdict:
    base = defaults()[UNKNOWN]
    last = max(scans, key=lambda s: (s.log_end.last_time or 0.0, s.log_end.bytes), default=None)
    when = max((s.log_end.last_time or 0.0 for s in scans), default=0.0)
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
            trained, scans[trained.last.file].log_end, scans[trained.last.file].log_end.lines + 1, now
        )
        if idle is not None:
            verdict = _hang(None, idle, chron, scans, topology)
            return replace(verdict, root=verdict.root or line_of(trained.last, scans))
    if last is None or not any(s.log_end.bytes for s in scans):
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
    if all(s.machine or not s.log_end.bytes for s in scans) and not chron.progress and not chron.cascades:
        return _machine(scans, last)
    by_code = from_report(chron, scans, topology)
    if by_code is not None:
        return by_code
    if last.log_end.cut_off or trained.last is not None:
        with_steps = [s for s in scans if s.progress]
        last = (
            max(with_steps, key=lambda s: (s.log_end.last_time or 0.0, s.log_end.bytes))
            if with_steps
            else last
        )
    root = Root(last.name, last.log_end.last_line, last.log_end.last_text, time=last.log_end.last_time)
    complaint = _complaint(scans)
    if complaint is not None:
        return Verdict(
            Outcome.UNKNOWN, None, UNKNOWN, complaint, (root,), recoverable=True, action=Action.RESTART, mitigation=base.mitigation,
            confidence=0.4, decided_by="unknown-error", notes=("no rule knows this error; nothing after it says how the run ended",),
        )  # fmt: skip
    why = (
        "the log breaks off in the middle of a line, without any error"
        if last.log_end.cut_off
        else "it ends, and nothing says how: no error, no last step, no word of the scheduler's"
    )
    return Verdict(
        Outcome.FAILED if last.log_end.cut_off or chron.cascades else Outcome.UNKNOWN, None, UNKNOWN, root, recoverable=True,
        action=Action.RESTART, mitigation=base.mitigation, confidence=0.5, decided_by="end-of-log", notes=(why,),
    )  # fmt: skip


def _complaint(scans: Sequence[FileScan]) -> Root | None:
    """The first error that no rule knows behind the last step of its log."""
    for s in scans:
        after = s.progress[-1].line if s.progress else 0
        for line, text, when, rank, node in s.complaints:
            if line > after and (s.progress or not any(x.progress for x in scans)):
                return Root(s.name, line, text, rank, node, when)
    return None


def _machine(scans: Sequence[FileScan], last: FileScan) -> Verdict:
    """Logs of a machine and of no job: no job failed in them. What no rule knows is shown, and not judged."""
    complaint = _complaint(scans)
    root = Root(last.name, last.log_end.last_line, last.log_end.last_text, time=last.log_end.last_time)
    return Verdict(
        Outcome.COMPLETED, root=complaint or root, action=Action.NONE, confidence=0.5 if complaint else 0.8, decided_by="no-fault",
        mitigation="For the job's own end read the job's own log.",
        notes=("nothing is wrong in it: a log of the machine, not of a job" if complaint is None
               else "a log of the machine, not of a job; one error in it is known to no rule",),
    )  # fmt: skip


_SIGNALLED = re.compile(r"(?:Sending process|Killing subprocess|\(pid:) (\d+)\b")
_ASKED = ("slurm-step-cancelled", "asked-to-stop")
_STOP = re.compile(r" CANCELLED AT |(?i:\bsig|signal|request|notice|sync point|graceful)")
_PEACEFUL = re.compile(r": tasks? [\d,\-\[\]]+: (?:Terminated|Killed|running)|SIGTERM|closing signal")
_TRANSIENT = re.compile(
    r"(?i)\btemporar|\bunavailable\b|timed? ?out\b|time-?out\b|too many requests|slow ?down|try again|connection (?:reset|refused|aborted|closed)"
    r"|broken pipe|throttl|\b50[0234]\b.{0,40}(?:error|server|gateway|service|status)|\b(?:status|http|code)\W{1,3}(?:429|50[0234])\b|curl error|DEADLINE_EXCEEDED|rate limit|(?:server|remote) (?:returned nothing|disconnected|closed)"
)
_BAD_LOSS = re.compile(r"(?i)\bloss\b|\bgrad|diverg|spike|\bnan\b")
_OF_ALL = re.compile(r"(?:iteration|step|%\|.{0,60}\|)\s*[:=]?\s*(\d+)\s*/\s*(\d+)\b")


def _last_step(p: MetricLine) -> bool:
    """Whether a metric line counts the last step of all (`iteration 500/ 500`)."""
    m = _OF_ALL.search(p.text)
    return not OF_EPOCH.search(p.text, 0, 200) and bool(m and int(m.group(1)) == int(m.group(2)) > 0)
