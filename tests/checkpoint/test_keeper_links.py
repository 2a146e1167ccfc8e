"""The keeper's socket and its port for peers: nonsense ends the link it came over, and no snapshot is lost by it."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.keepers import FakeAgent, FakeRank, alive, until
from unbroken.checkpoint.keeper.wire import VERSION
from unbroken.link.address import Address
from unbroken.link.bounds import HELLO_BYTES, STRANGERS
from unbroken.link.tls import Identity

from ..fuzzing import fuzz
from ..hostile import NESTED, closed_within, framed, frames, mutated, receive_frame, send

TOKEN = "planted-secret-of-the-run"
GROWTH = 200 << 20


class Attacked:
    """A keeper with a snapshot of rank 0, of 2, that must survive whatever the others say."""

    def __init__(self, folder: Path) -> None:
        self.agent = FakeAgent(folder)
        self.agent.attempt(1, ranks=2)
        self.ranks = [FakeRank(self.agent, rank=r, world_size=2) for r in range(2)]
        for r in self.ranks:
            r.save(5, fill=3 + r.rank)
        self.identity = Identity.make("keepers")
        link = self.ranks[0].link
        asked = {"op": "peer_listen", "host": "127.0.0.1", "identity": self.identity.pem}
        self.peers = Address.parse(link.request(asked)[0]["address"])
        self.here = Address.parse(link.request({"op": "peer_listen"})[0]["address"])
        self.ranks[0].link.request({"op": "peer_target", "token": TOKEN, "node": "", "address": ""})
        self.rss = psutil.Process(self.agent.pid).memory_info().rss

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(10)
        sock.connect(str(self.agent.socket))
        return sock

    def peer(self) -> socket.socket:
        """From another machine."""
        return self.identity.context(server=False).wrap_socket(self.raw_peer())

    def raw_peer(self) -> socket.socket:
        """One that has not shaken hands."""
        return socket.create_connection((self.peers.host, self.peers.port), timeout=10)

    def neighbour(self) -> socket.socket:
        """From this machine."""
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(10)
        sock.connect(self.here.host)
        return sock

    def open(self, where: str) -> socket.socket:
        return {"socket": self.connect, "peers": self.peer, "here": self.neighbour}[where]()

    def join(self, role: str) -> socket.socket:
        """A connection that has said hello; a rank is one that has no snapshot."""
        sock = self.connect()
        more = (
            {"rank": 7, "attempt": 1, "world_size": 2, "local_rank": 7, "wishes": {}}
            if role == "rank"
            else {}
        )
        send(sock, frame({"op": "hello", "id": 1, "version": VERSION, "role": role, **more}))
        assert receive_frame(sock)["ok"]
        return sock

    def lives(self) -> None:
        """The keeper answers, has all its snapshots, gives them away, and has printed no traceback."""
        assert alive(self.agent.pid)
        assert {(h.step, h.rank, h.everywhere) for h in self.agent.link.inventory() if h.rank < 2} == {
            (5, 0, True),
            (5, 1, True),
        }
        assert self.ranks[0].fetch(1, 5)[0] == 3
        self.ranks[0].link.request({"op": "release"})
        assert "Traceback" not in self.agent.log.read_text()
        assert psutil.Process(self.agent.pid).memory_info().rss - self.rss < GROWTH
        for where in ("peers", "here"):
            with self.open(where) as sock:
                send(sock, frame({"token": TOKEN}) + frame({"op": "get", "attempt": 1, "step": 5, "rank": 1}))
                assert receive_frame(sock)["found"]

    def end(self) -> None:
        for r in self.ranks:
            r.die()
        self.agent.end()


def frame(message: Any) -> bytes:
    return framed(json.dumps(message).encode())


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """One keeper for all of this file; looked at after each example, and whole in the end."""
    found = Attacked(tmp_path_factory.mktemp("attacked"))
    yield found
    found.lives()
    found.end()


# ------------------------------------------------------------------------------------------------ examples


@pytest.mark.parametrize("body", [NESTED, b"[]", b"\xff", b'{"op":' + NESTED])
@pytest.mark.parametrize("where", ["socket", "peers", "here"])
def test_one_frame_of_a_stranger_ends_its_link_only(attacked: Attacked, where: str, body: bytes) -> None:
    with attacked.open(where) as sock:
        send(sock, framed(body))
        assert closed_within(sock, 5)
    attacked.lives()


def test_descriptors_that_a_peer_of_this_machine_sends_are_not_kept(attacked: Attacked) -> None:
    keeper = psutil.Process(attacked.agent.pid)
    before = keeper.num_fds()
    get = {"op": "get", "attempt": 1, "step": 99, "rank": 1}
    with open(os.devnull) as file, attacked.neighbour() as sock:
        for message in ({"token": TOKEN}, get):
            socket.send_fds(sock, [frame(message)], [file.fileno()] * 60)
        assert not receive_frame(sock)["found"]
        assert closed_within(sock, 5)
    until(lambda: keeper.num_fds() < before + 10)
    attacked.lives()


@pytest.mark.parametrize("where", ["socket", "peers", "here"])
def test_a_stranger_may_send_a_few_kib_and_no_more(attacked: Attacked, where: str) -> None:
    for length in (HELLO_BYTES + 1, (256 << 20) - 1, (1 << 32) - 1):
        with attacked.open(where) as sock:
            send(sock, framed(b"", length))
            assert closed_within(sock, 5)
    attacked.lives()


@pytest.mark.parametrize("where", ["socket", "peers", "here"])
def test_too_many_strangers_push_out_the_oldest(attacked: Attacked, where: str) -> None:
    open_one = {"socket": attacked.connect, "peers": attacked.raw_peer, "here": attacked.neighbour}[where]
    silent = []
    for _ in range(STRANGERS + 8):
        silent.append(open_one())
        time.sleep(0.002)  # it accepts one after the other, and no backlog is meant here
    assert closed_within(silent[0], 5)
    attacked.lives()
    for sock in silent:
        sock.close()


@pytest.mark.slow
def test_who_says_nothing_is_cut_off(attacked: Attacked) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(attacked.open(where)) for where in ("socket", "peers", "here")]
        for sock in silent:
            send(sock, b"\0")
        assert all(closed_within(sock, 15) for sock in silent)
    attacked.lives()


def test_what_lasts_is_for_the_agent_alone(attacked: Attacked) -> None:
    with attacked.connect() as sock:
        for op in ("close", "settle", "flush", "pull"):
            send(sock, frame({"op": op, "id": 1, "attempt": 1, "flush": False}))
            assert not receive_frame(sock)["ok"]
    for role in ("visitor", "rank"):
        with attacked.join(role) as sock:
            for op in ("close", "settle", "flush", "attempt", "lease", "hello"):
                send(sock, frame({"op": op, "id": 2, "attempt": 1, "role": "agent", "version": VERSION}))
                assert not receive_frame(sock)["ok"], op
    attacked.lives()


def test_a_visitor_only_looks(attacked: Attacked) -> None:
    with attacked.join("visitor") as sock:
        for op in ("arena", "claim", "seal", "adopt", "fetch", "peer_target", "give_up", "wrote"):
            send(sock, frame({"op": op, "id": 2, "bytes": 4096, "count": 1}))
            assert not receive_frame(sock)["ok"], op
        send(sock, frame({"op": "inventory", "id": 3}))
        assert receive_frame(sock)["ok"]


def test_descriptors_are_bounded_and_closed(attacked: Attacked) -> None:
    before = psutil.Process(attacked.agent.pid).num_fds()
    with attacked.join("rank") as sock:
        null = os.open("/dev/null", os.O_RDONLY)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("60i", *[null] * 60))]
        body = json.dumps({"op": "ping", "id": 1, "x": "y" * 600}).encode()
        data = struct.pack(">I", len(body)) + body
        for at in range(0, len(data), 100):
            try:
                sock.sendmsg([data[at : at + 100]], rights)
            except OSError:
                break
        os.close(null)
        assert closed_within(sock, 5)
    attacked.lives()
    deadline = time.monotonic() + 5
    while psutil.Process(attacked.agent.pid).num_fds() > before + 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_peer_cannot_store_what_is_no_snapshot(attacked: Attacked) -> None:
    header = {
        "op": "put",
        "attempt": 1,
        "step": 6,
        "rank": 1,
        "world_size": 2,
        "file_bytes": 4096,
        "part": {},
    }
    for wrong in ({"file_bytes": 0}, {"file_bytes": -5}, {"file_bytes": 1 << 60}, {"rank": -1}, {"rank": 2}, {"part": 5},
                  {"world_size": 10**30}, {"attempt": "1"}, {"step": 1e300}, {"attempt": 0}):  # fmt: skip
        with attacked.peer() as sock:
            send(sock, frame({"token": TOKEN}) + frame({**header, **wrong}))
            try:
                assert not receive_frame(sock).get("ok"), wrong
            except OSError:
                pass  # it hung up
    attacked.lives()


# ------------------------------------------------------------------------------------------------- fuzzers

BUFFER = {"buffer": 5, "bytes": 4096, "count": 2, "step": 6, "file_bytes": 4096, "world_size": 2, "part": {}}
RANK = [
    {"op": "hello", "version": VERSION, "role": "rank", "rank": 7, "attempt": 1, "world_size": 2, "wishes": {}},
    {"op": "hello", "version": VERSION, "role": "visitor"},
    *({"op": op, "id": 3, **BUFFER} for op in ("arena", "claim", "unclaim", "seal", "give_up", "wrote")),
    {"op": "claim", "id": 3, "bytes": 4096, "now": True},
    {"op": "adopt", "id": 3, "buffers": [{"id": 1, "snapshot": {"attempt": 1, "step": 6}}]},
    {"op": "whole", "id": 3, "attempt": 1, "step": 6},
    {"op": "reclaim", "id": 3, "buffers": [1]},
    {"op": "fetch", "id": 3, "attempt": 1, "step": 5, "rank": 0},
    {"op": "pull", "id": 3, "attempt": 1, "step": 5, "address": "127.0.0.1:1"},
    {"op": "release", "id": 3, "restored": {"attempt": 1, "step": 5}},
    *({"op": op, "id": 3} for op in ("ping", "inventory", "candidates", "bye", "close", "flush", "settle", "nothing")),
]  # fmt: skip
AGENT = [
    {"op": "complete", "id": 3, "attempt": 1, "step": 5},
    {"op": "attempt", "id": 3, "attempt": 0, "world_size": 2, "ranks": {"0": 0}, "candidates": []},
    {"op": "flush", "id": 3, "deadline_s": 0.01},
    {"op": "settle", "id": 3, "attempt": 0, "deadline_s": 0.01, "gone": []},
    {"op": "ping", "id": 3},
]
PEER = [
    {"op": "put", "attempt": 1, "step": 6, "rank": 1, "world_size": 2, "file_bytes": 4096, "part": {}},
    {"op": "get", "attempt": 1, "step": 5, "rank": 0},
]


@fuzz(60)
@given(sent=st.lists(st.one_of(frames, mutated(RANK).map(frame)), min_size=1, max_size=3))
def test_strangers(attacked: Attacked, sent: list[bytes]) -> None:
    with attacked.connect() as sock:
        for data in sent:
            send(sock, data)
    assert alive(attacked.agent.pid)


# What ends its attempt or its lease is a rank's or an agent's to say; what makes no sense is nobody's.
@fuzz(100)
@given(
    role=st.sampled_from(["rank", "visitor", "agent"]),
    data=st.data(),
)
def test_those_who_said_hello(attacked: Attacked, role: str, data: st.DataObject) -> None:
    known = AGENT if role == "agent" else RANK
    sent = data.draw(st.lists(st.one_of(frames, mutated(known).map(frame)), min_size=1, max_size=4))
    with attacked.join(role) as sock:
        for piece in sent:
            if not send(sock, piece):
                break
    assert alive(attacked.agent.pid)
    assert "Traceback" not in attacked.agent.log.read_text(), sent


@fuzz(80)
@given(
    sent=st.lists(st.one_of(frames, mutated(PEER).map(frame)), min_size=1, max_size=3),
    knows=st.booleans(),
    where=st.sampled_from(["peers", "here"]),
)
def test_peers(attacked: Attacked, sent: list[bytes], knows: bool, where: str) -> None:
    with attacked.open(where) as sock:
        if knows:
            send(sock, frame({"token": TOKEN}))
        for piece in sent:
            if not send(sock, piece):
                break
    assert alive(attacked.agent.pid)
    assert "Traceback" not in attacked.agent.log.read_text(), sent
