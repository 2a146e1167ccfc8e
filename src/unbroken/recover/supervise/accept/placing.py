"""The supervisor's side of placement (checkpoint/catalogue/placement.py): examines, claims and journals each attempt's place."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ....checkpoint.catalogue.contents import Found, listing
from ....checkpoint.catalogue.placement import (
    Survey,
    check_folder,
    claim,
    elsewhere_of,
    read_claim,
    same_place,
    survey,
)
from ....checkpoint.convert.origin import bring, find_origin
from ....checkpoint.format.manifest import MANIFEST, Manifest
from ....checkpoint.storage import open_storage
from ....checkpoint.storage.base import Storage
from ....errors import CheckpointError, RunInterrupted, RunStopped, StorageError, UnbrokenError
from ....progress import RunDir
from ....progress.records.candidate import parse_folder_name
from ....progress.records.state import Brought, RunState
from ...wire import Message

_log = logging.getLogger("unbroken.supervisor")
_RETRY_S = 2.0
_SAY_EVERY = 15
_WENT_ON_S = 20.0

T = TypeVar("T")


class CheckpointPlace:
    """Where the attempts of one run keep their checkpoints. `refusal` is set where a place may not be used, `collided`
    where the number of the running attempt is taken in the place that its ranks name."""

    def __init__(
        self,
        run_dir: RunDir,
        run_id: str,
        state: Callable[[], RunState],
        record: Callable[..., Awaitable[None]],
        say: Callable[[str], None],
        giving_up: Callable[[], bool],
        note_wait: Callable[[str, str], None] = lambda what, why: None,
    ) -> None:
        self._run_dir, self._run_id, self._state = run_dir, run_id, state
        self._record, self._say, self._giving_up, self._note_wait = record, say, giving_up, note_wait
        self.refusal: UnbrokenError | None = None
        self.collided = False
        self._wanted: str | None = None
        self._settled: set[int] = set()
        self._naming: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        """One for each attempt: a file system that hangs while one names its place holds up no other's."""
        self._over = 0
        """Attempts up to this number are over: what a place answers them late is nothing to the next one."""

    @property
    def default(self) -> str:
        return str(self._run_dir.checkpoints)

    async def shorten(self, url: str) -> str:
        """A place as it is journalled: empty for the run's own folder, so that a run directory may be moved or copied. Paths are
        resolved in threads, here and wherever places are compared: a file system that hangs holds up no lease."""
        return "" if await asyncio.to_thread(same_place, url, self.default) else url

    def brought(self) -> list[Brought]:
        """What came from elsewhere, with the place in which it lies now."""
        return [replace(b, place=b.place or self.default) for b in self._state().brought]

    def of(self, attempt: int) -> str:
        """The place of an attempt."""
        return self._state().places.get(attempt) or self.default

    def current(self) -> str:
        """The place that the next attempt is expected to use: that of the last one."""
        return self._wanted or self.of(self._state().attempt)

    async def message(self, attempt: int) -> Message:
        """What keepers are told of an attempt's place."""
        url = self.of(attempt)
        mine = await asyncio.to_thread(self._mine, url)
        return {"url": url, "spare_below": min([attempt, *mine])}

    async def start_from(self, origin: str, trust: bool) -> None:
        """Copies what the run starts from into its own folder, once. Raises RunStopped where that cannot be."""
        if not origin or self._state().origin:
            return
        try:
            found = await asyncio.to_thread(find_origin, origin, trust=trust)
            self._say(
                f"the run starts from {found.text}, step {found.step}: it is copied into the run's folder"
            )
            target = open_storage(self.default)
            name = await asyncio.to_thread(bring, found, target, trust=trust)
        except (UnbrokenError, OSError) as e:
            what = e.message if isinstance(e, UnbrokenError) else str(e)
            raise RunStopped(
                f"the run cannot start from {origin}: {what}", where=getattr(e, "where", None),
                hint=getattr(e, "todo", None) or "Fix that, and give the same command again",
            ) from e  # fmt: skip
        key = parse_folder_name(name)
        await self._record(
            "accepted", number=key[1] if key else 0, checkpoints=[name], place="",
            before=self._state().attempt + 1, source=origin,
        )  # fmt: skip
        await self._record("origin", origin=origin, step=found.step, checkpoint=name)

    async def take(self) -> int:
        """Takes over what others left in the place, and claims the number of the next attempt there.

        Waits while the place cannot be reached. Raises RunStopped where it may not be used, RunInterrupted where a stop was asked
        for while it waited.
        """
        url = self.current()
        self.refusal, self.collided, self._over = None, False, self._state().attempt
        if not self._run_dir.path.is_dir():
            raise RunStopped("the run directory is gone", where=str(self._run_dir.path))
        try:
            found = await self._patiently(url, lambda s: self._survey(s, url))
            number = max(self._state().attempt, found.highest) + 1
            while not await self._patiently(url, lambda s, n=number: self._claim(s, n)):  # type: ignore[misc]
                number += 1
            await self._accept(url, found, number)
        except (RunStopped, RunInterrupted):
            raise
        except UnbrokenError as e:
            raise RunStopped(e.message, where=e.where, hint=e.hint) from e
        return number

    async def named(self, attempt: int, url: str) -> bool:
        """A rank of the running attempt names this place; True if keepers are to be told (again) of the attempt.

        Sets `refusal` or `collided` otherwise; nothing at all where the attempt is over by the time the place has answered.
        """
        async with self._naming[attempt]:
            if url == self.of(attempt) or await asyncio.to_thread(same_place, url, self.of(attempt)):
                return True
            if attempt <= self._over:
                return False
            if attempt in self._settled:
                self.refusal = self.refusal or UnbrokenError(
                    f"ranks of one attempt name different folders for checkpoints: {self.of(attempt)} and {url}",
                    where=str(self._run_dir.path),
                    hint="Give every Checkpointer of a training, on every rank, the same folder",
                )
                return False
            try:
                found, mine = await asyncio.to_thread(self._examine, url, attempt)
            except (UnbrokenError, OSError) as e:
                if attempt > self._over:
                    self.refusal = e if isinstance(e, UnbrokenError) else StorageError(str(e), where=url)
                return False
            shortened = await self.shorten(url)
            if attempt <= self._over:
                return False
            if not mine:
                self._wanted, self.collided = url, True
                return False
            self._settled.add(attempt)
            self._wanted = None
            await self._record("place", attempt=attempt, place=shortened)
            await self._accept(url, found, attempt)
            return True

    async def committed(self, attempt: int, *, within_s: float | None = None) -> list[str]:
        """The checkpoints of an attempt that are committed now. Waits while the place cannot be reached; raises
        StorageError after `within_s`, RunInterrupted where the run is asked to end."""

        def look(storage: Storage) -> list[str]:
            return [f.name for f in listing(storage) if f.attempt == attempt and f.committed]

        return await self._patiently(self.of(attempt), look, within_s)

    async def read_went_on(self, attempt: int, saved: Sequence[tuple[str, str]]) -> tuple[int, int] | None:
        """(attempt, step) of what an attempt went on from, by the newest of these checkpoints of it, each with its place; None where it
        does not say it. Raises RunInterrupted where the place cannot be reached and the run is asked to end."""
        newest, place = max(saved, key=lambda found: (parse_folder_name(found[0]) or (0, 0))[0])

        def look(storage: Storage) -> tuple[int, int] | None:
            where = f"{newest}/{MANIFEST}"
            return Manifest.decode(storage.read(where), where=where).went_on

        try:
            return await self._patiently(place, look, _WENT_ON_S)
        except CheckpointError as e:
            _log.warning("what attempt %d went on from cannot be read: %s", attempt, e)
            return None

    async def found(self) -> list[Found]:
        """Whatever this run's own attempts left, in every place of them. Raises StorageError, OSError."""

        def look() -> list[Found]:
            lying: list[Found] = []
            places = list(self._state().places.values())
            for url in dict.fromkeys([self.default, *(p or self.default for p in places)]):
                mine = self._mine(url)
                lying += [f for f in listing(open_storage(url)) if f.attempt in mine]
            return sorted(lying, key=lambda f: (f.attempt, f.step), reverse=True)

        return await asyncio.to_thread(look)

    def _examine(self, url: str, attempt: int) -> tuple[Survey, bool]:
        """What a place holds, and whether the attempt's number is this run's there now."""
        if "://" not in url:
            check_folder(Path(url))
        storage = open_storage(url)
        found = self._survey(storage, url)
        storage.check()
        return found, found.highest < attempt and self._claim(storage, attempt)

    def _survey(self, storage: Storage, url: str) -> Survey:
        return survey(storage, run_id=self._run_id, mine=self._mine(url), url=url)

    def _claim(self, storage: Storage, number: int) -> bool:
        """Whether the number is this run's now, also if it was claimed by a supervisor that died over it."""
        if claim(storage, number, "run", run_id=self._run_id, run_dir=str(self._run_dir.path)):
            return True
        return number > self._state().attempt - 1 and read_claim(storage, number).run_id == self._run_id

    def _mine(self, url: str) -> set[int]:
        """The numbers of this run's own attempts in a place."""
        places = dict(self._state().places)  # a thread asks, and another record may come meanwhile
        return {n for n, place in places.items() if same_place(place or self.default, url)}

    async def _find_known(self, url: str) -> set[tuple[int, str]]:
        """(attempt, name) of what was taken over from a place already."""
        brought = self.brought()
        return await asyncio.to_thread(
            lambda: {(b.number, n) for b in brought if same_place(b.place, url) for n in b.names}
        )

    async def _accept(self, url: str, found: Survey, before: int) -> None:
        """Writes down what the run may go on from, of what others left there, unless that was done already."""
        state = self._state()
        known, shortened = await self._find_known(url), await self.shorten(url)
        # --from is what the run was told to start from: until it has something of its own, whatever lay in a
        # folder when the run first came there is older than that.
        starting = bool(state.origin) and not any(state.seals.values()) and not state.accepted
        told = starting and not known and bool(shortened)
        count = 0
        for number, names in found.others.items():
            if fresh := [n for n in names if (number, n) not in known]:
                count += len(fresh)
                await self._record(
                    "accepted",
                    number=number,
                    checkpoints=fresh,
                    place=shortened,
                    before=0 if told else before,
                    source=found.where_from,
                )
        if count:
            things = "a checkpoint" if count == 1 else f"{count} checkpoints"
            goes = (
                f"the run starts from {state.origin} all the same" if told else "the run goes on from there"
            )
            self._say(f"{url} holds {things} of {found.where_from}: {goes}")

    async def accept_elsewhere(self, folder: str) -> list[str]:
        """Takes over what keepers wrote elsewhere (--room-elsewhere) because its own place refused it; the names.

        Only this run's keepers write there, and only what was whole: of a sealed attempt what counted then, of one that
        is not sealed yet all. It comes before everything that its attempt and those before made.
        """
        url, state = elsewhere_of(folder, self._run_id), self._state()
        if not url:
            return []
        known = await self._find_known(url)
        try:
            lying = await asyncio.to_thread(lambda: listing(open_storage(url)))
        except (OSError, UnbrokenError) as e:
            self._say(f"{url} cannot be read: {e}")
            return []
        fresh = [
            f
            for f in lying
            if f.committed
            and (f.attempt, f.name) not in known
            and ((f.attempt, f.step) in state.accepted or f.attempt not in state.seals)
        ]
        for attempt in sorted({f.attempt for f in fresh}):
            await self._record(
                "accepted", number=attempt, checkpoints=[f.name for f in fresh if f.attempt == attempt], place=url,
                before=attempt + 1, source="this run, because its own place refused it",
            )  # fmt: skip
        return [f.name for f in fresh]

    async def _patiently(self, url: str, ask: Callable[[Storage], T], within_s: float | None = None) -> T:
        """What `ask` gives of the storage at `url`, asked again while that cannot be reached. Raises RunInterrupted where the run is
        asked to end meanwhile: the next start does it."""
        tries = 0
        while True:
            try:
                answer = await asyncio.to_thread(lambda: ask(open_storage(url)))
                self._note_wait(url, "")
                return answer
            except (StorageError, OSError) as e:
                why = e.message if isinstance(e, StorageError) else str(e)
                self._note_wait(
                    url,
                    f"the checkpoints in {url} cannot be reached ({why}): what comes next waits until they can",
                )
                if within_s is not None and tries * _RETRY_S >= within_s:
                    raise StorageError(f"the checkpoints cannot be listed: {why}", where=url) from e
                if self._giving_up():
                    raise RunInterrupted(
                        f"the checkpoints cannot be reached: {why}", where=url,
                        hint="Fix that and give the same command again",
                    ) from e  # fmt: skip
                if tries % _SAY_EVERY == 0:
                    self._say(f"the checkpoints in {url} cannot be reached ({why}); waiting until they can")
                tries += 1
                await asyncio.sleep(_RETRY_S)


def told(refusal: UnbrokenError) -> dict[str, Any]:
    """A refusal as keepers pass it on."""
    return {"message": refusal.message, "where": refusal.where, "hint": refusal.hint}
