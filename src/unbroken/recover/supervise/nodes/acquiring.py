"""The run's nodes are asked for and waited for, however long that takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ....progress.records.state import RunState
from ...telling.teller import Teller
from ..record.background import Background
from ..record.clock import Clock
from ..record.stop_request import StopRequest
from ..record.term import TermWatch
from .away import wait_while_away
from .fleet import Fleet

_GRANTED_BEFORE_S = 5.0
"""What a run has been given before is granted again within so much; what it lacks may take for hours."""


async def acquire(
    fleet: Fleet,
    state: RunState,
    term: TermWatch,
    stop: StopRequest,
    teller: Teller,
    background: Background,
    clock: Clock,
    say: Callable[[str], None],
) -> bool:
    """Waits for the run's nodes; False where a stop was asked for meanwhile, which withdraws the request. Raises Superseded.

    Where ranks may run on the nodes that the run had, nobody waits for spares beside them. A cluster that does not answer is waited
    for where the run has had nodes of it before.
    """
    await asyncio.to_thread(teller.read_history, clock.wall())
    if avoided := teller.avoided - {*state.slots}:
        say(f"{', '.join(sorted(avoided))} is not asked for: its history (`unbroken nodes history`)")
        fleet.avoid(avoided)
    acquiring = asyncio.create_task(_ask(fleet, say, patient=state.attempt > 0))
    asked = asyncio.create_task(stop.asked.wait())
    patience, goes_on = clock.monotonic() + _GRANTED_BEFORE_S, False
    try:
        while True:
            await asyncio.wait({acquiring, asked}, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            if acquiring.done() or asked.done():
                return acquiring.done() and acquiring.result() is None
            term.check()
            if clock.monotonic() >= patience and fleet.runs_on(state.slots):
                fleet.remember(state.slots, given=True)
                background.start(_finish(acquiring))
                goes_on = True
                return True
    finally:
        asked.cancel()
        if not goes_on:
            acquiring.cancel()


async def _ask(fleet: Fleet, say: Callable[[str], None], *, patient: bool) -> None:
    await (wait_while_away(fleet.acquire, say) if patient else fleet.acquire())


async def _finish(work: asyncio.Task[None]) -> None:
    await work
