"""What each step was given, in the run's journal of the data: samples and a digest of the whole global batch.

`unbroken.data.journal.read(run / "data")` reads it. Rank 0 writes for all: which samples a step takes follows from seed and
position alone, and every rank has checked at its start that its text is the same. The digest is that of the same samples on
any plan and number of ranks. 25 ms for four million tokens, while the device updates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .order import SamplePosition

if TYPE_CHECKING:
    from ...data.journal import Journal
    from ...data.loading.loader import BatchRecord
    from ..training import Training


class BatchJournal:
    """Writes a line for each step, on rank 0 of a run with a folder; elsewhere nothing."""

    def __init__(self, trainer: Training) -> None:
        self._journal: Journal | None = None
        self._trainer = trainer
        if trainer.world.rank == 0 and trainer.run.run_dir is not None:
            from ...data.journal import Journal

            self._journal = Journal()

    def step(self, before: SamplePosition) -> None:
        """After a step that began where the data stood at `before`."""
        if self._journal is not None:
            self._journal(record(self._trainer, before))


def record(t: Training, before: SamplePosition) -> BatchRecord:
    """What the step that is complete was given."""
    from ...data.digest import digest
    from ...data.loading.loader import BatchRecord

    indices, _ = before.take(t.config.data.global_batch)
    digests = []
    for i in indices:
        tokens, targets = t.samples.rows([t.order[i]])
        digests.append(digest((i, tokens, targets)))
    spans = SamplePosition(before.consumed).skipping([(i, i + 1) for i in indices]).skips
    return BatchRecord(t.step, indices[0] // t.order.samples, spans, 0, 1, sum(digests) % 2**64)
