"""The node's keeper as its agent sees it: started or taken over, asked, its events passed on, respawned when it dies."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ...cluster.holding.processes import marked, read_stat
from ...errors import RunError
from ...link.bounds import READ_AHEAD, Malformed
from ...link.channel import MAX_MESSAGE_BYTES, VALUES
from ...link.framing import Unpacker, pack
from ...link.secret import Secret, as_input
from ...waiting import wait_within
from ..wire import Message
from .logs.folder import NodeFolder

_log = logging.getLogger("unbroken.agent")
_START_S = 20.0
_COME_UP_S = 240.0
"""While its process runs: a busy machine imports for minutes. The supervisor waits for an agent a little longer."""
_RETRY_S, _RETRY_MOST_S = 1.0, 30.0
_LEASE_EVERY_S = 0.5


class _Channel:
    """One connection to the keeper: requests are answered in order, events come between."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._unpacker = Unpacker(MAX_MESSAGE_BYTES, values=VALUES)
        self._lock = asyncio.Lock()
        self.pid: int | None = None
        """The keeper's process, as it says."""
        self.protocol = 1
        self.budget = 0

    @classmethod
    async def connect(cls, path: Path) -> _Channel:
        reader, writer = await asyncio.open_unix_connection(str(path))
        channel = cls(reader, writer)
        hello = {"op": "hello", "role": "agent", "version": 1}
        try:
            answer = await wait_within(channel.ask(hello), 10)
        except BaseException:
            channel.close()
            raise
        channel.pid, channel.protocol = answer.get("pid"), int(answer.get("protocol", 1))
        channel.budget = int(answer.get("budget", 0))
        return channel

    async def ask(self, request: Message) -> Message:
        """The answer. Raises OSError."""
        async with self._lock:
            self._writer.write(pack(request, MAX_MESSAGE_BYTES))
            await self._writer.drain()
            while True:
                message = await self.read()
                if "event" not in message:
                    return message

    async def read(self) -> Message:
        """The next answer or event. Raises OSError: ConnectionError where the keeper is gone."""
        try:
            while (message := self._unpacker.read()) is None:
                piece = await self._reader.read(READ_AHEAD)
                if not piece:
                    raise ConnectionResetError("the keeper closed the connection")
                self._unpacker.feed(piece)
        except Malformed as e:
            raise OSError(f"what it says makes no sense: {e}") from e
        return message

    def close(self) -> None:
        self._writer.close()


