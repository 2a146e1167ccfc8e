"""Who takes a lost node's place: looked for at a restart, and beside a run that goes on with fewer nodes meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any

from ....errors import RunError
from ....progress.records.state import RunState
from ....waiting import wait_within
from ...record.base import Superseded
from ..fence.fencing import Fencing
from ..nodes.fleet import Fleet
from ..record.clock import Clock
from ..record.recorder import Recorder
from ..record.stop_request import StopRequest
from ..record.term import TermWatch
from ..suspects.suspects import Suspects
from .amending import Amending

_log = logging.getLogger("unbroken.supervisor")
_SETTLE_S = 0.5
_SCAN_S = 0.5
_ASK_AGAIN_S = 30.0


class Replacing:
    """Finds nodes, and brings them up."""

    def __init__(
        self, fleet: Fleet, fencing: Fencing, suspects: Suspects, recorder: Recorder, term: TermWatch, stop: StopRequest,
        clock: Clock, say: Callable[[str], None], amending: Amending, cwd: str,
    ) -> None:  # fmt: skip
        self._fleet, self._fencing, self._suspects, self._recorder = fleet, fencing, suspects, recorder
        self._term, self._stop, self._clock, self._say = term, stop, clock, say
        self._amending, self._cwd = amending, cwd
        self._seeking: asyncio.Task[None] | None = None
        self._late: dict[str, None] = {}
        """Nodes that were given, and had no time left to come up: whoever seeks brings them in."""
        self._again_at: dict[str, float] = {}
        """When those are looked at again of which the look failed (monotonic)."""
        self._told: set[str] = set()

    @property
    def _state(self) -> RunState:
        return self._recorder.state

    # --- at a restart

    async def find(self, old: str, slots: Collection[str], until: float | None = None) -> str | None:
        """A suspect, the same node started again, or another one that the cluster gives. "" where there is none, or none by
        `until` (monotonic; None: however long it takes), None where a stop was asked for meanwhile. The nodes of the other `slots`
        have places of their own."""
        if (suspect := await self._suspects.give_one_back()) is not None:
            return suspect
        # Also one that was given up earlier: its link was cut for a moment, or its agent hardly ran, and it can be reached.
        given_up = [n for n in self._fleet.nodes if n in self._state.lost and n not in slots]
        for name in [old, *given_up]:
            if self.can_return(name) and await self._return(name, until):
                await self._recorder.record("returned", node=name)
                self._say(f"no spare is left; {name} was started again")
                return name
        while found := await self._ask_for_node(old, until):
            was_lost = found in self._state.lost
            if await self._return(found, until):
                if was_lost:
                    await self._recorder.record("returned", node=found)
                    self._say(f"{found} can be reached again")
                return found
            if until is not None and self._clock.monotonic() >= until:
                self._late[found] = None  # it has not failed: nobody has waited for it
                return ""
            await self._fencing.lose(found, "its agent did not come up")
        return found

    def is_hurried(self) -> bool:
        """Whether a stop was asked for. Raises Superseded: who waits for a cluster keeps hold of nodes that are another's by now."""
        self._term.check()
        return bool(self._stop)

    async def _return(self, name: str, until: float | None) -> bool:
        """Starts an agent on a node that has none; whether it came in time. One that comes later is found by whoever seeks."""
        starting = self._fleet.return_node(name, self.is_hurried)
        if until is None:
            return await starting
        try:
            return await wait_within(starting, max(0.0, until - self._clock.monotonic()))
        except TimeoutError:
            return False

    async def _ask_for_node(self, old: str, until: float | None) -> str | None:
        """A node in place of a lost one: a new one, or one that was lost and can be used again. "" where the cluster will never
        have one, or has none in time; None where a stop was asked for. What is asked for is withdrawn then."""
        cordoned = set(self._state.cordoned)
        asking = asyncio.create_task(self._fleet.replace(old, {*self._state.lost, *cordoned}))
        returning = asyncio.create_task(self._fleet.wait_for_returned({*self._state.slots} - {old}, cordoned))
        asked = asyncio.create_task(self._stop.asked.wait())
        tasks: set[asyncio.Task[Any]] = {asking, returning, asked}
        try:
            while not any(t.done() for t in tasks):
                left = 1.0 if until is None else min(1.0, until - self._clock.monotonic())
                if left <= 0:
                    return ""
                await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                self._term.check()
            if asking.done() and not asking.result():
                # It may be the return of one of its own for which the cluster has nothing else any more.
                await asyncio.wait({returning}, timeout=_SETTLE_S)
            if returning.done():
                return returning.result()
            return asking.result() or "" if asking.done() else None
        finally:
            for task in tasks:
                task.cancel()

    def can_return(self, name: str) -> bool:
        """Whether an agent may be started again on this node."""
        node = self._fleet.nodes[name]
        reached = node.usable and not node.unreachable
        return reached and node.preempted is None and name not in self._state.cordoned

    async def take_back(self, within_s: float) -> None:
        """Takes back the nodes that a supervisor before this one gave up and the cluster gives again, as far as they come in time."""
        try:
            await wait_within(
                self._take_back(n for n in self._fleet.nodes if n in self._state.lost), within_s
            )
        except TimeoutError:
            return  # they come in later

    # --- beside a run that goes on with fewer

    def seek(self) -> None:
        """Looks for nodes that can come in, until `rest`."""
        if self._seeking is None:
            self._seeking = asyncio.create_task(self._seek())

    def rest(self) -> None:
        """Looks no more; what was asked of the cluster is withdrawn."""
        if self._seeking is not None:
            self._seeking.cancel()
            self._seeking = None

    async def _seek(self) -> None:
        asking: asyncio.Task[str | None] | None = None
        ask_at = 0.0
        try:
            while True:
                try:
                    for name in self._state.lift_cordons(self._clock.wall()):
                        self._say(f"{name} may be used again: its cordon has expired")
                    await self._bring_in_late()
                    await self._take_back(n for n in self._fleet.nodes if n in self._state.lost)
                    if asking is not None and asking.done():
                        done, asking = asking, None
                        ask_at = self._clock.monotonic() + _ASK_AGAIN_S
                        if (given := done.result()) is not None:
                            self._late[given] = None
                    old, out = self._find_missing(), {*self._state.lost, *self._state.cordoned}
                    if asking is None and old and self._clock.monotonic() >= ask_at:
                        asking = asyncio.create_task(self._fleet.replace(old, out))
                    elif asking is not None and not old and not asking.done():
                        asking.cancel()  # one came back by itself: nobody needs another one beside it
                        asking = None
                except Superseded:
                    return  # its successor seeks
                except Exception as e:  # noqa: BLE001  without it nobody would look for nodes until the next attempt
                    self._note_failure("other nodes are looked for later", e)
                    ask_at = self._clock.monotonic() + _ASK_AGAIN_S
                await asyncio.sleep(_SCAN_S)
        finally:
            if asking is not None:
                asking.cancel()

    def _note_failure(self, what: str, e: Exception) -> None:
        """Says once what a look for nodes failed with; what is no error of ours is logged with where it came from."""
        _log.warning("%s: %s", what, e, exc_info=None if isinstance(e, RunError) else e)
        if (line := f"{what}: {e}") not in self._told:
            self._told.add(line)
            self._say(line)

    def _find_missing(self) -> str:
        """A node that left, in whose place there is none yet that waits to come in; "" where as many wait as are missing."""
        state, nodes = self._state, self._fleet.nodes
        free = self._fleet.find_free(state.slots, {*state.lost, *state.cordoned})
        # Suspects are tested aside, and return.
        gone = [
            n
            for n in state.without
            if n in state.lost
            or (n in state.cordoned and n not in state.suspects)
            or (n in nodes and nodes[n].preempted is not None)
        ]
        if not gone or len(state.slots) + len(free) >= self._fleet.request.nodes:
            return ""
        return gone[min(len(free), len(gone) - 1)]

    async def _take_back(self, lost: Iterable[str]) -> None:
        """Takes back those that can be reached again; also of those that a supervisor before this one gave up, which the cluster
        gives again."""
        up = frozenset(self._fleet.up())
        for name in list(lost):
            node = self._fleet.nodes[name]
            again = node.returned or node.state in ("down", "starting")
            if name in up or (again and self.can_return(name)):
                await self._try_to_bring_in(name)

    async def _bring_in_late(self) -> None:
        """Brings in those that were given and have not come up yet, unless they were lost, or taken in, meanwhile."""
        for name in [n for n in self._late if n in self._state.lost or n in self._state.slots]:
            del self._late[name]
        for name in [n for n in self._late if self.can_return(n)]:
            if await self._try_to_bring_in(name):
                del self._late[name]

    async def _try_to_bring_in(self, name: str) -> bool:
        """Whether it could be found out if a node comes in; where not, it is looked at again in a while, and the others before."""
        if self._clock.monotonic() < self._again_at.get(name, 0.0):
            return False
        try:
            await self._bring_in(name)
        except Superseded:
            raise
        except Exception as e:  # noqa: BLE001  one node is no reason to look for no other
            self._again_at[name] = self._clock.monotonic() + _ASK_AGAIN_S
            self._note_failure(f"{name} does not come in yet", e)
            return False
        return True

    async def _bring_in(self, name: str) -> None:
        """Brings a node up, where it is to wait until the run takes it in; one that cannot run the command is left out."""
        why = "its agent did not come up"
        if self._fleet.nodes[name].up or await self._fleet.return_node(name, lambda: True):
            answer = await self._fleet.ask(name, "check", command=list(self._amending.command), cwd=self._cwd)
            why = str(answer.get("refused") or "")
        if why:
            self._say(f"{name} does not come in: {why}")
            await self._fencing.lose(name, why)
        elif name in self._state.lost:
            await asyncio.shield(self._recorder.record("returned", node=name))
            self._say(f"{name} can be reached again")
