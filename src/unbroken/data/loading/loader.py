"""`wrap(loader)`: the same batches as torch's loader gives, in an order that is known, from where the training stood.

    loader = unbroken.data.wrap(DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2))
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpoints.restore(state)
    for epoch in loader.epochs(3):
        for batch in loader:
            ...
            if checkpoints.due(loader.step):
                checkpoints.save(loader.step, state)

Workers, prefetching and pinned memory are torch's: inside is a DataLoader whose items are whole batches. Needs torch.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, get_worker_info

from ...errors import InputError, UsageError
from ...progress import attach
from ..arguments import whole_number
from ..ordering.orders import Listed, ListedBatches, Order, UnitOrder, fingerprint
from ..ordering.samplers import Sampled, size_of
from ..position import Position, Ranges, normalize, subtract
from .counting import SCHEMA, CountingLoader
from .global_batch import count_rounds
from .samples import Probe, Request, Samples
from .shares import Share, Sharing
from .steps import OptimizerSteps

logger = logging.getLogger("unbroken.data")

PROBED = 4
"""So many samples of the dataset are read at the first iteration, for the fingerprint."""


@dataclass(frozen=True)
class BatchRecord:
    """What one rank was given, for a journal of the data."""

    step: int
    """The step that this batch belongs to, from 1."""
    epoch: int
    samples: Ranges
    """Absolute numbers of the whole global batch, of all ranks together."""
    rank: int
    world_size: int
    digest: int
    """Of this rank's samples: the digests of all ranks add up, modulo 2**64, to that of the global batch, which is the
    same at any world size (but where samples are given twice to fill up the last batch of an epoch)."""

    def as_json(self) -> dict[str, Any]:
        """As it stands in a journal."""
        return {
            "step": self.step, "epoch": self.epoch, "samples": [list(r) for r in self.samples], "rank": self.rank,
            "world_size": self.world_size, "digest": f"{self.digest:016x}",
        }  # fmt: skip


class Loader(CountingLoader):
    """A loader that knows where the training stands in its data, at any world size, batch size and number of workers.

    Iterate over it as over torch's; each iteration goes on to the end of the epoch from where the last one stopped.
    `accumulate` is how many batches make a step; with `global_batch` as many as it takes for so many samples over all ranks. `rank` and `world_size` are those of the data-parallel group (default:
    the sampler's, torch.distributed's, or the environment's).
    """

    def __init__(
        self,
        loader: Any,
        sampled: Sampled,
        *,
        seed: int = 0,
        order: Order | None = None,
        accumulate: int = 1,
        rank: int | None = None,
        world_size: int | None = None,
        on_batch: Callable[[BatchRecord], object] | None = None,
        content: str | None = None,
        global_batch: int | None = None,
    ) -> None:
        super().__init__(loader, seed=seed, accumulate=accumulate, rank=rank, world_size=world_size)
        seed = self._seed
        if (order is not None and order.size < 1) or (order is None and sampled.order.size < 1):
            raise UsageError("there is no sample to train on", hint="Give a dataset that is not empty")
        self._global_batch = 0 if global_batch is None else whole_number("global_batch", global_batch, 1)
        self._weight = 1.0
        self._sampled = sampled
        self._order = order or sampled.order
        self._sharing: Sharing | None = None
        self._on_batch = on_batch
        self._content = content
        """A name of the dataset's content; None until some of it was read."""
        self._size = size_of(loader.dataset)
        numbered = self._size > 0 and not isinstance(self._order, Listed)
        self._probe_wanted = content is None and numbered
        self._content_saved: str | None = None
        self._at = 0
        """The absolute number after everything consumed."""
        self._step_from: int | None = None
        """The absolute number that the present step began at, where the loop was given a part of it and nothing else moved it."""
        self._run_from = 0
        self._before: Ranges = ()
        """Consumed is this, and everything in [_run_from, _at) but the skips."""
        # What its run has decided to leave out, in a rollback before this start.
        self._skips: Ranges = normalize(attach().skips)
        self._stale = False
        self._steps = OptimizerSteps()
        self._requests = _Requests()
        units = isinstance(self._order, UnitOrder)
        if units and self._global_batch:
            raise UsageError(
                "global_batch counts samples, and this order makes batches of its own", hint="Use accumulate="
            )
        shape = "samples" if not units else "batches" if isinstance(self._order, ListedBatches) else "packs"
        samples: Any = Samples(
            loader.dataset, loader.collate_fn, seed, batched=sampled.batched or units, shape=shape,
            digests=on_batch is not None,
        )  # fmt: skip
        self._inner: Any = DataLoader(
            samples, batch_sampler=cast(Any, self._requests), collate_fn=_as_it_is, num_workers=loader.num_workers,
            pin_memory=loader.pin_memory, timeout=loader.timeout, worker_init_fn=_Begin(loader.dataset, loader.worker_init_fn),
            multiprocessing_context=loader.multiprocessing_context, generator=self._generator,
            prefetch_factor=loader.prefetch_factor, persistent_workers=loader.persistent_workers,
        )  # fmt: skip

    # --- what a training calls

    def __iter__(self) -> Iterator[Any]:
        turn = self._new_turn()
        while True:
            self._stale = False
            epoch = self._epoch
            yield from self._batches(turn)
            if not self._stale:
                break
        if self._at == epoch * self._order.size and not self._skips:
            s = self._shared()
            whole = (
                f"{s.batch} for each of {s.world_size} ranks"
                if not s.global_batch
                else f"a step's ({s.global_batch})"
            )
            logger.warning(
                "epoch %d has no batch: its %d samples are less than %s, and drop_last drops what is less. Leave out drop_last, or "
                "make %s smaller", epoch, self._order.size, whole, "global_batch" if s.global_batch else "the batch",
            )  # fmt: skip
        self._begin_epoch(epoch + 1)

    def __len__(self) -> int:
        """Batches of the whole epoch on this rank."""
        return self._shared().batches(self._epoch, self._skips)

    def batches_of_epoch(self) -> int:
        """Batches on this rank of an epoch of which nothing is skipped: what a schedule goes by. Raises TypeError where `len` does."""
        return self._shared().batches(self._epoch, ())

    def batches_left(self, epoch: int) -> int:
        """Batches on this rank of that epoch, the present one or a later one, that the loop was not given yet and that are not
        skipped. Raises TypeError where `len` does."""
        start = self._at if epoch == self._epoch else epoch * self._order.size
        return self._shared().batches(epoch, self._skips, start)

    def begin_inside_step(self, batches: int) -> None:
        """The first step from here on has so many batches less: a framework's own count of its epoch's batches wants that where
        the batch size, the ranks or the samples changed at a resume."""
        self._in_step, self._step_from = whole_number("batches", batches, 0) % self._accumulate, None

    def set_epoch(self, epoch: int) -> None:
        """Nothing where the training is in that epoch already; a later one is begun. Raises UsageError for an earlier one."""
        epoch = whole_number("the epoch", epoch)
        if epoch < self._epoch:
            raise UsageError(
                f"set_epoch({epoch}), but the training is in epoch {self._epoch}: its data would come twice",
                hint="Write `for epoch in loader.epochs(N)`, which begins where the training stands",
            )
        if epoch > self._epoch:
            self._begin_epoch(epoch)
            self._stale = True

    def skip(self, start: int, stop: int) -> None:
        """Never uses the samples with the absolute numbers [start, stop), in this and every later attempt.

        What was consumed stays consumed. Takes effect with the next batch, on every rank: call it on all. Raises UsageError inside a
        step of `global_batch`.
        """
        start, stop = whole_number("start", start), whole_number("stop", stop)
        if self._global_batch and self._in_step:
            raise UsageError(
                "skip() inside a step of global_batch, whose batches are weighed by what the whole step has",
                hint="Call it after the optimizer's step: `if loader.step_ends: ...`",
            )
        (new,) = normalize([(start, stop)]) or ((0, 0),)
        self._before, self._run_from = self._consumed(), self._at
        self._skips = normalize([*self._skips, new])
        self._stale = True

    def start_from(self, epoch: int, step: int, batches: int) -> None:
        """Goes on after so many batches of an epoch, as a training that another program saved; `step` is what it counted.

        Raises UsageError where the epoch has fewer.
        """
        shared, size = self._shared(), self._order.size
        at = epoch * size
        if batches:
            shares = itertools.islice(shared.epoch(epoch, at, self._skips), batches)
            ends = [share.stop for share in shares]
            if len(ends) < batches:
                raise UsageError(
                    f"an epoch of this loader has {len(ends)} batches, and {batches} of it were said to be done",
                    hint="Resume with the same dataset, batch size and number of ranks",
                )
            at = ends[-1]
        self._before = normalize([(0, epoch * size)])
        self._epoch, self._step = epoch, step
        # Another program may have saved inside a step.
        self._in_step, self._step_from = batches % self._accumulate, None
        self._at, self._run_from = at, epoch * size
        self._stale = True

    def move_on(self, batches: int) -> None:
        """Goes on as if the loop had been given so many batches more, from one epoch into the next."""
        left = whole_number("batches", batches, 0)
        while left:
            begin, given = self._epoch * self._order.size, 0
            for share in itertools.islice(self._next_shares(), left):
                if not self._in_step:
                    self._step_from = self._at
                self._at, given = share.stop, given + 1
                self._count_batch(share.last)
            left -= given
            if not given and self._at == begin:
                break  # an epoch without a batch: neither has any other
            if left:
                self._begin_epoch(self._epoch + 1)
        self._stale = True

    @property
    def rank(self) -> int:
        """This process's place among those that share the data."""
        return self._shared().rank

    @property
    def weight(self) -> float:
        """What to multiply the mean loss of the batch that the loop holds by: summed over the batches of a step, and averaged over the
        ranks as DistributedDataParallel does, that is the mean of the step's samples. Raises UsageError without `global_batch`.
        """
        if not self._global_batch:
            raise UsageError("weight is of a step of so many samples", hint="Write wrap(..., global_batch=N)")
        return self._weight

    def position(self) -> Position:
        """Where the training stands, counting the batch that the loop holds, and nothing that was only prefetched."""
        return Position(self._epoch, self._consumed(), self._skips, fingerprint(self._identity()))

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank. Raises UnsaveableState in the middle of a step."""
        self._refuse_inside_step()
        if self._steps.is_open():
            logger.warning(
                "the state was saved %d batches after the last optimizer step: what was accumulated since is in no "
                "checkpoint, and a resume would not be exact. Save after optimizer.step(), and tell how many batches make "
                "a step: unbroken.data.wrap(loader, accumulate=N)", self._steps.since,
            )  # fmt: skip
        return {
            "schema": SCHEMA, "step": self._step, "position": self.position().as_json(), "at": self._at,
            "identity": self._identity(),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there. Raises InputError if it is the state of other data, and says which."""
        self._check_state(state, "unbroken.data's loader", ("step", "at"), ("position",))
        saved, mine = state["identity"], self._identity()
        different = [k for k in mine if k != "content" and saved.get(k) != mine[k]]
        if different:
            raise InputError(_difference(different[0], saved, mine), hint=_SAME_DATA)
        self._check_content(saved.get("content") or "")
        position = Position.from_json(state["position"])
        begin = position.epoch * self._order.size
        if not begin <= state["at"] <= begin + self._order.size:
            raise InputError(
                f"the loader's state is no position: sample {state['at']} does not lie in epoch {position.epoch}",
                hint="Resume from another checkpoint",
            )
        self._epoch, self._step, self._in_step = position.epoch, int(state["step"]), 0
        self._at = self._run_from = int(state["at"])
        self._before = position.samples
        self._skips = normalize([*position.skips, *self._skips])
        self._stale = True
        self._steps = OptimizerSteps()

    # --- how it works

    def _shared(self) -> Sharing:
        """How the order is shared out, known from the first use on: by then torch.distributed has been set up."""
        if self._sharing is None:
            s = self._sampled
            rank, world_size = self._place(s.rank, s.world_size)
            g = self._global_batch
            self._sharing = Sharing(self._order, self._seed, s.batch, s.tail, rank, world_size, g)
            if g:
                self._accumulate = count_rounds(g, s.batch, world_size)
        return self._sharing

    def _begin_epoch(self, epoch: int) -> None:
        self._before = self._consumed()
        self._epoch = epoch
        self._at = self._run_from = epoch * self._order.size
        self._in_step = 0

    def _consumed(self) -> Ranges:
        return normalize([*self._before, *subtract([(self._run_from, self._at)], self._skips)])

    def _batches(self, turn: int) -> Iterator[Any]:
        """The rest of the epoch, or until the position is changed from outside."""
        pending: deque[Share | Probe] = deque()
        self._requests.source = self._ask(pending)
        self._seed_iterator()
        steps, record = self._steps, self._on_batch
        for data in _count_waiting(self._fetched()):
            self._check_turn(turn)
            share = pending.popleft()
            if type(share) is Probe:
                self._learn(share, data)
                continue
            before, self._at = self._at, share.stop  # type: ignore[union-attr]
            if not self._in_step:
                self._step_from = before
            self._count_batch(share.last)  # type: ignore[union-attr]
            self._weight = share.weight  # type: ignore[union-attr]
            steps.taken()
            if record is not None:
                data, digest = data
                # What stands in on a rank that is given nothing is another's sample.
                record(self._record(before, digest if self._weight else 0))
            yield data
            if self._stale:
                return

    def _fetched(self) -> Iterable[Any]:
        """What comes back for what is asked: from torch's loader, or where it would only pass it on, directly."""
        inner = self._inner
        if inner.num_workers or (inner.pin_memory and torch.accelerator.is_available()):
            found: Iterable[Any] = inner
            return found
        return map(inner.dataset.__getitems__, self._requests)

    def _ask(self, pending: deque[Share | Probe]) -> Iterator[Request | Probe]:
        """What the workers are asked for, ahead of the loop; noted in the order in which it comes back."""
        if self._probe_wanted:
            self._probe_wanted = False
            probe = Probe(_spread(self._size))
            pending.append(probe)
            yield probe
        for share in self._next_shares():
            pending.append(share)
            yield share[:2]  # the workers need no more

    def _next_shares(self) -> Iterator[Share]:
        """What is left of the epoch. A step of `global_batch` that the loop was left inside is cut as a whole, as before."""
        shared = self._shared()
        if self._global_batch and self._in_step and self._step_from is not None:
            whole = shared.epoch(self._epoch, self._step_from, self._skips)
            return itertools.islice(whole, self._in_step, None)
        return shared.epoch(self._epoch, self._at, self._skips)

    def _record(self, before: int, digest: int) -> BatchRecord:
        s = self._shared()
        step = self._step if self._in_step == 0 else self._step + 1
        samples = subtract([(before, self._at)], self._skips)
        return BatchRecord(step, self._epoch, samples, s.rank, s.world_size, digest)

    def _learn(self, probe: Probe, answer: Any) -> None:
        """What the first look into the dataset says."""
        digests, again = answer
        if not again:
            logger.warning(
                "sample %d of the dataset was another one when it was read again: it depends on the time, on what was "
                "read before or on a generator of its own, and cannot come back exactly. Let it draw from the generators of "
                "Python, numpy or torch, which are seeded for each sample", probe.indices[0],
            )  # fmt: skip
            self._content = ""
            return
        self._content = "-".join(f"{d:016x}" for d in digests)
        if self._content_saved is not None:
            self._check_content(self._content_saved)

    def _check_content(self, saved: str) -> None:
        if self._content is None:
            self._content_saved = saved
        elif saved and self._content and saved != self._content:
            where = _spread(self._size)
            pairs = zip(where, saved.split("-"), self._content.split("-"), strict=False)
            wrong = next((i for i, a, b in pairs if a != b), None)
            raise InputError(
                f"sample {wrong} of the dataset is another one than when the checkpoint was made"
                if wrong is not None and saved.count("-") == self._content.count("-")
                else f"the dataset is {self._content!r}, the checkpoint's was {saved!r}",
                hint=f"{_SAME_DATA} (a dataset that lists a set or a folder has another order in each process: sort it)",
            )

    def _identity(self) -> dict[str, Any]:
        return {
            "order": self._order.describe(), "seed": self._seed, "dataset_size": self._size,
            "content": self._content if self._content is not None else (self._content_saved or ""),
        }  # fmt: skip


class _Requests:
    """The batch sampler of the inner loader."""

    source: Iterator[Request | Probe] = iter(())

    def __iter__(self) -> Iterator[Request | Probe]:
        return self.source


class _Begin:
    """What a worker does first: the user's function, which finds the user's dataset, as in torch's loader."""

    def __init__(self, dataset: Any, then: Callable[[int], object] | None) -> None:
        self._dataset, self._then = dataset, then

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        if info is not None:
            # It refuses to be changed, in each version of torch in another way.
            object.__setattr__(info, "dataset", self._dataset)
        if self._then is not None:
            self._then(worker)


_SAME_DATA = "Resume with the same dataset, order and seed, or start a new run"


def _count_waiting(items: Iterable[Any]) -> Iterator[Any]:
    """The same, and says to the run how long each was waited for."""
    run, left = attach(), iter(items)
    while True:
        began = monotonic()
        try:
            item = next(left)
        except StopIteration:
            return
        run.add_data_wait(monotonic() - began)
        yield item


def _as_it_is(batch: Any) -> Any:
    return batch


def _spread(size: int) -> list[int]:
    """Some indices all over a dataset."""
    n = min(PROBED, size)
    return sorted({i * (size - 1) // max(n - 1, 1) for i in range(n)})


def _difference(key: str, saved: dict[str, Any], mine: dict[str, Any]) -> str:
    a, b = saved.get(key), mine[key]
    if isinstance(a, dict) and isinstance(b, dict):
        inner = next(k for k in {**a, **b} if a.get(k) != b.get(k))
        key, a, b = f"{key}'s {inner}", a.get(inner), b.get(inner)
    return f"the checkpoint was made with other data: its {key.replace('_', ' ')} is {a!r}, this loader's is {b!r}"
