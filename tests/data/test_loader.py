"""Whatever happens to a training, its data comes in the order of the undisturbed one, each sample once."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, SequentialSampler

from unbroken.data import BatchRecord, Journal, LengthGrouped, Loader, Mixture, Packed, journal, wrap
from unbroken.data.position import normalize, subtract
from unbroken.errors import InputError, UnsaveableState, UsageError
from unbroken.progress import PageReader, Run
from unbroken.progress import page as layout


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Augmented(Numbers):
    """Draws from every generator, and from one of them only now and then."""

    def __getitem__(self, index: int) -> Any:
        late = random.gauss(0, 1) if index % 5 == 4 else 0.0
        return torch.tensor(
            [index, random.random(), np.random.rand(), np.random.randn(), torch.rand(()).item(), late],
            dtype=torch.float64,
        )


class TorchOnly(Numbers):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, torch.randn(()).item()])


def plain(size: int = 23, batch: int = 4, **more: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(size), batch_size=batch, shuffle=True, **more)


def given_out(loader: Any) -> list[list[int]]:
    return [b.tolist() for b in loader]


# --- the property


@dataclass(frozen=True)
class Attempt:
    world: int
    batch: int
    accumulate: int
    save_every: int
    batches: int
    """Global batches until the kill."""
    skip: tuple[int, int] | None = None
    """Samples that are to be skipped from the beginning of this attempt on."""
    workers: int = 0


def attempts(workers: Any) -> Any:
    """Any world sizes, batch sizes, saves, kills and skips, with as many workers as drawn."""
    return st.lists(
        st.builds(
            Attempt, st.integers(1, 5), st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.integers(0, 9),
            st.none() | st.tuples(st.integers(0, 90), st.integers(1, 12)).map(lambda t: (t[0], t[0] + t[1])),
            workers,
        ),
        min_size=1, max_size=4,
    )  # fmt: skip


@dataclass
class World:
    """All ranks of an attempt in one process, in step."""

    ranks: list[Loader]
    taken: list[int] = field(default_factory=list)
    """What the ranks were given, in the order of the global batches; samples given twice to fill up are left out."""

    def batches(self) -> Iterator[bool]:
        """One global batch after the other to the end of the epoch; whether a step ends with it."""
        running = [iter(r) for r in self.ranks]
        while True:
            before = self.ranks[0].position().consumed()
            found = [next(i, None) for i in running]
            assert len({f is None for f in found}) == 1, "the ranks have different numbers of batches"
            if found[0] is None:
                return
            assert len({len(f) for f in found if f is not None}) == 1
            fresh = self.ranks[0].position().consumed() - before
            self.taken += [i for f in found if f is not None for i in f.tolist()][:fresh]
            assert len({r.position() for r in self.ranks}) == 1
            yield self.ranks[0].step_ends


def start(size: int, seed: int, a: Attempt, state: Any) -> World:
    ranks = []
    for r in range(a.world):
        loader = wrap(
            plain(size, a.batch, num_workers=a.workers),
            seed=seed,
            rank=r,
            world_size=a.world,
            accumulate=a.accumulate,
        )
        assert isinstance(loader, Loader)
        if state is not None:
            loader.load_state_dict(state)
        if a.skip is not None:
            loader.skip(*a.skip)
        ranks.append(loader)
    return World(ranks)


def disturbed(size: int, seed: int, epochs: int, story: list[Attempt]) -> tuple[list[int], list[int]]:
    """(what counts of the samples that were given, what should have been)."""
    state: Any = None
    done: list[int] = []
    skips: list[tuple[int, int]] = []
    for number, a in enumerate(story):
        world = start(size, seed, a, state)
        left = a.batches if number < len(story) - 1 else 10**9
        consumed = world.ranks[0].position().samples
        asked = subtract([a.skip], consumed) if a.skip else ()
        saved = 0
        while left and world.ranks[0].epoch < epochs:
            for ends in world.batches():
                left -= 1
                step = world.ranks[0].step
                if ends and step % a.save_every == 0:
                    states = [r.state_dict() for r in world.ranks]
                    assert all(s == states[0] for s in states)
                    state, saved = states[0], len(world.taken)
                    skips += asked  # from now on it is remembered
                if not left:
                    break
        skips += asked if number == len(story) - 1 else ()
        done += world.taken if number == len(story) - 1 else world.taken[:saved]
    undisturbed = given_out_of_one(size, seed, epochs)
    gone = normalize(skips)
    return done, [i for n, i in enumerate(undisturbed) if not any(a <= n < b for a, b in gone)]


def given_out_of_one(size: int, seed: int, epochs: int) -> list[int]:
    loader = wrap(plain(size, 1), seed=seed)
    return [i for _ in range(epochs) for batch in given_out(loader) for i in batch]


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(0, 3), st.integers(1, 2), attempts(st.just(0)))
def test_each_sample_once_in_the_order_of_the_undisturbed_run(
    size: int, seed: int, epochs: int, story: list[Attempt]
) -> None:
    done, expected = disturbed(size, seed, epochs, story)
    assert done == expected


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 40), st.integers(0, 3), st.integers(1, 2), attempts(st.integers(0, 2)))
def test_each_sample_once_with_any_number_of_workers(
    size: int, seed: int, epochs: int, story: list[Attempt]
) -> None:
    done, expected = disturbed(size, seed, epochs, story)
    assert done == expected


def test_two_four_three_ranks_with_skips_over_two_epochs_and_workers() -> None:
    story = [
        Attempt(2, 4, 2, 1, 5, workers=1),
        Attempt(4, 3, 1, 2, 7, skip=(50, 57), workers=2),
        Attempt(3, 5, 1, 1, 0, skip=(130, 140)),
    ]
    done, expected = disturbed(97, 5, 2, story)
    assert done == expected
    assert len(done) == 2 * 97 - 17


@pytest.mark.parametrize("size, world, batch", [(10, 3, 2), (1, 4, 2), (7, 2, 8), (12, 3, 2)])
def test_what_does_not_divide_is_filled_up_as_torch_does(size: int, world: int, batch: int) -> None:
    ranks = [wrap(plain(size, batch), rank=r, world_size=world) for r in range(world)]
    found = [given_out(r) for r in ranks]
    sampler = torch.utils.data.DistributedSampler(Numbers(size), world, 0)
    assert sum(len(b) for b in found[0]) == len(sampler)
    assert len({len(f) for f in found}) == 1 and len(found[0]) == len(ranks[0])
    assert sorted({i for f in found for b in f for i in b}) == list(range(size))


@pytest.mark.parametrize("sampler_drops", [False, True])
@pytest.mark.parametrize("loader_drops", [False, True])
@pytest.mark.parametrize("size", [3, 18, 20, 22, 23])
def test_an_epoch_has_as_many_batches_as_torchs(size: int, loader_drops: bool, sampler_drops: bool) -> None:
    found = []
    for r in range(3):
        sampler = torch.utils.data.DistributedSampler(Numbers(size), 3, r, drop_last=sampler_drops)
        loader = DataLoader(Numbers(size), batch_size=2, sampler=sampler, drop_last=loader_drops)
        wrapped = wrap(loader)
        found.append(given_out(wrapped))
        assert [len(b) for b in found[-1]] == [len(b) for b in loader] and len(wrapped) == len(loader)
    flat = [i for f in found for b in f for i in b]
    fills = not sampler_drops and size % 3
    assert len(flat) - len(set(flat)) <= (3 - size % 3 if fills else 0)
    assert len(set(flat)) == size or loader_drops or sampler_drops


@settings(max_examples=40)
@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 40),
)
def test_a_global_batch_has_the_same_samples_and_mean_at_any_number_of_ranks(
    size: int, each: int, world: int, batch: int, drop: bool, skipped: int
) -> None:
    def steps(ranks: int, batch: int) -> dict[int, tuple[list[int], float]]:
        found: dict[int, tuple[list[int], float]] = {}
        for rank in range(ranks):
            plain = DataLoader(Numbers(size), batch_size=batch, shuffle=True, drop_last=drop)
            loader = wrap(plain, global_batch=each, rank=rank, world_size=ranks)
            loader.skip(skipped, skipped + 3)
            expected = len(loader)
            count = 0
            for b in loader:
                count += 1
                assert len(b) <= batch
                samples, mean = found.get(number := loader.step + (not loader.step_ends), ([], 0.0))
                given_here = b.tolist() if loader.weight else []
                found[number] = (
                    samples + given_here,
                    mean + loader.weight * float(b.double().mean()) / ranks,
                )
            assert count == expected and loader.step_ends
        return {n: (sorted(samples), mean) for n, (samples, mean) in found.items()}

    alone, together = steps(1, each), steps(world, batch)
    assert {n: s for n, (s, _) in alone.items()} == {n: s for n, (s, _) in together.items()}
    for n, (samples, mean) in together.items():
        assert mean == pytest.approx(sum(samples) / len(samples)) == pytest.approx(alone[n][1])


def test_a_loop_that_is_left_inside_a_step_of_a_global_batch_goes_on_with_the_rest_of_it() -> None:
    def given(leave_after: int) -> list[tuple[list[int], float, int]]:
        loader = wrap(plain(25, 2), global_batch=10, rank=1, world_size=2)
        found = []
        while not loader.epoch:
            for b in loader:
                found.append((b.tolist(), loader.weight, loader.step))
                if len(found) == leave_after:
                    break
        return found

    whole = given(0)
    assert [given(n) for n in range(1, len(whole))] == [whole] * (len(whole) - 1)
    loader = wrap(plain(25, 2), global_batch=10, rank=0, world_size=1)
    next(iter(loader))
    with pytest.raises(UsageError, match="inside a step"):
        loader.skip(10, 12)


@pytest.mark.parametrize(("ranks", "samples", "batch"), [(3, 10, 2), (3, 2, 4), (2, 7, 3)])
def test_gradients_of_a_global_batch_are_those_of_one_process(ranks: int, samples: int, batch: int) -> None:
    """The mean over ranks of what each adds up, as DistributedDataParallel makes it."""
    total = torch.zeros(2, dtype=torch.float64)
    for rank in range(ranks):
        weights = torch.ones(2, dtype=torch.float64, requires_grad=True)
        loader = wrap(plain(samples, batch), global_batch=samples, rank=rank, world_size=ranks)
        for b in loader:
            x = b.double()
            loss = ((weights[0] * x + weights[1]) ** 2).mean() * loader.weight
            loss.backward()
        assert loader.step == 1
        assert weights.grad is not None
        total += weights.grad / ranks
    one = torch.ones(2, dtype=torch.float64, requires_grad=True)
    ((one[0] * torch.arange(samples).double() + one[1]) ** 2).mean().backward()
    torch.testing.assert_close(total, one.grad)


def test_with_all_ranks_a_global_batch_gives_what_accumulation_gives() -> None:
    for rank in range(4):
        ours = wrap(plain(96, 3), rank=rank, world_size=4, global_batch=24)
        theirs = wrap(plain(96, 3), rank=rank, world_size=4, accumulate=2)
        assert given_out(ours) == given_out(theirs) and ours.step == theirs.step == 4
        assert ours.weight == 0.5


def test_what_a_global_batch_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="both say"):
        wrap(plain(8, 2), global_batch=4, accumulate=2)
    with pytest.raises(UsageError, match="of its own"):
        wrap(DataLoader(Numbers(8), batch_size=2), order=Packed([1] * 8, budget=2), global_batch=4)
    with pytest.raises(UsageError, match="global_batch=N"):
        _ = wrap(plain(8, 2)).weight


# --- generators


def everything() -> tuple[Any, ...]:
    state = np.random.get_state()
    return (random.getstate(), state[1].tobytes(), *state[2:], bytes(torch.get_rng_state().numpy()))


@pytest.mark.parametrize("dataset", [Numbers(20), Augmented(20), TorchOnly(20)])
@pytest.mark.parametrize("workers", [0, 2])
def test_iterating_moves_no_generator_of_the_training(dataset: Numbers, workers: int) -> None:
    np.random.seed(1), random.seed(1), torch.manual_seed(1)
    np.random.randn(), random.gauss(0, 1), torch.randn(1)  # the second halves of the pairs wait
    before = everything()
    loader = wrap(DataLoader(dataset, batch_size=3, shuffle=True, num_workers=workers))
    for _ in loader:
        assert everything() == before
    for _ in loader:
        np.random.randn(), random.gauss(0, 1)  # odd numbers of draws between the batches
        before = everything()
    assert everything() == before


@pytest.mark.parametrize("dataset", [Augmented(24), TorchOnly(24)])
def test_randomness_is_the_same_at_any_number_of_workers_and_ranks_and_after_a_resume(
    dataset: Numbers,
) -> None:
    def rows(workers: int, world: int, batch: int, stop: int | None = None) -> torch.Tensor:
        found = []
        states = []
        for r in range(world):
            loader = DataLoader(dataset, batch_size=batch, shuffle=True, num_workers=workers)
            wrapped = wrap(loader, rank=r, world_size=world)
            for n, b in enumerate(wrapped):
                found.append(b)
                if n + 1 == stop:
                    states.append(wrapped.state_dict())
                    break
        for s in states:
            loader = DataLoader(dataset, batch_size=1, shuffle=True, num_workers=workers)
            again = wrap(loader, rank=0, world_size=1)
            again.load_state_dict(s)
            found += list(again)
        whole = torch.cat(found)
        return whole[whole[:, 0].argsort()]

    first = rows(0, 1, 4)
    assert len(first[:, 1].unique()) == 24
    for other in (rows(2, 1, 4), rows(0, 3, 2), rows(1, 1, 3, stop=4)):
        assert torch.equal(first, other)


def test_another_epoch_draws_other_numbers() -> None:
    loader = wrap(DataLoader(Augmented(6), batch_size=6))
    a, b = next(iter(loader)), None
    loader.set_epoch(1)
    b = next(iter(loader))
    assert torch.equal(a[:, 0], b[:, 0]) and not torch.equal(a[:, 1], b[:, 1])


def collate_with_noise(samples: list[int]) -> torch.Tensor:
    return torch.tensor(samples, dtype=torch.float32) + torch.rand(len(samples))


def test_randomness_of_the_collation_is_exact_too() -> None:
    def noisy(workers: int) -> list[torch.Tensor]:
        torch.manual_seed(workers)
        loader = DataLoader(Numbers(12), batch_size=4, num_workers=workers, collate_fn=collate_with_noise)
        return list(wrap(loader))

    assert all(torch.equal(a, b) for a, b in zip(noisy(0), noisy(2), strict=True))


def test_an_error_of_the_dataset_leaves_the_generators_alone() -> None:
    class Broken(Augmented):
        def __getitem__(self, index: int) -> Any:
            super().__getitem__(index)
            raise ValueError("no such sample")

    before = everything()
    with pytest.raises(ValueError, match="no such sample"):
        next(iter(wrap(DataLoader(Broken(5)), content="broken")))
    assert everything() == before


# --- samplers


class Odd(Sampler[int]):
    """Somebody's own: odd samples only, shuffled with a generator of its own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        yield from (2 * int(i) + 1 for i in torch.randperm(self.size // 2, generator=self.generator))

    def __len__(self) -> int:
        return self.size // 2


