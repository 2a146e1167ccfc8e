"""Makes one snapshot durable at an end: of a keeper, of a rank, of a run. What is in memory only must not end with it.

A storage that refuses (full disk, used-up quota, an object store that does not answer) is asked again until it takes
the checkpoint or the time for that is over, and whoever listens is told of the wait. The seal of an attempt closes
what it may still write, but not what was whole in memory when it was sealed: the same snapshot has the same bytes
whenever it is written, and the supervisor's journal says whether it counts.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from ...errors import UnbrokenError
from .buffers.holdings import FINALIZED, Buffer, SnapshotId
from .clients import OperationRefused, log
from .durability.commit import forget_failures, has_part
from .keeping import Keeper
from .wire import Message

PAUSE_S, PAUSE_MAX_S = 0.5, 5.0
STALL_S = 30.0
"""A writer that has taken no chunk for this long is not waited for beyond the time that writing may take."""


def flush(
    keeper: Keeper,
    deadline_s: float,
    *,
    snapshot_id: SnapshotId | None = None,
    ranks: Collection[int] | None = None,
    room_s: float = 0.0,
) -> Message:
    """Makes a snapshot durable; the answer names it: `{step, attempt}`, or `{step: None}` where nothing of it is here.

    Default: the newest that is whole on all ranks, of the ranks that live here. Given `ranks`, those, copies for
    another node included. Writing may take `deadline_s`, and within `room_s` longer
    while it gets on; a storage that refuses is asked again for `room_s`, and if it still does, the snapshot is written
    elsewhere where such a place was named: the answer says where (`elsewhere`).
    Raises Refused, saying why, where it did not become durable.
    """
    node = keeper.settings.node
    with keeper.changed:
        snapshot_id = snapshot_id or _newest(keeper)
        mine = [] if snapshot_id is None else _shares(keeper, snapshot_id, ranks)
        if snapshot_id is None or not mine:
            return {"step": None}  # a spare, or a node whose ranks are elsewhere now: others write it
        if not keeper.writing.may_finish(snapshot_id, keeper.holdings.wanted):
            raise OperationRefused(f"attempt {snapshot_id.attempt} is sealed", where=node)
        for b in mine:
            b.pins += 1
        keeper.writing.insisted.add(snapshot_id)
        keeper.writing.take_up(snapshot_id)
        keeper.hurried = False
    answer: Message = {"step": snapshot_id.step, "attempt": snapshot_id.attempt}
    try:
        try:
            _insist(keeper, snapshot_id, mine, deadline_s, room_s)
        except OperationRefused as e:
            _go_elsewhere(keeper, snapshot_id, mine, deadline_s, e)
    finally:
        with keeper.changed:
            if snapshot_id in keeper.writing.moved:  # now, or when somebody else asked for it
                answer["elsewhere"] = keeper.writing.moved[snapshot_id]
            keeper.writing.insisted.discard(snapshot_id)
            for b in mine:
                b.pins -= 1
            keeper.changed.notify_all()
    return answer


def _go_elsewhere(
    keeper: Keeper, snapshot_id: SnapshotId, mine: list[Buffer], deadline_s: float, refused: OperationRefused
) -> None:
    """Writes the snapshot where it was said that the last one may go. Raises Refused: both reasons, or the first."""
    place, writing = keeper.settings.elsewhere, keeper.writing
    with keeper.changed:
        gone = snapshot_id in writing.hopeless or keeper.stop.is_set()
        expired = writing.lease_until is not None and writing.lease_until < time.monotonic()
        if (
            not place
            or gone
            or expired
            or writing.place_of(snapshot_id) == place
            or not writing.move(snapshot_id, place)
        ):
            raise refused
        keeper.hurried = False
    log(f"{refused.message}; it is written to {place}")
    try:
        _insist(keeper, snapshot_id, mine, deadline_s, 0.0)
    except OperationRefused as e:
        raise OperationRefused(
            f"{refused.message}; and not in {place} either: {e.message}", where=e.where
        ) from e


def _insist(
    keeper: Keeper, snapshot_id: SnapshotId, mine: list[Buffer], deadline_s: float, room_s: float
) -> None:
    """Tries until the checkpoint is durable. Raises Refused."""
    node, writing = keeper.settings.node, keeper.writing
    began = time.monotonic()
    deadline, room_until, pause, reported = began + deadline_s, began + room_s, PAUSE_S, ""
    while True:
        _again(keeper, snapshot_id, mine)
        with keeper.changed:
            while snapshot_id not in keeper.holdings.durable and snapshot_id not in writing.failed:
                left = (
                    max(deadline, _gets_on_until(keeper, snapshot_id, room_until, reported))
                    - time.monotonic()
                )
                if left <= 0 or keeper.hurried:
                    raise OperationRefused(
                        f"step {snapshot_id.step} could not be made durable within {time.monotonic() - began:.1f} s"
                        + (f": {reported}" if reported else ""),
                        where=node,
                    )
                keeper.changed.wait(min(left, 0.5))
            if snapshot_id in keeper.holdings.durable:
                return
            why = writing.failed[snapshot_id]
            if snapshot_id in writing.hopeless:
                raise OperationRefused(
                    f"step {snapshot_id.step} could not be made durable: {why}", where=node
                )
            left = room_until - time.monotonic()
            if left <= 0 or keeper.hurried or keeper.stop.is_set():
                tried = f" (tried for {time.monotonic() - began:.0f} s)" if reported else ""
                raise OperationRefused(
                    f"step {snapshot_id.step} could not be made durable: {why}{tried}", where=node
                )
            if why != reported:
                reported = why
                log(f"step {snapshot_id.step} waits for the storage, for up to {left:.0f} s: {why}")
                keeper.emit(
                    {
                        "event": "waiting", "attempt": snapshot_id.attempt, "step": snapshot_id.step, "why": why,
                        "seconds": round(left, 1),
                    }
                )  # fmt: skip
            until = time.monotonic() + min(pause, left)
            while time.monotonic() < until and not keeper.hurried and not keeper.stop.is_set():
                keeper.changed.wait(max(0.01, until - time.monotonic()))
        pause = min(1.5 * pause, PAUSE_MAX_S)


def _gets_on_until(keeper: Keeper, snapshot_id: SnapshotId, room_until: float, reported: str) -> float:
    """Until when there is hope beyond the time for writing: a slow storage that takes one chunk after the other, and
    other nodes that may be slow or wait themselves, are no reason to give up; `changed` is held."""
    lease = keeper.writing.lease_until
    if lease is not None and lease < time.monotonic():
        return 0.0  # nothing may be written, and nobody renews it
    if reported or snapshot_id in keeper.writing.watches:
        return room_until
    moved = max((j.moved for j in keeper.writing.jobs if j.snapshot.snapshot_id == snapshot_id), default=0.0)
    return min(moved + STALL_S, room_until)


def _again(keeper: Keeper, snapshot_id: SnapshotId, mine: list[Buffer]) -> None:
    """Writes the shares of this node that the storage has not got, and watches for the others'."""
    writing = keeper.writing
    with keeper.changed:
        if snapshot_id in writing.failed and snapshot_id not in writing.hopeless:
            del writing.failed[snapshot_id]
            keeper.holdings.released.discard(snapshot_id)
        elif snapshot_id in writing.failed or snapshot_id in keeper.holdings.durable:
            return
        busy = {j.snapshot.rank for j in writing.jobs if j.snapshot.snapshot_id == snapshot_id}
    there: set[int] = set()
    try:
        storage = writing.storage(snapshot_id)
        there = {b.rank for b in mine if has_part(storage, snapshot_id, b.rank)}
        forget_failures(storage, snapshot_id, {b.rank for b in mine})
    except (UnbrokenError, OSError):
        pass  # the writers meet the same, and say it
    with keeper.changed:
        size = max(b.snapshot.world_size for b in mine if b.snapshot)
        for b in mine:
            if b.rank not in busy and b.rank not in there:
                writing.submit(b)
        if not any(j.snapshot.snapshot_id == snapshot_id for j in writing.jobs):
            writing.expect(snapshot_id, size)


def _newest(keeper: Keeper) -> SnapshotId | None:
    """The newest snapshot that is whole on all ranks, here, and may still be written; else the newest; `changed` is held."""
    holdings = keeper.holdings
    allowed = [
        m
        for m in holdings.completed
        if keeper.writing.may_finish(m, holdings.wanted) and _shares(keeper, m, None)
    ]
    return max(allowed, default=holdings.newest)


def _shares(keeper: Keeper, snapshot_id: SnapshotId, ranks: Collection[int] | None) -> list[Buffer]:
    """One buffer for each rank whose share of this snapshot this node is to write; `changed` is held."""
    found: dict[int, Buffer] = {}
    for b in sorted(keeper.holdings.buffers.values(), key=lambda b: b.replica):
        wanted = not b.replica if ranks is None else b.rank in ranks
        if wanted and b.state == FINALIZED and b.snapshot and b.snapshot.snapshot_id == snapshot_id:
            found.setdefault(b.rank, b)
    return list(found.values())
