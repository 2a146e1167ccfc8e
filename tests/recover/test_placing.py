"""The place of an attempt's checkpoints: a file system that hangs or answers late holds up and ends no attempt but its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unbroken.checkpoint.storage.posix import PosixStorage
from unbroken.errors import StorageError
from unbroken.progress import RunDir
from unbroken.progress.records.state import RunState
from unbroken.recover.supervise.accept import placing
from unbroken.recover.supervise.accept.placing import CheckpointPlace


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set, and whatever lies in a folder named `dead` answers again."""
    answers = threading.Event()

    def open_storage(url: str) -> PosixStorage:
        if url.endswith("dead"):
            answers.wait(20)
        return PosixStorage(Path(url))

    monkeypatch.setattr(placing, "open_storage", open_storage)
    return answers


def make_place(tmp_path: Path) -> tuple[CheckpointPlace, RunState]:
    run_dir, state = RunDir(tmp_path / "run"), RunState()
    run_dir.create()

    async def record(kind: str, **fields: Any) -> None:
        if kind == "place":
            state.places[fields["attempt"]] = fields["place"]

    return CheckpointPlace(run_dir, "r1", lambda: state, record, lambda _: None, lambda: False), state


def test_a_wait_for_a_place_is_noted_as_long_as_it_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, _ = make_place(tmp_path)
    notes: list[tuple[str, str]] = []
    monkeypatch.setattr(place, "_note_wait", lambda *note: notes.append(note))
    monkeypatch.setattr(placing, "_RETRY_S", 0.01)
    answers = iter([refuse, lambda _: "there"])
    assert asyncio.run(place._patiently(str(tmp_path), lambda s: next(answers)(s))) == "there"
    assert [bool(why) for _, why in notes] == [True, False] and "input/output error" in notes[0][1]


def refuse(*_: object) -> None:
    raise StorageError("input/output error", where="dead")


@pytest.mark.parametrize("late", [None, refuse], ids=["answers late", "refuses late"])
def test_a_place_that_hangs_is_nothing_to_the_next_attempt(
    tmp_path: Path,
    hang: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    late: Callable[..., None] | None,
) -> None:
    place, state = make_place(tmp_path)

    async def work() -> None:
        state.attempt = await place.take()
        first = asyncio.create_task(place.named(1, str(tmp_path / "dead")))
        await asyncio.sleep(0.05)  # its ranks are killed meanwhile, and another attempt begins
        state.attempt = await place.take()
        async with asyncio.timeout(10):
            assert await place.named(2, str(tmp_path / "alive"))
        assert not first.done()
        if late is not None:
            monkeypatch.setattr(place, "_survey", late)
        hang.set()
        assert not await first
        assert place.refusal is None and not place.collided, (
            "what it says of the first is not said of the second"
        )
        assert place.current() == place.of(2) == str(tmp_path / "alive")

    asyncio.run(work())


def test_all_ranks_of_an_attempt_name_one_place(tmp_path: Path, hang: threading.Event) -> None:
    """However many name it at once, it is examined and journalled once; another one is refused."""
    hang.set()
    place, state = make_place(tmp_path)

    async def work() -> None:
        state.attempt = await place.take()
        assert all(await asyncio.gather(*(place.named(1, str(tmp_path / "dead")) for _ in range(4))))
        assert place.refusal is None
        assert not await place.named(1, str(tmp_path / "other"))
        assert place.refusal is not None and "different folders" in place.refusal.message

    asyncio.run(work())


def test_paths_are_resolved_beside_the_loop_alone(
    tmp_path: Path, hang: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may hang just after it has answered; the loop has leases to renew."""
    hang.set()
    place, state = make_place(tmp_path)
    same_place = placing.same_place
    threads: set[threading.Thread] = set()

    def note(a: str, b: str) -> bool:
        threads.add(threading.current_thread())
        return same_place(a, b)

    monkeypatch.setattr(placing, "same_place", note)

    async def work() -> None:
        state.attempt = await place.take()
        assert await place.named(1, str(tmp_path / "alive"))
        assert await place.shorten(str(tmp_path / "run" / "checkpoints")) == ""
        assert (await place.message(1))["url"] == str(tmp_path / "alive")
        await place.accept_elsewhere(str(tmp_path / "elsewhere"))

    asyncio.run(work())
    assert threads and threading.main_thread() not in threads
