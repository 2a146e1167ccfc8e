"""What is no number, no order, no dataset's own lengths is refused where it comes in, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from unbroken.data import LengthGrouped, Mixture, Packed, wrap
from unbroken.errors import InputError, UsageError


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def plain(size: int = 12, batch: int = 4, **more: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(size), batch_size=batch, **more)


NO_NUMBERS: list[Any] = ["4", 2.5, 4.0, True, None, [1]]


@pytest.mark.parametrize("bad", [*NO_NUMBERS, -1])
@pytest.mark.parametrize(
    "use",
    [
        lambda bad: wrap(plain(), accumulate=bad),
        lambda bad: LengthGrouped([1] * 12, group=bad),
        lambda bad: LengthGrouped([1] * 12, group=2, groups=bad),
        lambda bad: Packed([1] * 12, budget=bad),
        lambda bad: Packed([1] * 12, budget=2, window=bad),
        lambda bad: wrap(plain()).skip(bad, 4),
        lambda bad: wrap(plain()).skip(0, bad),
        lambda bad: wrap(plain()).set_epoch(bad),
        lambda bad: list(wrap(plain()).epochs(bad)),
    ],
)
def test_what_is_no_number_is_refused(use: Callable[[Any], Any], bad: Any) -> None:
    with pytest.raises(UsageError):
        use(bad)


@pytest.mark.parametrize("bad", ["4", 2.5, True, -1])
@pytest.mark.parametrize(
    "use",
    [
        lambda bad: wrap(plain(), rank=bad, world_size=2),
        lambda bad: wrap(plain(), rank=0, world_size=bad),
        lambda bad: Mixture([Numbers(3)], [1.0], samples=bad),
    ],
)
def test_what_may_be_left_out_is_a_number_or_left_out(use: Callable[[Any], Any], bad: Any) -> None:
    with pytest.raises(UsageError):
        use(bad)


@pytest.mark.parametrize("bad", ["4", 2.5, True])
def test_a_seed_is_a_number(bad: Any) -> None:
    with pytest.raises(UsageError, match="seed"):
        wrap(plain(), seed=bad)


def test_numpys_numbers_are_numbers() -> None:
    given = wrap(
        plain(shuffle=True), seed=np.int64(5), accumulate=np.int64(2), rank=np.int64(0), world_size=1
    )  # type: ignore[arg-type]
    expected = wrap(plain(shuffle=True), seed=5, accumulate=2)
    assert [b.tolist() for b in given] == [b.tolist() for b in expected]


@pytest.mark.parametrize(
    "more",
    [
        {"order": object()}, {"order": [1, 2]}, {"order": "shuffled"}, {"on_batch": 5}, {"content": 5}, {"content": ""},
        {"content": b"x"},
    ],
)  # fmt: skip
def test_what_is_of_another_kind_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(more))):
        wrap(plain(), **more)


@pytest.mark.parametrize("size", [11, 13])
def test_lengths_of_another_dataset_are_refused(size: int) -> None:
    for order in (LengthGrouped([1] * size, group=2), Packed([1] * size, budget=2)):
        with pytest.raises(UsageError, match=f"lengths of {size} samples, and the dataset has 12"):
            wrap(plain(), order=order)


@pytest.mark.parametrize("lengths", [[1.5], ["a"], [-1], [float("nan")], [[1]], None, 5])
def test_lengths_are_whole_numbers(lengths: Any) -> None:
    for make in (lambda: LengthGrouped(lengths, group=2), lambda: Packed(lengths, budget=2)):
        with pytest.raises(UsageError, match="lengths"):
            make()


@pytest.mark.parametrize(
    "datasets, weights",
    [(None, None), ([1], [1.0]), ([Numbers(3)], ["1"]), ([Numbers(3)], [float("inf")]), ([Numbers(3)], [0])],
)
def test_a_mixture_is_of_datasets_and_weights(datasets: Any, weights: Any) -> None:
    with pytest.raises(UsageError):
        Mixture(datasets, weights)


@pytest.mark.parametrize("kind", [list, tuple, np.asarray, torch.tensor])
def test_weights_may_be_an_array_too(kind: Callable[[list[float]], Any]) -> None:
    both = [Numbers(3), Numbers(5)]
    assert Mixture(both, kind([1.0, 3.0])).shares == Mixture(both, [1.0, 3.0]).shares
    for bad in ([1.0, 0.0], [1.0, float("nan")], [1.0, 2.0, 3.0]):
        with pytest.raises(UsageError):
            Mixture(both, kind(bad))


def test_a_mixture_counts_from_the_end_as_a_list_does() -> None:
    both = Mixture([Numbers(3), Numbers(5)], [1.0, 1.0])
    assert [both[-1], both[-8], both[7]] == [4, 0, 4]
    for beyond in (8, -9):
        with pytest.raises(IndexError):
            both[beyond]


@pytest.mark.parametrize("world, batch", [(1, 13), (2, 7)])
def test_an_epoch_without_a_batch_is_told(world: int, batch: int, caplog: pytest.LogCaptureFixture) -> None:
    loader = wrap(plain(12, batch, drop_last=True), rank=0, world_size=world)
    assert list(loader) == []
    assert (
        f"epoch 0 has no batch: its 12 samples are less than {batch} for each of {world} ranks" in caplog.text
    )
    caplog.clear()
    assert list(wrap(plain(12, 2, drop_last=True), rank=0, world_size=world, global_batch=13)) == []
    assert (
        "its 12 samples are less than a step's (13)" in caplog.text
        and "make global_batch smaller" in caplog.text
    )
    caplog.clear()
    assert len(list(wrap(plain(12, batch), rank=0, world_size=world))) == 1 and not caplog.records


def test_an_epoch_that_is_skipped_is_over() -> None:
    loader = wrap(plain())
    loader.skip(0, 12)
    assert [(e, len(list(loader))) for e in loader.epochs(2)] == [(0, 0), (1, 3)]


@pytest.mark.parametrize(
    "name", ["dataset", "batch_size", "sampler", "batch_sampler", "drop_last", "collate_fn", "num_workers"]
)
def test_what_the_given_loader_says_cannot_be_changed_in_silence(name: str) -> None:
    given = plain()
    loader: Any = wrap(given)
    with pytest.raises(UsageError, match=f"{name} cannot be changed"):
        setattr(loader, name, None)
    assert getattr(loader, name) == getattr(given, name)


def test_a_state_that_is_none_is_refused() -> None:
    good = wrap(plain()).state_dict()
    for key in good:
        for bad in (None, "x", -5, [], {}):
            loader = wrap(plain())
            with pytest.raises(InputError):
                loader.load_state_dict({**good, key: bad})
            assert loader.state_dict() == good
    for state in (None, [], "x", {**good, "at": 13}):
        with pytest.raises(InputError):
            wrap(plain()).load_state_dict(state)  # type: ignore[arg-type]
