"""What the stager of a GPU does when something fails, with a GPU that does nothing; the real one is in tests/gpu."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from unbroken.checkpoint.layout import plan, spec
from unbroken.checkpoint.staging import Copying, CudaStager
from unbroken.testing.keepers import until


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
        m.setattr(torch.cuda, "stream", broken)
        done = copy(stager)
        until(lambda: bool(done))
    assert "illegal memory access" in str(done[0].error)
    assert in_time(stager.before_step) and in_time(stager.drain)
    again = copy(stager)  # the next one is not touched by it
    until(lambda: bool(again))
    assert again[0].error is None
