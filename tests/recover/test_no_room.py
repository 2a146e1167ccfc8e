"""A full disk as an attempt starts: it is waited for, charges nothing, and nothing runs meanwhile."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unbroken.cluster.local import open_log
from unbroken.progress import JournalWriter, RunDir
from unbroken.recover.node.logs.folder import NodeFolder
from unbroken.recover.node.ranks.process import LaunchOrder
from unbroken.recover.node.ranks.starting import Starting
from unbroken.recover.room import find_no_room

from .simulating import Simulate, Visitor, reach


def test_an_attempt_whose_logs_find_no_room_waits_for_it_and_charges_nothing(simulate: Simulate) -> None:
    async def act(run) -> None:  # type: ignore[no-untyped-def]
        await reach(run, 1, 9)
        run.faults.fill_disk("node-00003")
        run.faults.fail_rank("node-00001", 2, code=None, signal=9)
        await run.until(lambda: any(r["how"] == "no_room" for r in run.journal("ended")))

        said = (await Visitor(run).ask("waits"))["waits"]
        assert said.startswith("attempt 2 is not started: no room") and "node-00003" in said, said
        waiting = run.journal("waiting")[-1]
        assert waiting["why"] in said and "Free space there" in waiting["todo"]
        before = run.loop.time()
        await run.until(lambda: run.loop.time() > before + 300)
        assert [r["attempt"] for r in run.journal("attempt")] == [1, 2] and not run.task.done()
        run.faults.fill_disk("node-00003", full=False)
        await reach(run, 3, 12)
        await run.until(lambda: run.journal("resumed"))
        assert (await Visitor(run).ask("waits"))["waits"] == ""
        (incident,) = run.incidents()
        assert incident["kind"] == "failed" and incident["next_attempt"] == 3

    simulate(act, 4)


def test_a_record_that_is_refused_is_told_to_who_asks(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk takes no note of the wait for it."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def act(run) -> None:  # type: ignore[no-untyped-def]
        await reach(run, 1, 9)
        with monkeypatch.context() as m:
            m.setattr(JournalWriter, "append", refuse)
            run.faults.fail_rank("node-00001", 2, code=None, signal=9)
            await run.until(lambda: any("record cannot be written" in line for line in run.screen.lines))
            assert "what comes next waits" in (await Visitor(run).ask("waits"))["waits"]
        await run.until(lambda: run.journal("resumed"))
        assert (await Visitor(run).ask("waits"))["waits"] == ""

    simulate(act, 4)


def test_a_stop_ends_the_wait(simulate: Simulate) -> None:
    async def act(run) -> None:  # type: ignore[no-untyped-def]
        run.faults.fill_disk("node-00000")
        await run.until(lambda: any(r["how"] == "no_room" for r in run.journal("ended")))
        run.supervisor.request_stop()
        assert await run.task == "interrupted"

    simulate(act, 2)


def test_room_is_looked_for_as_an_attempt_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "attempts"
    assert find_no_room(folder) == "" and not any(folder.iterdir())

    def refuse(code: int) -> None:
        def mkdir(path: str, mode: int = 0o777) -> None:
            raise OSError(code, os.strerror(code), path)

        monkeypatch.setattr(os, "mkdir", mkdir)

    refuse(errno.EDQUOT)
    assert find_no_room(folder).endswith(os.strerror(errno.EDQUOT))
    refuse(errno.EROFS)
    assert find_no_room(folder) == "", "waiting does not help there"


@pytest.mark.parametrize("full", ["run", "scratch"])
def test_whatever_has_no_room_as_an_attempt_starts_is_looked_at_until_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    """Pages lie in memory and logs on a disk: where the full one was not looked at, attempts followed each other for ever."""
    for name in ("run", "scratch"):
        (tmp_path / name).mkdir(mode=0o700)
    run_dir, owner = RunDir(tmp_path / "run"), SimpleNamespace(kind=None)
    mkdir, write = Path.mkdir, Path.write_bytes

    def lies_there(path: Path) -> None:
        if path.is_relative_to(tmp_path / full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def refuse_mkdir(path: Path, *args: Any, **more: Any) -> None:
        if not path.is_dir():
            lies_there(path)
        mkdir(path, *args, **more)

    def refuse_bytes(path: Path, data: Any) -> int:
        lies_there(path)
        return write(path, data)

    order = LaunchOrder(
        attempt=1, run_id="r", command=("train.py",), cwd="/", ranks={0: 0, 1: 1}, world_size=2, slot=0, slots=1, nproc=2,
        master_addr="::1", master_port=1, restarts=0, devices=None, interface="",
    )  # fmt: skip

    async def work() -> None:
        starting = Starting(
            "n0", tmp_path / "scratch", NodeFolder(run_dir, run_dir), tmp_path / "s", owner, print  # type: ignore[arg-type]
        )  # fmt: skip
        with monkeypatch.context() as m:
            m.setattr(Path, "mkdir", refuse_mkdir)
            m.setattr(Path, "write_bytes", refuse_bytes)
            launched = await starting.launch(order, lambda _: pytest.fail("a rank was started"))
            assert "No space left" in launched["no_room"]
            assert "No space left" in (await starting.answer("room", {}))["no_room"]
        assert await starting.answer("room", {}) == {"no_room": ""}

    asyncio.run(work())


def test_an_agent_starts_without_a_log_where_its_log_finds_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with open_log(tmp_path / "agents" / "n1.log") as log:
        assert log.name == os.devnull
