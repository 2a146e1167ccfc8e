"""A worker's blocks in a model that answers many at once: what is begun, what ends, and whose time it was."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from unbroken.evaluate.contracts import Conditions, FedModel, Json, Request, Sample
from unbroken.evaluate.engines.worker.block_queue import Item, Queue
from unbroken.evaluate.engines.worker.feeding_model import Feeding


class Slow:
    """Answers one key a step, the last one first; fails where it is told to."""

    at_once = 4
    steps = 0
    tokens_read = tokens_made = 0

    def __init__(self) -> None:
        self.held: list[tuple[Hashable, list[Request]]] = []
        self.most = 0

    def put(self, key: Hashable, group: str, requests: Sequence[Request]) -> None:
        self.held.append((key, list(requests)))
        self.most = max(self.most, len(self.held))

    def take(self, within_s: float = 1.0) -> list[tuple[Hashable, list[Json] | Exception]]:
        key, requests = self.held.pop()
        self.tokens_made += 5
        if requests[0].arguments[0] == "bad":
            return [(key, RuntimeError("no"))]
        return [(key, [f"said {r.arguments[0]}" for r in requests])]

    def respond(self, requests: Sequence[Request]) -> list[Json]:
        return []

    respond_exactly = respond

    def halve(self) -> bool:
        return False

    def restore(self) -> None: ...

    def close(self) -> None: ...

    @property
    def conditions(self) -> Conditions:
        return Conditions("slow", "cpu", "float32", 0)


class Asks:
    """Blocks of two samples; 'alone' is a task whose harness makes calls of its own."""

    def requests(self, item: Item) -> list[Sample] | None:
        if item.task == "alone":
            return None
        if item.task == "broken":
            raise ValueError("no such file")
        text = "bad" if item.task == "bad" else f"{item.task}{item.block}"
        return [Sample(2 * item.block + i, (Request("x", (text,)),), f"h{i}") for i in range(2)]


def feeding(*items: Item) -> tuple[Feeding, Queue, Slow]:
    model, queue = Slow(), Queue()
    assert isinstance(model, FedModel)
    queue.extend(items)
    answering: Any = Asks()
    return Feeding(model, answering), queue, model


def run(fed: Feeding, queue: Queue, blocks: int) -> list[Any]:
    ended: list[Any] = []
    while len(ended) < blocks:
        step = fed.step(queue)
        assert step is not None
        ended += step.ended
        if step.alone is not None:
            ended.append(step.alone)
    queue.stop("done")
    assert fed.step(queue) is None
    return ended


def test_it_holds_so_many_samples_and_ends_blocks_as_they_are_ready() -> None:
    fed, queue, model = feeding(*(Item(1, "t", b) for b in range(5)))
    ended = run(fed, queue, 5)
    assert model.most == 2  # two blocks of two samples
    assert [e.item.block for e in ended] == [1, 2, 3, 4, 0]
    assert [a.outputs for a in ended[0].answers] == [("said t1",), ("said t1",)]
    assert [a.prompt_hash for a in ended[0].answers] == ["h0", "h1"]


def test_times_and_tokens_add_up_to_what_passed() -> None:
    fed, queue, model = feeding(*(Item(1, "t", b) for b in range(5)))
    ended = run(fed, queue, 5)
    assert all(a.ended == pytest.approx(b.started) for a, b in pairwise(ended))
    assert sum(e.tokens[1] for e in ended) == model.tokens_made


def test_what_fails_fails_alone() -> None:
    fed, queue, _ = feeding(Item(1, "t", 0), Item(1, "bad", 0), Item(1, "broken", 0), Item(1, "t", 1))
    ended = {(e.item.task, e.item.block): e.answers for e in run(fed, queue, 4)}
    assert isinstance(ended["bad", 0], RuntimeError) and isinstance(ended["broken", 0], ValueError)
    assert len(ended["t", 0]) == len(ended["t", 1]) == 2


def test_what_needs_the_model_for_itself_waits_until_nothing_is_in_flight() -> None:
    fed, queue, model = feeding(Item(1, "t", 0), Item(1, "alone", 0), Item(1, "t", 1))
    ended = run(fed, queue, 3)
    assert [e.item.task if hasattr(e, "item") else e.task for e in ended] == ["t", "alone", "t"]
    assert model.most == 1


def test_a_suspect_has_few_beside_it() -> None:
    fed, queue, model = feeding(
        Item(1, "t", 0, crowd=1), Item(1, "t", 1, crowd=1), Item(1, "t", 2), Item(1, "t", 3)
    )
    run(fed, queue, 2)
    assert model.most == 1
