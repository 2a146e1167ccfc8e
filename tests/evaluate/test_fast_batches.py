"""The fast way without a model: which tokens are shared, how batches are cut, how large they should be."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from unbroken.evaluate.harness.fast.budget import best_budget, measure
from unbroken.evaluate.harness.fast.prefixes import (
    PrefixBatch,
    PrefixRow,
    Stem,
    batches,
    common_prefix,
    root_of,
    stems_of,
)


def rows_of(shots: int, questions: int, choices: int, seed: int = 0) -> list[PrefixRow]:
    rng = random.Random(seed)
    root = tuple(rng.randrange(50) for _ in range(shots))
    found = []
    for q in range(questions):
        context = (*root, 100 + q, *(rng.randrange(50) for _ in range(rng.randint(20, 60))))
        for _ in range(choices):
            tail = tuple(rng.randrange(50) for _ in range(rng.randint(0, 4)))
            found.append(PrefixRow(context + tail, len(context), len(tail) + 1))
    return found


def rebuilt(made: list[PrefixBatch], count: int) -> dict[int, tuple[int, ...]]:
    """What the model reads for each row, put together again."""
    found: dict[int, tuple[int, ...]] = {}
    for b in made:
        for s in b.stems:
            for r, t in zip(s.rows, s.tails, strict=True):
                assert r not in found
                found[r] = b.root + s.tokens + t
    assert len(found) == count
    return found


@pytest.mark.parametrize("shots", [0, 10, 200])
@pytest.mark.parametrize("choices", [1, 4])
def test_every_row_is_read_whole_and_once(shots: int, choices: int) -> None:
    rows = rows_of(shots, 30, choices)
    root = root_of(rows)
    made = list(batches(stems_of(rows, root), root, 700, 5000))
    assert rebuilt(made, len(rows)) == {i: r.tokens for i, r in enumerate(rows)}
    assert all(b.computed <= 700 or len(b.stems) == 1 for b in made)


def test_shots_and_contexts_are_read_once() -> None:
    rows = rows_of(400, 40, 4)
    root = root_of(rows)
    assert len(root) == 400
    made = list(batches(stems_of(rows, root), root, 4000, 1 << 30))
    apart = sum(len(r.tokens) for r in rows)
    together = len(root) + sum(b.computed for b in made)
    assert together * 10 < apart  # 400 of 440 tokens, and each question for four choices


def test_a_root_leaves_every_context_a_token() -> None:
    same = [PrefixRow((*range(100), i), 100, 2) for i in range(3)] + [PrefixRow(tuple(range(100)), 100, 1)]
    assert len(root_of(same)) == 99


def test_no_root_where_it_saves_little() -> None:
    assert root_of(rows_of(10, 20, 1)) == ()
    assert root_of(rows_of(30, 1, 1)) == ()
    lone = rows_of(0, 5, 1)
    assert root_of([*lone, *rows_of(0, 5, 1, seed=1)]) == ()


def test_memory_bounds_a_batch_too() -> None:
    stems = stems_of(rows_of(300, 40, 4), root_of(rows_of(300, 40, 4)))
    root = root_of(rows_of(300, 40, 4))
    made = list(batches(stems, root, 1 << 30, 10_000))
    assert len(made) > 1 and sum(len(b.stems) for b in made) == len(stems)


def test_longest_first() -> None:
    made = list(batches([Stem((1,) * n, (n,), ((),)) for n in (3, 50, 9, 20)], (), 60, 1 << 30))
    assert [[len(s.tokens) for s in b.stems] for b in made] == [[50], [20, 9, 3]]


def test_common_prefix() -> None:
    assert common_prefix([(1, 2, 3), (1, 2), (1, 2, 4)]) == (1, 2)
    assert common_prefix([]) == () and common_prefix([(5,)]) == (5,)


def test_the_budget_is_where_nothing_more_is_gained() -> None:
    """The speeds of one H200, by tokens of a batch (a Llama of 5.9 B)."""
    asked = []

    def speeds() -> Iterator[tuple[int, float]]:
        for tokens, speed in (
            (512, 18e3),
            (1024, 30e3),
            (2048, 38e3),
            (4096, 41.6e3),
            (8192, 41.8e3),
            (16384, 41.4e3),
        ):
            asked.append(tokens)
            yield tokens, speed

    assert best_budget(speeds()) == 4096
    assert asked[-1] == 8192  # and no larger one was tried


def test_measuring_ends_where_memory_does() -> None:
    def read(rows: int, width: int) -> None:
        if rows * width > 2000:
            raise RuntimeError("CUDA out of memory")

    clock = iter(float(i) * 1e-3 for i in range(1000))
    assert [t for t, _ in measure(read, 128, clock=lambda: next(clock))] == [512, 1024]
    assert best_budget(iter(())) == 512


def test_measuring_ends_where_a_pass_takes_long() -> None:
    clock = iter(float(i) for i in range(1000))
    assert len(list(measure(lambda rows, width: None, 64, clock=lambda: next(clock)))) == 1
