"""No process of an attempt is left when the next one starts: ended, fenced by its lease, or made sure of by a person."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict

from ....cluster import EndedProcesses
from ....cluster.at_once import FENCES_AT_ONCE, for_each
from ....cluster.contract import Cordon
from ....progress import RunDir
from ..attempt.attempt import Attempt
from ..attempt.outcome import AttemptOutcome, NodeEnd
from ..nodes.fleet import Fleet
from ..record.clock import Clock
from ..record.recorder import Recorder
from ..record.stop_request import StopRequest
from ..record.term import TermWatch
from . import proof

_CORDON_S = 86400
_OWNER = "unbroken"
_STOP_S = 30.0
_FREEZE_S = 5.0
_SAID_AFTER_S = 2.0
_AFTER_STOP_S = 10.0
"""A fence that is under way when a stop is asked for has so long."""


class Fencing:
    """Proves that processes are gone, and takes nodes out of use of which that, or more, is in doubt."""

    def __init__(
        self,
        run_dir: RunDir,
        fleet: Fleet,
        recorder: Recorder,
        term: TermWatch,
        stop: StopRequest,
        say: Callable[[str], None],
        clock: Clock,
    ) -> None:
        self._run_dir, self._fleet, self._recorder = run_dir, fleet, recorder
        self._term, self._stop, self._say, self._clock = term, stop, say, clock
        self._unproven = proof.Unproven(dict(recorder.state.unproven))

    async def end_attempt(self, attempt: Attempt, outcome: AttemptOutcome) -> dict[str, str]:
        """Proves that no process of the attempt is left, or waits until what cannot be reached has stopped.

        Returns the nodes that did not answer, each with what its agent was found to do, where the cluster can see that, else "".
        """
        self._term.check(at_once=True)
        # A node whose agent was lost has another one by now, perhaps, which knows best what is left there.
        reachable = [
            n for n in attempt.nodes
            if self._fleet.nodes[n].up and outcome.nodes.get(n) in (None, NodeEnd.AGENT_LOST)
        ]  # fmt: skip
        if outcome.kind == "hung":
            # None may print an error of those that were ended before it: that would seem to be the failure.
            await self._fleet.ask_all(reachable, "freeze", attempt=attempt.number, timeout=_FREEZE_S)
        answers = await self._fleet.ask_all(reachable, "stop", attempt=attempt.number, timeout=_STOP_S)
        for name, answer in answers.items():
            await self.take_proof(name, proof.of_message(answer))
        silent = [n for n in attempt.nodes if n not in answers]
        found = await asyncio.gather(*(self._end_node(n, outcome.nodes.get(n)) for n in silent))
        return dict(zip(silent, found, strict=True))

    async def _end_node(self, name: str, end: NodeEnd | None) -> str:
        """Fences a node that did not answer, by force or by its lease; what its agent was found to do, of a silent one."""
        end = end or self._fleet.read_end(name)
        if await self._note_reboot(name):
            return ""  # nothing that ran before is left, and the agent that came since is not to be ended
        if end is NodeEnd.AGENT_LOST:
            return ""  # its next agent ends the ranks before it says hello
        ended, found = await self._fence_silent(name)
        await self.take_proof(name, ended)
        if not ended.gone and (wait := self._find_lease_left(name)) > 0:
            await self._stop.pause(wait)
        if end is not NodeEnd.UNREACHABLE:
            return ""
        how = (
            "its processes were ended" if ended.gone else "what ran there has stopped by its lease, if it did"
        )
        return f"{found}; {how}" if found else how

    async def _fence_silent(self, name: str) -> tuple[EndedProcesses, str]:
        """Fences a node that may go on until its lease has expired, which is waited for no longer once a stop is asked for."""
        left = self._find_lease_left(name)
        fencing = asyncio.create_task(self._fleet.fence(name, left))
        done, _ = await asyncio.wait({fencing}, timeout=_SAID_AFTER_S)
        if not done and left > _SAID_AFTER_S:
            self._say(
                f"{name} cannot be reached: waiting up to {left:.0f} s until it is fenced, or until its lease has expired"
            )
            await self._stop.wait_for(fencing)
            await asyncio.wait({fencing}, timeout=_AFTER_STOP_S)
        if not fencing.done():
            fencing.cancel()
            until = "before the run was asked to stop" if self._stop else "by the end of its lease"
            return EndedProcesses(proven=False, why=f"{name} was not fenced {until}"), ""
        return fencing.result()

    def _find_lease_left(self, name: str) -> float:
        return max(0.0, self._fleet.lease_ends(name) - self._clock.monotonic())

    async def check_cleared(self, slots: Sequence[str]) -> None:
        """Takes what the agents of these nodes said, when they came, of the ranks before."""
        state = self._recorder.state
        before = set(state.slots) if state.attempt else set()
        for name in dict.fromkeys(n for n in slots if n in before):
            if await self._note_reboot(name):
                continue
            node = self._fleet.nodes[name]
            cleared = proof.of_message(node.hello.get("cleared", {}))
            if state.held == "marks" != self._fleet.held:
                cleared |= EndedProcesses(proven=False, why=proof.MARKS_LEFT)
            if not cleared.gone:
                await self.take_proof(name, cleared)

    async def _note_reboot(self, name: str) -> bool:
        """Whether the node's machine was booted again since an attempt last ran there: then nothing of that is left."""
        if not self._fleet.has_rebooted(name, self._recorder.state.boots.get(name, "")):
            return False
        if name in self._unproven.nodes:
            self._unproven.forget(name)
            await self._recorder.record("proven", node=name)
            self._say(f"{name} was booted again: nothing of the attempts before is left there")
        return True

    async def take_proof(self, name: str, ended: EndedProcesses) -> None:
        """Notes what ending a node's processes came to: parks it where some survived, and says what is not proven."""
        if ended.survivors:
            await self._park(name, ended.survivors)
        attempt = self._recorder.state.attempt
        before = self._unproven.nodes.get(name)
        why = self._unproven.take(name, ended, attempt, self._fleet.held)
        if why:
            self._say(f"{name}: the end of attempt {attempt} is not proven: {why}")
        after = self._unproven.nodes.get(name)
        if after is None and before is not None:
            await self._recorder.record("proven", node=name)
        elif after is not None and after != before:
            await self._recorder.record("unproven", node=name, **asdict(after))

    async def wait_for_proof(self, *, accepted: bool) -> bool:
        """Waits for a person where an old process could overwrite what the next attempt saves; False where a stop came."""
        waiting = ""
        while True:
            for node in list(self._unproven.nodes):
                await self._note_reboot(node)
            for node in self._unproven.confirmed(self._run_dir):
                self._unproven.forget(node)
                await self._fleet.forget(node)
                await self._recorder.record("made_sure", node=node)
                self._say(f"{node}: a person has made sure that nothing is left; going on")
            asked = self._recorder.state.asked
            why = self._unproven.in_the_way(self._run_dir, accepted=accepted, asked=asked)
            if not why:
                return True
            if why != waiting:
                waiting, hint = why, self._unproven.what_to_do(self._run_dir)
                await self._recorder.record("waiting", why=why, todo=hint)
                self._say(
                    f"the next attempt waits for a person: an old process may still run and overwrite what the script saves "
                    f"by itself ({why}). {hint}"
                )
            if self._stop:
                return False
            self._term.check()
            await self._stop.pause(1.0)

    # --- nodes out of use

    async def lose(self, name: str, reason: str, *, is_fenced: bool = False) -> None:
        """Gives a node up, and ends what is left there, unless that was done."""
        self._term.check(at_once=True)  # its processes may be another supervisor's by now
        await self._recorder.record("lost", node=name, reason=reason)
        self._fleet.give_up(name)
        if is_fenced:
            return
        ended, _ = await self._fleet.fence(name)
        if name in self._recorder.state.slots and not ended.gone:
            await self.take_proof(name, ended)

    async def cordon(self, name: str, reason: str | None, confidence: float) -> None:
        """Takes a node out of use for a day."""
        await self._put_out_of_use(name, str(reason))
        self._say(f"{name} is cordoned for a day: {reason} (confidence {confidence:.0%})")

    async def _park(self, name: str, pids: Sequence[int]) -> None:
        reason = f"processes {list(pids)} survived kill -9"
        await self._put_out_of_use(name, reason)
        self._say(f"{name} is parked: {reason}")

    async def _put_out_of_use(self, name: str, reason: str) -> None:
        """For this run, and for whoever else asks the cluster for nodes."""
        await self._recorder.record("cordon", node=name, reason=reason, owner=_OWNER, expires_s=_CORDON_S)
        expires = self._clock.wall() + _CORDON_S
        if refused := await self._fleet.cordon(Cordon(name, _OWNER, reason or "an incident", expires)):
            self._say(f"{name} is out of use for this run only: {refused}")

    async def clear(self, names: Sequence[str]) -> list[str]:
        """Ends whatever is left on nodes that the run leaves, and returns them to the cluster; writes down for the next
        start what is not proven. Returns those where nothing is left."""
        proven, found = [], await for_each(names, self._fleet.fence, FENCES_AT_ONCE)
        for name, (ended, _) in found.items():
            if ended.survivors:
                self._say(f"processes {list(ended.survivors)} on {name} survive kill -9")
            elif not ended.proven:
                self._say(f"{name}: it is not proven that nothing of the run is left: {ended.why}")
            if ended.gone:
                proven.append(name)
            state = self._recorder.state
            if not ended.gone and name in state.slots:
                # For the same command given again: what it starts must not run beside this.
                self._unproven.take(name, ended, state.attempt, self._fleet.held)
                await self._recorder.record_soft("unproven", node=name, **asdict(self._unproven.nodes[name]))
        await self._fleet.give_back(proven)
        return proven
