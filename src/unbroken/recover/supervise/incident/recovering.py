"""One incident, from how the attempt ended to what is done about it: facts, verdict, decision, journal, file, screen."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ....detect import late_ranks
from ....detect.stacks import place as name_stacks
from ....diagnose.judge.facts import Facts, HangFact
from ....diagnose.observed.early_exit import RankPlace, blame_early_exit
from ....diagnose.observed.interruptions import (
    agent_lost_verdict,
    lease_expired_verdict,
    preempted_verdict,
    takeover_verdict,
)
from ....diagnose.observed.kills import killed_from_outside, with_kill
from ....diagnose.observed.root import with_root
from ....diagnose.read.run_folder import named_in_run
from ....errors import RunStopped
from ....progress import Budgets, RunDir, RunSpec
from ....progress.records.decision import Decision
from ....progress.records.incident import Incident
from ....progress.records.steps import read_steps
from ....progress.records.verdict import Action, Root, Verdict
from ...decide.policy import (
    AGENT,
    FREE,
    LEASE_EXPIRED,
    as_carried_out,
    cause_of,
    decide,
    decide_agent_lost,
    decide_lease_expired,
    fingerprint,
)
from ..attempt.attempt import Attempt
from ..attempt.outcome import AttemptOutcome, name_loss
from ..fence.fencing import Fencing
from ..fence.stopping import Stopping
from ..nodes.fleet import Fleet
from ..record.background import Background
from ..record.clock import Clock
from ..record.recorder import Recorder
from ..record.stop_request import StopRequest
from ..screen.view import View
from .facts import facts_of, logs_of

_SETTLE_S = 0.5
_SETTLE_QUIET_S = 0.15
Diagnose = Callable[[Sequence[Path], Facts], Awaitable[Verdict]]


class Recovering:
    """Handles incidents, and notes when each is over."""

    def __init__(
        self,
        run_dir: RunDir,
        spec: RunSpec,
        fleet: Fleet,
        fencing: Fencing,
        stopping: Stopping,
        diagnose: Diagnose,
        recorder: Recorder,
        background: Background,
        stop: StopRequest,
        view: View,
        clock: Clock,
    ) -> None:
        self._run_dir, self._budgets, self._fleet = run_dir, spec.budgets, fleet
        self._fencing, self._stopping, self._diagnose = fencing, stopping, diagnose
        self._recorder, self._background, self._stop = recorder, background, stop
        self._view, self._clock = view, clock
        self._open: Incident | None = None
        """The newest one, until training is past the step that it was at."""

    # --- from outcome to decision

    async def recover(self, attempt: Attempt, outcome: AttemptOutcome) -> None:
        """Ends what is left, finds the verdict, decides; raises RunStopped where a restart cannot help."""
        began, detected = self._clock.monotonic(), self._clock.wall()
        if outcome.kind == "failed":
            outcome = await self._let_settle(attempt, outcome)
        incident = Incident(
            number=self._recorder.state.incident + 1, attempt=attempt.number, kind=outcome.kind, step=attempt.step,
            last_sign=self._find_last_sign(attempt, outcome), detected=detected,
            nodes={n: end.value for n, end in outcome.nodes.items()},
        )  # fmt: skip
        incident.phases["detect"] = max(0.0, detected - incident.last_sign)
        hang = self._describe_hang(attempt, outcome, incident.number)
        stop_began = self._clock.monotonic()
        silent = await self._fencing.end_attempt(attempt, outcome)
        diagnose_began = self._clock.monotonic()
        incident.phases["stop"] = diagnose_began - stop_began
        facts = facts_of(attempt, outcome.lost_nodes, hang)
        verdict = await self._find_verdict(attempt, outcome, facts, silent)
        incident.verdict = verdict
        incident.phases["diagnose"] = self._clock.monotonic() - diagnose_began
        incident.step = max(attempt.step, self._recorder.state.step)
        decision = await self._decide(attempt, outcome, facts, verdict, incident)
        self._view.incident(incident, self._clock.monotonic() - began)
        self._open = incident
        for name in outcome.lost_nodes:
            await self._fencing.lose(name, verdict.reason or outcome.kind, is_fenced=True)
        if decision.action is Action.STOP:
            await self._end_run(incident, decision)
        for name in decision.exclude:
            if name in self._fleet.nodes and name not in outcome.nodes:
                await self._fencing.cordon(name, verdict.reason, verdict.confidence)
        if decision.delay_s:
            self._view.say(
                f"waiting {decision.delay_s:.0f} s before the restart (no progress since the last one)"
            )
            await self._stop.pause(decision.delay_s)

    async def _let_settle(self, attempt: Attempt, outcome: AttemptOutcome) -> AttemptOutcome:
        """Waits a moment for the other ranks to end too: who was first is told by times, not by arrival.

        A dying node's ranks may be heard of before the node is missed: then the node is the cause.
        """
        deadline = self._clock.monotonic() + _SETTLE_S
        seen, quiet = attempt.ended, self._clock.monotonic()
        while self._clock.monotonic() < deadline and not attempt.all_ended:
            await asyncio.sleep(0.02)
            if attempt.ended != seen:
                seen, quiet = attempt.ended, self._clock.monotonic()
            elif self._clock.monotonic() - quiet > _SETTLE_QUIET_S:
                break
        if lost := self._fleet.find_lost(attempt.nodes):
            return replace(outcome, kind=name_loss(lost), nodes=lost)
        if attempt.stopped_by_us() is not None:
            return replace(outcome, kind="lease")
        return outcome

    async def _decide(
        self, attempt: Attempt, outcome: AttemptOutcome, facts: Facts, verdict: Verdict, incident: Incident
    ) -> Decision:
        """Decides, and writes it down before anything is done."""
        killed = killed_from_outside(facts, verdict)
        stacks, reached = name_stacks(outcome.processes), attempt.step >= 0
        history, step = self._recorder.state.history, incident.step
        if not _is_training(verdict, outcome):
            decision = _decide_free(outcome.kind, step, self._recorder, self._budgets)
        else:
            decision = decide(
                verdict, step, history, self._budgets, killed=killed, reached=reached, stacks=stacks
            )
        state = self._recorder.state
        free = self._fleet.find_free(state.slots, {*outcome.nodes, *state.cordoned})
        decision = as_carried_out(decision, len(free))
        incident.action, incident.why = decision.action.value, decision.why
        self._recorder.write_incident(incident)
        await self._recorder.record("ended", attempt=attempt.number, how=outcome.kind, step=step)
        await self._recorder.record(
            "incident", incident=incident.number, attempt=attempt.number, what=outcome.kind, step=step,
            cause=_charge(verdict, outcome, killed), fingerprint=fingerprint(verdict, stacks), reason=verdict.reason,
            outcome=verdict.outcome.value, action=incident.action, why=decision.why, reached=reached,
        )  # fmt: skip
        return decision

    async def _end_run(self, incident: Incident, decision: Decision) -> None:
        """Leaves the nodes and raises RunStopped."""
        await self._recorder.record("status", status="stopped", why=decision.why)
        await self._stopping.leave(flush=True)
        self._view.stopped(incident, self._run_dir)
        raise RunStopped(
            decision.why, where=f"incident {incident.number} in {self._run_dir.incident(incident.number)}",
            hint="Fix the cause and give the same command again (another one needs another --run-dir): "
            "it goes on from the last checkpoint, if one was saved",
        )  # fmt: skip

    # --- what is known

    def _find_last_sign(self, attempt: Attempt, outcome: AttemptOutcome) -> float:
        """When the attempt was last known to be well, seconds since the epoch."""
        failures = attempt.failures()
        if outcome.kind == "failed" and failures:
            return failures[0].time
        if outcome.kind == "preempted":
            return self._clock.wall()
        now, clock = self._clock.wall(), self._clock.monotonic()
        heard = [now - (clock - self._fleet.nodes[n].heard) for n in outcome.nodes]
        if heard:
            return min([now, *heard])
        if attempt.last is not None:
            return attempt.last.time
        kept = read_steps(self._run_dir.steps(attempt.number))
        return kept[-1].time if kept else attempt.started

    def _describe_hang(self, attempt: Attempt, outcome: AttemptOutcome, incident: int) -> HangFact | None:
        if outcome.hang is None:
            return None
        late = late_ranks(outcome.processes, outcome.hang.behind)
        folder = self._run_dir.evidence(incident)
        return HangFact(
            step=attempt.step, phase=outcome.hang.phase.name.lower(), idle_s=round(outcome.hang.idle_s, 2), late=late,
            stacks=str(folder) if folder.is_dir() else None,
        )  # fmt: skip

    async def _find_verdict(
        self, attempt: Attempt, outcome: AttemptOutcome, facts: Facts, silent: Mapping[str, str]
    ) -> Verdict:
        found = await self._read_verdict(attempt, outcome, facts)
        oom = {r: s.oom for r, s in attempt.ranks.items()}
        verdict = with_root(with_kill(found, facts, oom), facts, outcome.processes, silent)
        frames = {r: look.frames for r, look in outcome.processes.items()}
        places = {r: RankPlace(s.step, frames.get(r, ())) for r, s in attempt.ranks.items()}
        return blame_early_exit(verdict, facts, places, attempt.total)

    async def _read_verdict(self, attempt: Attempt, outcome: AttemptOutcome, facts: Facts) -> Verdict:
        """From what the supervisor did or saw itself, where that is all; else from the logs."""
        now = self._clock.wall()
        if outcome.kind == "agent_lost":
            return agent_lost_verdict(next(iter(outcome.nodes)), attempt.step)
        if outcome.kind == "start_failed":
            verdict = agent_lost_verdict(attempt.slots[0], attempt.step)
            root = Root(text=f"the attempt could not be launched: {outcome.error}", time=now)
            return replace(verdict, root=root, mitigation="Tried again.", decided_by="launch")
        if outcome.kind == "preempted":
            return preempted_verdict(outcome.error, now)
        expired = attempt.stopped_by_us()
        if outcome.kind in ("supervisor_lost", "lease") and expired is not None:
            # What other ranks said and did after that, their own lease's end or a lost connection, followed from it.
            return lease_expired_verdict(expired)
        if outcome.kind == "supervisor_lost" and not attempt.failures():
            verdict = agent_lost_verdict(attempt.slots[0], attempt.step)
            text = "the supervisor was gone, and so are the ranks: nothing else is known of their end"
            return replace(verdict, root=Root(text=text, time=now), decided_by="lost-supervisor")
        logs = logs_of(self._run_dir, attempt)
        return named_in_run(await self._diagnose(logs, facts), logs, self._run_dir)

    # --- until it is over

    def note_schedule(self, attempt: int, seconds: float) -> None:
        """The next attempt is about to be launched, so long after its start was begun."""
        if self._open is not None:
            self._open.phases["schedule"] = seconds
            self._open.next_attempt = attempt

    def note_steps(self, attempt: Attempt) -> None:
        """The leading rank made steps: the incident before may be over by that."""
        incident, first, up = self._open, attempt.first_step, attempt.caught_up
        if incident is None or first is None or up is None or incident.next_attempt != attempt.number:
            return
        self._open = None
        incident.resumed = up.time
        incident.resumed_step = first.step
        incident.steps_lost = max(0, incident.step - first.step + 1)
        start = attempt.attached_at or attempt.started
        incident.phases["start"] = max(0.0, start - attempt.started)
        incident.phases["restore_and_first_step"] = max(0.0, first.time - start)
        incident.phases["replay"] = max(0.0, up.time - first.time)
        self._background.start(self._tell_resumed(incident, attempt, up.time))

    async def _tell_resumed(self, incident: Incident, attempt: Attempt, resumed: float) -> None:
        self._recorder.write_incident(incident)
        await self._recorder.record_soft(
            "resumed", incident=incident.number, attempt=attempt.number, step=incident.step,
            first_step=incident.resumed_step, steps_lost=incident.steps_lost,
            seconds=round(resumed - incident.detected, 3),
        )  # fmt: skip
        self._view.resumed(incident)

    async def note_takeover(self, attempt: Attempt) -> None:
        """An incident that cost no step: the supervisor was gone and the ranks never stopped."""
        now, step = self._clock.wall(), self._recorder.state.step
        incident = Incident(
            number=self._recorder.state.incident + 1, attempt=attempt.number, kind="supervisor_lost", step=step,
            last_sign=now, detected=now, verdict=takeover_verdict(), action=Action.NONE.value,
            why="a successor took over; no rank was touched", resumed=now, steps_lost=0, next_attempt=attempt.number,
        )  # fmt: skip
        self._recorder.write_incident(incident)
        await self._recorder.record(
            "incident", incident=incident.number, attempt=attempt.number, what=incident.kind, step=step,
            cause=FREE, fingerprint="takeover", reason=None, outcome="running", action="none", why=incident.why,
        )  # fmt: skip
        await self._recorder.record(
            "resumed", incident=incident.number, attempt=attempt.number, step=step, steps_lost=0, seconds=0.0
        )


def _is_training(verdict: Verdict, outcome: AttemptOutcome) -> bool:
    """Whether the training had a part in it."""
    free = ("agent_lost", "supervisor_lost", "lease", "start_failed", "preempted")
    return outcome.kind not in free or bool(verdict.category)


def _charge(verdict: Verdict, outcome: AttemptOutcome, killed: bool) -> str:
    """The budget of an incident: what is free must not use up that of failures nobody can explain."""
    if _is_training(verdict, outcome):
        return cause_of(verdict, killed=killed)
    return {"lease": LEASE_EXPIRED, "agent_lost": AGENT}.get(outcome.kind, FREE)


def _decide_free(kind: str, step: int, recorder: Recorder, budgets: Budgets) -> Decision:
    """What is done about an incident in which the training had no part."""
    history = recorder.state.history
    if kind == "lease":
        return decide_lease_expired(step, history, budgets)
    if kind == "agent_lost":
        return decide_agent_lost(step, history, budgets)
    return Decision(Action.RESTART, "free of charge: not the training's fault")
