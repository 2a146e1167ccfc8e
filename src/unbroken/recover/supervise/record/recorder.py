"""Writes down what happens to a run, and knows what that adds up to: the only one who appends to its journal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Iterable
from typing import Any

from ....errors import ContractError, RunError
from ....progress import RunDir, newest_term
from ....progress.records.incident import Incident
from ....progress.records.state import RunState
from ...record.base import RunJournal, Superseded
from .clock import Clock
from .stop_request import StopRequest

_log = logging.getLogger("unbroken.supervisor")
_RETRY_S = 0.5
_UNWRITTEN_MAX = 10_000
WAIT_LEAST_S = 10.0
"""A disk that refuses at the end is waited for at least this long, however late the stop was asked for."""


class CannotRecord(RunError):
    """The journal cannot be written, and there is no time left to wait until it can."""


class Recorder:
    """`state` is what the journal says so far."""

    def __init__(
        self,
        run_dir: RunDir,
        journal: RunJournal,
        state: RunState,
        stop: StopRequest,
        say: Callable[[str], None],
        clock: Clock,
        grace_s: float,
    ) -> None:
        """`grace_s`: how long a run that was asked to stop waits for a disk that refuses."""
        self._run_dir, self._journal, self.state = run_dir, journal, state
        self._stop, self._say, self._clock, self._grace_s = stop, say, clock, grace_s
        self._slow = getattr(journal, "slow", False)
        self._writing = asyncio.Lock()
        self._flushing: asyncio.Task[None] | None = None
        self._unwritten: list[tuple[str, dict[str, Any]]] = []
        self._incidents: dict[int, Incident] = {}
        self._waits: dict[str, str] = {}

    def note_wait(self, what: str, why: str) -> None:
        """Notes what the run waits for, under a name, for who asks the supervisor; "" once it does no more."""
        self._waits.pop(what, None)
        if why:
            self._waits[what] = why

    def describe_waits(self) -> str:
        """What it waits for now, in words."""
        return "; ".join(self._waits.values())

    async def record(self, kind: str, **fields: Any) -> None:
        """Journals what is about to be acted on; waits while the disk refuses, because nothing may go before.

        Raises CannotRecord once a stop was asked for and its grace is over.
        """
        began: float | None = None
        while True:
            try:
                async with self._writing:
                    if self._slow:
                        await self._write_kept()
                    else:
                        self._write_incidents()
                        self._write_news()
                    if not self._unwritten:
                        self.state.apply(await self._append(kind, fields))
                        self.note_wait("record", "")
                        return
            except OSError as e:
                now = self._clock.monotonic()
                if began is None:
                    began = now
                    why = f"the run's record cannot be written ({e.strerror})"
                    self._say(f"{why}; waiting until it can")
                    self.note_wait("record", f"{why}: what comes next waits until it can")
                if self._stop.first is not None:
                    until = max(self._stop.first + self._grace_s, began + WAIT_LEAST_S)
                    if now > until:
                        raise CannotRecord(
                            f"the journal cannot be written ({e.strerror})", where=str(self._run_dir.path)
                        ) from e
            await asyncio.sleep(_RETRY_S)

    async def _append(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Appends, in a thread where that takes the time of a network. Raises OSError."""
        if self._slow:
            return await asyncio.to_thread(lambda: self._journal.append(kind, **fields))
        return self._journal.append(kind, **fields)

    async def _write_kept(self) -> None:
        """Writes what is kept, in its order. Raises OSError where the record refuses."""
        while self._unwritten:
            kind, fields = self._unwritten.pop(
                0
            )  # a thread writes it, also where its waiter is cancelled: never twice
            try:
                self.state.apply(await self._append(kind, fields))
            except OSError:
                self._unwritten.insert(0, (kind, fields))
                raise

    async def _flush(self) -> None:
        try:
            async with self._writing:
                await self._write_kept()
        except OSError:
            del self._unwritten[:-_UNWRITTEN_MAX]
        except Superseded as e:
            _log.warning("%s", e)  # the watch over the term ends this supervisor

    async def record_soft(self, kind: str, **fields: Any) -> None:
        """Journals news that nothing depends on; kept in memory while the disk refuses."""
        self._unwritten.append((kind, fields))
        self.write_later()

    def write_incident(self, incident: Incident) -> None:
        """Writes the incident's file now, or later where the disk refuses.

        One that was superseded while it did not run writes none: the number is its successor's by now.
        """
        if newest_term(self._run_dir) > self._journal.term:
            _log.warning("incident %d is not written: another supervisor has the run", incident.number)
            return
        try:
            incident.write(self._run_dir)
            self._incidents.pop(incident.number, None)
        except OSError as e:
            if incident.number not in self._incidents:
                _log.warning(
                    "incident %d cannot be written yet (%s); tried again until it can", incident.number, e
                )
            self._incidents[incident.number] = incident

    def read_incident(self, number: int) -> Incident:
        """An incident as its file has it, or will have it. Raises OSError, ValueError, ContractError."""
        if (kept := self._incidents.get(number)) is not None:
            return kept
        return Incident.from_json(json.loads(self._run_dir.incident(number).read_bytes()))

    def write_missing_incidents(self, records: Iterable[dict[str, Any]]) -> None:
        """Writes those whose file a supervisor before this one could not write, as far as the record tells of them."""
        missing: dict[int, Incident] = {}
        for r in records:
            if r["kind"] == "incident" and not self._run_dir.incident(r["incident"]).exists():
                try:
                    missing[r["incident"]] = Incident.from_record(r)
                except ContractError as e:
                    _log.warning(
                        "incident %s has no file, and none can be made of the journal: %s", r["incident"], e
                    )
            elif r["kind"] == "resumed" and r.get("incident") in missing:
                missing[r["incident"]].take_resumed(r)
        for incident in missing.values():
            self.write_incident(incident)

    def write_later(self) -> None:
        """Writes what the disk refused before, in its order, as far as it takes it now."""
        self._write_incidents()
        if self._slow:
            if self._unwritten and (self._flushing is None or self._flushing.done()):
                self._flushing = asyncio.create_task(self._flush())
            return
        with contextlib.suppress(OSError):
            self._write_news()

    def _write_incidents(self) -> None:
        for incident in list(self._incidents.values()):
            self.write_incident(incident)

    def _write_news(self) -> None:
        """Writes what is kept, in its order. Raises OSError where the disk refuses."""
        while self._unwritten:
            kind, fields = self._unwritten[0]
            try:
                self.state.apply(self._journal.append(kind, **fields))
            except OSError:
                del self._unwritten[:-_UNWRITTEN_MAX]
                raise
            self._unwritten.pop(0)

    def close(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
        with contextlib.suppress(OSError):
            self._write_incidents()
        try:
            while self._slow and self._unwritten:  # news that nothing depends on, and that came last
                kind, fields = self._unwritten[0]
                self._journal.append(kind, **fields)
                self._unwritten.pop(0)
        except Superseded:
            pass  # its record is another supervisor's by now, which is said where it ends this one
        except OSError as e:
            _log.warning(
                "the last %d pieces of news are not in the run's record: %s", len(self._unwritten), e
            )
        self._journal.close()