class KeeperProcess:
    """Keeps one keeper running for this node. Slow requests have a connection of their own, so that the lease,
    which must be renewed while a `settle` waits for a disk, never queues behind one."""

    def __init__(
        self,
        folder: NodeFolder,
        run_id: str,
        node: str,
        scratch: Path,
        budget_bytes: int,
        on_event: Callable[[Message], Awaitable[None]],
        *,
        room_s: float = 600.0,
        elsewhere: str = "",
        secret: Secret | None = None,
    ) -> None:
        """With a `secret` that holds a certificate the keeper reaches those of other machines by it."""
        self._secret = secret if secret is not None and secret.identity is not None else None
        self._folder, self._run_id, self._node = folder, run_id, node
        self._on_event = on_event
        self._room_s, self._elsewhere = room_s, elsewhere
        self.budget = budget_bytes
        """What it may hold, in bytes: of one that was taken over what it says."""
        self.socket = scratch / "keeper.sock"
        self._events_task: asyncio.Task[None] | None = None
        self._lease_until = 0.0
        self._last_until = 0.0
        self._lease_task: asyncio.Task[None] | None = None
        self._attempt: Message | None = None
        self._closing = False
        self._process: subprocess.Popen[bytes] | None = None
        self.alive = False
        self.pid: int | None = None
        self.protocol = 1
        """What it understands; see `checkpoint.keeper.wire.PROTOCOL`."""

    async def start(self) -> None:
        """Takes over the keeper that is there, or starts one. Raises RunError when it does not come up."""
        try:
            channel = await _Channel.connect(self.socket)
            _log.info("took over the keeper on %s", self.socket)
        except OSError:
            channel = await self._spawn()
        self.alive, self.pid, self.protocol = True, channel.pid, channel.protocol
        self.budget = channel.budget or self.budget
        self._events_task = asyncio.create_task(self._follow(channel))
        if self._lease_task is None:
            self._lease_task = asyncio.create_task(self._renew())

    async def _spawn(self) -> _Channel:
        await asyncio.to_thread(self._end_leftover)
        self.socket.unlink(missing_ok=True)
        log = self._folder.own.agent_log(self._node).with_suffix(".keeper.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        given = b"" if self._secret is None else self._secret.as_bytes()
        with open(log, "ab") as out, as_input(given) as secret:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "unbroken.checkpoint.keeper",
                    "--socket", str(self.socket), "--node", self._node, "--run-id", self._run_id,
                    "--checkpoints", str(self._folder.run.checkpoints), "--budget", str(self.budget),
                    "--wait-for-room", str(self._room_s), "--room-elsewhere", self._elsewhere,
                    *(["--secret-on-input"] if given else []),
                ],
                env={**os.environ, "UNBROKEN_ROLE": "keeper"},
                stdin=secret,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + _COME_UP_S
        while time.monotonic() < deadline:
            try:
                return await _Channel.connect(self.socket)
            except OSError:
                if self._process.poll() is not None:
                    break
                await asyncio.sleep(0.02)
        raise RunError("the keeper did not come up", where=f"node {self._node}", hint=f"See {log}")

    def _end_leftover(self) -> None:
        """A keeper that does not answer must not write beside its successor."""
        from ...cluster.holding.processes import end

        left = end(lambda: [p for p in marked(self._run_id, node=self._node) if p.role == "keeper"])
        if left:
            raise RunError("the old keeper does not die", where=f"node {self._node}, pid {left[0].pid}")

    async def _follow(self, channel: _Channel) -> None:
        """Passes events on until the keeper is gone; then starts another and tells it of the attempt."""
        try:
            while True:
                message = await channel.read()
                if "event" in message:
                    await self._on_event(message)
        except OSError as e:
            why = str(e)
        finally:
            channel.close()
        self.alive = False
        if self._closing:
            return
        _log.error("the keeper is gone (%s); starting another", why)
        await self._on_event({"event": "keeper_lost"})
        if self._process is not None:
            self._process.poll()
        if not await self._start_again():
            return
        while self._attempt is not None and self.alive and not self._closing:
            try:
                await self.call(self._attempt, timeout=20)
                break
            except RunError as e:  # one that has died again is another call's of this
                _log.warning("the new keeper is not told of the attempt yet: %s", e)
                await asyncio.sleep(_RETRY_S)
        await self._on_event({"event": "keeper_back"})

    async def _start_again(self) -> bool:
        """Starts another keeper, however often that fails: without one no snapshot of this node would be kept any more."""
        pause = _RETRY_S
        while not self._closing:
            try:
                await self.start()
                return True
            except (RunError, OSError) as e:  # no memory, a folder that is gone for a while
                _log.error("no keeper can be started, tried again in %.0f s: %s", pause, e)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _RETRY_MOST_S)
        return False

    async def call(self, request: Message, timeout: float = 60.0) -> Message:
        """Asks on a connection of its own; one that died just now has until `_START_S` to be back.

        Raises RunError, also when the keeper is gone or late.
        """
        if request.get("op") == "attempt":
            # A keeper that takes this one's place later is told of the attempt, not to fetch what was restored long ago.
            self._attempt = {k: v for k, v in request.items() if k != "ring"}
        try:
            channel = await self._reach(time.monotonic() + min(timeout, _START_S))
            try:
                answer = await wait_within(channel.ask(request), timeout)
            finally:
                channel.close()
        except OSError as e:
            raise RunError(
                f"the keeper did not answer '{request.get('op')}': {_why_silent(e, timeout)}",
                where=f"node {self._node}",
            ) from e
        if not answer.get("ok", False):
            raise RunError(
                answer.get("what", "the keeper refused"), where=answer.get("where"), hint=answer.get("todo")
            )
        return answer

    async def _reach(self, deadline: float) -> _Channel:
        """A connection to the keeper, or to the one that is started in its place: it has answered nothing yet, so that
        asking it loses and repeats nothing."""
        while True:
            try:
                return await _Channel.connect(self.socket)
            except (ConnectionError, FileNotFoundError):
                if self._closing or self._events_task is None or time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(0.05)

    def lease(self, until: float) -> None:
        """Lets the keeper write until `until` (CLOCK_MONOTONIC of this node, seconds)."""
        self._lease_until = max(until, self._last_until)

    def let_finish(self, seconds: float) -> None:
        """Lets the keeper write what it holds at an end, with or without a supervisor: into folders of attempts that
        are its own, of which the journal says whether they count."""
        self._last_until = time.monotonic() + seconds
        self.lease(self._last_until)

    def wake(self) -> int | None:
        """Continues a keeper that was stopped by a signal; its process, None where it was not."""
        try:
            if self.pid is None or read_stat(self.pid)[0] != "T":
                return None
            os.kill(self.pid, signal.SIGCONT)
        except OSError:
            return None
        _log.warning("the keeper (process %d) was stopped by a signal: it is continued", self.pid)
        return self.pid

    async def _renew(self) -> None:
        channel: _Channel | None = None
        while not self._closing:
            left = self._lease_until - time.monotonic()
            if left > 0:
                try:
                    channel = channel or await _Channel.connect(self.socket)
                    await wait_within(channel.ask({"op": "lease", "seconds": left}), 5)
                except OSError:
                    if channel is not None:
                        channel.close()
                    channel = None
            await asyncio.sleep(_LEASE_EVERY_S)

    async def flush(self, deadline_s: float, room_s: float, **what: Any) -> Message:
        """Lets it make a snapshot durable (default: the newest; else `mark` and `ranks`); why not, in words, in `why`.

        Waits up to `deadline_s` for the writing, and `room_s` for a storage that refuses.
        """
        within = deadline_s + room_s + (deadline_s if self._elsewhere else 0.0)
        self.let_finish(within + 10)
        self.wake()
        try:
            request = {"op": "flush", "deadline_s": deadline_s, "room_s": room_s, **what}
            return await self.call(request, timeout=within + 10)
        except RunError as e:
            return {"step": None, "why": e.message}

    async def close(self) -> Message:
        """Ends it, and what it holds."""
        self._closing = True
        self.wake()
        try:
            answer = await self.call({"op": "close", "flush": False, "deadline_s": 0.0}, timeout=10)
        except RunError as e:
            answer = {"ok": False, "what": str(e)}
            await asyncio.to_thread(self._end_leftover)
        for task in (self._events_task, self._lease_task):
            if task is not None:
                task.cancel()
        if self._process is not None:
            try:
                await asyncio.to_thread(self._process.wait, 10)
            except subprocess.TimeoutExpired:
                await asyncio.to_thread(self._end_leftover)
        answer.pop("ok", None)
        return answer


def _why_silent(e: Exception, timeout_s: float) -> str:
    if isinstance(e, ConnectionRefusedError | FileNotFoundError):
        return "it is not there just now"
    if isinstance(e, TimeoutError):
        return f"not within {timeout_s:g} s"
    if isinstance(e, ConnectionError):
        return "it ended meanwhile"
    return str(e)
