"""A suspicious step is computed twice again before its gradients are used: a card that does not agree with itself leaves.

The weights are still those that the step began with, so nothing has to be loaded or rolled back for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class StepNumbers:
    """What a computation of a step's gradients gave, the same on every rank: their norm before clipping (on the device too), the
    mean loss, and how much of the ranks wants to stop."""

    norm_on_device: torch.Tensor
    norm: float
    loss: float
    stop: float


class Prints:
    """This rank's gradients in a few numbers, taken on the device before they are reduced; read only where they are needed.

    Deterministic: one digest a bucket, of all its bits. Else its norm, which moves a little from one time to the next. With
    one rank nothing overwrites the gradients until they are clipped, so that the numbers are taken only when they are read.
    """

    def __init__(self, buckets: Buckets, *, exact: bool, at_once: bool) -> None:
        self.exact = exact
        device = buckets.scalars.device
        # In float32: a sum in float64 takes five times as long on a GPU.
        kind = torch.int64 if exact else torch.float32
        self._buckets = () if at_once else tuple(b.gradients for b in buckets.buckets)
        self._values = torch.zeros(len(buckets.buckets), dtype=kind, device=device)
        if at_once:
            buckets.before_reduce = self._take

    def _take(self, i: int, gradients: torch.Tensor) -> None:
        if self.exact:
            torch.sum(gradients.view(torch.int64), dim=0, out=self._values[i])
        else:
            torch.linalg.vector_norm(gradients, out=self._values[i])

    def read(self) -> list[float]:
        """Those of the last computation, before its gradients are clipped. Waits for the GPU."""
        for i, gradients in enumerate(self._buckets):
            self._take(i, gradients)
        return self._values.tolist()


class Recheck:
    """Watches the norms of one rank's steps. `say` prints for people; only rank 0 has something to say. `at_once` takes the
    prints of every step, as several ranks have to (default: where there are several)."""

    def __init__(
        self,
        world: World,
        buckets: Buckets,
        *,
        exact: bool,
        say: Callable[[str], None],
        at_once: bool | None = None,
    ) -> None:
        self._world, self._say = world, say
        self._prints = Prints(buckets, exact=exact, at_once=world.size > 1 if at_once is None else at_once)
        self.suspicion = StepSuspicion()
        self._noise: tuple[float, ...] | None = None
        self._made = 0

    def check(self, step: int, made: StepNumbers, compute: Callable[[], StepNumbers]) -> StepNumbers:
        """The numbers of a step, computed again where its norm is suspicious: `compute` makes the gradients again, on every
        rank. Raises SilentCorruption where this rank did not get the same each time."""
        self._made += 1
        if not self._prints.exact and self._made == _NOISE_AT:
            made = self._measure(compute)
        why = self.suspicion.judge(step, made.norm)
        if not why or (not self._prints.exact and self._noise is None):
            return made
        first, repeats, now = self._prints.read(), [], made
        for _ in range(REPEATS):
            now = compute()
            repeats.append(self._prints.read())
        self.suspicion.note_repeats(REPEATS)
        found = judge_repeats(first, repeats, self._noise)
        if found.kind is RepeatKind.DIFFERS:
            raise SilentCorruption(
                found.why, where=f"rank {self._world.rank}, step {step}: {why}",
                hint="The run goes on without it; see the card with `unbroken check --full`",
            )  # fmt: skip
        if self._world.rank == 0:
            self._say(f"step {step}: {why}; {found.why}{self._of_sum(made.norm, now.norm)}")
        return now

    def _measure(self, compute: Callable[[], StepNumbers]) -> StepNumbers:
        """How much a step's prints move by themselves; the numbers of the last computation, whose gradients are there now."""
        prints = [self._prints.read()]
        for _ in range(_NOISE_REPEATS):
            made = compute()
            prints.append(self._prints.read())
        self._noise = measure_noise(prints)
        return made

    def _of_sum(self, a: float, b: float) -> str:
        """What is to be said of the reduction over the ranks: nobody's own part was other, and the sum may be."""
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
