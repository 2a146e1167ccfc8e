"""Supervisor and agent over their link: answers find their question, and a broken peer harms nobody else."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from unbroken.errors import InputError, RunError
from unbroken.link.address import Address
from unbroken.recover.wire import Link, LinkClosed, Message

Handler = Callable[[Message], Awaitable[Message | None]]


async def nothing(_: Message) -> None:
    return None


class Pair:
    """A server with `handler`, and a client linked to it."""

    def __init__(self, handler: Handler, client: Handler = nothing) -> None:
        self._handler, self._client = handler, client
        self.served: list[Link] = []

    async def __aenter__(self) -> Link:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            link = Link(reader, writer, self._handler)
            self.served.append(link)
            await link.serve()

        self._folder = tempfile.TemporaryDirectory()
        self.path = f"{self._folder.name}/s"
        self._server = await asyncio.start_unix_server(accept, self.path)
        self.link = await Link.connect(Address("unix", self.path), self._client)
        self._task = asyncio.create_task(self.link.serve())
        return self.link

    async def __aexit__(self, *_: object) -> None:
        self.link.close()
        await self._task
        self._server.close()
        for s in self.served:
            s.close()
        self._folder.cleanup()


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 30))  # type: ignore[arg-type]


def test_answers_find_their_question_in_any_order() -> None:
    async def handler(m: Message) -> Message:
        await asyncio.sleep(0.002 * (20 - m["n"]))
        return {"twice": 2 * m["n"]}

    async def main() -> None:
        async with Pair(handler) as link:
            answers = await asyncio.gather(*(link.call("double", n=n) for n in range(20)))
            assert [a["twice"] for a in answers] == [2 * n for n in range(20)]

    run(main)


def test_errors_come_across_in_words() -> None:
    async def handler(m: Message) -> Message | None:
        if m["op"] == "ours":
            raise InputError("it is broken", where="node 3", hint="fix it")
        if m["op"] == "defect":
            raise ZeroDivisionError("oops")
        return {"ok": False}

    async def main() -> None:
        async with Pair(handler) as link:
            with pytest.raises(RunError) as e:
                await link.call("ours")
            assert (e.value.message, e.value.where, e.value.hint) == ("it is broken", "node 3", "fix it")
            with pytest.raises(RunError, match="ZeroDivisionError: oops"):
                await link.call("defect")
            with pytest.raises(RunError, match="'other' failed"):
                await link.call("other")

    run(main)


def test_waiting_calls_end_when_the_other_side_goes() -> None:
    asked = asyncio.Event()

    async def handler(_: Message) -> Message:
        asked.set()
        await asyncio.sleep(60)
        return {}

    async def main() -> None:
        pair = Pair(handler)
        async with pair as link:
            call = asyncio.create_task(link.call("slow"))
            await asked.wait()
            pair.served[0].close()
            with pytest.raises(LinkClosed):
                await call
            assert link.closed.is_set()
            with pytest.raises(LinkClosed):
                await link.call("again")
            link.tell(op="nobody hears")
            link.close()
            link.close()

    run(main)


def test_a_late_answer_is_dropped() -> None:
    async def handler(m: Message) -> Message:
        await asyncio.sleep(m["for"])
        return {"n": m["n"]}

    async def main() -> None:
        async with Pair(handler) as link:
            with pytest.raises(TimeoutError):
                await link.call("slow", timeout=0.05, n=1, **{"for": 0.15})
            assert (await link.call("quick", n=2, **{"for": 0.3}))["n"] == 2

    run(main)


def test_what_is_told_arrives_in_order_and_both_ways() -> None:
    heard: list[int] = []
    done = asyncio.Event()

    async def server(m: Message) -> Message | None:
        return {"echo": m["n"]} if m["op"] == "ask" else None

    async def client(m: Message) -> None:
        heard.append(m["n"])
        if m["n"] == 199:
            done.set()

    async def main() -> None:
        pair = Pair(server, client)
        async with pair as link:
            assert (await link.call("ask", n=1))["echo"] == 1
            for n in range(200):
                pair.served[0].tell(op="told", n=n)
            await done.wait()
            assert heard == list(range(200))

    run(main)


@pytest.mark.parametrize(
    "line",
    [
        b"rubbish\n",
        b"3\n",
        b"null\n",
        b"[]\n",
        b'"text"\n',
        b"\xff\xfe\n",
        b"\n",
        b'{"answer": 77}\n',
        b'{"op":',
    ],
)
def test_rubbish_is_dropped_and_the_next_message_heard(line: bytes) -> None:
    async def handler(m: Message) -> Message:
        return {"op": m.get("op")}

    async def main() -> None:
        pair = Pair(handler)
        async with pair as link:
            reader, writer = await asyncio.open_unix_connection(pair.path)
            writer.write(line if line.endswith(b"\n") else line + b"\n")
            writer.write(json.dumps({"op": "fine", "id": 9}).encode() + b"\n")
            told: dict[str, Any] = json.loads(await reader.readline())
            assert told == {"answer": 9, "ok": True, "op": "fine"}
            writer.close()
            assert (await link.call("other"))["op"] == "other"

    run(main)


def test_a_line_without_end_closes_only_its_own_link() -> None:
    async def handler(m: Message) -> Message:
        return {}

    async def main() -> None:
        pair = Pair(handler)
        async with pair as link:
            reader, writer = await asyncio.open_unix_connection(pair.path)
            writer.write(b"x" * 200_000)  # the server of this test reads lines of up to 64 KiB
            try:
                assert await reader.read() == b""
            except ConnectionResetError:
                pass  # it closed before it had read all of it
            writer.close()
            await link.call("other")

    run(main)


def test_nobody_there() -> None:
    async def main() -> None:
        with pytest.raises(OSError):
            await Link.connect(Address("unix", "/nobody/listens/here"), nothing)

    run(main)
