"""torchdata's StatefulDataLoader, and iterable datasets with and without a state."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from unbroken.data import Loader, wrap
from unbroken.data.loading.stateful import StatefulLoader
from unbroken.errors import InputError, UnsaveableState, UsageError

torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")


class Stream(IterableDataset[int]):
    """Counts to `size`, each worker its share, and knows where it stands."""

    def __init__(self, size: int = 24) -> None:
        self.size, self.at = size, 0

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        of, me = (info.num_workers, info.id) if info else (1, 0)
        while self.at < self.size:
            self.at += 1
            if (self.at - 1) % of == me:
                yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Forgetful(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(24)


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return index


def listed(loader: Any) -> list[list[int]]:
    return [b.tolist() for b in loader]


@pytest.mark.parametrize("sampler", [False, True])
def test_of_a_map_style_dataset_the_order_is_ours(sampler: bool) -> None:
    def make() -> Any:
        more: dict[str, Any] = {"shuffle": True}
        if sampler:
            from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

            more = {
                "sampler": StatefulDistributedSampler(Numbers(), num_replicas=1, rank=0, shuffle=True, seed=0)
            }
        return wrap(torchdata.StatefulDataLoader(Numbers(), batch_size=3, **more))

    loader = make()
    assert isinstance(loader, Loader)
    plain = wrap(DataLoader(Numbers(), batch_size=3, shuffle=True))
    assert listed(loader) == listed(plain)
    iterator = iter(loader)
    next(iterator)
    other = make()
    other.load_state_dict(loader.state_dict())
    assert listed(other) == [b.tolist() for b in iterator]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_dataset_with_a_state_resumes(workers: int) -> None:
    def make() -> Any:
        return wrap(torchdata.StatefulDataLoader(Stream(), batch_size=3, num_workers=workers))

    whole = make()
    expected = [listed(whole), listed(whole)]
    assert sorted(i for b in expected[0] for i in b) == list(range(24))
    for epoch, stop in ((0, 3), (1, 5)):
        loader = make()
        assert isinstance(loader, StatefulLoader)
        before = torch.get_rng_state()
        for _ in range(epoch):
            list(loader)
        iterator = iter(loader)
        for _ in range(stop):
            next(iterator)
        state = loader.state_dict()
        assert loader.position().consumed() == epoch * 24 + stop * 3
        assert torch.equal(before, torch.get_rng_state()), "the training's generator was drawn from"
        other = make()
        other.load_state_dict(state)
        assert other.state_dict() == state
        assert (other.epoch, other.step) == (epoch, epoch * 8 + stop)
        assert listed(other) == expected[epoch][stop:]
        assert other.epoch == epoch + 1 and listed(other) == expected[0]


def test_a_state_before_the_first_batch_starts_no_worker() -> None:
    loader = wrap(torchdata.StatefulDataLoader(Stream(), batch_size=3, num_workers=2))
    assert loader.state_dict()["loader"] == {}
    assert loader._original._iterator is None


@pytest.mark.parametrize(
    "change, words",
    [({"num_workers": 1}, "number of workers"), ({"batch_size": 4}, "dataset"), ({}, "number of ranks")],
)
def test_other_ranks_and_workers_are_refused_in_words(change: dict[str, Any], words: str) -> None:
    loader = wrap(torchdata.StatefulDataLoader(Stream(), batch_size=3))
    next(iter(loader))
    more = {"batch_size": 3, **change}
    world = {} if change else {"rank": 0, "world_size": 2}
    other = wrap(torchdata.StatefulDataLoader(Stream(), **more), **world)
    with pytest.raises(InputError, match=words):
        other.load_state_dict(loader.state_dict())
    with pytest.raises(InputError, match="another loader"):
        other.load_state_dict({"schema": 1})


def test_without_a_state_exactness_is_refused_at_the_start() -> None:
    with pytest.raises(UsageError, match="without state_dict"):
        wrap(DataLoader(Forgetful(), batch_size=3))
    with pytest.raises(UsageError, match="without state_dict"):
        wrap(torchdata.StatefulDataLoader(Forgetful(), batch_size=3))
    with pytest.raises(UsageError, match="StatefulDataLoader"):
        wrap(DataLoader(Stream(), batch_size=3))
    with pytest.raises(UsageError, match="wrapped already"):
        wrap(wrap(DataLoader(Numbers())))
    with pytest.raises(UsageError, match="DataLoader"):
        wrap(Numbers())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_of_the_last_short_step_of_an_epoch_resumes(workers: int) -> None:
    def make() -> Any:
        return wrap(torchdata.StatefulDataLoader(Stream(15), batch_size=3, num_workers=workers), accumulate=4)

    whole = make()
    expected = [listed(whole), listed(whole)]
    loader, states = make(), []
    for _ in loader:
        if loader.step_ends:
            states.append(loader.state_dict())
    assert [s["step"] for s in states] == [1, 2] and [s["epoch"] for s in states] == [0, 0]
    for state, given in zip(states, (4, len(expected[0])), strict=True):
        other = make()
        other.load_state_dict(state)
        assert other.state_dict() == state
        assert listed(other) == expected[0][given:], "what is left of the epoch, though it be nothing"
        assert (other.epoch, other.step) == (1, 2) and listed(other) == expected[1]
    without = {k: v for k, v in states[0].items() if k != "ended"}  # as it was saved before
    other = make()
    other.load_state_dict(without)
    assert listed(other) == expected[0][4:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_second_loop_goes_on_where_the_first_one_stopped(workers: int) -> None:
    def make() -> Any:
        return wrap(torchdata.StatefulDataLoader(Stream(), batch_size=3, num_workers=workers), accumulate=2)

    expected = listed(make())
    loader = make()
    first = iter(loader)
    given = [next(first).tolist(), next(first).tolist(), next(first).tolist()]
    second = iter(loader)
    given.append(next(second).tolist())
    with pytest.raises(UsageError, match="two iterations"):
        next(first)
    assert [*given, *(b.tolist() for b in second)] == expected and (loader.epoch, loader.step) == (1, 4)


def test_what_an_iterable_dataset_cannot_have_is_refused_and_its_name_is_compared() -> None:
    with pytest.raises(UsageError, match="on_batch"):
        wrap(torchdata.StatefulDataLoader(Stream(), batch_size=3), on_batch=print)
    state = wrap(torchdata.StatefulDataLoader(Stream(), batch_size=3), content="web-v1").state_dict()
    wrap(torchdata.StatefulDataLoader(Stream(), batch_size=3), content="web-v1").load_state_dict(state)
    with pytest.raises(InputError, match="web-v1"):
        wrap(torchdata.StatefulDataLoader(Stream(), batch_size=3), content="web-v2").load_state_dict(state)


def test_accumulation_counts_steps_here_too() -> None:
    loader = wrap(torchdata.StatefulDataLoader(Stream(15), batch_size=3), accumulate=2)
    ends = []
    for _ in loader:
        ends.append(loader.step_ends)
        if not ends[-1]:
            with pytest.raises(UnsaveableState):
                loader.state_dict()
    assert ends == [False, True, False, True, True] and loader.step == 3, "what is left is a step too"
    assert [e for e in loader.epochs(2) if listed(loader)] == [1]
    random.seed(0)
