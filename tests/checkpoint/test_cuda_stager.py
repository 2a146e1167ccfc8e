"""What the stager of a GPU does when something fails, with a GPU that does nothing; the real one is in tests/gpu."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest
import torch

from tests.support.keepers import until
from unbroken.checkpoint.device import staging
from unbroken.checkpoint.device.staging import Copying, CudaStager, TornSnapshot, _Pending
from unbroken.checkpoint.device.targets import Targets
from unbroken.checkpoint.format.layout import plan, spec


class Event:
    """An event that has always happened."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 0.0


@pytest.fixture
def stager(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaStager]:
    for name, fake in {
        "Event": Event, "Stream": lambda *_: MagicMock(), "current_stream": lambda *_: MagicMock(),
        "stream": lambda _: nullcontext(), "device": lambda _: nullcontext(), "set_device": lambda _: None,
        "is_current_stream_capturing": lambda: False,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    made = CudaStager(torch.device("cuda", 0))
    yield made
    made.close()


def copy(stager: CudaStager) -> list[Copying]:
    tensors = {"w": torch.ones(8)}
    layout = plan([spec(n, str(t.dtype), t.shape) for n, t in tensors.items()])
    done: list[Copying] = []
    stager.copy(tensors, torch.zeros(layout.file_bytes, dtype=torch.uint8), layout, frozenset(), done.append)
    return done


def in_time(what: Any) -> bool:
    """Whether it returns."""
    thread = threading.Thread(target=what, daemon=True)
    thread.start()
    thread.join(20)
    return not thread.is_alive()


def test_where_no_thread_can_be_started_the_copies_are_issued_in_place(
    stager: CudaStager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as m:
        m.setattr(threading.Thread, "start", refuse)
        done = copy(stager)
    until(lambda: bool(done))
    assert done[0].error is None
    assert in_time(stager.before_step) and in_time(stager.drain)


def test_a_copy_that_fails_on_the_way_is_told_and_nobody_waits_for_it(
    stager: CudaStager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as m:
        m.setattr(torch.cuda, "device", broken)
        done = copy(stager)
        until(lambda: bool(done))
    assert "illegal memory access" in str(done[0].error)
    assert in_time(stager.before_step) and in_time(stager.drain)
    again = copy(stager)  # the next one is not touched by it
    until(lambda: bool(again))
    assert again[0].error is None


class Slow(Event):
    """An event that happens when it is told to."""

    recorded: ClassVar[list[threading.Event]] = []
    """One for each time that one of them was recorded."""

    def __init__(self, **_: Any) -> None:
        self.happened = threading.Event()

    def record(self, *_: Any) -> None:
        self.happened = threading.Event()
        Slow.recorded.append(self.happened)

    def query(self) -> bool:
        return self.happened.is_set()


@pytest.fixture
def under_way(
    stager: CudaStager, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[_Pending, list[torch.Tensor]]]:
    """Twenty copies that are being issued, of which the driver gets four at a time; their targets."""
    monkeypatch.setattr(torch.cuda, "Event", Slow)
    monkeypatch.setattr(staging, "_QUEUED", 4)
    monkeypatch.setattr(staging, "_UNDER_WAY", 2)
    Slow.recorded = []
    tensors = {f"t{i}": torch.full((8,), float(i + 1)) for i in range(20)}
    layout = plan([spec(n, str(t.dtype), t.shape) for n, t in tensors.items()])
    buffer = torch.zeros(layout.file_bytes, dtype=torch.uint8)
    where = Targets().of(buffer, layout, tensors)
    pending = _Pending(Copying(lambda _: None), [], [], Event(), Event(), Event())  # type: ignore[arg-type]
    pending.remaining = [(where[n], t) for n, t in tensors.items()]
    thread = threading.Thread(target=stager._issue, args=(pending,), daemon=True)
    thread.start()
    yield pending, [where[n].view for n in tensors]
    pending.hurry.set()
    thread.join(20)
    assert not thread.is_alive()


def test_the_driver_is_never_given_more_than_it_has_room_for(
    under_way: tuple[_Pending, list[torch.Tensor]],
) -> None:
    pending, targets = under_way
    for batch in range(10):
        until(lambda n=batch: len(Slow.recorded) >= min(10, n + 2))
        assert not pending.issued.wait(0.01) or batch >= 8
        assert len(Slow.recorded) == min(10, batch + 2)  # two more than have ended
        Slow.recorded[batch].set()
    assert pending.issued.wait(20) and pending.copying.error is None
    assert [float(t[0]) for t in targets] == [float(i + 1) for i in range(20)]


def test_a_fence_has_all_of_them_issued_at_once(
    stager: CudaStager, under_way: tuple[_Pending, list[torch.Tensor]]
) -> None:
    pending, _ = under_way
    until(lambda: len(Slow.recorded) == 2)
    stager._pending.append(pending)
    assert in_time(stager.wait_for_copies)
    assert pending.issued.is_set() and len(Slow.recorded) >= 10
    stager._pending.clear()


def test_a_large_tensor_is_given_in_pieces_until_a_fence_has_the_rest_given_at_once(
    stager: CudaStager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the training reads meanwhile waits for two pieces, not for the tensor."""
    given: list[int] = []

    def copies(targets: list[torch.Tensor], sources: list[torch.Tensor], non_blocking: bool) -> None:
        given.append(sum(t.nbytes for t in targets))
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    monkeypatch.setattr(torch.cuda, "Event", Slow)
    monkeypatch.setattr(torch, "_foreach_copy_", copies)
    monkeypatch.setattr(staging, "_PIECE_BYTES", 1024)
    monkeypatch.setattr(staging, "_UNDER_WAY", 2)
    Slow.recorded = []
    tensors = {"w": torch.arange(4096.0), "v": torch.arange(64.0)}
    layout = plan([spec(n, str(t.dtype), t.shape) for n, t in tensors.items()])
    where = Targets().of(torch.zeros(layout.file_bytes, dtype=torch.uint8), layout, tensors)
    pending = _Pending(Copying(lambda _: None), [], [], Event(), Event(), Event())  # type: ignore[arg-type]
    pending.remaining = [(where[n], t) for n, t in tensors.items()]
    thread = threading.Thread(target=stager._issue, args=(pending,), daemon=True)
    thread.start()
    for number in range(3):
        until(lambda n=number: len(given) == n + 2)
        Slow.recorded[number].set()
    until(lambda: len(given) == 5)
    assert given == [1024] * 5 and not pending.issued.is_set()
    pending.hurry.set()
    assert pending.issued.wait(20) and pending.copying.error is None
    assert sum(given) == layout.data_bytes and len(given) <= 7, "the rest was given piece by piece"
    assert all(torch.equal(where[n].view, t) for n, t in tensors.items())


def changed_while_copied(stager: CudaStager, *, waited: bool = False) -> _Pending:
    live = torch.ones(8)
    done: list[Copying] = []
    pending = _Pending(Copying(done.append), [], [("w", live, live._version)], Event(), Event(), Event())  # type: ignore[arg-type]
    pending.issued.set()
    stager._pending.append(pending)
    if waited:
        stager.wait_for_copies()
    live.add_(1)
    return pending


def test_a_tensor_that_was_changed_before_the_fence_is_found_by_it(stager: CudaStager) -> None:
    pending = changed_while_copied(stager)
    stager.wait_for_copies()
    assert isinstance(pending.copying.error, TornSnapshot) and "'w' was changed" in str(pending.copying.error)


@pytest.mark.parametrize("waited", [False, True])
def test_the_watcher_finds_a_change_unless_a_fence_was_before_it(stager: CudaStager, waited: bool) -> None:
    pending = changed_while_copied(stager, waited=waited)
    stager._done.put(pending)
    until(lambda: stager.last is pending.copying)
    assert isinstance(pending.copying.error, TornSnapshot) is not waited
