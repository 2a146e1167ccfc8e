"""An attempt whose logs find no room on its nodes: it is ended, and the next one waits until there is some.

A full disk is nobody's failure: it charges no budget, and no number of such starts ends a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ....errors import RunError
from ...wire import Message
from ..attempt.attempt import Attempt
from ..attempt.outcome import AttemptOutcome
from ..fence.fencing import Fencing
from ..nodes.fleet import Fleet
from ..record.recorder import Recorder
from ..record.stop_request import StopRequest
from ..record.term import TermWatch

_LOOK_S = 1.0
_SHOWN = 4


class NoRoom(RunError):
    """Files of an attempt found no room; `nodes` says on which nodes, and where there."""

    def __init__(self, nodes: Mapping[str, str]) -> None:
        shown = ", ".join(list(nodes)[:_SHOWN]) + (
            f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else ""
        )
        super().__init__(
            f"no room for its logs ({next(iter(nodes.values()))})", where=shown,
            hint="Free space there: the run goes on as soon as there is some",
        )  # fmt: skip
        self.nodes = nodes


def check_room(answers: Mapping[str, Message]) -> None:
    """Raises NoRoom where agents that were to launch ranks have answered that their files find none."""
    if full := {n: str(a["no_room"]) for n, a in answers.items() if a.get("no_room")}:
        raise NoRoom(full)


class RoomWait:
    """Ends attempts that found no room, and waits for some."""

    def __init__(
        self, fleet: Fleet, fencing: Fencing, recorder: Recorder, term: TermWatch, stop: StopRequest, say: Callable[[str], None]
    ) -> None:  # fmt: skip
        self._fleet, self._fencing, self._recorder = fleet, fencing, recorder
        self._term, self._stop, self._say = term, stop, say

    async def wait(self, attempt: Attempt, lack: NoRoom) -> None:
        """Ends the attempt, and returns once its nodes have room, are gone, or a stop was asked for."""
        why = f"attempt {attempt.number} is not started: {lack.message} on {lack.where}"
        self._say(f"{why}; the next one starts as soon as there is room")
        self._recorder.note_wait("room", f"{why}; the next one waits for room")
        try:
            await self._wait(attempt, lack, why)
        finally:
            self._recorder.note_wait("room", "")

    async def _wait(self, attempt: Attempt, lack: NoRoom, why: str) -> None:
        await self._fencing.end_attempt(attempt, AttemptOutcome("start_failed"))
        await self._recorder.record("ended", attempt=attempt.number, how="no_room", step=attempt.step)
        await self._recorder.record_soft("waiting", why=why, todo=lack.hint)
        nodes = list(lack.nodes)
        answers: Mapping[str, Message] = {}
        while nodes and not self._stop:
            # Before the first look too: where it finds what the launch did not, attempts follow each other no faster.
            await self._stop.pause(_LOOK_S)
            self._term.check()
            answers = await self._fleet.ask_all([n for n in nodes if self._fleet.nodes[n].up], "room")
            nodes = [n for n, a in answers.items() if a.get("no_room")]
        if answers and not nodes:
            self._say("there is room again: the run goes on")
