"""A run that ends: its ranks stop at a step that all agree on, and what only the keepers hold is saved first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from ....errors import Exit, RunError
from ....progress import RunSpec
from ...wire import Message
from ..accept.accepting import Accepting
from ..attempt.attempt import Attempt
from ..attempt.farewell import Farewell, Last
from ..nodes.fleet import Fleet
from ..nodes.keepers import Keepers
from ..record.clock import Clock
from ..record.recorder import WAIT_LEAST_S, CannotRecord, Recorder
from ..record.stop_request import StopRequest
from ..record.term import TermWatch
from ..screen.view import View
from .fencing import Fencing

FLUSH_S = 60.0
"""For writing a checkpoint at the end, where the storage takes it."""
ANSWER_S = 15.0
_AGREE_S = 5.0
_AGREE_TRIES = 8
_STOP_S = 30.0
_LEAVE_S = 3.0
_POLL_S = 0.05


class Stopping:
    """Stops ranks on request, and leaves the nodes."""

    def __init__(
        self,
        spec: RunSpec,
        fleet: Fleet,
        keepers: Keepers,
        accepting: Accepting,
        fencing: Fencing,
        recorder: Recorder,
        term: TermWatch,
        stop: StopRequest,
        view: View,
        clock: Clock,
        elsewhere: str,
    ) -> None:
        """`elsewhere` is where keepers write what its own place refuses; "" for nowhere."""
        self._fleet, self._keepers, self._accepting, self._fencing = fleet, keepers, accepting, fencing
        self._recorder, self._term, self._stop, self._view, self._clock = recorder, term, stop, view, clock
        self._grace_s, self._room_s = float(spec.timeouts.stop), float(spec.timeouts.room)
        self._grace = spec.timeouts.stop
        self._extra_s = FLUSH_S if elsewhere else 0.0

    @property
    def needs_s(self) -> float:
        """How long stopping at a step and saving may take."""
        return self._grace_s + FLUSH_S + ANSWER_S

    # --- the ranks

    async def stop_ranks(self, attempt: Attempt, why: str = "") -> None:
        """Asks for a stop at a step that no rank has passed; kills what has not stopped in time.

        `why` is said where nobody has asked for it.
        """
        asked = "the ranks are asked to save and exit at the next step (run.should_stop)"
        self._view.say(f"{why}: {asked}" if why else f"stopping: {asked}; Ctrl-C again kills them")
        await self._wake_keepers(attempt.nodes)
        if not await self._agree_on_step(attempt):
            await self._send_sigterm(attempt)
            return
        deadline = self._clock.monotonic() + self._grace_s
        while self._clock.monotonic() < deadline and not attempt.all_ended and self._stop.count < 2:
            failures = attempt.failures()
            if failures and all(e.code != Exit.RANK_STOPPED_ON_REQUEST for e in failures):
                break
            if self._lacks_only_room(attempt):
                break
            await asyncio.sleep(_POLL_S)
        if self._lacks_only_room(attempt):
            self._view.say(
                "the ranks have saved, and wait for the storage only: their keepers do that without them"
            )
        elif not attempt.all_ended:
            self._view.say("not all ranks stopped in time; killing them")
        await self._fleet.ask_all(attempt.nodes, "stop", attempt=attempt.number, timeout=_STOP_S)

    async def _agree_on_step(self, attempt: Attempt) -> bool:
        """Names a step to stop at; whether every rank can be asked and none had passed it."""
        margin = 2 + int(1.0 / max(attempt.step_time or 1.0, 1e-3))
        for _ in range(_AGREE_TRIES):
            target = attempt.step + margin
            answers = await self._fleet.ask_all(attempt.nodes, "stop_at", step=target, timeout=_AGREE_S)
            if len(answers) < len(attempt.nodes) or not all(a["told"] for a in answers.values()):
                return False
            if max((a["furthest"] for a in answers.values()), default=-1) < target:
                return True
            margin *= 2
        return False

    async def _send_sigterm(self, attempt: Attempt) -> None:
        self._view.say(
            f"the script cannot be asked to stop at a step; it gets SIGTERM and {self._grace} to exit"
        )
        ending = asyncio.create_task(
            self._fleet.ask_all(
                attempt.nodes, "stop", attempt=attempt.number, signal=15, grace_s=self._grace_s,
                timeout=self._grace_s + _STOP_S,
            )
        )  # fmt: skip
        while not ending.done() and self._stop.count < 2:
            await asyncio.wait([ending], timeout=_POLL_S)
        if not ending.done():
            self._view.say("asked again: killing the ranks")
            await self._fleet.ask_all(attempt.nodes, "stop", attempt=attempt.number, timeout=_STOP_S)
        await ending

    def _list_waits(self) -> list[Message]:
        """The snapshots that wait for a storage that refuses."""
        return [n.waits for n in self._fleet.nodes.values() if n.waits is not None]

    def _lacks_only_room(self, attempt: Attempt) -> bool:
        """Whether what the ranks wait for, at their end, is whole in memory and lacks nothing but room on the storage."""
        waits = [w for w in self._list_waits() if w.get("attempt") == attempt.number]
        return bool(waits) and all(w["step"] == attempt.tracker.host_step for w in waits)

    async def _wake_keepers(self, names: Sequence[str]) -> None:
        """A keeper that somebody stopped holds the newest snapshot: at an end it has to go on."""
        for name, process in (await self._keepers.wake(names)).items():
            self._view.say(
                f"{name}: its keeper (process {process}) was stopped by a signal; it is continued so that it can save"
            )

    # --- the nodes

    async def leave(self, *, flush: bool) -> tuple[Farewell, Last | None]:
        """Ends all agents and keepers that are reachable, and proves that nothing is left on their nodes.

        Returns what came of it, and the newest snapshot that was whole in memory. Raises Superseded: what runs there is another
        supervisor's then.
        """
        with contextlib.suppress(OSError):  # who cannot look has to leave all the same
            self._term.check(at_once=True)
        names, last = self._fleet.up(), None
        began = self._clock.monotonic()
        for node in self._fleet.nodes.values():
            node.waits = None
        if flush and names:
            await self._wake_keepers(names)
            last = next(iter(await self._accepting.list_in_memory()), None)
            if last is not None and (last.step, last.attempt) not in self._recorder.state.durable:
                self._view.say(f"saving step {last.step} from memory")
            if last is not None:
                with contextlib.suppress(CannotRecord):  # then the next start lists what it finds
                    await self._accepting.count_in_memory(last)
        asked = self._stop.count

        def find_patience() -> float:
            """The monotonic time until which the keepers are waited for."""
            if not self._list_waits():  # they write: beyond the grace of a stop they do that without us
                within = began + FLUSH_S + ANSWER_S + self._extra_s
                return within if self._stop.first is not None else within + self._room_s
            if self._stop.count > asked:
                return 0.0
            if self._stop.first is not None:
                return max(self._stop.first + self._grace_s, began + WAIT_LEAST_S)
            return began + FLUSH_S + self._room_s + self._extra_s

        farewell = await self._say_farewell(names, last, flush=flush, find_patience=find_patience)
        if flush:
            self._view.kept(farewell, last, self._room_s)
        await asyncio.gather(
            *(self._fleet.wait_until_gone(n, _LEAVE_S) for n in names if n not in farewell.holding)
        )
        proven = await self._fencing.clear([n for n in self._fleet.nodes if n not in farewell.holding])
        left = {*proven, *farewell.holding, *(n for n in farewell.answers if n not in farewell.silent)}
        state = self._recorder.state  # what was given up is waited for no more, as before an attempt
        farewell.unreached = [n for n in state.slots if n not in left and n not in state.lost]
        return farewell, last

    async def _say_farewell(
        self, names: Sequence[str], last: Last | None, *, flush: bool, find_patience: Callable[[], float]
    ) -> Farewell:
        """Asks all agents to save what is in memory and to end; waits while `find_patience()` is ahead (monotonic).

        An agent that is not waited for goes on by itself: it tries for as long as a storage may refuse and ends, or
        serves the next supervisor.
        """
        room_s = self._room_s if last is not None else 0.0
        request: Message = {"flush": flush, "deadline_s": FLUSH_S, "room_s": room_s}
        if last is not None:  # else nothing is whole: what a lost node lacks is not worth a long wait
            request["mark"] = [last.attempt, last.step]
        timeout = FLUSH_S + self._room_s + ANSWER_S + self._extra_s

        async def ask(name: str) -> Message:
            ranks = list(last.shares.get(name, ())) if last is not None else []
            return await self._fleet.ask(name, "quit", timeout=timeout, ranks=ranks, **request)

        tasks = {name: asyncio.create_task(ask(name)) for name in names}
        farewell = Farewell()
        pending = set(tasks.values())
        while pending and self._clock.monotonic() < find_patience():
            _, pending = await asyncio.wait(pending, timeout=0.1)
        for name, task in tasks.items():
            if not task.done():
                task.cancel()
                farewell.holding.append(name)
                continue
            try:
                farewell.answers[name] = task.result()
            except RunError as e:
                farewell.answers[name] = {"closed": {"what": e.message}}
                farewell.silent.append(name)
        return farewell
