"""One incident, from how the attempt ended to what is done about it: facts, verdict, decision, journal, file, screen."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ....diagnose import Facts
from ....diagnose.observed.interruptions import judge_interruption
from ....diagnose.observed.stored import write_facts
from ....errors import ContractError, RunStopped
from ....progress import Policy, RunDir, RunSpec
from ....progress.records.decision import Decision
from ....progress.records.incident import Incident
from ....progress.records.steps import read_steps
from ....progress.records.verdict import Action, Verdict
from ....units import plural
from ...decide.going_back import goes_back
from ...decide.policy import OUTSIDE, cause_of, decide
from ...telling.teller import Teller
from ..attempt.attempt import Attempt
from ..attempt.code import describe_new
from ..attempt.outcome import AttemptOutcome, NodeEnd, name_loss
from ..attempt.own_checkpoints import OwnCheckpoints
from ..fence.fencing import Fencing
from ..fence.stopping import Stopping
from ..nodes.fleet import Fleet
from ..nodes.machines import list_gpus, share_machine
from ..record.background import Background
from ..record.clock import Clock
from ..record.recorder import Recorder
from ..record.stop_request import StopRequest
from ..record.term import TermWatch
from ..screen.view import View
from ..suspects.suspects import Suspects
from .facts import collect_facts, describe_hang, logs_of

_log = logging.getLogger("unbroken.supervisor")
_DOUBT_S = 3.0
"""A cluster says within so much what became of an agent whose link has closed."""
_SETTLE_S = 0.5
_SETTLE_QUIET_S = 0.15
Diagnose = Callable[[Sequence[Path], Facts], Awaitable[Verdict]]


class WayBack(Protocol):
    """Lets the next attempt run the command from before it was amended."""

    def describe_way_back(self) -> str: ...
    async def go_back(self, why: str) -> None: ...


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
        way_back: WayBack,
        recorder: Recorder,
        term: TermWatch,
        background: Background,
        stop: StopRequest,
        view: View,
        clock: Clock,
        teller: Teller,
        suspects: Suspects,
        own: OwnCheckpoints,
    ) -> None:
        self._run_dir, self._budgets, self._fleet = run_dir, spec.budgets, fleet
        self._policy, self._least = spec.policy, spec.node_counts[-1]
        self._fencing, self._stopping, self._diagnose = fencing, stopping, diagnose
        self._way_back = way_back
        self._recorder, self._term, self._background, self._stop = recorder, term, background, stop
        self._view, self._clock, self._teller, self._suspects = view, clock, teller, suspects
        self._own = own
        self._open = self._find_open()
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
        # What grows with the ranks, or asks the file system for each of them, must not keep agents from their leases.
        evidence = self._run_dir.evidence(incident.number)
        hang = await asyncio.to_thread(
            describe_hang, attempt, outcome, evidence, self._run_dir.flights(attempt.number)
        )
        stop_began = self._clock.monotonic()
        silent = await self._fencing.end_attempt(attempt, outcome)
        late = self._find_lost_meanwhile(silent, outcome)
        incident.nodes |= {n: end.value for n, end in late.items()}
        diagnose_began = self._clock.monotonic()
        incident.phases["stop"] = diagnose_began - stop_began
        facts = collect_facts(
            attempt,
            outcome,
            {n: words for n, words in silent.items() if words},
            hang,
            run_step=self._recorder.state.step,
            noticed=self._clock.wall(),
            wall_clocks={n: self._fleet.nodes[n].wall_clock for n in attempt.nodes},
        )
        await self._keep_facts(attempt.number, facts)
        await self._fleet.gather_logs(attempt.nodes)
        logs = await asyncio.to_thread(logs_of, self._run_dir, attempt)
        verdict = await self._diagnose(logs, facts)
        outside = cause_of(verdict, facts) in OUTSIDE
        if new := await asyncio.to_thread(describe_new, self._run_dir, attempt.number, from_outside=outside):
            verdict = replace(verdict, notes=(new, *verdict.notes))
            self._view.say(new)
        incident.phases["diagnose"] = self._clock.monotonic() - diagnose_began
        decision = await self._decide(
            incident, verdict, facts, attempt, missing=len({*late} - {*verdict.cordon})
        )
        self._view.incident(incident, self._clock.monotonic() - began)
        self._open = incident
        for name in outcome.lost_nodes:
            await self._fencing.lose(name, verdict.reason or outcome.kind, is_fenced=True)
        for name, end in late.items():
            await self._fencing.lose(name, f"{end.value} while the attempt was ended", is_fenced=True)
        if decision.action is Action.STOP:
            await self._end_run(incident, decision)
        for name in decision.exclude:
            if name in self._fleet.nodes and name not in outcome.nodes:
                await self._fencing.cordon(name, verdict.reason, verdict.confidence)
        leaving = [n for n in decision.suspects if n in self._fleet.nodes and n not in incident.nodes]
        await self._suspects.leave(
            leaving, incident.number, f"{verdict.title}, {verdict.confidence:.0%} sure"
        )
        if decision.delay_s:
            self._view.say(
                f"waiting {decision.delay_s:.0f} s before the restart (no progress since the last one)"
            )
            await self._stop.pause(decision.delay_s)

    async def _let_settle(self, attempt: Attempt, outcome: AttemptOutcome) -> AttemptOutcome:
        """Waits a moment for the other ranks to end too: who was first is told by times, not by arrival.

        A dying node's ranks may be heard of before the node is missed, and a dead agent's peers before the cluster says that it
        ended: then the node is the cause.
        """
        began = self._clock.monotonic()
        seen, quiet = attempt.ended, began
        while True:
            now = self._clock.monotonic()
            if attempt.ended != seen:
                seen, quiet = attempt.ended, now
            settled = attempt.all_ended or now - quiet > _SETTLE_QUIET_S or now - began >= _SETTLE_S
            if settled and not (now - began < _DOUBT_S and self._fleet.is_in_doubt(attempt.nodes)):
                break
            await asyncio.sleep(0.02)
        if lost := self._fleet.find_lost(attempt.nodes):
            return replace(outcome, kind=name_loss(lost), nodes=lost)
        if attempt.stopped_by_us() is not None:
            return replace(outcome, kind="lease")
        return outcome

    def _find_lost_meanwhile(self, silent: Iterable[str], outcome: AttemptOutcome) -> dict[str, NodeEnd]:
        """Those of the nodes which did not answer that were lost while the attempt was ended: no cause that is known, and none to go
        on with. They are fenced as far as they can be."""
        lost = self._fleet.find_lost(silent)
        known = {*outcome.nodes, *(n for n in lost if self._fleet.nodes[n].state == "lost")}
        return {n: end for n, end in lost.items() if n not in known and end is not NodeEnd.AGENT_LOST}

    def _choose_policy(self) -> Policy:
        """The policy, with what "auto" means for these nodes. A spare on the same machine takes over the GPUs of the slot too, so
        that on one machine nothing that may be at fault would leave with a node."""
        known = [name for name, node in self._fleet.nodes.items() if node.facts is not None]
        if self._policy.on_doubt != "auto" or not known or not share_machine(self._fleet.nodes, known):
            return self._policy
        return replace(self._policy, on_doubt="keep")

    async def _decide(
        self, incident: Incident, verdict: Verdict, facts: Facts, attempt: Attempt | None = None, *, missing: int = 0
    ) -> Decision:  # fmt: skip
        """Decides, and writes it down before anything is done. So many slots are `missing`, whatever the verdict. Raises Superseded."""
        # A diagnosis takes its time, and whoever stood still does not know how long.
        self._term.check(at_once=True)
        state = self._recorder.state
        room = len(self._fleet.find_free(state.slots, {*incident.nodes, *state.cordoned})) - missing
        decision = decide(
            verdict,
            facts,
            state.history,
            self._budgets,
            max(0, room),
            self._choose_policy(),
            state.cordons,
            self._teller.priors,
            max(0, len(state.slots) - self._least + min(0, room)),
        )
        if (
            decision.action is Action.STOP
            and attempt is not None
            and attempt.warm
            and attempt.first_step is None
        ):
            why = f"{plural(attempt.warm or 0, 'rank')} had started from warm processes: once more, cold ({decision.why})"
            decision = replace(decision, action=Action.RESTART, why=why)
        failed = decision.why if goes_back(decision, state.proven_command) else ""
        if failed:
            why = f"{self._way_back.describe_way_back()}: {failed}"
            decision = replace(decision, action=Action.RESTART, why=why)
        charged = decision.charged
        incident.decide(verdict, decision)
        self._recorder.write_incident(incident)
        if not facts.taken_over:
            await self._recorder.record(
                "ended", attempt=incident.attempt, how=incident.kind, step=incident.step
            )
        await self._recorder.record(
            "incident", incident=incident.number, attempt=incident.attempt, what=incident.kind, step=incident.step,
            cause=charged.cause, fingerprint=charged.fingerprint, reason=verdict.reason, outcome=verdict.outcome.value,
            action=incident.action, why=decision.why, reached=charged.reached, named=charged.named, test_pairs=decision.test_pairs,
        )  # fmt: skip
        if failed:
            line = verdict.root.text.strip() if verdict.root is not None else ""
            await self._way_back.go_back(f"{failed} ({line})" if line and line not in failed else failed)
        if decision.rollback is not None:
            await self._recorder.record(
                "rollback", incident=incident.number, attempt=incident.attempt, before=decision.rollback.before,
                skip=[list(r) for r in decision.rollback.skip],
            )  # fmt: skip
        self._teller.tell_incident(incident, list_gpus(self._fleet.nodes))
        return decision

    async def _keep_facts(self, attempt: int, facts: Facts) -> None:
        """Writes down what the verdict comes from, so that it can be come to again; a disk that refuses holds nothing up."""
        try:
            await asyncio.to_thread(write_facts, self._run_dir, attempt, facts)  # they grow with the ranks
        except OSError as e:
            _log.warning("what was seen of the end of attempt %d cannot be written: %s", attempt, e)

    async def _end_run(self, incident: Incident, decision: Decision) -> None:
        """Leaves the nodes and raises RunStopped."""
        await self._recorder.record("status", status="stopped", why=decision.why)
        await self._stopping.leave(flush=True)
        self._teller.write_metrics(self._recorder.state, self._clock.wall(), up=False)
        await asyncio.to_thread(self._teller.tell_end, "stopped", self._recorder.state.step, decision.why)
        goes_on = await self._own.describe_last() or "from the last checkpoint, if one was saved"
        self._view.stopped(incident, self._run_dir)
        raise RunStopped(
            decision.why, where=f"incident {incident.number} in {self._run_dir.incident(incident.number)}",
            hint="Fix the cause and give the same command again, or another one with --amend: "
            f"it goes on {goes_on}",
        )  # fmt: skip

    # --- what is known

    def _find_last_sign(self, attempt: Attempt, outcome: AttemptOutcome) -> float:
        """When the attempt was last known to be well, seconds since the epoch."""
        failures = attempt.failures()
        if outcome.kind == "failed" and failures:
            return failures[0].time
        if outcome.kind in ("preempted", "slow"):
            return self._clock.wall()
        now, clock = self._clock.wall(), self._clock.monotonic()
        heard = [now - (clock - self._fleet.nodes[n].heard) for n in outcome.nodes]
        if heard:
            return min([now, *heard])
        if attempt.last is not None:
            return attempt.last.time
        kept = read_steps(self._run_dir.steps(attempt.number))
        return kept[-1].time if kept else attempt.started

    # --- until it is over

    def _find_open(self) -> Incident | None:
        """The incident that a supervisor before this one handled, and did not see the end of."""
        number = self._recorder.state.unresumed
        if number is None:
            return None
        try:
            found = self._recorder.read_incident(number)
        except (OSError, ValueError, ContractError) as e:
            _log.warning("incident %d cannot be read, and stays open: %s", number, e)
            return None
        return found if found.action != Action.STOP.value else None

    def note_schedule(self, attempt: int, seconds: float, resized: str = "") -> None:
        """The next attempt is about to be launched, so long after its start was begun; `resized` says with how many nodes, where
        that are not as many as before."""
        if self._open is not None:
            self._open.phases["schedule"] = seconds
            self._open.next_attempt = attempt
            if resized:
                self._open.resized = resized
                self._recorder.write_incident(self._open)

    def note_steps(self, attempt: Attempt) -> None:
        """The leading rank made steps: the incident before may be over by that."""
        incident, first, up = self._open, attempt.first_step, attempt.caught_up
        if incident is None or first is None or up is None or incident.next_attempt != attempt.number:
            return
        self._open = None
        incident.resumed = up.time
        if attempt.taken_over:
            # Its first steps, and how it started, were another supervisor's to see.
            self._background.start(self._tell_resumed(incident, attempt, up.time))
            return
        incident.resumed_step, incident.warm, incident.cold_why = first.step, attempt.warm, attempt.cold_why
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
        attempt.taken_over = True
        if self._open is not None:
            self._open.next_attempt = attempt.number
        now, step = self._clock.wall(), self._recorder.state.step
        facts = Facts(taken_over=True, run_step=step, noticed=now)
        verdict = judge_interruption(facts)
        assert verdict is not None
        incident = Incident(
            number=self._recorder.state.incident + 1, attempt=attempt.number, kind="supervisor_lost", step=step,
            last_sign=now, detected=now, resumed=now, steps_lost=0, next_attempt=attempt.number,
        )  # fmt: skip
        await self._decide(incident, verdict, facts)
        await self._recorder.record(
            "resumed", incident=incident.number, attempt=attempt.number, step=step, steps_lost=0, seconds=0.0
        )
