"""Whether an optimizer has stepped since the loop was given its last batch. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_count = 0
_hooked = False


def _stepped(*_: Any) -> None:
    global _count
    _count += 1


class OptimizerSteps:
    """Batches given and optimizer steps made, in turn."""

    def __init__(self) -> None:
        global _hooked
        if not _hooked:
            # Once per process: an integer is counted, whatever the optimizer.
            register_optimizer_step_post_hook(torch._disable_dynamo(_stepped))  # type: ignore[attr-defined]
            _hooked = True
        self._seen = _count
        self._ever = False
        self.since = 0
        """Batches given since the last optimizer step."""

    def taken(self) -> None:
        """The loop was given a batch."""
        if _count != self._seen:
            self._seen, self._ever, self.since = _count, True, 0
        self.since += 1

    def is_open(self) -> bool:
        """Whether batches were given that no optimizer step has used, in a training whose optimizers are seen."""
        return self.since > 0 and self._ever and _count == self._seen
