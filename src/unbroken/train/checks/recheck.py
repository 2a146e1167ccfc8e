"""A suspicious step is computed twice again before its gradients are used: a card that does not agree with itself leaves.

The weights are still those that the step began with, so nothing has to be loaded or rolled back for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ...detect.corruption import RepeatKind, StepSuspicion, judge_repeats, measure_noise
from ...errors import SilentCorruption
from ..buckets import Buckets
from ..world import World

REPEATS = 2
_NOISE_REPEATS = 3
_NOISE_AT = 3
"""The step of a process after which a fast mode's noise is measured: the first ones choose kernels."""


class Prints:
    """This rank's gradients in a few numbers, taken on the device before they are reduced; read only where they are needed.

    Deterministic: one digest a bucket, of all its bits. Else its norm, which moves a little from one time to the next.
    """

    def __init__(self, buckets: Buckets, *, exact: bool) -> None:
        self.exact = exact
        device = buckets.scalars.device
        # In float32: a sum in float64 takes five times as long on a GPU.
        kind = torch.int64 if exact else torch.float32
        self._values = torch.zeros(len(buckets.buckets), dtype=kind, device=device)
        buckets.before_reduce = self._take

    def _take(self, i: int, gradients: torch.Tensor) -> None:
        if self.exact:
            torch.sum(gradients.view(torch.int64), dim=0, out=self._values[i])
        else:
            torch.linalg.vector_norm(gradients, out=self._values[i])

    def read(self) -> list[float]:
        """As they are now. Waits for the GPU."""
        return self._values.tolist()


class Recheck:
    """Watches the norms of one rank's steps. `say` prints for people; only rank 0 has something to say."""

    def __init__(self, world: World, buckets: Buckets, *, exact: bool, say: Callable[[str], None]) -> None:
        self._world, self._say = world, say
        self._prints = Prints(buckets, exact=exact)
        self.suspicion = StepSuspicion()
        self._noise: tuple[float, ...] | None = None
        self._made = 0

    def check(self, step: int, norm: torch.Tensor, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The norm of a step's gradients, computed again where it is suspicious: `compute` makes the gradients again, on every
        rank. Raises SilentCorruption where this rank did not get the same each time."""
        self._made += 1
        if not self._prints.exact and self._made == _NOISE_AT:
            self._measure(compute)
        why = self.suspicion.judge(step, float(norm))
        if not why or (not self._prints.exact and self._noise is None):
            return norm
        first, repeats, norms = self._prints.read(), [], []
        for _ in range(REPEATS):
            norms.append(compute())
            repeats.append(self._prints.read())
        self.suspicion.note_repeats(REPEATS)
        found = judge_repeats(first, repeats, self._noise)
        if found.kind is RepeatKind.DIFFERS:
            raise SilentCorruption(
                found.why, where=f"rank {self._world.rank}, step {step}: {why}",
                hint="The run goes on without it; see the card with `unbroken check --full`",
            )  # fmt: skip
        if self._world.rank == 0:
            self._say(f"step {step}: {why}; {found.why}{self._of_sum(norm, norms[-1])}")
        return norms[-1]

    def _measure(self, compute: Callable[[], torch.Tensor]) -> None:
        """How much a step's prints move by themselves."""
        prints = [self._prints.read()]
        for _ in range(_NOISE_REPEATS):
            compute()
            prints.append(self._prints.read())
        self._noise = measure_noise(prints)

    def _of_sum(self, before: torch.Tensor, now: torch.Tensor) -> str:
        """What is to be said of the reduction over the ranks: nobody's own part was other, and the sum may be."""
        a, b = float(before), float(now)
        if a == b or (math.isnan(a) and math.isnan(b)) or not self._prints.exact:
            return ""
        return f"; but its sum over the ranks was {a:.9g} and is {b:.9g} now: the network, or a card that reduced it"


def keep_generators(is_needed: bool) -> Callable[[], None]:
    """What puts torch's generators back to where they are now; nothing where a step draws no random numbers."""
    if not is_needed:
        return lambda: None
    cpu: Any = torch.get_rng_state()
    cuda: Any = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def put_back() -> None:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)

    return put_back
