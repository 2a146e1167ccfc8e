"""The supervisor's port: strangers have ten seconds and 4 KiB, agents what their ranks need, and the run goes on."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.cluster.contract import AgentCommand, Request
from unbroken.detect import HangDetector
from unbroken.errors import RunError, UnsafeFile
from unbroken.link.address import Address
from unbroken.link.bounds import HELLO_BYTES, STRANGERS, proof
from unbroken.link.framing import pack
from unbroken.link.listener import Listener, open_link
from unbroken.link.tls import Identity
from unbroken.progress import RunDir
from unbroken.progress.spec import Timeouts
from unbroken.recover.supervise.attempt.attempt import Attempt
from unbroken.recover.supervise.nodes import desk as module
from unbroken.recover.supervise.nodes.desk import MESSAGE_BYTES, RANK_BYTES, Desk, Inbox, make_token
from unbroken.recover.supervise.nodes.door import Serve
from unbroken.recover.supervise.nodes.fleet import Fleet
from unbroken.recover.supervise.nodes.logs import ShippedLogs
from unbroken.recover.supervise.nodes.node import Node
from unbroken.recover.supervise.record.clock import Clock
from unbroken.recover.wire import Link, Message, read_token

from ..cluster.toy import ToyCluster, ToyOptions
from ..fuzzing import fuzz
from ..hostile import NESTED, closed_within, framed, frames, lines, mutated, receive_frame, send

HELLO = {
    "op": "hello", "id": 2, "run_id": "r", "node": "n0", "pid": 1, "host": "h", "epoch": 1, "attempt": 1,
    "ranks": {"0": {"pid": 5, "running": True, "attached": True, "ours": False}}, "leased": True,
}  # fmt: skip
SAID = [
    HELLO,
    {"op": "beat", "number": 1, "keeper": True},
    {"op": "progress", "attempt": 1, "sent": 5.0, "ranks": {
        "0": {"count": 1, "phase": 2, "source": "page", "total": 9, "steps": [[1, 10, (1.5).hex(), 4.0]]}}},
    {"op": "exited", "attempt": 1, "rank": 1, "code": 0, "signal": None, "time": 5.0, "ours": False, "sent": 6.0},
    {"op": "keeper", "event": "host", "attempt": 1, "step": 4, "rank": 0, "seconds": 0.5, "sent": 6.0},
]  # fmt: skip


class Port:
    """A desk in a thread of its own, with a sink that does with messages what the supervisor does."""

    def __init__(self, folder: Path, identity: Identity | None = None) -> None:
        self._socket, self.identity = folder / "s.sock", identity
        self.run_dir = RunDir(folder / "run")
        self.run_dir.create()
        self.taken: list[Message] = []
        self.said: list[str] = []
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.attempt = Attempt.make(1, ("n0",), 2, HangDetector(Timeouts()), -1, self.run_dir)
        self.address = self.do(self._start())
        self.token = read_token(self.run_dir)

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    async def _start(self) -> Address:
        fleet = Fleet(
            "r", ToyCluster("r", ToyOptions(secrets.token_hex(4))), Request(1), lambda node: AgentCommand("agent"),
            lease_s=5.0, say=self.said.append, clock=Clock(), changed=asyncio.Event(),
        )  # fmt: skip
        await fleet.acquire()
        fleet.nodes["n0"] = Node("n0")
        inbox = Inbox()
        inbox.open(self._take)

        def listen(serve: Serve) -> Listener:
            at = self._socket if self.identity is None else "127.0.0.1"
            self.door = Listener(serve, at, identity=self.identity)
            return self.door

        self.desk = Desk(
            fleet, inbox, make_token(self.run_dir), listen, ShippedLogs(self.run_dir), nproc=2, world_size=2
        )
        return self.desk.address

    async def _close(self) -> None:
        self.desk.close()

    def _take(self, node: Node, message: Message) -> None:
        self.taken.append(message)
        if message.get("op") == "progress" and message["attempt"] == 1:
            self.attempt.take(message["sent"], message["ranks"])
        elif message.get("op") == "exited":
            self.attempt.note_exit(message["rank"], message)

    def raw(self) -> socket.socket:
        """A connection that has not shaken hands."""
        if self.identity is not None:
            return socket.create_connection((self.address.host, self.address.port), timeout=10)
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(10)
        sock.connect(self.address.host)
        return sock

    def connect(self) -> socket.socket:
        sock = self.raw()
        return sock if self.identity is None else self.identity.context(server=False).wrap_socket(sock)

    def join(self, form: Callable[[Any], bytes] | None = None) -> socket.socket:
        """A connection that has shown the token; in lines, as agents of an earlier version send them, or in frames."""
        sock, form = self.connect(), form or line
        shown = form({"op": "token", "id": 1, "token": self.token})
        send(sock, shown)
        if shown.startswith(b"{"):
            assert json.loads(sock.makefile("rb").readline())["ok"]
        else:
            assert receive_frame(sock)["ok"]
        return sock

    def agent(self) -> None:
        """A right agent still finds its supervisor, and is heard."""

        async def meet() -> None:
            async def nothing(_: Message) -> None:
                return None

            link = await Link.connect(self.address, nothing, self.identity)
            serving = asyncio.create_task(link.serve())
            await link.introduce(self.token, self.address, timeout=10)
            await link.call("hello", **{k: v for k, v in HELLO.items() if k not in ("op", "id")})
            before = len(self.taken)
            link.tell(**SAID[2])
            while len(self.taken) == before:
                await asyncio.sleep(0.01)
            link.close()
            await serving

        self.do(asyncio.wait_for(meet(), 20))

    def end(self) -> None:
        self.do(self._close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)


def line(message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


@pytest.fixture(params=["unix", "tls"])
def port(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Port]:
    found = Port(tmp_path, Identity.make("r") if request.param == "tls" else None)
    yield found
    found.end()


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Port]:
    """One port for all fuzzers; in the end it hears a right agent, and took no more memory."""
    found = Port(tmp_path_factory.mktemp("attacked"))
    before = psutil.Process().memory_info().rss
    yield found
    found.agent()
    assert psutil.Process().memory_info().rss - before < 300 << 20
    found.end()


# ------------------------------------------------------------------------------------------------ examples


@pytest.mark.parametrize(
    "said",
    [NESTED, b"x" * (HELLO_BYTES + 1), b"rubbish\n", line({"op": "beat", "number": 1}), line({"op": "hello"}), line([]),
     line({"op": "token", "token": "wrong"}), line({"op": "token", "token": 5, "id": 1})],
)  # fmt: skip
def test_a_stranger_who_shows_no_token_is_cut_off(port: Port, said: bytes) -> None:
    with port.connect() as sock:
        send(sock, said)
        assert closed_within(sock, 5)
    port.agent()


def test_a_stranger_who_says_nothing_is_cut_off_and_keeps_no_agent_out(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = [port.raw() for _ in range(2 * STRANGERS)]
    port.agent()
    assert port.door.strangers <= STRANGERS
    for sock in silent:
        sock.close()
    monkeypatch.setattr(module, "HELLO_S", 0.3)
    with port.connect() as sock:
        assert closed_within(sock, 5)
    with port.join() as sock:  # the token alone is not enough
        assert closed_within(sock, 5)


def test_strangers_cost_no_memory(port: Port) -> None:
    before = psutil.Process().memory_info().rss
    for _ in range(8):
        with port.connect() as sock:
            for _ in range(64):
                if not send(sock, b"x" * (1 << 20)):
                    break
    assert psutil.Process().memory_info().rss - before < 64 << 20
    port.agent()


def test_a_line_may_be_as_long_as_a_nodes_ranks_need(port: Port) -> None:
    most = MESSAGE_BYTES + 2 * RANK_BYTES
    with port.join() as sock:
        send(sock, line({**HELLO, "padding": "x" * (most - 2000)}))
        assert json.loads(sock.makefile("rb").readline())["ok"]
        send(sock, b"x" * (most + 2))
        assert closed_within(sock, 5)
    port.agent()


@pytest.mark.parametrize(
    "message",
    [
        {"op": "progress", "attempt": 1, "sent": 5.0, "ranks": {"7": {}}},
        {"op": "progress", "attempt": 1, "sent": float("nan"), "ranks": {}},
        {"op": "progress", "attempt": 1, "sent": 5.0, "ranks": {"0": {"count": 1, "phase": 99, "steps": []}}},
        {"op": "progress", "attempt": 1, "sent": 5.0, "ranks": {"0": {"count": 1, "phase": 2, "steps": [[1, 2, "x", 3.0]]}}},
        {"op": "exited", "attempt": 1, "rank": 9, "code": 0, "signal": None, "time": 5.0, "ours": False},
        {"op": "exited", "attempt": 1, "rank": 0, "code": None, "signal": None, "time": 5.0, "ours": False},
        {"op": "keeper", "event": "host", "attempt": 1, "step": 4, "rank": 2},
        {"op": "keeper", "event": 5},
        {"op": "beat", "number": []},
    ],
)  # fmt: skip
def test_what_an_agent_cannot_mean_is_passed_over(
    port: Port, message: Message, caplog: pytest.LogCaptureFixture
) -> None:
    with port.join() as sock:
        heard = sock.makefile("rb")
        send(sock, line(HELLO) + line({**message, "id": 3}) + line({**SAID[2], "id": 4}))
        answers = {m.get("answer"): m for m in (json.loads(heard.readline()) for _ in range(3))}
        assert not answers[3]["ok"] and "makes no sense" in answers[3]["what"]
        assert answers[4]["ok"]
    assert message not in port.taken
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_who_took_a_dead_supervisors_port_does_not_get_the_token(port: Port, tmp_path: Path) -> None:
    heard: list[bytes] = []

    async def meet() -> None:
        async def thief(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # It may ask the living supervisor for a proof, which holds for that one's port only.
            (size,) = struct.unpack(">I", await reader.readexactly(4))
            asked = json.loads(await reader.readexactly(size))
            theirs, ours = await open_link(port.address, port.identity, 10)
            ours.write(line({"op": "prove", "id": 1, "nonce": asked["nonce"]}))
            told = json.loads(await theirs.readline())
            ours.close()
            writer.write(pack({"answer": asked["id"], "ok": True, "proof": told["proof"]}))
            heard.append(await reader.read())
            writer.close()

        async def nothing(_: Message) -> None:
            return None

        # One who has the run's certificate too.
        server = Listener(
            thief, tmp_path / "thief.sock" if port.identity is None else "127.0.0.1", identity=port.identity
        )
        at = server.address
        link = await Link.connect(at, nothing, port.identity)
        serving = asyncio.create_task(link.serve())
        with pytest.raises(RunError, match="not this run's supervisor"):
            await link.introduce(port.token, at, timeout=10)
        await serving
        while not heard:
            await asyncio.sleep(0.01)
        server.close()

    port.do(asyncio.wait_for(meet(), 20))
    assert heard == [b""]
    assert proof("t", "supervisor", "n", "1") != proof("t", "supervisor", "n", "2")


def test_a_token_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    run_dir.token.write_text("planted\n")
    run_dir.token.chmod(0o644)
    with pytest.raises(UnsafeFile, match="chmod 600"):
        read_token(run_dir)
    run_dir.token.chmod(0o600)
    assert read_token(run_dir) == "planted"
    elsewhere = tmp_path / "elsewhere"
    run_dir.token.rename(elsewhere)
    run_dir.token.symlink_to(elsewhere)
    with pytest.raises(OSError):
        read_token(run_dir)


# ------------------------------------------------------------------------------------------------- fuzzers


said = st.one_of(lines, frames, mutated(SAID).flatmap(lambda m: st.sampled_from([line(m), framed(line(m))])))


@fuzz(60)
@given(sent=st.lists(said, min_size=1, max_size=3))
def test_strangers(attacked: Port, sent: list[bytes]) -> None:
    taken = len(attacked.taken)
    with attacked.connect() as sock:
        for data in sent:
            send(sock, data)
    assert len(attacked.taken) == taken


@fuzz(60)
@given(sent=st.lists(said, min_size=1, max_size=4), earlier=st.booleans())
def test_agents(attacked: Port, sent: list[bytes], earlier: bool) -> None:
    form = line if earlier else lambda m: framed(line(m))
    errors: list[logging.LogRecord] = []
    watch = logging.Handler(logging.ERROR)
    watch.emit = errors.append  # type: ignore[method-assign]
    logging.getLogger("unbroken").addHandler(watch)
    try:
        with attacked.join(form) as sock:
            send(sock, form(HELLO))
            for data in sent:
                if not send(sock, data):
                    break
            send(sock, (b"\n" if earlier else b"") + form({"op": "beat", "number": 7, "id": 77}))
            sock.settimeout(0.05)
            deadline = time.monotonic() + 10
            heard = b""
            while b'"answer":77' not in heard and time.monotonic() < deadline:
                try:
                    piece = sock.recv(1 << 16)
                except (TimeoutError, ConnectionError):  # it may close with what it was sent unread
                    break
                if not piece:
                    break
                heard += piece
    finally:
        logging.getLogger("unbroken").removeHandler(watch)
    assert not errors, [r.getMessage() for r in errors]
