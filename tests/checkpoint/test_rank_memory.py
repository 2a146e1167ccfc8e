"""A rank's side of its keeper's memory, without a keeper."""

from __future__ import annotations

import threading
import time

import pytest

from unbroken.checkpoint.client.links import KeeperGone
from unbroken.checkpoint.client.rank_memory import RankMemory


def test_a_copy_that_ends_does_not_wait_behind_a_save_that_waits_for_a_keeper() -> None:
    memory, back, waits = object.__new__(RankMemory), threading.Event(), threading.Event()
    memory._asking, memory._ahead = threading.Lock(), None

    def alive(within_s: float) -> None:
        if within_s:
            waits.set()
            back.wait(within_s)
        raise KeeperGone("the keeper is gone")

    def save() -> None:
        with pytest.raises(KeeperGone):
            memory._ask_ahead(64, 30.0)

    memory.alive = alive  # type: ignore[method-assign, assignment]
    saving = threading.Thread(target=save)
    saving.start()
    assert waits.wait(5)
    began = time.monotonic()
    with pytest.raises(KeeperGone):
        memory._ask_ahead(64, 0.0)
    assert time.monotonic() - began < 5
    back.set()
    saving.join(5)
    assert not saving.is_alive()
