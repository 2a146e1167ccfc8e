"""One interruption: what happened, its verdict, what was done, and what it cost."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ....detect import ProcessLook
from ....diagnose.judge.facts import Facts, HangFact, RankExit
from ....progress import RunDir
from ....progress.records.verdict import UNKNOWN, Action, Outcome, Root, Verdict
from ..attempt.attempt import Attempt


def logs_of(run_dir: RunDir, attempt: Attempt) -> list[Path]:
    """The rank logs of an attempt that exist."""
    paths = [run_dir.rank_log(attempt.number, s.node, r) for r, s in sorted(attempt.ranks.items())]
    return [p for p in paths if p.exists()]


def facts_of(attempt: Attempt, lost_nodes: Sequence[str], hang: HangFact | None) -> Facts:
    """What the supervisor knows of an attempt's end, beside its logs."""
    return Facts(
        exits=attempt.exits(),
        lost_nodes=tuple(lost_nodes),
        hang=hang,
        nodes=tuple((r, s.node) for r, s in sorted(attempt.ranks.items())),
        oom_kills=tuple(r for r, s in sorted(attempt.ranks.items()) if s.oom),
        completed=attempt.all_finished,
        step=attempt.step if attempt.step >= 0 else None,
    )


def named_in_run(verdict: Verdict, logs: Sequence[Path], run_dir: RunDir) -> Verdict:
    """The verdict with each quoted file named from the run directory on, so that it can be opened."""
    places = {p.name: p for p in logs}

    def named(root: Root) -> Root:
        path = places.get(Path(root.file).name) if root.file else None
        return root if path is None else replace(root, file=str(path.relative_to(run_dir.path)))

    return replace(
        verdict,
        root=named(verdict.root) if verdict.root else None,
        evidence=tuple(named(e) for e in verdict.evidence),
    )


def killed_from_outside(facts: Facts, verdict: Verdict) -> bool:
    """Whether what ended first was ended by a SIGKILL or SIGTERM that we did not send and the logs do not explain."""
    first = _first_end(facts, verdict)
    unexplained = verdict.reason in (None, UNKNOWN)
    return first is not None and unexplained and first.signal in (signal.SIGKILL, signal.SIGTERM)


def _first_end(facts: Facts, verdict: Verdict) -> RankExit | None:
    """The exit that the verdict blames, else the earliest that was an error and not our doing.

    Agents see ends at moments of their own: an error that a kill caused elsewhere may carry the earlier time.
    """
    bad = [e for e in facts.exits if not e.killed_by_agent and e.code != 0]
    blamed = verdict.faulty.rank if verdict.faulty is not None else None
    return next((e for e in bad if e.rank == blamed), None) or next(iter(bad), None)


def _how(end: RankExit) -> str:
    how = signal_name(end.signal) if end.signal else f"exit code {end.code}"
    return f"rank {end.rank} on {end.node} ended by {how}"


def with_kill(verdict: Verdict, facts: Facts, oom: Mapping[int, bool | None]) -> Verdict:
    """The verdict of a kill that nothing explains, with what is known of it: the signal, and what the kernel's log says.

    `oom` tells of each rank whether the kernel killed it for memory; None where its log cannot be read.
    """
    first = _first_end(facts, verdict)
    if first is None or first.signal != signal.SIGKILL or not killed_from_outside(facts, verdict):
        return verdict
    if oom.get(first.rank) is None:
        kernel, sure = "the kernel's log cannot be read: it may have been killed for memory", 0.6
    else:
        kernel, sure = "no out-of-memory kill in the kernel's log", 0.9
    return replace(
        verdict,
        mitigation=f"Somebody or something killed it: {kernel}. Look at who may signal processes there (a scheduler, a "
        "container's memory limit, a person).",
        confidence=max(verdict.confidence, sure),
        decided_by="signal",
        notes=(*(n for n in verdict.notes if "without a word" not in n), f"killed by signal 9; {kernel}"),
    )


