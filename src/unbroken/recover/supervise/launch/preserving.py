"""What the next attempt could not have from memory is saved before it starts: of nodes that leave, and of another number of ranks.

A storage that refuses is waited for, as room for logs is: that charges no budget, and no number of such waits ends a run. A state is
given up only where no keeper has all of it any more, and that is said.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from ....progress.records.state import RunState
from ..accept.accepting import Accepting
from ..attempt.farewell import Last
from ..fence.stopping import FLUSH_S
from ..nodes.fleet import Fleet
from ..nodes.keepers import Inventories, Keepers
from ..record.clock import Clock
from ..record.recorder import Recorder
from ..record.stop_request import StopRequest
from ..record.term import TermWatch
from .replacing import Replacing

_AGAIN_S = 5.0
_LOOK_S = 1.0
_SILENT_S = 60.0
"""A keeper that does not say what it holds is waited for so long; its start is not held up for ever."""
_SHOWN = 4


class Preserving:
    """Saves, between two attempts, what would not be there any more after them."""

    def __init__(
        self, fleet: Fleet, keepers: Keepers, accepting: Accepting, recorder: Recorder, term: TermWatch, stop: StopRequest,
        clock: Clock, say: Callable[[str], None], replacing: Replacing,
    ) -> None:  # fmt: skip
        self._fleet, self._keepers, self._accepting = fleet, keepers, accepting
        self._recorder, self._term, self._stop = recorder, term, stop
        self._clock, self._say, self._replacing = clock, say, replacing
        self._unsaved: Last | None = None
        """What was to be saved before a start, and was not yet."""

    @property
    def _state(self) -> RunState:
        return self._recorder.state

    async def settle(self, slots: Sequence[str]) -> Inventories | None:
        """What the keepers hold, once that is on disk which an attempt on these nodes could not have from them. None where the start
        is to be prepared again: a stop was asked for meanwhile, or nodes have come or gone."""
        up, before = frozenset(self._fleet.up()), self._state.slots
        resized = bool(before) and len(slots) != len(before)
        held = await self._list_snapshots(up, patient=resized)
        behind = await self._find_unsaved(slots, held)
        if behind is None:
            self._unsaved = None
            return held
        staying = set(slots)
        away = [n for n in behind.shares if n not in staying]
        why = f"{_show(away)} is left, which alone has a part of it"
        self._say(
            f"saving step {behind.step} first: {'another number of ranks restores it from disk' if resized else why}"
        )
        if not resized:  # it goes on either way: a node that is taken away waits for nobody
            if refused := await self._save(behind):
                self._say(f"step {behind.step} could not be saved: {refused}")
            self._unsaved = None
            return held
        self._replacing.seek()
        try:
            return await self._insist(slots, behind, up)
        finally:
            self._replacing.rest()

    async def _insist(self, slots: Sequence[str], behind: Last, up: frozenset[str]) -> Inventories | None:
        """Saves a snapshot however long that takes; where it is gone from memory, the newest that is left."""
        last: Last | None = behind
        told: set[str] = set()
        while last is not None:
            self._unsaved = last
            why = await self._save(last)
            if self._stop:
                return None
            if not why:
                break
            if why not in told:
                told.add(why)
                await self._tell(last, why)
            await self._stop.pause(_AGAIN_S)
            self._term.check()
            if self._stop or frozenset(self._fleet.up()) != up:
                return None
            last = await self._find_unsaved(slots, await self._list_snapshots(up, patient=True))
        self._unsaved = None
        return await self._keepers.list_snapshots(self._fleet.up())

    async def _find_unsaved(self, slots: Sequence[str], held: Inventories) -> Last | None:
        """What is to be saved first; says so where what was to be saved before is not there any more."""
        found, before = await self._accepting.find_left_behind(slots, held), self._unsaved
        if before is None or self._accepting.is_on_disk(before):
            return found
        if found is not None and (found.attempt, found.step) >= (before.attempt, before.step):
            return found
        if (before.step, before.attempt) in self._state.durable:
            return before  # whoever lists the checkpoints does not see it yet
        if not await self._accepting.is_in_memory(before, held):
            self._unsaved = None
            self._say(
                f"step {before.step} was in memory, and no keeper that answers has all of it any more: the run goes back to "
                + (f"step {found.step}" if found is not None else "what is left")
            )
        return found

    async def _tell(self, last: Last, why: str) -> None:
        hint = (
            "Free space there, or repair it: the run goes on as soon as it takes that. Ctrl-C ends the wait"
        )
        waits = f"step {last.step} is in memory and not on disk, from which another number of ranks restores it: {why}"
        await self._recorder.record("waiting", why=waits, todo=hint)
        self._say(f"the next attempt waits: {waits}. {hint}")

    async def _save(self, last: Last) -> str:
        """Has a snapshot saved, once; "" where it counts now, else why not."""
        await self._accepting.count_in_memory(last)
        now = self._clock.monotonic()
        left = [at - now for n in last.shares if (at := self._fleet.nodes[n].preempted) is not None]
        saving = asyncio.create_task(self._keepers.save(last, max(1.0, min([FLUSH_S, *left]))))
        try:
            await self._stop.wait_for(saving)
            if not saving.done():
                return "a stop was asked for"
            refused = saving.result()
        finally:
            saving.cancel()
        await self._accepting.accept_late()
        if self._accepting.is_on_disk(last):
            return ""
        if not refused:
            return "it was written, and is not found where the checkpoints lie"
        node, why = next(iter(refused.items()))
        return f"{node}: {why}" + (f" (and {len(refused) - 1} more)" if len(refused) > 1 else "")

    async def _list_snapshots(self, names: Collection[str], *, patient: bool) -> Inventories:
        """What these hold. `patient`: those that do not answer are asked again for a while, since nobody could go back to theirs."""
        held = await self._keepers.list_snapshots(names)
        until, told = self._clock.monotonic() + _SILENT_S, False
        while (
            patient
            and not self._stop
            and (silent := [n for n in names if n not in held and self._fleet.nodes[n].up])
        ):
            if self._clock.monotonic() >= until:
                self._say(
                    f"{_show(silent)}: the keeper does not say what it holds, and is waited for no longer"
                )
                break
            if not told:
                told = True
                self._say(
                    f"{_show(silent)}: the keeper does not say what it holds, which may be the newest state: it has {_SILENT_S:.0f} s"
                )
            await self._keepers.wake(silent)
            await self._stop.pause(_LOOK_S)
            self._term.check()
            held |= await self._keepers.list_snapshots(silent)
        return held


def _show(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
