"""Next-token cross-entropy, divided by the tokens of the whole global batch; over a vocabulary that ranks may share."""

from __future__ import annotations

import contextlib

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel


class NextToken:
    """The sum of a micro-batch's losses over `tokens`: such sums add up to the mean, whatever the plan."""

    def __init__(self, mesh: DeviceMesh, tokens: int) -> None:
        self._mesh, self._tokens = mesh, tokens

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits (batch, time, this rank's vocabulary), targets (batch, time) of int64 -> scalar of float32."""
        logits = logits.float().flatten(0, 1)
        targets = targets.flatten()
        if self._mesh.size() == 1:
            return F.cross_entropy(logits, targets, reduction="sum") / self._tokens
        spread = DTensor.from_local(logits, self._mesh, [Shard(-1)], run_check=False)
        same = DTensor.from_local(targets, self._mesh, [Replicate()], run_check=False)
        loss: Tensor = F.cross_entropy(spread, same, reduction="sum").to_local() / self._tokens  # type: ignore[attr-defined]
        return loss

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """What forward and backward pass run within."""
        return loss_parallel() if self._mesh.size() > 1 else contextlib.nullcontext()
