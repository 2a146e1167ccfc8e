"""Logs of a node that has not got the run directory: in pieces over the link, each byte once, or said to be lost."""

from __future__ import annotations

import asyncio
import base64
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from unbroken.errors import RunError
from unbroken.link.bounds import Malformed
from unbroken.link.calls import LinkClosed
from unbroken.progress import RunDir
from unbroken.recover.node.logs import shipping
from unbroken.recover.node.logs.shipping import LogShipper
from unbroken.recover.supervise.nodes.logs import ShippedLogs


class FakeLink:
    """Answers as the supervisor does; `breaks_after` calls it is gone, with or without having written."""

    def __init__(self, logs: ShippedLogs, *, breaks_after: int = 1 << 30, answers_last: bool = True) -> None:
        self._logs, self._left, self._answers_last = logs, breaks_after, answers_last
        self.closed = asyncio.Event()
        self.longest = 0

    async def call(self, op: str, *, timeout: float, **fields: Any) -> dict[str, Any]:
        assert op == "logs"
        self.longest = max(self.longest, len(str(fields)))
        self._left -= 1
        if self._left <= 0:
            self.closed.set()
            if self._answers_last:
                self._logs.take("n0", fields)
            raise LinkClosed("gone")
        return self._logs.take("n0", fields)


class Place:
    def __init__(self, folder: Path) -> None:
        self.own, self.run_dir = RunDir(folder / "scratch" / "run"), RunDir(folder / "run")
        self.run_dir.create()
        self.log = self.own.rank_log(1, "n0", 0)
        self.log.parent.mkdir(parents=True)
        self.there = self.run_dir.rank_log(1, "n0", 0)
        self.shipper = LogShipper(self.own, "n0")

    def write(self, data: bytes) -> None:
        with open(self.log, "ab") as f:
            f.write(data)

    async def send(self, link: FakeLink) -> None:
        """Until all is sent, or the link breaks."""
        running = asyncio.create_task(self.shipper.run(link))  # type: ignore[arg-type]
        catching = asyncio.create_task(self.shipper.catch_up(10))
        await asyncio.wait({running, catching}, return_when=asyncio.FIRST_COMPLETED)
        link.closed.set()
        await running
        catching.cancel()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_every_byte_comes_once_over_breaks_and_a_successor(place: Place) -> None:
    async def scenario() -> None:
        content = b""
        for n in range(6):
            more = os.urandom(200_000) + b"\n"
            place.write(more)
            content += more
            link = FakeLink(ShippedLogs(place.run_dir), breaks_after=1 + n, answers_last=n % 2 == 0)
            await place.send(link)
        await place.send(link := FakeLink(ShippedLogs(place.run_dir)))
        assert place.there.read_bytes() == content
        assert link.longest < 1 << 20

    asyncio.run(scenario())


def test_what_the_supervisor_has_is_let_go_here_and_an_older_attempts_log_goes(place: Place) -> None:
    async def scenario() -> None:
        place.write(os.urandom(20 << 20))
        await place.send(FakeLink(ShippedLogs(place.run_dir)))
        assert place.log.stat().st_blocks * 512 <= 13 << 20
        later = place.own.rank_log(2, "n0", 0)
        later.parent.mkdir(parents=True)
        later.write_bytes(b"two\n")
        await place.send(FakeLink(ShippedLogs(place.run_dir)))
        assert not place.log.exists() and later.exists()
        assert place.there.stat().st_size == 20 << 20
        assert place.run_dir.rank_log(2, "n0", 0).read_bytes() == b"two\n"

    asyncio.run(scenario())


