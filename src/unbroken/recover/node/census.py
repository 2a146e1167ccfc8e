"""What is there of a run on its node, noted again and again for the case that what holds it is killed."""

from __future__ import annotations

import asyncio
import logging

from ...cluster import Ownership

_log = logging.getLogger("unbroken.agent")
_EVERY_S = 1.0


async def take_censuses(owner: Ownership, node: str) -> None:
    """Takes one each second, until it is cancelled; one that fails is logged, and the next one taken."""
    told = ""
    while True:
        try:
            await asyncio.to_thread(owner.take_census, node)
            told = ""
        except Exception as e:  # noqa: BLE001  whatever it is, the next one may be taken
            if str(e) != told:
                told = str(e)
                _log.warning("no census of the run's processes here, tried again: %r", e)
        await asyncio.sleep(_EVERY_S)
