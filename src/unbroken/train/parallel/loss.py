"""What a training makes small: next-token cross-entropy over a vocabulary that ranks may share, or preferences.

A loss divides by `total`, which the trainer sets for each global batch: sums of micro-batches add up to the mean, whatever the
plan.
"""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

from ..corpus.samples import IGNORED


class NextToken:
    """Cross-entropy of the tokens that are to be learnt."""

    def __init__(self, mesh: DeviceMesh, *, compile: bool = False) -> None:
        self._mesh = mesh
        # Compiled, the logits are read in 16 bits: their float32 copies would be the largest tensors of a step.
        self._sum = torch.compile(_sum) if compile else _sum
        self.total = 1
        """Tokens of the global batch that are learnt."""

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits (batch, time, this rank's vocabulary), targets (batch, time) of int64 -> scalar of float32."""
        if self._mesh.size() == 1:
            return self._sum(logits, targets) / self.total
        logits = logits.float().flatten(0, 1)
        targets = targets.flatten()
        spread = DTensor.from_local(logits, self._mesh, [Shard(-1)], run_check=False)
        same = DTensor.from_local(targets, self._mesh, [Replicate()], run_check=False)
        loss = F.cross_entropy(spread, same, ignore_index=IGNORED, reduction="sum")
        return loss.to_local() / self.total  # type: ignore[attr-defined,no-any-return]

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """What forward and backward pass run within."""
        return loss_parallel() if self._mesh.size() > 1 else contextlib.nullcontext()


def _sum(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")  # fmt: skip


class Preference(NextToken):
    """Direct preference optimisation (Rafailov et al. 2023): answers that were chosen become likelier than those that were
    not, measured from the model that the training began with. `total` counts pairs."""

    def __init__(self, mesh: DeviceMesh, beta: float) -> None:
        super().__init__(mesh)
        self._beta = beta
        self._began: dict[bytes, Tensor] = {}

    def remember(self, targets: Tensor, logits: Tensor) -> None:
        """Keeps what the model that the training begins with says of these answers."""
        for row, found in zip(targets, likelihoods(logits, targets), strict=True):
            self._began[_key(row)] = found.detach()

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Rows chosen, rejected, chosen, ...; scalar of float32."""
        began = torch.stack([self._began[_key(row)] for row in targets])
        gained = likelihoods(logits, targets) - began
        return -F.logsigmoid(self._beta * (gained[0::2] - gained[1::2])).sum() / self.total


def likelihoods(logits: Tensor, targets: Tensor) -> Tensor:
    """The log-likelihood of each row's answer: logits (batch, time, vocabulary), targets (batch, time) -> (batch,)."""
    flat = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")  # fmt: skip
    return -flat.view(targets.shape).sum(1)


def _key(row: Tensor) -> bytes:
    return row.cpu().numpy().tobytes()