def with_root(
    verdict: Verdict,
    facts: Facts,
    looks: Mapping[int, ProcessLook],
    silent: Mapping[str, str] | None = None,
) -> Verdict:
    """The verdict with what the supervisor itself saw as its root, where no line of a log is one.

    `silent` says of nodes that did not answer what their agent was doing, and how they were fenced.
    """
    first = _first_end(facts, verdict)
    if verdict.root is not None and verdict.root.text:
        if first is None or verdict.decided_by not in ("exit-code", "signal"):
            return verdict
        # The last line of a rank that was killed tells how far it was, not what happened to it.
        text = f"{_how(first)}; the last line of its log: {verdict.root.text.strip()}"
        return replace(verdict, root=replace(verdict.root, text=text))
    nodes = dict(facts.nodes)
    if facts.hang is not None:
        late = facts.hang.late[0] if facts.hang.late else None
        at = f"after step {facts.hang.step}" if facts.hang.step >= 0 else "before the first step"
        text = f"no step for {facts.hang.idle_s:.0f} s {at}"
        if late is not None and late in looks:
            text += f"; rank {late} on {nodes.get(late)}: {looks[late].text.splitlines()[0]}"
            if looks[late].frames:
                text += f", in {looks[late].frames[0]}"
        return replace(
            verdict, root=Root(text=text, rank=late, node=nodes.get(late) if late is not None else None)
        )
    if facts.lost_nodes:
        text = f"nothing is left of {', '.join(facts.lost_nodes)}: agent, keeper and ranks are gone"
        if why := (silent or {}).get(facts.lost_nodes[0]):
            text = f"{facts.lost_nodes[0]} did not answer: {why}"
        return replace(verdict, root=Root(text=text, node=facts.lost_nodes[0]))
    if first is not None:
        text = f"{_how(first)}, without a word in its log"
        return replace(verdict, root=Root(text=text, rank=first.rank, node=first.node, time=first.time))
    return verdict


def signal_name(number: int) -> str:
    """SIGKILL for 9; 'signal 40' for one of the real-time signals, which have no name of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def agent_lost_verdict(node: str, step: int) -> Verdict:
    """The verdict for an agent that died on a node whose keeper is still there: nothing a log can tell."""
    text = f"the agent of {node} ended; its keeper and the snapshots in memory are still there"
    return Verdict(
        outcome=Outcome.FAILED,
        reason="Unknown",
        root=Root(text=text, node=node, time=time.time()),
        recoverable=True,
        action=Action.RESTART,
        mitigation="Restarted on the same node from the snapshots in memory.",
        confidence=0.9,
        decided_by="lost-agent",
    )


def lease_expired_verdict(end: RankExit) -> Verdict:
    """The verdict when ranks were ended because their node heard from no supervisor: nothing that they did."""
    text = f"{end.node} did not hear from its supervisor for longer than its lease, and its ranks were ended"
    return Verdict(
        outcome=Outcome.FAILED,
        reason=UNKNOWN,
        root=Root(text=text, node=end.node, time=end.time),
        recoverable=True,
        action=Action.RESTART,
        mitigation="Restarted from the newest snapshots.",
        confidence=0.95,
        decided_by="lapsed-lease",
    )


def preempted_verdict(text: str, now: float) -> Verdict:
    """The verdict when a node was announced to be taken away, and the ranks were stopped at a step for that."""
    return Verdict(
        outcome=Outcome.PREEMPTED,
        root=Root(text=text, time=now),
        recoverable=True,
        action=Action.RESTART,
        mitigation="Restarted on other nodes from the snapshot that was made for it.",
        confidence=1.0,
        decided_by="notice",
    )


def takeover_verdict() -> Verdict:
    """The verdict when a supervisor was lost and its successor found every rank still running."""
    return Verdict(
        outcome=Outcome.RUNNING,
        root=Root(
            text="the supervisor was gone; every rank was still running when its successor came",
            time=time.time(),
        ),
        recoverable=True,
        action=Action.NONE,
        mitigation="Nothing to do: the successor took the ranks over.",
        confidence=1.0,
        decided_by="takeover",
    )