class Pairs(Sampler[list[int]]):
    """Batches of unlike length."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from random.sample([[0, 1, 2], [3], [4, 5], [6, 7, 8, 9]], 4)

    def __len__(self) -> int:
        return 4


def loaders(size: int = 20) -> dict[str, Any]:
    n, weights = Numbers(size), [float(i % 4) + 0.1 for i in range(size)]
    t = torch.utils.data
    return {
        "sequential": lambda: DataLoader(n, batch_size=3),
        "shuffled": lambda: DataLoader(n, batch_size=3, shuffle=True),
        "replacement": lambda: DataLoader(n, 3, sampler=t.RandomSampler(n, replacement=True, num_samples=17)),
        "part": lambda: DataLoader(n, 3, sampler=t.RandomSampler(n, num_samples=7)),
        "more": lambda: DataLoader(n, 3, sampler=t.RandomSampler(n, num_samples=47)),
        "subset": lambda: DataLoader(n, 3, sampler=t.SubsetRandomSampler([1, 5, 9, 13])),
        "weighted": lambda: DataLoader(n, 3, sampler=t.WeightedRandomSampler(weights, 30)),
        "weighted once": lambda: DataLoader(
            n, 3, sampler=t.WeightedRandomSampler(weights, 12, replacement=False)
        ),
        "own": lambda: DataLoader(n, 3, sampler=Odd(size)),
        "own batches": lambda: DataLoader(n, batch_sampler=Pairs()),
        "torch's batches": lambda: DataLoader(n, batch_sampler=BatchSampler(SequentialSampler(n), 3, True)),
        "no batches": lambda: DataLoader(n, batch_size=None, shuffle=True),
    }


def listed(loader: Any) -> list[Any]:
    return [b.tolist() if isinstance(b, torch.Tensor) else b for b in loader]


@pytest.mark.parametrize("kind", loaders())
def test_any_sampler_resumes_in_the_middle_of_any_epoch(kind: str) -> None:
    make = loaders()[kind]
    whole = wrap(make(), seed=3)
    expected = [listed(whole), listed(whole)]
    assert len(expected[0]) == len(whole) == len(make())
    if kind not in ("sequential", "torch's batches"):
        assert expected[0] != expected[1]
    for epoch, stop in ((0, 1), (1, 2)):
        first = wrap(make(), seed=3)
        for _ in range(epoch):
            list(first)
        iterator = iter(first)
        for _ in range(stop):
            next(iterator)
        torch.manual_seed(stop), random.seed(stop)  # the new process is seeded otherwise
        second = wrap(make(), seed=3)
        second.load_state_dict(first.state_dict())
        assert second.epoch == epoch
        assert listed(second) == expected[epoch][stop:]


def test_weights_are_those_asked_for() -> None:
    weights = [1.0, 2.0, 7.0]
    t = torch.utils.data
    loader = wrap(DataLoader(Numbers(3), 10, sampler=t.WeightedRandomSampler(weights, 20000)))
    found = np.bincount([i for b in given_out(loader) for i in b])
    assert np.allclose(found / 20000, [0.1, 0.2, 0.7], atol=0.02)


class Named(Dataset[str]):
    """Asked for by name, and does not say how many it has."""

    def __getitem__(self, name: str) -> str:
        return name * 2


class Names(Sampler[str]):
    def __iter__(self) -> Iterator[str]:
        yield from random.sample("abcdefg", 7)

    def __len__(self) -> int:
        return 7


def test_samples_may_be_asked_for_by_name() -> None:
    def make() -> Any:
        return wrap(DataLoader(Named(), batch_size=2, sampler=Names(), collate_fn=list))

    loader = make()
    whole = list(loader)
    assert sorted(i for b in whole for i in b) == [c * 2 for c in "abcdefg"]
    loader = make()
    next(iter(loader))
    other = make()
    other.load_state_dict(loader.state_dict())
    assert list(other) == whole[1:]


class Opened(Numbers):
    offset = 0

    def __getitem__(self, index: int) -> int:
        return index + self.offset


def open_it(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    info.dataset.offset = 100  # type: ignore[attr-defined]


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_begin_as_torchs_do(context: str) -> None:
    """What a worker_init_fn changes of its dataset is what the samples come from."""
    more = {"num_workers": 1, "worker_init_fn": open_it, "multiprocessing_context": context}
    assert given_out(wrap(DataLoader(Opened(4), batch_size=2, **more))) == [[100, 101], [102, 103]]


def test_a_sampler_that_shares_by_itself_or_never_ends_is_refused() -> None:
    class Sharing(Odd):
        num_replicas = 4

    class Endless(Odd):
        def __iter__(self) -> Iterator[int]:
            return itertools.repeat(0)

    with pytest.raises(UsageError, match="num_replicas=1"):
        wrap(DataLoader(Numbers(8), sampler=Sharing(8)))
    with pytest.raises(UsageError, match="not ended"):
        wrap(DataLoader(Numbers(8), sampler=Endless(8)))


# --- mixtures, lengths, packs


def test_a_mixture_has_its_weights_and_resumes_anywhere() -> None:
    def make() -> Any:
        return wrap(
            DataLoader(Mixture([Numbers(50), range(1000, 1300)], [0.25, 0.75]), batch_size=7, shuffle=True)
        )

    whole = [i for b in given_out(make()) for i in b]
    assert len(whole) == 350 and abs(sum(i < 1000 for i in whole) / 350 - 0.25) < 0.08
    small = [i for i in whole if i < 1000]
    assert len(set(small[:50])) == 50, "a source begins again only when it is used up"
    first = make()
    iterator = iter(first)
    taken = [next(iterator).tolist() for _ in range(20)]
    second = wrap(
        DataLoader(Mixture([Numbers(50), range(1000, 1300)], [0.25, 0.75]), batch_size=5, shuffle=True)
    )
    second.load_state_dict(first.state_dict())
    assert [i for b in taken for i in b] + [i for b in given_out(second) for i in b] == whole


def test_batches_of_like_length() -> None:
    lengths = [(i * 37) % 101 + 1 for i in range(240)]
    order = LengthGrouped(lengths, group=8, groups=10)
    loader = wrap(DataLoader(Numbers(240), batch_size=4), order=order, rank=0, world_size=2)
    other = wrap(DataLoader(Numbers(240), batch_size=4), order=order, rank=1, world_size=2)
    batches = [a + b for a, b in zip(given_out(loader), given_out(other), strict=True)]
    assert sorted(i for b in batches for i in b) == list(range(240))
    spread = [max(lengths[i] for i in b) - min(lengths[i] for i in b) for b in batches]
    assert np.mean(spread) < 20
    one = wrap(DataLoader(Numbers(240), batch_size=8), order=order)
    assert given_out(one) == batches


def keep(packs: list[list[int]]) -> list[list[int]]:
    return packs


@pytest.mark.parametrize("budget", [100, 130])
def test_packs_fill_their_budget_and_stay_whole_at_any_world_size(budget: int) -> None:
    lengths = [(i * 37) % 97 + 1 for i in range(300)]

    def make(world: int, rank: int, batch: int) -> Any:
        loader = DataLoader(Numbers(300), batch_size=batch, collate_fn=keep)
        return wrap(loader, order=Packed(lengths, budget, window=64), rank=rank, world_size=world)

    whole = [p for b in make(1, 0, 1) for p in b]
    sums = [sum(lengths[i] for i in p) for p in whole]
    assert max(sums) <= budget and np.mean(sums) > 0.9 * budget
    assert sorted(i for p in whole for i in p) == list(range(300))
    ranks = [make(3, r, 2) for r in range(3)]
    iterators = [iter(r) for r in ranks]
    found = [p for _ in range(7) for it in iterators for p in next(it)]
    last = make(2, 0, 1), make(2, 1, 1)
    for loader in last:
        loader.load_state_dict(ranks[2].state_dict())
    for a, b in zip(*last, strict=True):
        found += a + b
    assert found[: len(whole)] == whole
    with pytest.raises(TypeError):
        len(ranks[0])


# --- position, epochs, steps


def test_only_what_the_loop_was_given_counts_not_what_was_fetched_ahead() -> None:
    loader = wrap(plain(40, 2, num_workers=2, prefetch_factor=4))
    iterator = iter(loader)
    next(iterator), next(iterator)
    assert loader.position().samples == ((0, 4),)
    assert loader.step == 2


def test_skipping_takes_effect_with_the_next_batch_also_where_workers_are_ahead() -> None:
    order = given_out_of_one(40, 0, 1)
    loader = wrap(plain(40, 4, num_workers=1))
    found = []
    for n, batch in enumerate(loader):
        found += batch.tolist()
        if n == 1:
            loader.skip(8, 15)
            loader.skip(2, 5)  # consumed already
    assert found == order[:8] + order[15:]
    assert loader.position().samples == ((0, 8), (15, 40))
    assert loader.position().skips == ((2, 5), (8, 15))


def test_a_state_of_the_end_of_an_epoch_still_ends_that_epoch() -> None:
    loader = wrap(plain(8, 4))
    iterator = iter(loader)
    next(iterator), next(iterator)
    other = wrap(plain(8, 4))
    other.load_state_dict(loader.state_dict())
    assert (other.epoch, other.step) == (0, 2)
    assert [(e, len(given_out(other))) for e in other.epochs(3)] == [(0, 0), (1, 2), (2, 2)]


def test_accumulation_counts_steps_and_refuses_a_save_inside_one() -> None:
    loader = wrap(plain(22, 4), accumulate=4)
    seen = []
    for _ in loader:
        seen.append((loader.step, loader.step_ends))
        if not loader.step_ends:
            with pytest.raises(UnsaveableState, match="step_ends"):
                loader.state_dict()
    assert seen == [(0, False), (0, False), (0, False), (1, True), (1, False), (2, True)]
    assert loader.state_dict()["step"] == 2


def test_a_save_between_a_batch_and_its_step_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    loader = wrap(plain())
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 0.1)
    iterator = iter(loader)
    next(iterator)
    optimizer.step()
    loader.state_dict()
    assert not caplog.records
    next(iterator)
    loader.state_dict()
    assert "optimizer" in caplog.text and "accumulate=N" in caplog.text


def test_a_loop_that_goes_on_after_a_break_gets_the_rest_of_the_epoch() -> None:
    loader = wrap(plain(12, 4))
    first = next(iter(loader)).tolist()
    rest = given_out(loader)
    assert sorted(first + rest[0] + rest[1]) == list(range(12)) and loader.epoch == 1


def test_set_epoch_never_goes_back() -> None:
    loader = wrap(plain())
    list(loader), list(loader)
    loader.set_epoch(2)
    with pytest.raises(UsageError, match="epochs"):
        loader.set_epoch(0)


def test_two_iterations_at_once_are_refused() -> None:
    loader = wrap(plain())
    a, b = iter(loader), iter(loader)
    next(a), next(b)
    with pytest.raises(UsageError, match="at once"):
        next(a)


def test_persistent_workers_go_on_over_epochs_and_skips() -> None:
    loader = wrap(plain(16, 4, num_workers=1, persistent_workers=True))
    first, second = given_out(loader), []
    for n, b in enumerate(loader):
        second.append(b.tolist())
        if n == 0:
            loader.skip(20, 24)
    expected = given_out_of_one(16, 0, 2)
    assert [i for b in first + second for i in b] == expected[:20] + expected[24:]


# --- fingerprint, journal


def changed(**more: Any) -> Any:
    size, seed = more.pop("size", 23), more.pop("seed", 0)
    loader = more.pop("loader", None) or plain(size)
    return wrap(loader, seed=seed, **more)


@pytest.mark.parametrize(
    "other, words",
    [
        ({"size": 24}, "size is 23, this loader's is 24"),
        ({"seed": 1}, "seed is 0, this loader's is 1"),
        ({"loader": DataLoader(Numbers(23))}, "kind is 'shuffled'"),
    ],
)  # fmt: skip
def test_other_data_is_refused_in_words(other: dict[str, Any], words: str) -> None:
    loader = changed()
    next(iter(loader))
    with pytest.raises(InputError, match=words):
        changed(**other).load_state_dict(loader.state_dict())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_of_other_content_is_noticed_at_the_first_batch(workers: int) -> None:
    class Others(Numbers):
        def __getitem__(self, index: int) -> int:
            return index + (index == self.size - 1)

    loader = changed()
    next(iter(loader))
    other = wrap(DataLoader(Others(23), batch_size=4, shuffle=True, num_workers=workers))
    other.load_state_dict(loader.state_dict())
    with pytest.raises(InputError, match="sample 22 of the dataset"):
        next(iter(other))


def test_a_dataset_that_is_no_function_of_the_index_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Drifting(Numbers):
        reads = 0

        def __getitem__(self, index: int) -> int:
            self.reads += 1
            return self.reads

    next(iter(wrap(DataLoader(Drifting(9)))))
    assert "another one when it was read again" in caplog.text


def test_batches_can_be_recorded_and_add_up_to_the_same_at_any_world_size() -> None:
    def totals(world: int, batch: int, workers: int = 0) -> dict[int, int]:
        found: list[BatchRecord] = []
        for r in range(world):
            loader = DataLoader(Augmented(24), batch_size=batch, shuffle=True, num_workers=workers)
            for b in wrap(loader, rank=r, world_size=world, on_batch=found.append):
                assert b.shape[0] == batch
        return {s: sum(f.digest for f in found if f.step == s) % 2**64 for s in {f.step for f in found}}

    one = totals(1, 6)
    assert one == totals(3, 2) == totals(2, 3, workers=1)
    assert len(set(one.values())) == 4


def test_the_journal_tells_each_global_batch_whoever_made_it(tmp_path: Path) -> None:
    def train(folder: Path, world: int, batch: int, stop: int, states: list[Any]) -> list[Any]:
        after = []
        for r in range(world):
            loader = DataLoader(Augmented(24), batch_size=batch, shuffle=True)
            wrapped = wrap(
                loader, rank=r, world_size=world, accumulate=12 // (world * batch), on_batch=Journal(folder)
            )
            if states:
                wrapped.load_state_dict(states[0])
            saved = None
            for n, _ in enumerate(wrapped, 1):
                if wrapped.step_ends and saved is None:
                    saved = wrapped.state_dict()
                if n == stop:
                    break
            after.append(saved)
        return after

    train(tmp_path / "one", 1, 12, 9, [])
    states = train(tmp_path / "two", 3, 2, 3, [])  # a step and a half, of which one counts
    train(tmp_path / "two", 2, 6, 9, states)
    one, two = journal.read(tmp_path / "one"), journal.read(tmp_path / "two")
    assert one == two and list(one) == [1, 2] and all(b.whole for b in one.values())
    assert one[2].samples == ((12, 24),)
    with open(next((tmp_path / "two").glob("*0001-rank-00000.jsonl")), "ab") as f:
        f.write(b'{"sum":"')
    assert journal.read(tmp_path / "two") == two
    with pytest.raises(UsageError, match="unbroken run"):
        Journal()


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("batches", [0, 1, 4, 5, 17])
def test_moving_on_leaves_the_loader_where_it_had_been_with_so_many_batches_more(
    batches: int, accumulate: int
) -> None:
    """From within an iteration, into the same epoch and later ones (six batches each)."""

    every = wrap(plain(), accumulate=accumulate)
    undisturbed = [(every.epoch, every.step, b.tolist()) for _ in every.epochs(5) for b in every]
    loader: Any = wrap(plain(), accumulate=accumulate)
    found = []
    for _ in loader.epochs(5):
        for batch in loader:
            found.append((loader.epoch, loader.step, batch.tolist()))
            if len(found) == 2:
                loader.move_on(batches)
    assert len(undisturbed) == 30 and found == undisturbed[:2] + undisturbed[2 + batches :]


def test_how_long_a_rank_waits_for_its_data_is_told_to_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Dataset[int]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, i: int) -> int:
            time.sleep(0.005)
            return i

    path = tmp_path / "p" / "rank-0.page"
    layout.create(path, rank=0, attempt=1)
    run = Run(path)
    monkeypatch.setattr("unbroken.data.loading.loader.attach", lambda: run)
    assert len(list(wrap(DataLoader(Slow(), batch_size=2)))) == 4
    waited = PageReader(path).read().data_s
    assert waited is not None and 8 * 0.005 <= waited < 5.0
