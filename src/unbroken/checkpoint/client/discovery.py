"""Finding the node's keeper: the one that `unbroken run` named, or one of our own that the first rank here starts."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...errors import StorageError, UnbrokenError, UsageError
from ..catalogue.placement import claim, next_number, refuse_supervised
from ..device.host_memory import default_budget
from ..keeper.wire import Message
from ..ranks.agreement import Agreement
from ..ranks.environment import Place, scratch
from ..storage.base import Storage
from .links import KeeperGone, KeeperLink, KeeperRefused, NotAnnounced, RankLink, keeper_command, start_keeper
from .rank_memory import RankMemory

logger = logging.getLogger("unbroken.checkpoint")

T = TypeVar("T")
FIND_S = 300.0
"""For the agent's keeper, which a busy machine may take minutes to start: without one nothing can be restored or saved, and a rank
that gives up ends the attempt. The agent starts another whenever one ends."""
SAID_EVERY_S = 30.0
ENDING_S = 15.0
SETTLE_S = 600.0
ORPHAN_GRACE_S = 60.0

Connect = Callable[[Callable[[Message], None], Callable[[], None]], RankLink]


def supervised_keeper(p: Place, options: Mapping[str, Any]) -> Connect:
    """Connects to the keeper that the agent started; waits a little for one that is being respawned."""

    def connect(listener: Callable[[Message], None], ended: Callable[[], None]) -> RankLink:
        began = said = time.monotonic()
        while True:
            try:
                return RankLink(
                    p.keeper or "", rank=p.rank, attempt=p.attempt or 0, world_size=p.world_size,
                    local_rank=p.local_rank, listener=listener, ended=ended, options=options,
                )  # fmt: skip
            except (KeeperGone, NotAnnounced) as e:
                now = time.monotonic()
                if now > began + FIND_S:
                    raise
                if now > said + SAID_EVERY_S:
                    said = now
                    logger.warning("waiting for the keeper of this node since %.0f s: %s", now - began, e)
                time.sleep(0.05)

    return connect


@dataclass(frozen=True)
class OwnKeeper:
    """A keeper without an agent: it ends by itself when nobody has needed it for a while."""

    place: Place
    folder: Path
    command: tuple[str, ...]

    @property
    def socket(self) -> Path:
        return self.folder / "keeper.sock"

    def ensure(self) -> None:
        """Starts the keeper unless one answers; of several ranks at once, one does."""
        with _locked(self.folder / "lock"):
            with contextlib.suppress(KeeperGone):
                KeeperLink(self.socket, {"role": "visitor"}, timeout_s=10.0).disconnect()
                return
            pid = start_keeper(self.command, self.socket, self.folder / "keeper.log")
            logger.info("started a keeper (process %d, log %s)", pid, self.folder / "keeper.log")

    def newest_attempt(self) -> int:
        """The newest attempt that the keeper has seen."""
        link = self._patiently(lambda: KeeperLink(self.socket, {"role": "visitor"}, timeout_s=10.0))
        try:
            return int(link.info["attempt"])
        finally:
            link.disconnect()

    def _patiently(self, connect: Callable[[], T]) -> T:
        """What `connect` gives once there is a keeper that stays: one that is just ending still takes connections."""
        deadline = time.monotonic() + ENDING_S
        while True:
            try:
                self.ensure()
                return connect()
            except KeeperGone:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def connector(self, attempt: int, options: Mapping[str, Any]) -> Connect:
        """Connects this rank, starting a new keeper if the old one is gone."""
        p = self.place

        def connect(listener: Callable[[Message], None], ended: Callable[[], None]) -> RankLink:
            return self._patiently(
                lambda: RankLink(
                    self.socket, rank=p.rank, attempt=attempt, world_size=p.world_size,
                    local_rank=p.local_rank, listener=listener, ended=ended, options=options,
                )
            )  # fmt: skip

        return connect


def own_keeper(p: Place, checkpoints: str, *, budget: int | None, keep: int, room_s: float) -> OwnKeeper:
    """The keeper of this user for these checkpoints on this node, which need not run yet."""
    folder = scratch(checkpoints, p.node)
    run_id = (
        p.run_id if p.run_id not in ("", "none") else hashlib.sha256(checkpoints.encode()).hexdigest()[:16]
    )
    command = keeper_command(
        folder / "keeper.sock", node=p.node, run_id=run_id, checkpoints=checkpoints,
        budget=default_budget() if budget is None else budget, keep=keep,
        orphan_grace_s=float(os.environ.get("UNBROKEN_ORPHAN_GRACE", ORPHAN_GRACE_S)), room_s=room_s,
    )  # fmt: skip
    return OwnKeeper(p, folder, tuple(command))


def own_attempt(own: OwnKeeper, agreement: Agreement, storage: Storage) -> int:
    """The number of this attempt, claimed for good by rank 0 and told to all; above every one that came before.

    torchrun counts restarts from zero at each call, and two calls must never write into one folder.
    Raises StorageError if the checkpoints' folder cannot be written to, KeeperGone if no keeper stays.
    """
    if agreement.rank == 0:
        try:
            refuse_supervised(storage, storage.url)
            number = next_number(storage, above=own.newest_attempt())
            while not claim(storage, number, "alone", run_id=own.place.run_id):
                number += 1
        except UnbrokenError as e:
            agreement.publish(
                "attempt",
                {
                    "error": [e.message, e.where, e.hint],
                    "storage": isinstance(e, StorageError),
                    "usage": isinstance(e, UsageError),
                },
            )
            raise
        agreement.publish("attempt", {"number": number})
    answer = agreement.read("attempt", timeout_s=120.0)
    if "error" in answer:
        what, where, hint = answer["error"]
        kind = UsageError if answer.get("usage") else StorageError if answer["storage"] else KeeperGone
        raise kind(what, where=where, hint=hint)
    return int(answer["number"])


def settle_place(memory: RankMemory, wanted: str) -> None:
    """Waits until the supervisor has examined the place that this rank names and lets checkpoints go there.

    Raises UsageError, with its words, where they may not, KeeperGone where nobody answers.
    """
    deadline, pause = time.monotonic() + SETTLE_S, 0.01
    while True:
        try:
            if memory.alive().request({"op": "place", "place": wanted})[0]["settled"]:
                return
        except KeeperRefused as e:
            raise UsageError(e.message, where=e.where, hint=e.hint) from None
        except KeeperGone:  # its successor is told by the supervisor
            if time.monotonic() > deadline:
                raise
        if time.monotonic() > deadline:
            raise KeeperGone(
                f"nobody said within {SETTLE_S:.0f} s whether checkpoints may go to {wanted}",
                hint="See whether the supervisor is alive: `unbroken status`",
            )
        time.sleep(pause)
        pause = min(pause * 1.5, 0.25)


def end_process(pid: int) -> None:
    """Kills a keeper that does not answer; its agent, or the next rank that asks, starts another."""
    with contextlib.suppress(OSError):
        if (
            b"unbroken.checkpoint.keeper" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ):  # not its number's next owner
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "a") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield
