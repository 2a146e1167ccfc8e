"""What each step was given, in the run's journal of the data: samples and a digest of the whole global batch.

`unbroken.data.journal.read(run / "data")` reads it. Rank 0 writes for all: which samples a step takes follows from seed and
position alone, and every rank has checked at its start that its text is the same. The digest is that of the same samples on
any plan and number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .mixture import MixedOrder
from .order import SampleOrder, SamplePosition
from .samples import CorpusSamples

if TYPE_CHECKING:
    from ...data.loading.loader import BatchRecord


@dataclass(frozen=True)
class GlobalBatches:
    """Says of each step what all ranks together were given."""

    order: SampleOrder | MixedOrder
    samples: CorpusSamples
    each: int
    """Samples of a global batch."""

    def record(self, step: int, before: SamplePosition) -> BatchRecord:
        """The batch of a step that began where the data stood at `before`."""
        from ...data.digest import digest
        from ...data.loading.loader import BatchRecord

        indices, _ = before.take(self.each)
        digests = []
        for i in indices:
            tokens, targets = self.samples.rows([self.order[i]])
            digests.append(digest((i, tokens, targets)))
        spans = SamplePosition().skipping([(i, i + 1) for i in indices]).skips
        return BatchRecord(step, indices[0] // self.order.samples, spans, 0, 1, sum(digests) % 2**64)
