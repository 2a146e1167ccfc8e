"""Who supervises, as an agent finds it out: from the record of the run, wherever that lies."""

from __future__ import annotations

import asyncio
import logging
import time

from ...errors import StorageError
from ...progress import Term
from ..record.base import Record

_log = logging.getLogger("unbroken.agent")
_EVERY_S = 2.0
"""So often, at most, each agent asks a record in an object store: there may be thousands of them."""


class Supervisors:
    """The terms of a run."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._asked = -_EVERY_S

    async def find(self, known: int) -> Term | None:
        """The newest supervisor's term, which is not before the one that is `known`; None where there is none, or the
        record does not answer. Raises ContractError for a term of a newer version."""
        try:
            if await self._newest() < max(1, known):
                return None
            return (await asyncio.to_thread(self._record.terms))[-1]
        except StorageError as e:
            _log.warning("the record of the run does not answer: %s", e)
            return None

    async def has_newer(self, term: int) -> bool:
        """Whether a higher term was claimed, as far as the record answers."""
        try:
            return await self._newest() > term
        except StorageError:
            return False

    async def _newest(self) -> int:
        if not self._record.slow:
            return self._record.newest()
        await asyncio.sleep(max(0.0, self._asked + _EVERY_S - time.monotonic()))
        self._asked = time.monotonic()
        return await asyncio.to_thread(self._record.newest)
