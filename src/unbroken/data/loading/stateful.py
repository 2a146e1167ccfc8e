"""Around torchdata's StatefulDataLoader of an iterable dataset that has a state: the order is the dataset's. Needs torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...errors import InputError, UnsaveableState, UsageError
from ..ordering.orders import Sequential, fingerprint
from ..ordering.permutation import key_of
from ..ordering.samplers import Sampled
from ..position import Position
from .loader import _place

SCHEMA = 1


class StatefulLoader:
    """Counts what the loop was given, keeps the loader's own state, and the training's generators out of it.

    Each rank's place is its own: a resume needs the same number of ranks and workers, and says so. Randomness that the
    dataset draws is exact only where its state holds it.
    """

    def __init__(
        self,
        loader: Any,
        *,
        seed: int = 0,
        accumulate: int = 1,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if accumulate < 1:
            raise UsageError(f"accumulate must be a whole number from 1 up, not {accumulate!r}")
        self._original = loader
        self._seed = seed
        self._accumulate = accumulate
        self._given = (rank, world_size)
        self._ranks: tuple[int, int] | None = None
        self._epoch = self._step = self._in_step = self._samples = 0
        self._turn = 0
        self._loaded: dict[str, Any] | None = None
        self._generator = torch.Generator()
        loader.generator = self._generator

    def __iter__(self) -> Iterator[Any]:
        self._turn += 1
        turn, epoch = self._turn, self._epoch
        # What an iterator draws (the base seed of the workers) comes from here, not from the training's generator.
        self._generator.manual_seed(key_of(self._seed, epoch) & (1 << 63) - 1)
        loader = self._original
        if self._loaded is not None:
            loader.load_state_dict(self._loaded)
            self._loaded = None
        iterator = iter(loader)
        batch = next(iterator, _END)
        while batch is not _END:
            if turn != self._turn:
                raise UsageError("two iterations over one loader at once: it has one position")
            self._in_step = (self._in_step + 1) % self._accumulate
            self._step += not self._in_step
            self._samples += _samples_of(batch, loader)
            yield batch
            batch = next(iterator, _END)
        if self._in_step:  # the epoch ends the step
            self._in_step = 0
            self._step += 1
        self._epoch = epoch + 1

    def __len__(self) -> int:
        return len(self._original)

    @property
    def epoch(self) -> int:
        """The epoch that the training is in, from 0."""
        return self._epoch

    @property
    def step(self) -> int:
        """Steps that are complete with the batch that the loop holds."""
        return self._step

    @property
    def step_ends(self) -> bool:
        """Whether the batch that the loop holds is the last of its step."""
        return self._in_step == 0

    def epochs(self, total: int) -> Iterator[int]:
        """The epochs from the present one to the last of `total`."""
        while self._epoch < total:
            before = (self._epoch, self._step, self._in_step)
            yield self._epoch
            if (self._epoch, self._step, self._in_step) == before:
                raise UsageError(
                    "the loop over the epochs took no batch", hint="Iterate over this loader inside the loop"
                )

    def position(self) -> Position:
        """How many samples this rank was given, numbered from 0: an iterable dataset has no global order."""
        return Position(
            self._epoch, ((0, self._samples),) if self._samples else (), (), fingerprint(self._identity())
        )

    def _identity(self) -> dict[str, Any]:
        dataset = type(self._original.dataset).__qualname__
        return {"dataset": dataset, "seed": self._seed, "batch_size": self._original.batch_size}

    def _place(self) -> tuple[int, int]:
        if self._ranks is None:
            self._ranks = _place(self._given, Sampled(Sequential(1), 1, True, "pad", None))
        return self._ranks

    def state_dict(self) -> dict[str, Any]:
        """This rank's. Raises UnsaveableState in the middle of a step."""
        if self._in_step:
            raise UnsaveableState(
                "loader",
                f"the loop holds batch {self._in_step} of the {self._accumulate} of a step: their gradients are in no checkpoint",
                hint="Save after the optimizer's step: `if loader.step_ends and checkpoints.due(loader.step)`",
            )
        # Before the first batch its state_dict would make the iterator, and with it the workers.
        own = self._loaded if self._loaded is not None else self._original.state_dict() if self._turn else {}
        return {
            "schema": SCHEMA, "epoch": self._epoch, "step": self._step, "samples": self._samples,
            "world_size": self._place()[1], "rank": self._place()[0], "workers": self._original.num_workers,
            "identity": self._identity(), "loader": own,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there. Raises InputError for another number of ranks or workers, or other data."""
        if not isinstance(state, dict) or "loader" not in state or "workers" not in state:
            raise InputError(
                "this is no state of an iterable dataset's loader",
                hint="It was saved from another loader: start a new run, or leave the loader out of the state",
            )
        if state.get("schema") != SCHEMA:
            raise InputError(
                f"the loader's state has schema {state.get('schema')}, this version reads {SCHEMA}"
            )
        mine = {
            "identity": self._identity(), "world_size": self._place()[1], "workers": self._original.num_workers,
        }  # fmt: skip
        for key, words in (
            ("identity", "dataset"),
            ("world_size", "number of ranks"),
            ("workers", "number of workers"),
        ):
            if state[key] != mine[key]:
                raise InputError(
                    f"the checkpoint's {words} is {state[key]!r}, this loader's is {mine[key]!r}: each worker of an iterable "
                    "dataset has a place of its own, which nobody else can go on from",
                    hint="Resume with the same ranks and workers, or make it a map-style dataset",
                )
        self._epoch, self._step, self._samples = (
            int(state["epoch"]),
            int(state["step"]),
            int(state["samples"]),
        )
        self._in_step = 0
        self._loaded = state["loader"] or None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._original, name)


_END: Any = object()


def _samples_of(batch: Any, loader: Any) -> int:
    """How many samples a batch holds, as far as its shape tells."""
    if loader.batch_sampler is None:
        return 1
    while isinstance(batch, dict | list | tuple) and len(batch):
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    try:
        return len(batch)
    except TypeError:
        return int(loader.batch_size or 1)
