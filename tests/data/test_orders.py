"""Orders are pure functions, each of its kind what it says."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unbroken.data.generators import Generators, seeded
from unbroken.data.loading.shares import Sharing
from unbroken.data.ordering.mixture import BLOCK, Mixture, apportion
from unbroken.data.ordering.orders import Drawn, Shuffled, WeightedOnce
from unbroken.data.ordering.permutation import key_of, mix, mix_all, permute, walk
from unbroken.data.position import Position, count, normalize, subtract
from unbroken.errors import InputError, UsageError

ranges = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 9)).map(lambda t: (t[0], t[0] + t[1])), max_size=6
)


def numbers(of: object) -> set[int]:
    return {n for a, b in of for n in range(a, b)}  # type: ignore[attr-defined]


@given(ranges, ranges)
def test_ranges_are_sets(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    assert numbers(normalize(a)) == numbers(a)
    assert numbers(subtract(a, normalize(b))) == numbers(a) - numbers(b)
    assert count(normalize(a)) == len(numbers(a))
    left = subtract(a, normalize(b))
    assert left == normalize(left)


def test_a_position_comes_back_from_json() -> None:
    p = Position(2, ((0, 9),), (), "abc").skipping(20, 30)
    assert p.skips == ((20, 30),) and p.consumed() == 9
    assert Position.from_json(p.as_json()) == p
    for wrong in ({}, {**p.as_json(), "samples": [[5, 2]]}, {**p.as_json(), "skips": "x"}, None):
        with pytest.raises(InputError, match="position"):
            Position.from_json(wrong)
    with pytest.raises(UsageError):
        normalize([(-1, 3)])


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1), st.integers(0, 5))
def test_a_permutation_has_each_number_once_and_any_part_is_as_in_the_whole(
    size: int, seed: int, epoch: int
) -> None:
    found = permute(size, key_of(seed, epoch), np.arange(size))
    assert sorted(found.tolist()) == list(range(size))
    walked = walk(size, key_of(seed, epoch), np.arange(size))
    assert sorted(walked.tolist()) == list(range(size))
    part = np.arange(size - 1, -1, -3)
    assert (permute(size, key_of(seed, epoch), part) == found[part]).all()
    assert (walk(size, key_of(seed, epoch), part) == walked[part]).all()


def test_the_order_is_the_same_for_ever() -> None:
    """Checkpoints name numbers of this order: a change of it would resume them with other data."""
    assert permute(10, key_of(0, 0), np.arange(10)).tolist() == [0, 1, 9, 4, 2, 3, 6, 8, 7, 5]
    assert permute(10**9, key_of(7, 3), np.arange(3)).tolist() == [445344923, 554226177, 856649016]


def test_any_part_of_a_huge_order_is_found_at_once() -> None:
    size = 10**13
    at = np.asarray([0, 1, size // 2, size - 1])
    found = permute(size, 7, at)
    assert len(set(found.tolist())) == 4 and (found < size).all() and (found >= 0).all()
    share = next(Sharing(Shuffled(size, size), 3, 8, rank=5, world_size=1000).epoch(0, size // 3, ()))
    assert len(share.indices) == 8 and share.stop == size // 3 + 8000


def test_numbers_are_mixed_alike_one_by_one_and_together() -> None:
    values = np.asarray([0, 1, 2**63, 2**64 - 1], np.uint64)
    assert mix_all(values).tolist() == [mix(int(v)) for v in values]


@pytest.mark.parametrize("by", [permute, walk])
def test_an_order_has_no_pattern(by: Any) -> None:
    found = by(1000, key_of(0, 0), np.arange(1000))
    other = by(1000, key_of(0, 1), np.arange(1000))
    assert abs(np.corrcoef(found, np.arange(1000))[0, 1]) < 0.1
    assert abs(np.corrcoef(found, other)[0, 1]) < 0.1
    assert len(np.flatnonzero(np.diff(found) == 1)) < 10


def test_weighted_without_replacement_prefers_the_heavy() -> None:
    weights = tuple([1.0] * 50 + [9.0] * 50)
    early = [int((WeightedOnce(20, weights).indices(s, 0, np.arange(20)) >= 50).sum()) for s in range(30)]
    assert 16 < np.mean(early) < 19
    one = WeightedOnce(100, weights).indices(0, 0, np.arange(100))
    assert sorted(one.tolist()) == list(range(100))


def test_a_draw_of_no_weight_never_comes() -> None:
    found = Drawn(3, 5000, (0.0, 1.0, 0.0)).indices(1, 0, np.arange(5000))
    assert set(found.tolist()) == {1}


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40))
def test_shares_of_a_mixture_add_up(weights: list[float]) -> None:
    shares = apportion(weights)
    assert sum(shares) == BLOCK and min(shares) >= 1
    total = sum(weights)
    assert max(abs(s / BLOCK - w / total) for s, w in zip(shares, weights, strict=True)) < 0.02


def test_each_source_of_a_mixture_goes_through_all_of_its_samples() -> None:
    sizes = [300, 5000, 77]
    mixture = Mixture([range(n) for n in sizes], [1, 2, 3], samples=9000)
    order = mixture.order()
    found = np.concatenate([order.indices(4, e, np.arange(9000)) for e in range(2)])
    for s, n in enumerate(sizes):
        mine = found[(found >= mixture.starts[s]) & (found < mixture.starts[s + 1])]
        turns = len(mine) // n
        for t in range(turns):
            assert len(set(mine[t * n : (t + 1) * n].tolist())) == n
    assert [mixture[i] for i in (0, 299, 300, 5300)] == [0, 299, 0, 0]
    with pytest.raises(UsageError):
        Mixture([range(3), range(0)], [1, 1])
    with pytest.raises(UsageError):
        Mixture([range(3)], [0.0])


# --- generators


def test_the_generators_lie_where_they_are_read() -> None:
    """On a Python or numpy where they do not, the slow way is taken: this tells."""
    g = Generators()
    assert g._python_at and g._numpy_at
    assert (
        len(g.see().python) == 2500 and struct.unpack("<i", g.see().python[:4])[0] == random.getstate()[1][-1]
    )


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    "kind, draw",
    [
        ("python", random.random), ("python", lambda: random.gauss(0, 1)), ("python", lambda: random.seed(3)),
        ("numpy", np.random.rand), ("numpy", np.random.randn), ("numpy", lambda: np.random.seed(3)),
        ("torch", lambda: torch.rand(1)), ("torch", lambda: torch.randn(1)), ("torch", lambda: torch.manual_seed(3)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("halves", [True, False])
def test_every_draw_is_seen_and_undone(kind: str, draw: object, fast: bool, halves: bool) -> None:
    g = Generators()
    if not fast:
        g._python_at = g._numpy_at = 0
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    if halves:
        random.gauss(0, 1), np.random.randn(), torch.randn(1, dtype=torch.float64)
    expected = None
    for _ in range(2):
        before = g.see()
        g.hide_gauss(before)
        draw()  # type: ignore[operator]
        assert kind in g.moved(before)
        g.put_back(before)
        after = g.see()
        assert g.moved(before) == set() and after.gauss == before.gauss
        following = (random.gauss(0, 1), np.random.randn(), torch.randn(1).item())
        assert expected in (None, following)
        expected = following
        g.put_back(before)


def test_nothing_drawn_is_nothing_moved() -> None:
    g = Generators()
    before = g.see()
    assert g.moved(before) == set()
    with seeded(5):
        a = random.random(), np.random.rand(), torch.rand(1).item()
    assert g.moved(before) == set()
    with seeded(5):
        assert (random.random(), np.random.rand(), torch.rand(1).item()) == a
