"""Who supervises, as an agent finds it out: from the record of the run, or at the ports where one may listen."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from ....errors import StorageError
from ....link.address import Address
from ....link.bounds import Malformed
from ...record.base import Record

_log = logging.getLogger("unbroken.agent")
_EVERY_S = 2.0
"""So often, at most, each agent asks a record in an object store: there may be thousands of them."""


class Supervisors:
    """Those of a run, by its record; where this node cannot read that, by the `doors` at which one of them may listen."""

    def __init__(self, record: Record | None, doors: Sequence[Address] = ()) -> None:
        self._record, self._doors = record, list(doors)
        self._asked = -_EVERY_S

    async def find(self, known: int) -> list[tuple[Address, int]]:
        """Where to ask, with the newest supervisor's term, which is not before the one that is `known`, or 0 where it has to
        say that itself; empty where there is none, or the record does not answer. Raises ContractError for a term of a
        newer version."""
        if self._record is None:
            return [(door, 0) for door in self._doors]
        try:
            if await self._newest() < max(1, known):
                return []
            term = (await asyncio.to_thread(self._record.terms))[-1]
            return [(Address.parse(term.address), term.number)]
        except Malformed:
            return []
        except StorageError as e:
            _log.warning("the record of the run does not answer: %s", e)
            return []

    @property
    def patience(self) -> int:
        """So many beats without an answer before another supervisor is looked for: few where the record tells of one."""
        return 1 if self._record is not None else 3

    async def has_newer(self, term: int) -> bool:
        """Whether a higher term was claimed, as far as the record answers; without a record there may always be one."""
        if self._record is None:
            return True
        try:
            return await self._newest() > term
        except StorageError:
            return False

    async def _newest(self) -> int:
        assert self._record is not None
        if not self._record.slow:
            return self._record.newest()
        await asyncio.sleep(max(0.0, self._asked + _EVERY_S - time.monotonic()))
        self._asked = time.monotonic()
        return await asyncio.to_thread(self._record.newest)
