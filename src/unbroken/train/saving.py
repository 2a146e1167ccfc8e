"""How the trainer keeps its checkpoints: through `unbroken.Checkpointer`, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ..checkpoint.format.position import Position as SavedPosition
from ..progress import Run
from .config import RunConfig
from .corpus.order import SamplePosition

if TYPE_CHECKING:
    from ..checkpoint import Checkpointer
    from .callbacks import Callback
    from .training import Training


class Saving(Protocol):
    """What the step loop asks of checkpoints."""

    def wait_for_copies(self) -> None:
        """Called before the weights change."""

    def due(self) -> bool:
        """Whether the state is to be saved after this step."""

    def save(self) -> None:
        """Takes a snapshot."""

    def last(self) -> None:
        """Makes the state as it is now durable, and waits for it. Raises NotDurable."""


class NoSaving:
    """A training that keeps nothing."""

    def wait_for_copies(self) -> None:
        """Nothing is being copied."""

    def due(self) -> bool:
        """Never."""
        return False

    def save(self) -> None:
        """Keeps nothing."""

    def last(self) -> None:
        """There is nothing to wait for."""


class CheckpointSaving:
    """Snapshots of a trainer's whole state, by its own step."""

    def __init__(
        self, checkpoints: Checkpointer, trainer: Training, more: dict[str, Any], durable_step: int | None
    ) -> None:
        self._checkpoints, self._trainer, self._more = checkpoints, trainer, more
        self._durable_step = durable_step
        self.wait_for_copies = checkpoints.wait_for_copies  # type: ignore[method-assign]

    def wait_for_copies(self) -> None:
        """Lets a snapshot that is still being copied finish."""

    def due(self) -> bool:
        """Whether the state is to be saved after this step."""
        return self._checkpoints.due(self._trainer.step)

    def save(self) -> None:
        """Takes a snapshot."""
        self._save(None)

    def last(self) -> None:
        """Makes the state as it is now durable, and waits for it. Raises NotDurable."""
        if self._durable_step != self._trainer.step:
            self._save(True)
        self._checkpoints.close()

    def _save(self, persist: bool | None) -> None:
        t = self._trainer
        self._checkpoints.save(t.step, t.state() | self._more, position=position_of(t), persist=persist)


def position_of(t: Training) -> SavedPosition:
    """The data position as a checkpoint's manifest keeps it: absolute sample numbers, over all epochs."""
    p = t.position
    epoch = p.next_index // t.order.samples
    return SavedPosition(epoch, p.consumed, p.skips, t.tokens.fingerprint)


def open_saving(
    config: RunConfig, run: Run, trainer: Training, callbacks: Mapping[str, Callback]
) -> tuple[Saving, str | None]:
    """Where the training's checkpoints go, after it resumed from the newest one there; and that one, in words.

    Raises InputError if the checkpoint is of another training.
    """
    if config.checkpoints is None and run.run_dir is None:
        return NoSaving(), None
    from ..checkpoint import Checkpointer

    checkpoints = Checkpointer(
        config.checkpoints,
        snapshot_every=config.snapshot_every,
        persist_every=config.persist_every,
        keep=config.keep,
        fenced=True,
    )
    more: dict[str, Any] = {"callbacks": dict(callbacks)} if callbacks else {}
    state = trainer.state() | more
    restored = checkpoints.restore(state)
    # Not by the source, which differs from rank to rank: all save the last step again, or none does.
    durable = restored.step if restored and restored.durable else None
    saving = CheckpointSaving(checkpoints, trainer, more, durable)
    if restored is None:
        return saving, None
    where = SamplePosition(restored.position.samples, restored.position.skips)
    trainer.resume(restored.step, state["training"], where)
    skipped = "".join(f"; passed over {name}: {why}" for name, why in restored.skipped)
    return saving, f"resumed step {restored.step} from {restored.source} in {restored.seconds:.2f} s{skipped}"
