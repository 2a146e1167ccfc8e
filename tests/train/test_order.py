"""The order of the data is a pure function, and positions survive skips, resumes and other world sizes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.errors import ContractError, UsageError
from unbroken.train.corpus.order import Permutation, SampleOrder, SamplePosition, merge

ranges = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 40)).map(lambda p: (p[0], p[0] + p[1])), max_size=8
)


@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_an_epoch_visits_every_sample_once(size: int, seed: int, epoch: int) -> None:
    p = Permutation(size, seed, epoch)
    assert sorted(p[i] for i in range(size)) == list(range(size))


def test_the_order_is_frozen() -> None:
    """A change here breaks the resume of every run that exists."""
    order = SampleOrder(1000, seed=7)
    assert [order[i] for i in (0, 1, 2, 999, 1000, 2500)] == [471, 366, 741, 583, 661, 357]


def test_epochs_and_seeds_differ_and_look_shuffled() -> None:
    size = 4096
    a, b = ([Permutation(size, 1, e)[i] for i in range(size)] for e in (0, 1))
    same = sum(x == y for x, y in zip(a, b, strict=True))
    assert same < 12  # one is expected of two random permutations
    assert sum(abs(x - y) for x, y in itertools.pairwise(a)) / size == pytest.approx(size / 3, rel=0.1)


@given(ranges)
@settings(deadline=None)
def test_merge_keeps_the_set(rs: list[tuple[int, int]]) -> None:
    merged = merge(rs)
    assert {i for a, b in merged for i in range(a, b)} == {i for a, b in rs for i in range(a, b)}
    assert all(x[1] < y[0] for x, y in itertools.pairwise(merged))


@given(ranges, st.lists(st.integers(1, 17), min_size=1, max_size=12))
@settings(deadline=None)
def test_taking_passes_over_the_skips_and_nothing_else(
    skips: list[tuple[int, int]], counts: list[int]
) -> None:
    position = SamplePosition().skipping(skips)
    taken: list[int] = []
    for n in counts:
        some, position = position.take(n)
        assert len(some) == n
        taken += some
    banned = {i for a, b in skips for i in range(a, b)}
    expected = [i for i in range(2000) if i not in banned][: len(taken)]
    assert taken == expected
    assert {i for a, b in position.consumed for i in range(a, b)} == set(expected)


def test_skips_are_idempotent_and_outlive_the_passage() -> None:
    p = SamplePosition().skipping([(10, 20)])
    _, p = p.take(30)
    again = p.skipping([(10, 20), (12, 15)])
    assert again == p and p.consumed == ((0, 10), (20, 40)) and p.skips == ((10, 20),)


def test_batches_do_not_depend_on_how_they_are_taken() -> None:
    p = SamplePosition().skipping([(5, 9)])
    a, _ = p.take(24)
    b, q = p.take(10)
    c, _ = SamplePosition.from_json(q.as_json(100)).take(14)
    assert a == b + c


def test_bad_ranges() -> None:
    with pytest.raises(UsageError):
        merge([(5, 3)])
    with pytest.raises(ContractError):
        SamplePosition.from_json({"samples": "x"})
