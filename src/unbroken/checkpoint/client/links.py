"""The other ends of the keeper's socket: `KeeperLink` for whoever asks, `RankLink` for a training process.

Both are usable from any thread. Answers are matched by number, events go to callbacks. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, DoesNotFit, UnbrokenError
from ...machine import python_path
from ..keeper.wire import VERSION, Channel, Closed, Message, check_socket, connect

ANSWER_TIMEOUT_S = 30.0


class KeeperGone(CheckpointError):
    """The connection to the keeper broke; it may have been killed."""


class KeeperRefused(CheckpointError):
    """The keeper understood and said no."""


class NotAnnounced(KeeperRefused):
    """The agent has not told the keeper of this attempt yet; asking again soon helps."""


class KeeperLink:
    """A connection on which requests are answered by number and everything else is an event."""

    def __init__(self, socket_path: str | Path, hello: Message, *, timeout_s: float) -> None:
        self.socket_path = str(socket_path)
        self.timeout_s = timeout_s
        try:
            self.channel: Channel = connect(self.socket_path, timeout_s)
        except Closed as e:
            raise KeeperGone(str(e)) from e
        self._numbers = itertools.count(1)
        self._pending: dict[int, Future[tuple[Message, list[int]]]] = {}
        self._guard = threading.Lock()
        self.closed = threading.Event()
        self.messages = 0
        """How many messages came from the keeper."""
        self._reader = threading.Thread(target=self._read, name="unbroken-keeper-link", daemon=True)
        self._reader.start()
        try:
            self.info = self.request({"op": "hello", "version": VERSION, **hello})[0]
        except UnbrokenError:
            self.disconnect()
            raise

    def request(
        self, message: Message, fds: Sequence[int] = (), *, timeout_s: float | None = None
    ) -> tuple[Message, list[int]]:
        """Sends a request and waits for its answer. Raises KeeperGone, KeeperRefused (or DoesNotFit)."""
        future = self.post(message, fds)
        try:
            answer, got = future.result(self.timeout_s if timeout_s is None else timeout_s)
        except TimeoutError:
            raise KeeperGone(
                f"the keeper did not answer '{message['op']}' in time", where=self.socket_path
            ) from None
        return checked(answer), got

    def post(self, message: Message, fds: Sequence[int] = ()) -> Future[tuple[Message, list[int]]]:
        """Sends a request; its answer arrives in the future. Raises KeeperGone if it cannot even be sent."""
        number = next(self._numbers)
        future: Future[tuple[Message, list[int]]] = Future()
        with self._guard:
            if self.closed.is_set():
                raise KeeperGone("the connection to the keeper is closed", where=self.socket_path)
            self._pending[number] = future
        try:
            self.channel.send({**message, "id": number}, fds)
        except Closed as e:
            with self._guard:
                self._pending.pop(number, None)
            raise KeeperGone(str(e), where=self.socket_path) from e
        return future

    def disconnect(self) -> None:
        """Closes the connection; whoever waits gets KeeperGone."""
        self.channel.close()

    def on_event(self, event: Message) -> None:
        """Takes an event; called on the reader's thread."""

    def on_close(self) -> None:
        """Called once, on the reader's thread, after the connection has ended."""

    def _read(self) -> None:
        while True:
            try:
                message, fds = self.channel.receive()
            except Closed as e:
                self._end(str(e))
                return
            self.messages += 1
            number = message.pop("id", None)
            if number is None:
                for fd in fds:
                    os.close(fd)
                self.on_event(message)
                continue
            with self._guard:
                future = self._pending.pop(int(number), None)
            if future is None:
                for fd in fds:
                    os.close(fd)
            else:
                future.set_result((message, fds))

    def _end(self, why: str) -> None:
        with self._guard:
            self.closed.set()
            pending, self._pending = list(self._pending.values()), {}
        self.channel.close()
        for future in pending:
            future.set_exception(KeeperGone(why, where=self.socket_path))
        self.on_close()


def checked(answer: Message) -> Message:
    """The answer if it says ok; raises what the keeper said otherwise."""
    if answer.get("ok"):
        return answer
    kinds: dict[str, type[UnbrokenError]] = {"DoesNotFit": DoesNotFit, "NotYet": NotAnnounced}
    kind = kinds.get(str(answer.get("kind")), KeeperRefused)
    raise kind(str(answer.get("what", "refused")), where=answer.get("where"), hint=answer.get("todo"))


class RankLink(KeeperLink):
    """A training process's side; events go to `listener`, the end of the connection to `ended`."""

    def __init__(
        self,
        socket_path: str | Path,
        *,
        rank: int,
        attempt: int,
        world_size: int,
        local_rank: int,
        listener: Callable[[Message], None] = lambda event: None,
        ended: Callable[[], None] = lambda: None,
        options: Mapping[str, Any] | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self._listener, self._ended = listener, ended
        hello = {
            "role": "rank", "rank": rank, "attempt": attempt, "world_size": world_size, "local_rank": local_rank,
            "pid": os.getpid(), "wishes": dict(options or {}),
        }  # fmt: skip
        super().__init__(socket_path, hello, timeout_s=timeout_s)

    def on_event(self, event: Message) -> None:
        """Hands the event on."""
        self._listener(event)

    def on_close(self) -> None:
        """Says that the keeper is gone."""
        self._ended()


def keeper_command(
    socket_path: Path,
    *,
    node: str,
    run_id: str,
    checkpoints: str | Path,
    budget: int,
    keep: int = 3,
    keep_every: int = 0,
    orphan_grace_s: float = 60.0,
    lease_s: float | None = None,
    room_s: float | None = None,
) -> list[str]:
    """The command line of a keeper."""
    command = [
        sys.executable, "-m", "unbroken.checkpoint.keeper", "--socket", str(socket_path), "--node", node,
        "--run-id", run_id, "--checkpoints", str(checkpoints), "--budget", str(int(budget)), "--keep", str(keep),
        "--keep-every", str(keep_every), "--orphan-grace", str(float(orphan_grace_s)),
    ]  # fmt: skip
    if lease_s is not None:
        command += ["--lease", str(float(lease_s))]
    if room_s is not None:
        command += ["--wait-for-room", str(float(room_s))]
    return command


def start_keeper(command: Sequence[str], socket_path: Path, log: Path, *, within_s: float = 15.0) -> int:
    """Starts a keeper in a session of its own and waits until it listens; its process id.

    Raises KeeperGone with the end of its log if it does not come up, UsageError where the path is too long.
    """
    check_socket(socket_path, "TMPDIR")
    log.parent.mkdir(parents=True, exist_ok=True)
    socket_path.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": python_path()}
    with open(log, "ab") as out:
        process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd="/",
            env=environment,
        )  # fmt: skip
    threading.Thread(target=process.wait, name="unbroken-keeper-reaper", daemon=True).start()
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        with contextlib.suppress(Closed):
            connect(str(socket_path), 1.0).close()
            return process.pid
        if process.poll() is not None:
            break
        time.sleep(0.01)
    tail = log.read_text(errors="replace")[-500:].strip() if log.exists() else ""
    raise KeeperGone(f"the keeper did not start: {tail or 'it wrote nothing'}", where=str(log))
