"""What becomes of each save: its futures follow what the keeper reports, and what failed for good is known at the end."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from ...errors import UnbrokenError
from ..client.session import Session
from ..keeper.buffers.holdings import SnapshotId
from ..keeper.wire import Message
from ..levels import Saved

logger = logging.getLogger("unbroken.checkpoint")

REMEMBERED = 64
"""Steps whose end is remembered."""
ENDINGS = ("durable", "failed", "superseded", "remote", "remote_failed")
SLOW_STORAGE = "checkpoints are asked for faster than the storage takes them"


@dataclass(frozen=True)
class Failure:
    """A save that nothing newer has made up for."""

    step: int
    level: str
    why: str


class Outcomes:
    """The saves of this rank and how each ended. `on_durable` is called with the seconds that one took."""

    def __init__(self, session: Session, remote: str | None, on_durable: Callable[[float], None]) -> None:
        self.session = session
        self.skipped = 0
        """Saves left out because no buffer was free, or no keeper was there."""
        self.superseded = 0
        """Checkpoints that stayed in memory, because a newer one was whole before the storage had taken those before it."""
        self.last: Saved | None = None
        self._remote, self._on_durable = remote, on_durable
        self._superseded_logged = 0
        self._guard = threading.RLock()
        self._saves: dict[SnapshotId, list[Saved]] = {}
        """A step that is saved again has several; what happens to its snapshot happens to all of them."""
        self._keeper_of: dict[SnapshotId, str] = {}
        """Which keeper was given each of them: what it had written and not committed when it died, nobody speaks of again."""
        self._recent_events: dict[SnapshotId, list[Message]] = {}
        """How recent steps ended: another rank may be ahead with one, and fail, before this rank saves it."""
        self._failures: list[Failure] = []
        self._refused = False
        """Whether a storage refused one of them: only then trying again can help."""

    def begin(self, saved: Saved) -> None:
        """This save has a buffer, or is written without one: from now on it is followed."""
        with self._guard:
            for m in [m for m, saves in self._saves.items() if _done(saves)][:-REMEMBERED]:
                del self._saves[m]
            snapshot_id = SnapshotId(saved.attempt, saved.step)
            self._saves.setdefault(snapshot_id, []).append(saved)
            self._keeper_of.setdefault(snapshot_id, self.session.memory.keeper_id)
            for m in [m for m in self._keeper_of if m not in self._saves]:
                del self._keeper_of[m]
            self.last = saved
            before = list(self._recent_events.get(snapshot_id, ()))
        for event in before:  # the keeper writes a step once and does not say it again
            self._apply([saved], event)
        if (
            lost := self.session.memory.lost
        ) is not None:  # since the buffer was claimed, and reported already
            self._fail_open([saved], str(lost))

    def skip(self, saved: Saved, why: str) -> Saved:
        """This step is left out on all ranks alike; the save has no level."""
        self.skipped += 1
        logger.warning("step %d is not saved: %s", saved.step, why)
        saved.skipped = why
        saved.staged = saved.host = saved.peer = saved.disk = saved.remote = None
        return saved

    def fail(self, saved: Saved, why: str) -> None:
        """This rank will not have this step: the others learn it from their keepers."""
        logger.error("step %d is not saved: %s", saved.step, why)
        with self._guard:
            self._failures.append(Failure(saved.step, "disk", f"step {saved.step}: {why}"))
        saved.fail(why)
        with suppress(UnbrokenError):
            self.session.memory.link.post(
                {
                    "op": "give_up", "step": saved.step, "why": why, "world_size": self.session.place.world_size,
                }
            )  # fmt: skip

    def wait(self, level: str, timeout_s: float | None) -> None:
        """Waits until every save that is to reach this level has reached it. Raises StorageError, TimeoutError."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for saved in self._all():
            if level in saved.levels():
                saved.wait(level, None if deadline is None else max(0.0, deadline - time.monotonic()))

    def settle(self, timeout_s: float) -> list[str]:
        """Waits for all that is to become durable, and once more for the last one; what did not arrive, in words."""
        deadline, late = time.monotonic() + timeout_s, []
        for saved in [s for s in self._all() if not s.done]:
            for name, future in saved.levels().items():
                try:
                    future.result(max(0.0, deadline - time.monotonic()))
                except TimeoutError:
                    late.append(f"step {saved.step} did not reach {name} within {timeout_s:.0f} s")
                except UnbrokenError:
                    continue  # it is in `_failures`, unless something newer has made up for it
        self._insist()
        # Looked at only now: what was waited for may make up for what had failed before.
        with self._guard:
            return [*(f.why for f in self._failures), *late]

    def _insist(self) -> None:
        """Lets the keeper try on where the storage refused a save: the last one makes up for all before it, and this is the end."""
        with self._guard:
            waits = any(f.level == "disk" for f in self._failures) and self._refused
        if not waits or self.last is None:
            return
        step = self.last.step
        try:
            link = self.session.memory.alive(5.0)
            room_s = float(link.info.get("room_s", 0.0))
            link.request({"op": "insist", "step": step}, timeout_s=room_s + 60.0)
        except UnbrokenError as e:
            logger.error("step %d is not on disk: %s", step, e)
            return
        self._made_up_for("disk", step + 1)

    def _all(self) -> list[Saved]:
        with self._guard:
            return list(itertools.chain(*self._saves.values()))

    def _made_up_for(self, level: str, step: int) -> None:
        """Failures of steps before this one do not count any more."""
        with self._guard:
            self._failures = [f for f in self._failures if f.level != level or f.step >= step]

    # --- what the keeper reports

    def event(self, event: Message) -> None:
        """Takes one event of the keeper; called from the thread that reads them."""
        kind, step = event.get("event"), event.get("step")
        if kind == "lost":
            self._fail_open(self._all(), str(event["why"]))
        if step is None:
            return
        attempt = self.session.attempt
        snapshot_id = SnapshotId(event["attempt"] if event.get("attempt") is not None else attempt, step)
        if kind == "complete" and snapshot_id.attempt == attempt and self.session.completion is not None:
            self.session.completion.known(step)
        with self._guard:
            saves = list(self._saves.get(snapshot_id, ()))
            # Without an attempt it is a refused buffer: of that save alone, not of the step.
            if kind in ENDINGS and event.get("attempt") is not None:
                self._recent_events.setdefault(snapshot_id, []).append(event)
                for m in sorted(self._recent_events)[:-REMEMBERED]:
                    del self._recent_events[m]
            if kind == "durable":
                # What is older and still open was superseded or has failed; what is done is forgotten.
                for m in [m for m, older in self._saves.items() if m < snapshot_id and _done(older)]:
                    del self._saves[m]
        if kind in (
            "durable",
            "remote",
        ):  # a newer checkpoint that is whole makes up for an older one that failed
            self._made_up_for("disk" if kind == "durable" else "remote", step)
        if kind == "durable" and event.get("attempt") == attempt:
            for orphans in self._orphans_before(snapshot_id):
                self._supersede(orphans, step, "its keeper died before it was committed")
        if saves:
            if kind == "durable":
                self._on_durable(time.monotonic() - saves[-1].began)
            self._apply(saves, event)
        if kind in ("peer", "peer_failed") and event.get("rank") == self.session.place.rank:
            self._end_copies(snapshot_id, str(event.get("why") or f"step {step} was copied in its place"))

    def _end_copies(self, snapshot_id: SnapshotId, why: str) -> None:
        """Of this snapshot and those before it no copy will come any more: keepers send the newest alone, each once. Training
        goes on, and the next copy makes up for it."""
        with self._guard:
            saves = [s for m, of in self._saves.items() if m <= snapshot_id for s in of]
        for saved in saves:
            saved.fail(why, levels=("peer",))

    def _apply(self, saves: list[Saved], event: Message) -> None:
        """Lets what the keeper reports of a step happen to the saves of it."""
        kind, step = event.get("event"), saves[-1].step
        if kind == "durable":
            _reach(saves, self.session.storage.level)
        elif kind == "peer" and event.get("rank") == self.session.place.rank:
            _reach(saves, "peer")
        elif kind == "remote":
            _reach(saves, "remote")
        elif kind == "remote_failed":
            logger.error("step %d did not reach %s: %s", step, self._remote, event["why"])
            self._note_failure(saves, str(event["why"]), f"step {step}, remote: {event['why']}", ("remote",))
        elif kind == "superseded":
            self._supersede(saves, int(event["by"]), SLOW_STORAGE)
        elif kind == "waiting":
            logger.warning(
                "step %d is in memory and waits for the storage, for up to %.0f s: %s", step, event["seconds"],
                event["why"],
            )  # fmt: skip
        elif kind == "failed":
            why = f"rank {event['rank']}: {event['why']}" if event.get("rank", -1) >= 0 else str(event["why"])
            logger.error("the checkpoint of step %d failed, training goes on: %s", step, why)
            with self._guard:
                self._refused |= bool(event.get("refused"))
            self._note_failure(saves, why, f"step {step}: {why}", ("disk", "remote"))

    def _fail_open(self, saves: Iterable[Saved], why: str) -> None:
        """No keeper will speak of these any more."""
        for saved in [s for s in saves if not s.done]:
            self._note_failure([saved], why, f"step {saved.step}: {why}", tuple(saved.levels()))

    def _note_failure(self, saves: list[Saved], why: str, described: str, levels: tuple[str, ...]) -> None:
        with self._guard:
            self._failures.append(Failure(saves[-1].step, levels[0], described))
        for saved in saves:
            saved.fail(why, levels=levels)

    def _orphans_before(self, snapshot_id: SnapshotId) -> list[list[Saved]]:
        """Older saves that are open, of a keeper that is gone: this one, which is durable, makes up for them."""
        with self._guard:
            now = self.session.memory.keeper_id
            return [
                list(saves)
                for m, saves in self._saves.items()
                if m < snapshot_id and not _done(saves) and self._keeper_of.get(m, now) != now
            ]

    def _supersede(self, saves: list[Saved], by: int, why: str) -> None:
        """A checkpoint will never be whole, and a newer one is: that is logged, seldom."""
        step = saves[-1].step
        self.session.memory.note(saves[-1].attempt, step, persist=False)
        for saved in saves:
            saved.fail(f"superseded by step {by}: {why}", levels=("disk", "remote"))
        self.superseded += 1
        if self.superseded >= 2 * self._superseded_logged:
            self._superseded_logged = self.superseded
            logger.warning("%s: step %d is left out for step %d (%d so far)", why, step, by, self.superseded)


def _done(saves: Iterable[Saved]) -> bool:
    return all(s.done for s in saves)


def _reach(saves: Iterable[Saved], level: str) -> None:
    for saved in saves:
        saved.reach(level)
