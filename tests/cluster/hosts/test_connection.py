"""What a host's first words mean, and its silence: a busy host is no host without our program."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unbroken.cluster.contract import Request
from unbroken.cluster.hosts import connection
from unbroken.cluster.hosts.cluster import HostsCluster
from unbroken.cluster.hosts.connection import Connection, HostRefused
from unbroken.cluster.hosts.options import Host, HostsOptions
from unbroken.errors import RunError


class FakeProcess:
    """Says these lines, each after so many seconds; then it ends, or stays silent."""

    def __init__(self, *lines: tuple[float, str], ends: bool = True, error: str = "") -> None:
        self._lines, self._ends, self._error = list(lines), ends, error
        self.stdout = self.stderr = self.stdin = self

    async def readline(self) -> str:
        if not self._lines:
            if not self._ends:
                await asyncio.sleep(60)
            return ""
        after, line = self._lines.pop(0)
        await asyncio.sleep(after)
        return line

    async def read(self) -> str:
        return self._error

    def write_eof(self) -> None:
        self._ends = True


def ask(process: FakeProcess, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str]]:
    """The report, or the error; and why it was down meanwhile."""
    monkeypatch.setattr(connection, "_ORDER_S", 0.05)
    monkeypatch.setattr(connection, "_SLOW_S", 0.3)
    down: list[str] = []

    async def main() -> Any:
        link = Connection(
            "r", Host("h1"), HostsOptions(hosts=("h1",)), on_up=lambda *_: None, on_down=lambda c: down.append(f"{c.why} {c.slow}"),
            on_event=lambda *_: None,
        )  # fmt: skip
        try:
            return await link._read_report(process)
        except RunError as e:
            return e

    return asyncio.run(main()), down


REPORT = json.dumps({"unbroken": "1"}) + "\n"


def test_a_busy_host_is_waited_for_and_said_to_be_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    found, down = ask(FakeProcess((0.0, "welcome\n"), (0.15, REPORT)), monkeypatch)
    assert found == {"unbroken": "1"}
    assert len(down) == 1 and "the host is busy" in down[0] and down[0].endswith("True")


def test_one_that_never_says_anything_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = ask(FakeProcess(ends=False), monkeypatch)
    assert not isinstance(found, HostRefused) and "did not start within" in found.message


def test_a_python_without_our_program_is_refused_with_its_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    found, down = ask(FakeProcess(error="No module named unbroken"), monkeypatch)
    assert isinstance(found, HostRefused) and "No module named unbroken" in found.message and not down


def test_whatever_breaks_a_connection_that_begins_it_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library raised something else than expected: the host was never tried again, and whoever waited for it hung for ever."""
    monkeypatch.setattr(connection, "_AGAIN_S", 0.01)
    why: list[str] = []

    async def main() -> None:
        link = Connection(
            "r", Host("h1"), HostsOptions(hosts=("h1",)), on_up=lambda *_: None, on_down=lambda c: why.append(c.why), on_event=lambda *_: None
        )  # fmt: skip
        tries = iter([ValueError("no such channel"), BrokenPipeError("closed"), RunError("not there")])

        async def break_down(stack: object) -> None:
            raise next(tries, RunError("still not there"))

        monkeypatch.setattr(link, "_open", break_down)
        link.start()
        async with asyncio.timeout(5):
            await link.tried.wait()
            while len(why) < 4:
                await asyncio.sleep(0.01)
        await link.close()

    asyncio.run(main())
    assert "no such channel" in why[0] and "closed" in why[1] and why[2:4] == ["not there", "still not there"]


class FakeLink:
    """A host that is reached, has no agent, and is lost with its first order to be the run's where `breaks`."""

    def __init__(self, host: Host, *, breaks: bool = False) -> None:
        self.host, self.up, self.why, self.tried = host, True, "", asyncio.Event()
        self.report, self.given, self._breaks = {"cpus": 8}, False, breaks
        self.tried.set()

    async def order(self, op: str, **fields: Any) -> dict[str, Any]:
        if op == "give" and self._breaks:
            self.up, self.why = False, "the connection to it broke"
            raise RunError(self.why)
        self.given |= op == "give"
        return {"ok": True, "others": [], "cordon": None}


def test_a_library_that_raises_as_it_is_closed_does_not_hold_up_the_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        began = asyncio.Event()
        link = Connection(
            "r", Host("h1"), HostsOptions(hosts=("h1",)), on_up=lambda *_: None, on_down=lambda *_: None, on_event=lambda *_: None,
        )  # fmt: skip

        async def open_it(stack: Any) -> Any:
            try:
                began.set()
                await asyncio.sleep(60)
            finally:
                raise OSError("the connection is gone already")

        monkeypatch.setattr(link, "_open", open_it)
        link.start()
        await began.wait()
        async with asyncio.timeout(10):
            await link.close()

    asyncio.run(main())


def test_a_host_that_is_lost_as_it_is_taken_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        cluster = HostsCluster("r", HostsOptions(hosts=("h1", "h2")))
        links = {h.name: FakeLink(h, breaks=h.name == "h1") for h in cluster._hosts}

        async def reach_all() -> None:
            cluster._links = links  # type: ignore[assignment]

        monkeypatch.setattr(cluster, "_reach_all", reach_all)
        monkeypatch.setattr("unbroken.cluster.hosts.cluster._ASK_AGAIN_S", 0.01)
        async with asyncio.timeout(5):
            assert (await cluster.acquire(Request(1))).nodes == ("h2",)
        assert links["h2"].given and not links["h1"].given

    asyncio.run(main())


def test_a_program_that_cannot_report_says_why_and_ends(tmp_path: Path) -> None:
    """It had stayed, silent, until nobody waited any more."""
    notes = tmp_path / "unbroken" / "hosts" / "h1.json"
    notes.parent.mkdir(parents=True)
    notes.write_text("{")
    command = [sys.executable, "-m", "unbroken.cluster.hosts.program", "run-1", "h1"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    )  # fmt: skip
    try:
        assert process.wait(60) == 1
        assert process.stderr is not None
        assert "what is noted of the host cannot be read" in process.stderr.read().splitlines()[-1]
    finally:
        process.kill()
        process.wait()
