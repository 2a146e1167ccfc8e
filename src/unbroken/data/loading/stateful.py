"""Around torchdata's StatefulDataLoader of an iterable dataset that has a state: the order is the dataset's. Needs torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...errors import InputError
from ..ordering.orders import fingerprint
from ..position import Position
from .counting import SCHEMA, CountingLoader


class StatefulLoader(CountingLoader):
    """Counts what the loop was given, keeps the loader's own state, and the training's generators out of it.

    Each rank's place is its own: a resume needs the same number of ranks and workers, and says so. Randomness that the
    dataset draws is exact only where its state holds it. `content` names the dataset.
    """

    def __init__(
        self,
        loader: Any,
        *,
        seed: int = 0,
        accumulate: int = 1,
        rank: int | None = None,
        world_size: int | None = None,
        content: str | None = None,
    ) -> None:
        super().__init__(loader, seed=seed, accumulate=accumulate, rank=rank, world_size=world_size)
        self._content = content
        self._samples = 0
        self._loaded: dict[str, Any] | None = None
        """The loader's own state that the next iterator begins from."""
        self._iterator: Iterator[Any] | None = None
        """Of the epoch that the training is in, until it has ended: a second loop goes on with it."""
        self._ahead: Any = _UNKNOWN
        """The batch after the one that the loop holds, where that had to be known."""
        self._ended = False
        """The loop was given the last batch of the epoch, and has not come back for more."""
        loader.generator = self._generator

    def __iter__(self) -> Iterator[Any]:
        turn = self._new_turn()
        while not self._ended and (batch := self._next()) is not _END:
            # Whether a step that is not full ends with this batch is known only from what follows. To look costs
            # nothing but time: inside of a step no state is given, so none can count a batch too many.
            if (self._in_step + 1) % self._accumulate:
                self._ahead = self._next()
                self._ended = self._ahead is _END
            self._count_batch(self._ended)
            self._samples += _samples_of(batch, self._original)
            yield batch
            self._check_turn(turn)  # before it takes a batch of the newer loop
        self._iterator, self._ahead, self._ended = None, _UNKNOWN, False
        self._epoch += 1

    def _next(self) -> Any:
        if self._ahead is not _UNKNOWN:
            batch, self._ahead = self._ahead, _UNKNOWN
            return batch
        if self._iterator is None:
            self._seed_iterator()
            if self._loaded is not None:
                self._original.load_state_dict(self._loaded)
                self._loaded = None
            self._iterator = iter(self._original)
        return next(self._iterator, _END)

    def __len__(self) -> int:
        return len(self._original)

    def position(self) -> Position:
        """How many samples this rank was given, numbered from 0: an iterable dataset has no global order."""
        return Position(
            self._epoch, ((0, self._samples),) if self._samples else (), (), fingerprint(self._identity())
        )

    def _identity(self) -> dict[str, Any]:
        dataset = type(self._original.dataset).__qualname__
        named = {} if self._content is None else {"content": self._content}
        return {"dataset": dataset, "seed": self._seed, "batch_size": self._original.batch_size, **named}

    def state_dict(self) -> dict[str, Any]:
        """This rank's. Raises UnsaveableState in the middle of a step."""
        self._refuse_inside_step()
        # Before the first batch its state_dict would make the iterator, and with it the workers.
        own = self._loaded if self._loaded is not None else self._original.state_dict() if self._turn else {}
        rank, world_size = self._place()
        return {
            "schema": SCHEMA, "epoch": self._epoch, "step": self._step, "samples": self._samples,
            "world_size": world_size, "rank": rank, "workers": self._original.num_workers,
            "identity": self._identity(), "ended": self._ended, "loader": own,
        }  # fmt: skip

    def count_from(self, step: int) -> None:
        """Goes on after so many steps, as a training that another program saved, whose place the given loader has."""
        self._step, self._in_step = step, 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there. Raises InputError for another number of ranks or workers, or other data."""
        self._check_state(
            state,
            "an iterable dataset's loader",
            ("step", "epoch", "samples"),
            ("loader", "workers", "world_size"),
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
        self._epoch, self._step, self._in_step = int(state["epoch"]), int(state["step"]), 0
        self._samples = int(state["samples"])
        self._ended = bool(state.get("ended", False))
        self._loaded = state["loader"] or None
        self._iterator, self._ahead = None, _UNKNOWN


_END: Any = object()
_UNKNOWN: Any = object()


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
