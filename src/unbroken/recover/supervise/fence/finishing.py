"""The end of a run that is done, or was asked to stop: what its nodes hold is saved, and the journal says how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import time

from ....errors import NotDurable, RunDirLost
from ....progress import RunDir
from ....progress.records.candidate import folder_name
from ...telling.teller import Teller
from ..accept.accepting import Accepting
from ..accept.placing import CheckpointPlace
from ..attempt.farewell import Farewell, Last
from ..attempt.own_checkpoints import OwnCheckpoints
from ..record.recorder import CannotRecord, Recorder
from ..screen.view import View
from .stopping import Stopping


class Finishing:
    """Ends the run."""

    def __init__(
        self,
        run_dir: RunDir,
        stopping: Stopping,
        accepting: Accepting,
        place: CheckpointPlace,
        recorder: Recorder,
        view: View,
        elsewhere: str,
        teller: Teller,
        own: OwnCheckpoints,
    ) -> None:
        """`elsewhere` is where keepers write what its own place refuses; "" for nowhere."""
        self._run_dir, self._stopping, self._accepting, self._place = run_dir, stopping, accepting, place
        self._recorder, self._view, self._elsewhere = recorder, view, elsewhere
        self._teller, self._own = teller, own

    async def finish(self, kind: str) -> str:
        """Lets the keepers make the last snapshot durable, ends agents and keepers, and says how it ended.

        Returns that: `kind` is completed or interrupted. Raises NotDurable where all is done but the last checkpoint.
        """
        farewell, last = await self._stopping.leave(flush=True)
        state = self._recorder.state
        unsaved = ""
        try:
            await self._seal(farewell, last, is_done=kind == "completed" and not farewell.unsaved)
            if last is not None and kind == "completed" and not await self._is_saved(farewell, last):
                unsaved = _explain_unsaved(farewell, last)
                kind = "interrupted"  # so that the same command goes on, and makes that checkpoint
            why = {"why": unsaved} if unsaved else {}
            await self._recorder.record("status", status=kind, step=state.step, **why)
        except CannotRecord as e:
            self._view.say(
                f"{e.message}: the next start will take this end for a lost supervisor, and lose nothing by it"
            )
        self._teller.write_metrics(state, time.time(), up=False)
        await asyncio.to_thread(self._teller.tell_end, kind, state.step, unsaved)
        newest = await self._name_newest(last)
        goes_on = (
            "" if newest or kind == "completed" or not state.attempt else await self._own.describe_last()
        )
        self._view.finished(kind, state.step, newest, goes_on)
        if unsaved:
            raise NotDurable(
                unsaved, where=str(self._run_dir.path),
                hint="Make room, and give the same command again: it goes on from the newest checkpoint",
            )  # fmt: skip
        return kind

    async def leave(self) -> None:
        """Leaves the nodes of a run that ends with an error, which is said elsewhere. Raises Superseded."""
        farewell, last = await self._stopping.leave(flush=True)
        if not self._recorder.state.attempt_open:  # else its end is an incident, for whoever goes on
            with contextlib.suppress(CannotRecord):
                await self._seal(farewell, last, is_done=False)

    async def _seal(self, farewell: Farewell, last: Last | None, *, is_done: bool) -> None:
        """Seals the last attempt, unless what is left of it somewhere may still save what counts, and takes in what was saved late."""
        state = self._recorder.state
        if farewell.unreached and not is_done:
            shown = ", ".join(farewell.unreached[:4]) + (" ..." if len(farewell.unreached) > 4 else "")
            self._view.say(
                f"{shown} could not be reached: what still runs there ends with its lease, and what it saves until then counts "
                "when the run goes on"
            )
        elif state.attempt and state.attempt not in state.seals:
            somewhere = bool(farewell.holding or farewell.elsewhere)
            memory = [[last.attempt, last.step]] if last is not None and somewhere else []
            await self._accepting.seal_last(state.attempt, memory)
        await self._accepting.accept_late()

    async def _is_saved(self, farewell: Farewell, last: Last) -> bool:
        """Whether this snapshot is a checkpoint now, in its own place or elsewhere."""
        if not (farewell.unsaved or farewell.holding):
            return True
        name = folder_name(last.step, last.attempt)
        if any(name in b.names for b in self._place.brought()):
            return True
        return any(f.committed and f.name == name for f in await self._accepting.list_found())

    async def _name_newest(self, last: Last | None) -> list[str]:
        """The checkpoints that count, the newest first, as they are shown."""
        state = self._recorder.state
        counted = {n for names in state.seals.values() for n in names}
        found = await self._accepting.list_found()
        if state.attempt not in state.seals:  # the next start does that
            counted |= {f.name for f in found if f.attempt == state.attempt}
        if last is not None:
            name = folder_name(last.step, last.attempt)
            if any(b.place == self._elsewhere and name in b.names for b in self._place.brought()):
                return [f"{name} in {self._elsewhere}"]
        counts = [f for f in found if f.committed and f.name in counted]
        return [f.name for f in counts if not state.is_rolled_back(f.attempt, f.step)]

    async def describe_lost_folder(self, why: str) -> RunDirLost:
        """The end of a run whose directory was lost, with what was saved where."""
        found = [f.name for f in await self._accepting.list_found() if f.committed]
        place, step = self._place.current(), self._recorder.state.step
        saved = f"saved: {', '.join(found[:3])} in {place}" if found else f"nothing could be saved in {place}"
        return RunDirLost(
            f"{why}, while the run went on; {saved}",
            where=f"step {step}" if step >= 0 else None,
            hint="Move the folder back where it was moved, or start another run (`unbroken run --from CHECKPOINT` takes up "
            "one that was saved)",
        )  # fmt: skip


def _explain_unsaved(farewell: Farewell, last: Last) -> str:
    """Of a run whose ranks are done, in words, why that is not all."""
    whys = list(farewell.unsaved.values())
    why = whys[0] if whys else "its keepers still try"
    return f"all ranks are done, but step {last.step}, the last checkpoint, is not saved: {why}"
