"""The keeper's buffers as a rank sees them: mapped, claimed, filled, sealed; handed on when the keeper dies.

A rank keeps the descriptors of its buffers, so a new keeper gets the very same memory back, with what was sealed in
it and what was still to be written. Needs torch only where a buffer is looked at as a tensor.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import UnbrokenError
from .keeper_client import KeeperGone, KeeperRefused, RankLink
from .wire import Message

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("unbroken.checkpoint")

RECONNECT_S = 120.0
BEAT_S = 1.0
STALL_S = 10.0


@dataclass(eq=False)
class Slab:
    """One buffer, mapped into this process. `sealed` is what a new keeper would have to know of its content."""

    id: int
    bytes: int
    fd: int
    map: mmap.mmap
    ready: threading.Event = field(default_factory=threading.Event)
    pinned: bool = False
    sealed: dict[str, Any] | None = None
    claimed: bool = False
    keeper: str = ""
    gone: bool = False
    unpin: Callable[[], None] | None = None
    _tensor: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """All of it as bytes."""
        if self._tensor is None:
            import torch

            self._tensor = torch.frombuffer(self.map, dtype=torch.uint8)
        return self._tensor


class RankMemory:
    """This rank's buffers. `connect` makes a link to the keeper that is there now; it may start one."""

    def __init__(
        self,
        connect: Callable[[Callable[[Message], None], Callable[[], None]], RankLink],
        listener: Callable[[Message], None],
        *,
        count: int = 3,
        end_mute: Callable[[int], None] | None = None,
    ) -> None:
        self._connect = connect
        self._listener = listener
        self.count = count
        self.slabs: dict[int, Slab] = {}
        self.guard = threading.RLock()
        self.back = threading.Condition(self.guard)
        self.closing = False
        self.lost: UnbrokenError | None = None
        self.end_mute = end_mute
        self._ahead: tuple[int, Future[tuple[Message, list[int]]]] | None = None
        self.heard = time.monotonic()
        self.link = connect(self._event, self._ended)
        threading.Thread(target=self._watch, name="unbroken-keeper-watch", daemon=True).start()

    @property
    def keeper_id(self) -> str:
        return str(self.link.info["keeper"])

    def provide(self, size: int) -> list[Slab]:
        """Sees to it that there are buffers of `size` bytes. Raises DoesNotFit if the budget has no room for one."""
        if self._ahead is not None:
            self._ahead[1].add_done_callback(self._give_back)
            self._ahead = None
        answer, fds = self.alive().request({"op": "arena", "bytes": size, "count": self.count})
        with self.guard:
            told = {int(b["id"]): (b, fd) for b, fd in zip(answer["buffers"], fds, strict=True)}
            for number, (b, fd) in told.items():
                if number in self.slabs:
                    os.close(fd)
                    continue
                slab = Slab(
                    number, int(b["bytes"]), fd, mmap.mmap(fd, int(b["bytes"])), keeper=self.keeper_id
                )
                if b["ready"]:
                    slab.ready.set()
                self.slabs[number] = slab
            for number in [n for n, s in self.slabs.items() if n not in told and not s.claimed]:
                self._unmap(self.slabs.pop(number))
            return list(self.slabs.values())

    def map_buffer(self, number: int, fd: int, size: int, sealed: dict[str, Any]) -> Slab:
        """The buffer that holds a fetched snapshot of this rank; from now on it is handed on to a new keeper too."""
        with self.guard:
            slab = self.slabs.get(number)
            if slab is None:
                slab = Slab(number, size, fd, mmap.mmap(fd, size), keeper=self.keeper_id)
                slab.ready.set()
                self.slabs[number] = slab
            else:
                os.close(fd)
            slab.sealed = sealed
            return slab

    def claim(self, size: int, timeout_s: float) -> Slab | None:
        """A buffer to fill, or None if none came free in time.

        One is asked for ahead, after each `seal`, so that as a rule nobody is asked anything here. Raises
        KeeperGone if the keeper is gone or does not answer, KeeperRefused.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            ahead = self._claim_ahead(size, wait_s=max(0.0, deadline - time.monotonic()))
            try:
                answer = self._answer_of(ahead, deadline)
            except TimeoutError:
                return None  # what was asked for ahead stays asked for
            except KeeperGone:
                self._ahead = None
                if self.link.closed.is_set() and time.monotonic() < deadline:
                    continue
                raise
            self._ahead = None
            if not answer.get("ok"):
                raise KeeperRefused(
                    str(answer.get("what")), where=answer.get("where"), todo=answer.get("todo")
                )
            with self.guard:
                slab = self.slabs.get(int(answer["buffer"]))
                if slab is None or slab.bytes < size:
                    self._unclaim(int(answer["buffer"]))
                    continue
                slab.claimed, slab.sealed = True, None
                return slab

    def _claim_ahead(self, size: int, wait_s: float) -> Future[tuple[Message, list[int]]]:
        if self._ahead is None or self._ahead[0] != size:
            if self._ahead is not None:
                self._ahead[1].add_done_callback(self._give_back)
            future = self.alive(wait_s).post({"op": "claim", "bytes": size})
            future.add_done_callback(self._note_claim)
            self._ahead = (size, future)
        return self._ahead[1]

    def _note_claim(self, future: Future[tuple[Message, list[int]]]) -> None:
        if future.exception() is None and future.result()[0].get("buffer") is not None:
            with self.guard:
                slab = self.slabs.get(int(future.result()[0]["buffer"]))
                if slab is not None:
                    slab.claimed, slab.sealed = True, None

    def _answer_of(self, future: Future[tuple[Message, list[int]]], deadline: float) -> Message:
        while True:
            try:
                return future.result(max(0.02, min(0.5, deadline - time.monotonic())))[0]
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise
                if time.monotonic() - self.heard > STALL_S:
                    raise KeeperGone(f"the keeper has not answered for {STALL_S:.0f} s") from None

    def _give_back(self, future: Future[tuple[Message, list[int]]]) -> None:
        if future.exception() is None and future.result()[0].get("buffer") is not None:
            number = int(future.result()[0]["buffer"])
            threading.Thread(target=self._unclaim, args=(number,), daemon=True).start()

    def _unclaim(self, number: int) -> None:
        with self.guard:
            if number in self.slabs:
                self.slabs[number].claimed = False
        try:
            self.link.post({"op": "unclaim", "buffer": number})
        except KeeperGone:
            return

    def release(self, slab: Slab) -> None:
        """Gives a claimed buffer back unfilled."""
        self._unclaim(slab.id)

    def _watch(self) -> None:
        """Asks the keeper every second whether it lives; one of our own that stays mute is ended and replaced."""
        while not self.closing:
            time.sleep(BEAT_S)
            link = self.link
            if link.closed.is_set():
                self.heard = time.monotonic()  # `alive` waits for its successor
                continue
            try:
                link.request({"op": "ping"}, timeout_s=BEAT_S)
                self.heard = time.monotonic()
            except UnbrokenError:
                mute = time.monotonic() - self.heard
                if mute > STALL_S and self.end_mute is not None and not self.closing:
                    logger.error(
                        "the keeper has not answered for %.0f s: it is ended, another takes over", mute
                    )
                    self.end_mute(int(link.info["pid"]))
                    self.heard = time.monotonic()

    def seal(self, slab: Slab, step: int, attempt: int, sealed: dict[str, Any], seconds: float) -> None:
        """Says that the buffer is whole now. With a dead keeper the next one will be told."""
        with self.guard:
            slab.claimed = False
            slab.sealed = {"attempt": attempt, "step": step, **sealed}
            link, number = self.link, slab.id
        try:
            future = link.post({"op": "seal", "buffer": number, "step": step, "seconds": seconds, **sealed})
        except KeeperGone:
            return
        future.add_done_callback(lambda f: self._seal_answered(slab, step, f))
        try:
            self._claim_ahead(slab.bytes, wait_s=0.0)
        except KeeperGone:
            return

    def _seal_answered(self, slab: Slab, step: int, future: Any) -> None:
        if future.exception() is not None:
            return  # the keeper died: the next one gets it
        answer = future.result()[0]
        if not answer.get("ok"):
            with self.guard:
                slab.sealed = None
            self._listener(
                {"event": "failed", "step": step, "attempt": None, "rank": -1, "why": str(answer.get("what"))}
            )

    def note(self, attempt: int, step: int, **what: Any) -> None:
        """Remembers of a sealed snapshot what a new keeper should know (complete, persist)."""
        with self.guard:
            for slab in self.slabs.values():
                if slab.sealed and (slab.sealed["attempt"], slab.sealed["step"]) == (attempt, step):
                    slab.sealed.update(what)

    def alive(self, within_s: float = RECONNECT_S) -> RankLink:
        """The link, once there is a keeper. Raises KeeperGone, or whatever the new keeper refused us with."""
        deadline = time.monotonic() + within_s
        with self.back:
            while self.link.closed.is_set():
                if self.lost is not None:
                    raise self.lost
                left = deadline - time.monotonic()
                if left <= 0:
                    raise KeeperGone("the keeper of this node is gone and no other has come yet")
                self.back.wait(min(left, 0.2))
            return self.link

    def close(self) -> None:
        """Says goodbye and unmaps everything."""
        with self.guard:
            self.closing = True
        try:
            self.link.request({"op": "bye"}, timeout_s=5.0)
        except UnbrokenError:
            pass
        self.link.disconnect()
        with self.guard:
            for slab in self.slabs.values():
                self._unmap(slab)
            self.slabs.clear()

    def _unmap(self, slab: Slab) -> None:
        slab.gone = True
        if slab.unpin is not None:
            slab.unpin()
        slab._tensor = None
        try:
            slab.map.close()
        except BufferError:
            pass  # a view of it lives on; the mapping goes with the view
        os.close(slab.fd)

    def _event(self, event: Message) -> None:
        if event.get("event") == "ready":
            with self.guard:
                slab = self.slabs.get(int(event["buffer"]))
            if slab is not None and not event.get("why"):
                slab.ready.set()
        elif event.get("event") == "complete":
            self.note(event["attempt"], event["step"], complete=True)
        elif event.get("event") in ("durable", "failed"):
            self.note(event["attempt"], event["step"], persist=False)
        self._listener(event)

    def _ended(self) -> None:
        with self.guard:
            if self.closing:
                return
        logger.warning("the connection to the keeper broke; looking for its successor")
        threading.Thread(target=self._reconnect, name="unbroken-reconnect", daemon=True).start()

    def _reconnect(self) -> None:
        deadline, pause = time.monotonic() + RECONNECT_S, 0.02
        while not self.closing and time.monotonic() < deadline:
            try:
                link = self._connect(self._event, self._ended)
            except KeeperRefused as e:
                with self.back:
                    self.lost = e
                    self.back.notify_all()
                logger.error("the keeper refuses this process: %s", e)
                return
            except (UnbrokenError, OSError):
                time.sleep(pause)
                pause = min(2 * pause, 1.0)
                continue
            try:
                self._hand_over(link)
            except KeeperGone:
                continue
            except (UnbrokenError, OSError) as e:
                if not self.closing:
                    logger.error("the new keeper did not take the snapshots over: %s", e)
                    with self.back:
                        self.lost = KeeperGone(f"the new keeper did not take the snapshots over: {e}")
                        self.back.notify_all()
            return

    def _hand_over(self, link: RankLink) -> None:
        """Gives a new keeper the buffers; the same one (a connection that broke) has them still."""
        keeper = str(link.info["keeper"])
        with self.guard:
            slabs = [s for s in self.slabs.values() if s.keeper != keeper]
            told = [s.sealed for s in slabs]
            entries = [{"id": s.id, "snapshot": s.sealed, "claimed": s.claimed} for s in slabs]
        answer: Message = {"ids": {}}
        if slabs:
            # Not under the guard: the answer comes on the thread that also delivers events.
            answer, _ = link.request({"op": "adopt", "buffers": entries}, [s.fd for s in slabs])
        with self.back:
            for slab in slabs:
                self.slabs.pop(slab.id, None)
                slab.id, slab.keeper = int(answer["ids"][str(slab.id)]), keeper
                slab.ready.set()
            self.slabs.update({s.id: s for s in slabs})
            self.link = link
            late = [
                s
                for s, before in zip(slabs, told, strict=True)
                if s.sealed is not None and s.sealed is not before
            ]
            self.back.notify_all()
        for slab in late:  # sealed while the buffers changed hands
            link.post({"op": "seal", "buffer": slab.id, "seconds": 0.0, **(slab.sealed or {})})
        logger.warning("a new keeper took over %d buffers of this rank", len(slabs))