def test_what_comes_faster_than_it_can_be_sent_is_said_to_be_lost(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, "BACKLOG", 100_000)

    async def scenario() -> None:
        place.write(b"first\n")
        await place.send(FakeLink(ShippedLogs(place.run_dir)))
        place.write(b"flood\n" * 100_000 + b"last\n")
        await place.send(FakeLink(ShippedLogs(place.run_dir)))
        place.write(b"more\n")
        await place.send(FakeLink(ShippedLogs(place.run_dir)))
        text = place.there.read_text()
        assert text.startswith("first\n\n[unbroken: ") and "bytes of this log are lost" in text
        assert text.endswith("last\nmore\n") and len(text) < 150_000

    asyncio.run(scenario())


def test_an_agents_log_of_a_node_that_began_anew_comes_after_the_old_one(
    place: Place, tmp_path: Path
) -> None:
    async def scenario() -> None:
        log = place.own.agent_log("n0")
        log.parent.mkdir(parents=True)
        log.write_bytes(b"a long first life\n")
        await place.send(FakeLink(ShippedLogs(place.run_dir)))
        again = RunDir(tmp_path / "other" / "run")
        again.agent_log("n0").parent.mkdir(parents=True)
        again.agent_log("n0").write_bytes(b"short\n")
        place.shipper = LogShipper(again, "n0")
        await place.send(FakeLink(ShippedLogs(place.run_dir)))
        with open(again.agent_log("n0"), "ab") as f:
            f.write(b"then more than before\n")
        await place.send(FakeLink(ShippedLogs(place.run_dir)))
        assert place.run_dir.agent_log("n0").read_text() == (
            "a long first life\nshort\nthen more than before\n"
        )

    asyncio.run(scenario())


def pack(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


@pytest.mark.parametrize(
    "piece",
    [
        {"log": "../../etc/passwd", "attempt": 1, "at": 0, "data": ""},
        {"log": "rank-0/../../x", "attempt": 1, "at": 0, "data": ""},
        {"log": "rank-0", "attempt": -1, "at": 0, "data": ""},
        {"log": "rank-0", "attempt": 1, "at": "0", "data": ""},
        {"log": "rank-0", "attempt": 1, "at": 0, "data": "no base64!"},
        {"log": "rank-0", "attempt": 1, "at": 0, "data": pack(b"\0" * (64 << 20))},
        {"log": "rank-0", "attempt": 1, "at": 0, "data": 7},
        "rank-0",
    ],
)
def test_what_is_no_piece_of_a_log_is_refused(place: Place, piece: Any) -> None:
    with pytest.raises(Malformed):
        ShippedLogs(place.run_dir).take("n0", {"life": "x", "pieces": [piece]})
    assert not place.there.exists()


def test_a_run_directory_that_was_deleted_does_not_come_back(place: Place) -> None:
    logs = ShippedLogs(place.run_dir)
    place.run_dir.path.rename(place.run_dir.path.with_name("moved"))
    with pytest.raises(RunError, match="is gone"):
        logs.take(
            "n0", {"life": "x", "pieces": [{"log": "rank-0", "attempt": 1, "at": 0, "data": pack(b"x")}]}
        )
    assert not place.run_dir.path.exists()


def test_a_full_disk_takes_it_later(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from unbroken.recover.supervise.nodes import logs as module

    logs, piece = (
        ShippedLogs(place.run_dir),
        {"log": "rank-0", "attempt": 1, "at": 0, "data": pack(b"0123456789")},
    )
    real, room = os.pwrite, 4

    def pwrite(fd: int, data: bytes, at: int) -> int:
        if at >= room:
            raise OSError(28, "No space left on device")
        return real(fd, data[: room - at], at)

    monkeypatch.setattr(module.os, "pwrite", pwrite)
    assert logs.take("n0", {"life": "x", "pieces": [piece]}) == {"have": [4]}
    with pytest.raises(RunError, match="No space left"):
        logs.take("n0", {"life": "x", "pieces": [{**piece, "at": 4, "data": pack(b"456789")}]})
    monkeypatch.setattr(module.os, "pwrite", real)
    assert logs.take("n0", {"life": "x", "pieces": [piece]}) == {"have": [10]}
    assert place.there.read_bytes() == b"0123456789"
