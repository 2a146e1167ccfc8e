"""Questions and answers over one connection in an event loop: answers find their question by its id.

What comes over a link is bounded: a message by `limit`, which its owner raises once it knows the other side; what waits
to be handled by `PENDING`; what waits to be sent by `limit` again, since whoever does not read must not cost memory.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from ..errors import RunError, UnbrokenError
from ..waiting import wait_within
from .address import Address
from .bounds import READ_AHEAD, Malformed, Message, proof, same_secret
from .framing import Form, Unpacker, pack
from .listener import open_link
from .tls import Identity

FROM_SUPERVISOR = 64 << 20
"""Bytes of one message of the supervisor, whom an agent has asked for a proof: where to restore from, for 100,000 ranks."""
PENDING = 1024
"""Messages of one link that are being handled at a time."""
IN_ONE_GO = 2
"""Messages of one link that are taken before the others have their turn: their leases wait for that."""
_log = logging.getLogger(__name__)


class LinkClosed(RunError):
    """The other side is gone."""


class Link:
    """One connection. `call` asks and waits for the answer; `tell` sends and goes on; what the other side
    asks or tells comes to `on_message`, whose return value is the answer to a request.

    A message above `limit` bytes ends it. While it is `strict`, so does what is no message; else that is dropped.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_message: Callable[[Message], Awaitable[Message | None]],
        *,
        limit: int = READ_AHEAD,
        strict: bool = False,
        take_news: Callable[[Message], bool] | None = None,
        form: Form | None = None,
    ) -> None:
        """`form` is that of the other side, None where it speaks first and shows it.

        `take_news` is given each message that wants no answer, in order and without a task of its own, which costs more than
        most of them do; where it returns False the message goes the way of all others.
        """
        self._take_news = take_news
        self._reader, self._writer, self._on_message = reader, writer, on_message
        self.strict = strict
        self._unpacker = Unpacker(limit, form=form)
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.closed = asyncio.Event()

    @classmethod
    async def connect(
        cls,
        address: Address,
        on_message: Callable[[Message], Awaitable[Message | None]],
        identity: Identity | None = None,
        *,
        timeout: float = 3.0,
    ) -> Link:
        """Connects, with the run's certificate where that is asked for. Raises OSError (an SSLError is one), TimeoutError."""
        reader, writer = await open_link(address, identity, timeout)
        return cls(reader, writer, on_message, limit=FROM_SUPERVISOR, form=Form.FRAMES)

    @property
    def limit(self) -> int:
        """Bytes of the longest message that is taken."""
        return self._unpacker.limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._unpacker.limit = limit

    async def introduce(self, token: str, address: Address, *, timeout: float) -> Message:
        """Shows the token to a supervisor that has proven to know it; what the supervisor says of itself.

        An address is free again when its owner dies, and another may listen there next: the token is sent to nobody who
        cannot prove to have it, for this very address. Raises RunError, LinkClosed, TimeoutError.
        """
        nonce = secrets.token_hex(16)
        answer = await self.call("prove", timeout=timeout, nonce=nonce)
        if not same_secret(answer.get("proof"), proof(token, "supervisor", nonce, address.name)):
            self.close()
            raise RunError("whoever listens there is not this run's supervisor", where=str(address))
        return await self.call("token", timeout=timeout, token=token)

    def tell(self, **message: Any) -> None:
        """Sends without waiting; does nothing on a closed link. One whose other side does not read is closed."""
        # A connection that was lost while nobody read from it is closing before it is known to be closed.
        if self.closed.is_set() or self._writer.is_closing():
            return
        self._writer.write(pack(message, form=self._unpacker.form or Form.FRAMES))
        if self._writer.transport.get_write_buffer_size() > max(self.limit, FROM_SUPERVISOR):
            _log.warning("the other side reads nothing; the link is closed")
            self.close()

    async def call(self, op: str, *, timeout: float = 30.0, **fields: Any) -> Message:
        """Asks and returns the answer. Raises LinkClosed, TimeoutError, or RunError with the other side's words."""
        if self.closed.is_set():
            raise LinkClosed(f"the link is closed; '{op}' was not sent")
        number = next(self._ids)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self.tell(op=op, id=number, **fields)
            answer = await wait_within(future, timeout)
        finally:
            self._waiting.pop(number, None)
        if not answer.get("ok", False):
            raise RunError(
                answer.get("what", f"'{op}' failed"), where=answer.get("where"), hint=answer.get("todo")
            )
        return answer

    async def serve(self) -> None:
        """Reads until the other side is gone; then every waiting call raises LinkClosed."""
        taken = 0
        try:
            while (body := await self._body()) is not None:
                try:
                    message = self._unpacker.decode(body)
                except Malformed as e:
                    if self.strict:
                        raise
                    _log.warning("what is no message came over the link; dropped: %s", e)
                    continue
                if "answer" in message:
                    number = message["answer"]
                    waiting = self._waiting.get(number) if type(number) is int else None
                    if waiting is not None and not waiting.done():
                        waiting.set_result(message)
                    continue
                if "id" not in message and self._read_news(message):
                    taken += 1
                    if taken % IN_ONE_GO == 0:
                        await asyncio.sleep(0)
                    continue
                if len(self._tasks) >= PENDING:
                    raise Malformed(f"{PENDING} messages of this link are being handled already")
                task = asyncio.create_task(self._handle(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except Malformed as e:
            _log.warning("the link is closed: %s", e)
        except OSError:
            pass  # the other side is gone, in whatever way
        finally:
            self.close()

    def _read_news(self, message: Message) -> bool:
        """Whether the message was taken at once, well or badly: a defect in one must not end the link."""
        if self._take_news is None:
            return False
        try:
            return self._take_news(message)
        except (UnbrokenError, Malformed) as e:
            _log.warning("a message was passed over: %s", e)
        except Exception:  # noqa: BLE001  a defect in one message must not end the link; it is logged
            _log.exception("a message could not be handled: %s", message.get("op"))
        return True

    async def _body(self) -> bytes | None:
        """The next message's JSON; None when the other side is gone. Raises Malformed for one above the limit."""
        while (body := self._unpacker.next()) is None:
            piece = await self._reader.read(READ_AHEAD)
            if not piece:
                return None
            self._unpacker.feed(piece)
        return body

    async def _handle(self, message: Message) -> None:
        number = message.get("id")
        try:
            answer = await self._on_message(message)
        except UnbrokenError as e:
            answer = {"ok": False, "what": e.message, "where": e.where, "todo": e.hint}
        except Malformed as e:
            answer = {"ok": False, "what": f"the message makes no sense: {e}"}
        except Exception as e:  # noqa: BLE001  a defect in one message must not end the link; it is logged and told
            _log.exception("a message could not be handled: %s", message.get("op"))
            answer = {"ok": False, "what": f"{type(e).__name__}: {e}"}
        if type(number) in (int, str):
            self.tell(**{"answer": number, "ok": True, **(answer or {})})

    def close(self) -> None:
        """Closes; idempotent."""
        if self.closed.is_set():
            return
        self.closed.set()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(LinkClosed("the other side is gone"))
        self._writer.close()
