"""What all our loaders have in common: epochs, steps, and one position for one loop. Needs torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ...errors import InputError, UnsaveableState, UsageError
from ..arguments import whole_number
from ..ordering.permutation import key_of

SCHEMA = 1


class CountingLoader:
    """Counts the epochs and steps of a training by the batches that its loop was given.

    `accumulate` batches make a step, and so does what is left at the end of an epoch. All else is the given loader's.
    """

    def __init__(
        self, loader: Any, *, seed: int, accumulate: int, rank: int | None, world_size: int | None
    ) -> None:
        self._original = loader
        self._seed = whole_number("seed", seed)
        self._accumulate = whole_number("accumulate", accumulate, 1)
        self._given = (
            None if rank is None else whole_number("rank", rank, 0),
            None if world_size is None else whole_number("world_size", world_size, 1),
        )
        self._epoch = 0
        self._step = 0
        self._in_step = 0
        """Batches of the present step that the loop was given, if the step is not complete with them."""
        self._last = False
        self._turn = 0
        """Which iteration is the newest: there is one position, so only one can go on."""
        self._generator = torch.Generator()

    @property
    def epoch(self) -> int:
        """The epoch that the training is in, from 0; it changes when an iteration has come to its end."""
        return self._epoch

    @property
    def seed(self) -> int:
        """What the order and the samples' generators are made from."""
        return self._seed

    @property
    def rank(self) -> int:
        """This process's place among those that share the data."""
        return self._place()[0]

    @property
    def step(self) -> int:
        """Steps that are complete with the batch that the loop holds, over all epochs and attempts."""
        return self._step

    @property
    def step_ends(self) -> bool:
        """Whether the batch that the loop holds is the last of its step: with `accumulate`, when to call the optimizer."""
        return self._in_step == 0

    @property
    def epoch_ends(self) -> bool:
        """Whether the batch that the loop holds is the last of its epoch, as far as that is known."""
        return self._last

    def epochs(self, total: int) -> Iterator[int]:
        """The epochs from the present one to the last of `total`: the outer loop of a training."""
        total = whole_number("the number of epochs", total, 0)
        while self._epoch < total:
            before = (self._epoch, self._step, self._in_step)
            yield self._epoch
            if (self._epoch, self._step, self._in_step) == before:
                raise UsageError(
                    "the loop over the epochs took no batch", hint="Iterate over this loader inside the loop"
                )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._original, name)

    # --- for the loaders

    def _new_turn(self) -> int:
        self._turn += 1
        return self._turn

    def _check_turn(self, turn: int) -> None:
        if turn != self._turn:
            raise UsageError(
                "two iterations over one loader at once: it has one position",
                hint="Wrap a second DataLoader for the second loop",
            )

    def _seed_iterator(self) -> None:
        """The base seed of the workers is drawn from this generator, not from the training's."""
        self._generator.manual_seed(key_of(self._seed, self._epoch) & (1 << 63) - 1)

    def _count_batch(self, last: bool) -> None:
        """The loop is given a batch, the last of its epoch or not."""
        self._in_step += 1
        self._last = last
        if self._in_step == self._accumulate or last:
            self._in_step = 0
            self._step += 1

    def _refuse_inside_step(self) -> None:
        if self._in_step:
            raise UnsaveableState(
                "loader",
                f"the loop holds batch {self._in_step} of the {self._accumulate} of a step: their gradients are in no checkpoint",
                hint="Save after the optimizer's step: `if loader.step_ends and checkpoints.due(loader.step)`",
            )

    def _check_state(self, state: Any, kind: str, numbers: tuple[str, ...], keys: tuple[str, ...]) -> None:
        """Raises InputError for what is no state of such a loader, or of another version. `numbers` count from 0."""
        if isinstance(state, dict) and isinstance(state.get("schema"), int) and state["schema"] != SCHEMA:
            raise InputError(
                f"the loader's state has schema {state['schema']}, this version reads {SCHEMA}",
                hint="Use the version of unbroken that wrote it",
            )
        if (
            not isinstance(state, dict)
            or state.get("schema") != SCHEMA
            or not isinstance(state.get("identity"), dict)
            or any(k not in state for k in keys)
            or any(type(state.get(n)) is not int or state[n] < 0 for n in numbers)
        ):
            raise InputError(
                f"this is no state of {kind}",
                hint="It was saved from another loader: start a new run, or leave the loader out of the state",
            )

    def _place(self, rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
        """(rank, world size) of the data-parallel group: as given, else as the sampler says, else torch.distributed's
        or the environment's."""
        given, size = self._given
        rank, size = (rank, world_size) if given is None and size is None and world_size else (given, size)
        dist = sys.modules.get("torch.distributed")
        up = dist is not None and dist.is_available() and dist.is_initialized()
        if size is None:
            size = dist.get_world_size() if up and dist else int(os.environ.get("WORLD_SIZE", "1"))
        if rank is None:
            rank = dist.get_rank() if up and dist else int(os.environ.get("RANK", "0"))
        if not 0 <= rank < size:
            raise UsageError(f"rank {rank} of {size}", hint="Give wrap() both rank and world_size")
        return rank, size


def _fixed(name: str) -> property:
    """What the given loader says: as in torch's, to change it later would change nothing, in silence."""

    def read(self: CountingLoader) -> Any:
        return getattr(self._original, name)

    def refuse(self: CountingLoader, value: Any) -> None:
        raise UsageError(
            f"the loader's {name} cannot be changed after wrap()",
            hint=f"Build the DataLoader with another {name}, and wrap that",
        )

    return property(read, refuse, doc=f"The given loader's {name}.")


for _name in ("dataset", "batch_size", "sampler", "batch_sampler", "drop_last", "collate_fn", "num_workers"):
    setattr(CountingLoader, _name, _fixed(_name))
