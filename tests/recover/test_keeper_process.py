"""The node's keeper as its agent sees it."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from pathlib import Path

import pytest

from unbroken.errors import RunError
from unbroken.link.framing import LENGTH, pack
from unbroken.progress import RunDir
from unbroken.recover.node.keeper_process import KeeperProcess
from unbroken.recover.node.logs.folder import NodeFolder
from unbroken.recover.wire import Message

pytestmark = pytest.mark.integration


def test_what_is_asked_while_a_killed_keeper_is_replaced_is_answered_by_the_new_one(tmp_path: Path) -> None:
    """A rank's keeper that dies with it is back in a second: the next attempt's announcement waits for it."""

    async def asked_after_its_death() -> tuple[int | None, int | None, Message, list[str]]:
        events: list[str] = []

        async def on_event(event: Message) -> None:
            events.append(event["event"])

        run_dir = RunDir(tmp_path / "run")
        run_dir.agent_log("node-000").parent.mkdir(parents=True)
        with tempfile.TemporaryDirectory(prefix="ub-") as scratch:
            keeper = KeeperProcess(
                NodeFolder(run_dir, run_dir), "r" * 12, "node-000", Path(scratch), 1 << 26, on_event
            )
            await keeper.start()
            first = keeper.pid
            assert first is not None
            try:
                os.kill(first, signal.SIGKILL)
                os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)  # it may answer until it is dead
                answer = await keeper.call({"op": "inventory"}, timeout=60)
                async with asyncio.timeout(30):
                    while "keeper_back" not in events:
                        await asyncio.sleep(0.01)
                second = keeper.pid
            finally:
                await keeper.close()
            with pytest.raises(RunError, match="not there just now"):
                await asyncio.wait_for(keeper.call({"op": "inventory"}), 5)  # closed: nobody will come
            return first, second, answer, events

    first, second, answer, events = asyncio.run(asked_after_its_death())
    assert answer["inventory"] == [] and second != first
    assert events[0] == "keeper_lost"


def test_a_keeper_that_cannot_be_started_for_a_while_is_back_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder of its log is gone: without a second try the node had no keeper any more, and every later attempt failed."""

    async def outlast() -> list[str]:
        events: list[str] = []

        async def on_event(event: Message) -> None:
            events.append(event["event"])

        async def wait_for(event: str) -> None:
            async with asyncio.timeout(30):
                while event not in events:
                    await asyncio.sleep(0.01)

        run_dir = RunDir(tmp_path / "run")
        logs = run_dir.agent_log("node-000").parent
        logs.mkdir(parents=True)
        with tempfile.TemporaryDirectory(prefix="ub-") as scratch:
            keeper = KeeperProcess(
                NodeFolder(run_dir, run_dir), "r" * 12, "node-000", Path(scratch), 1 << 26, on_event
            )
            await keeper.start()
            try:
                logs.rename(tmp_path / "away")
                logs.touch()
                assert keeper.pid is not None
                os.kill(keeper.pid, signal.SIGKILL)
                await wait_for("keeper_lost")
                async with asyncio.timeout(30):
                    while "no keeper can be started" not in caplog.text:
                        await asyncio.sleep(0.01)
                logs.unlink()
                await wait_for("keeper_back")
                assert (await keeper.call({"op": "inventory"}))["inventory"] == []
            finally:
                await keeper.close()
        return events

    assert asyncio.run(outlast()) == ["keeper_lost", "keeper_back"]


def test_a_keeper_that_talks_nonsense_is_an_error_and_no_defect(tmp_path: Path) -> None:
    """Its answers are bounded and read as those of all links."""
    hello = pack({"ok": True, "pid": 1})
    said = {
        "no object": (LENGTH.pack(2) + b"[]", "makes no sense"),
        "no JSON": (LENGTH.pack(2) + b"{,", "makes no sense"),
        "too long": (LENGTH.pack(0xFFFF_FFFF), "above the limit"),
        "half": (LENGTH.pack(2) + b"{", "it ended meanwhile"),
    }

    async def ask(nonsense: bytes) -> str:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(hello + nonsense)
            writer.write_eof()
            await reader.read()
            writer.close()

        with tempfile.TemporaryDirectory(prefix="ub-") as scratch:
            keeper = KeeperProcess(
                NodeFolder(RunDir(tmp_path), RunDir(tmp_path)), "r", "node-000", Path(scratch), 1, _ignore
            )
            async with await asyncio.start_unix_server(serve, keeper.socket):
                with pytest.raises(RunError) as error:
                    await asyncio.wait_for(keeper.call({"op": "inventory"}), 10)
        return error.value.message

    for what, (nonsense, why) in said.items():
        assert why in asyncio.run(ask(nonsense)), what


async def _ignore(_: Message) -> None:
    return None
