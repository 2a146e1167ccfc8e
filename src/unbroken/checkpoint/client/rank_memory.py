"""The keeper's buffers as a rank sees them: mapped, claimed, filled, finalized; handed on when the keeper dies.

A rank keeps the descriptors of its buffers, so a new keeper gets the very same memory back, with what was finalized in
it and what was still to be written. No torch here.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ...errors import UnbrokenError
from ..keeper.wire import Message
from .links import KeeperGone, KeeperRefused, RankLink
from .rank_buffer import RankBuffer

logger = logging.getLogger("unbroken.checkpoint")

RECONNECT_S = 120.0
BEAT_S = 1.0
FILLED_S = 120.0
MUTE_AFTER = 10
"""Questions in a row without an answer; one takes two seconds, a pause and a wait of `BEAT_S` each."""


@dataclass(eq=False)
class _Ahead:
    """A claim that was asked for before it is needed."""

    size: int
    link: RankLink
    future: Future[tuple[Message, list[int]]]
    buffer: RankBuffer | None = None
    dropped: bool = False


class RankMemory:
    """This rank's buffers. `connect` makes a link to the keeper that is there now; it may start one."""

    def __init__(
        self,
        connect: Callable[[Callable[[Message], None], Callable[[], None]], RankLink],
        *,
        count: int = 3,
        end_mute: Callable[[int], None] | None = None,
    ) -> None:
        self._connect = connect
        self._listener: Callable[[Message], None] | None = None
        self._early: list[Message] = []
        self._subscribing = threading.Lock()
        self.count = count
        self.buffers: dict[int, RankBuffer] = {}
        self.guard = threading.RLock()
        self.back = threading.Condition(self.guard)
        self.closing = False
        self.lost: UnbrokenError | None = None
        self.end_mute = end_mute
        self._ahead: _Ahead | None = None
        self._moving = False
        self._asking = threading.Lock()
        self.missed = 0
        self.went_on: tuple[int, int] | None = None
        """(attempt, step) of what this attempt has restored: its saves say it."""
        self._reconnecting = threading.Lock()
        self._filled: dict[int, bool] = {}
        self._opened = False
        self.link = connect(self._event, self._ended)
        self._opened = True
        if self.link.closed.is_set():
            self._ended()
        threading.Thread(target=self._watch, name="unbroken-keeper-watch", daemon=True).start()

    @property
    def keeper_id(self) -> str:
        return str(self.link.info["keeper"])

    def subscribe(self, listener: Callable[[Message], None]) -> None:
        """Calls `listener` with each of the keeper's events; those that came before come first, in their order."""
        with self._subscribing:
            for event in self._early:
                listener(event)
            self._early.clear()
            self._listener = listener

    def _publish(self, event: Message) -> None:
        with self._subscribing:
            listener = self._listener
            if listener is None:
                self._early.append(event)
                return
        listener(event)

    def provide(self, size: int, count: int | None = None) -> list[RankBuffer]:
        """Sees to it that there are buffers of `size` bytes, `count` of them if told. Raises DoesNotFit if the budget has no room for one."""
        self._drop_ahead()
        answer, fds = self.alive().request({"op": "arena", "bytes": size, "count": count or self.count})
        with self.guard:
            given = {int(b["id"]): (b, fd) for b, fd in zip(answer["buffers"], fds, strict=True)}
            for number, (b, fd) in given.items():
                if number in self.buffers:
                    os.close(fd)
                    continue
                buffer = RankBuffer(
                    number, int(b["bytes"]), fd, mmap.mmap(fd, int(b["bytes"])), keeper=self.keeper_id
                )
                if b["ready"] or number in self._filled:
                    buffer.unfilled = not b["ready"] and not self._filled[number]
                    buffer.ready.set()
                self.buffers[number] = buffer
            for number in [n for n, s in self.buffers.items() if n not in given and not s.claimed]:
                self.buffers.pop(number).unmap()
            return list(self.buffers.values())

    def enter(self, buffers: list[RankBuffer]) -> None:
        """Enters the pages of these buffers into this process's page table, in a thread, so that no save has to."""
        if waiting := [s for s in buffers if not s.entered]:
            threading.Thread(target=self._enter, args=(waiting,), name="unbroken-pages", daemon=True).start()

    def _enter(self, buffers: list[RankBuffer]) -> None:
        for buffer in buffers:
            buffer.entered = True
            if not buffer.ready.wait(FILLED_S):
                return
            buffer.enter(self.guard)

    def map_buffer(self, number: int, fd: int, size: int, content: dict[str, Any]) -> RankBuffer:
        """The buffer that holds a fetched snapshot of this rank; from now on it is handed on to a new keeper too."""
        with self.guard:
            buffer = self.buffers.get(number)
            if buffer is None:
                buffer = RankBuffer(number, size, fd, mmap.mmap(fd, size), keeper=self.keeper_id)
                buffer.ready.set()
                self.buffers[number] = buffer
            else:
                os.close(fd)
            buffer.content = content
            return buffer

    def claim(self, size: int, timeout_s: float) -> RankBuffer | None:
        """A buffer to fill, or None if none came free in time.

        One is asked for ahead, after each `finalize`, so that as a rule nobody is asked anything here. Raises
        KeeperGone if the keeper is gone or does not answer, KeeperRefused (this attempt is over, say).
        """
        if self.lost is not None:
            raise self.lost
        deadline = time.monotonic() + timeout_s
        while True:
            ahead = self._ask_ahead(size, wait_s=max(0.0, deadline - time.monotonic()))
            try:
                answer = self._answer_of(ahead, deadline)
            except TimeoutError:
                return None  # what was asked for ahead stays asked for
            except KeeperGone:
                if not ahead.link.closed.is_set():
                    raise  # it is mute; its answer may still come
                self._forget(ahead)
                if time.monotonic() >= deadline:
                    raise
                continue
            if not answer.get("ok"):
                self._forget(ahead)
                raise KeeperRefused(
                    str(answer.get("what")), where=answer.get("where"), hint=answer.get("todo")
                )
            buffer = self._bind(ahead)
            if buffer is None and self._moving and time.monotonic() < deadline:
                time.sleep(0.002)
                continue
            self._forget(ahead)
            if buffer is None or buffer.bytes < size:
                if buffer is not None:
                    self.release(buffer)
                continue
            return buffer

    def _ask_ahead(self, size: int, wait_s: float) -> _Ahead:
        if (ahead := self._ahead) is not None and ahead.size == size:
            return ahead
        link = self.alive(wait_s)  # before the lock: who waits for no keeper waits for nobody who does
        with self._asking:  # a copy that ends and a save that begins may both ask
            ahead = self._ahead
            if ahead is not None and ahead.size == size:
                return ahead
            self._drop_ahead()
            ahead = _Ahead(size, link, link.post({"op": "claim", "bytes": size}))
            self._ahead = ahead
        ahead.future.add_done_callback(lambda _: self._bind(ahead))
        return ahead

    def _bind(self, ahead: _Ahead) -> RankBuffer | None:
        """The buffer that was answered, from now on claimed whatever keeper owns it.

        None if there is none, or if the keeper died before anybody here looked at its answer: then the buffer was
        handed on as free, and the answer means nothing any more.
        """
        with self.guard:
            valid = not self._moving and ahead.link is self.link and ahead.future.done()
            if ahead.buffer is None and valid and ahead.future.exception() is None:
                number = ahead.future.result()[0].get("buffer")
                buffer = None if number is None else self.buffers.get(int(number))
                if buffer is not None:
                    buffer.claimed, buffer.content, ahead.buffer = True, None, buffer
            if ahead.dropped and ahead.buffer is not None:
                buffer, ahead.buffer = ahead.buffer, None
                threading.Thread(target=self.release, args=(buffer,), daemon=True).start()
            return ahead.buffer

    def _forget(self, ahead: _Ahead) -> None:
        if self._ahead is ahead:
            self._ahead = None

    def _drop_ahead(self) -> None:
        """Nobody will want what was asked for ahead: it goes back as soon as it comes."""
        if (ahead := self._ahead) is not None:
            self._ahead = None
            ahead.dropped = True
            self._bind(ahead)

    def _answer_of(self, ahead: _Ahead, deadline: float) -> Message:
        while True:
            try:
                return ahead.future.result(max(0.02, min(0.5, deadline - time.monotonic())))[0]
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise
                if self.mute:
                    raise KeeperGone(f"the keeper leaves {self.missed} questions unanswered") from None

    def _unclaim(self, number: int) -> None:
        with self.guard:
            if number in self.buffers:
                self.buffers[number].claimed = False
        try:
            self.link.post({"op": "unclaim", "buffer": number})
        except KeeperGone:
            return

    def release(self, buffer: RankBuffer) -> None:
        """Gives a claimed buffer back unfilled."""
        self._unclaim(buffer.id)

    def _watch(self) -> None:
        """Asks the keeper again and again whether it lives; one that stays mute is ended, so that another takes over.

        What counts is questions without any answer, late ones included, not the clock: a process that was stopped
        itself for a while must not blame its keeper.
        """
        while not self.closing:
            time.sleep(BEAT_S)
            link, before = self.link, self.link.messages
            if link.closed.is_set():
                self.missed = 0  # `alive` waits for its successor
                continue
            try:
                link.request({"op": "ping"}, timeout_s=BEAT_S)
            except UnbrokenError:
                pass
            if link.messages != before:
                self.missed = 0
                continue
            self.missed += 1
            if self.mute and self.end_mute is not None and not self.closing:
                logger.error(
                    "the keeper leaves %d questions unanswered: it is ended, another takes over", self.missed
                )
                self.end_mute(int(link.info["pid"]))
                self.missed = 0

    @property
    def mute(self) -> bool:
        """Whether the keeper has not said a word since `MUTE_AFTER` questions."""
        return self.missed >= MUTE_AFTER

    def finalize(
        self, buffer: RankBuffer, step: int, attempt: int, content: dict[str, Any], seconds: float
    ) -> None:
        """Says that the buffer is whole now. With a dead keeper the next one will be told."""
        with self.guard:
            buffer.claimed = False
            buffer.content, buffer.confirmed = {"attempt": attempt, "step": step, **content}, False
            link, number = self.link, buffer.id
        try:
            future = link.post({"op": "seal", "buffer": number, "step": step, "seconds": seconds, **content})
        except KeeperGone:
            return
        future.add_done_callback(lambda f: self._finalize_answered(buffer, step, f))
        try:
            self._ask_ahead(buffer.bytes, wait_s=0.0)
        except KeeperGone:
            return

    def _finalize_answered(self, buffer: RankBuffer, step: int, future: Any) -> None:
        if future.exception() is not None:
            return  # the keeper died: the next one gets it
        answer = future.result()[0]
        with self.guard:
            if buffer.content is not None and buffer.content["step"] == step:
                buffer.confirmed = bool(answer.get("ok"))
                if not buffer.confirmed:
                    buffer.content = None
        if not answer.get("ok"):
            self._publish(
                {"event": "failed", "step": step, "attempt": None, "rank": -1, "why": str(answer.get("what"))}
            )

    def note(self, attempt: int, step: int, **what: Any) -> None:
        """Remembers of a finalized snapshot what a new keeper should know (complete, persist)."""
        with self.guard:
            for buffer in self.buffers.values():
                if buffer.content and (buffer.content["attempt"], buffer.content["step"]) == (attempt, step):
                    buffer.content.update(what)

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
            for buffer in self.buffers.values():
                buffer.unmap()
            self.buffers.clear()

    def abandon(self) -> None:
        """Goes without a goodbye: for the keeper this rank has died."""
        self.closing = True
        self.link.disconnect()

    def _event(self, event: Message) -> None:
        if event.get("event") == "ready":
            with self.guard:
                # It may come before the answer that names the buffer was looked at.
                number, unfilled = int(event["buffer"]), bool(event.get("why"))
                self._filled[number] = not unfilled
                if (buffer := self.buffers.get(number)) is not None:
                    buffer.unfilled = unfilled
                    buffer.ready.set()
        elif event.get("event") == "complete":
            self.note(event["attempt"], event["step"], complete=True)
        elif event.get("event") in ("durable", "failed"):
            self.note(event["attempt"], event["step"], persist=False)
        self._publish(event)

    def _ended(self) -> None:
        with self.guard:
            if self.closing or not self._opened or self.lost is not None:
                return
        threading.Thread(target=self._reconnect, name="unbroken-reconnect", daemon=True).start()

    def _reconnect(self) -> None:
        # A connection may break again while the buffers change hands: one thread after the other.
        # One that a keeper refused ends too: after that nobody is looked for, or it would go on for ever.
        with self._reconnecting:
            if self.link.closed.is_set() and self.lost is None:
                logger.warning("the connection to the keeper broke; looking for its successor")
                self._find_successor()

    def _find_successor(self) -> None:
        deadline, pause = time.monotonic() + RECONNECT_S, 0.02
        while not self.closing and time.monotonic() < deadline:
            try:
                link = self._connect(self._event, self._ended)
            except KeeperRefused as e:
                logger.error("the keeper refuses this process: %s", e)
                self._give_up(e)
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
                    self._give_up(KeeperGone(f"the new keeper did not take the snapshots over: {e}"))
            return
        if not self.closing:
            self._give_up(KeeperGone(f"the keeper is gone, and no other came within {RECONNECT_S:.0f} s"))

    def _give_up(self, why: UnbrokenError) -> None:
        """No keeper will speak to this process again: who waits for one, or for what one would report, need not."""
        with self.back:
            self.lost = why
            self.back.notify_all()
        self._publish({"event": "lost", "why": str(why)})

    def _hand_over(self, link: RankLink) -> None:
        """Gives a new keeper the buffers; the same one (a connection that broke) has them still.

        Meanwhile no answer of the old keeper makes a buffer claimed, so that both sides agree on which are.
        """
        keeper = str(link.info["keeper"])
        with self.guard:
            self._moving = True
            buffers = [s for s in self.buffers.values() if s.keeper != keeper]
            handed = [s.content for s in buffers]
            entries = [{"id": s.id, "snapshot": s.content, "claimed": s.claimed} for s in buffers]
            unsure = [
                s for s in self.buffers.values() if s.keeper == keeper and s.content and not s.confirmed
            ]
            kept = [s for s in self.buffers.values() if s.keeper == keeper and s.claimed] + unsure
        try:
            # Not under the guard: the answers come on the thread that also delivers events.
            answer: Message = {"ids": {}}
            if buffers:
                answer, _ = link.request({"op": "adopt", "buffers": entries}, [s.fd for s in buffers])
            if kept:
                got, _ = link.request({"op": "reclaim", "buffers": [s.id for s in kept]})
                kept = [s for s in kept if s.id in got["buffers"]]  # the others it knows as finalized
            with self.back:
                for buffer in buffers:
                    self.buffers.pop(buffer.id, None)
                for buffer, entry in zip(buffers, entries, strict=True):
                    buffer.id, buffer.keeper = int(answer["ids"][str(entry["id"])]), keeper
                    if (
                        not buffer.ready.is_set()
                    ):  # the old keeper died over it, the new one does not begin again
                        buffer.unfilled = True
                        buffer.ready.set()
                self.buffers.update({s.id: s for s in buffers})
                self.link = link
                content_since = [
                    s for s, t in zip(buffers, handed, strict=True) if s.content and s.content is not t
                ]
                let_go = [
                    s
                    for s, e in zip(buffers, entries, strict=True)
                    if e["claimed"] and not s.claimed and not s.content
                ] + [s for s in kept if not s.claimed and not s.content]
                content_since += [s for s in kept if s.content]
        finally:
            with self.back:
                self._moving = False
                self.back.notify_all()
        for buffer in content_since:  # while the buffers changed hands
            link.post({"op": "seal", "buffer": buffer.id, "seconds": 0.0, **(buffer.content or {})})
        for buffer in let_go:
            link.post({"op": "unclaim", "buffer": buffer.id})
        logger.warning("a new keeper took over %d buffers of this rank", len(buffers))
