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

    The norm of each bucket; under deterministic kernels a digest of all its bits too, which costs more. At once, as several ranks have to, the
    digests are taken of repeats and where `whole` says so: what makes a step suspicious shows in the norm, which is the same bits each
    time there. With one rank nothing overwrites the gradients until they are clipped, so that all is taken when it is read.
    """

    def __init__(self, buckets: Buckets, *, exact: bool, at_once: bool) -> None:
        self.exact = exact
        device = buckets.scalars.device
        self.whole = True
        self._buckets = () if at_once else tuple(b.gradients for b in buckets.buckets)
        # In float32: a sum in float64 takes five times as long on a GPU.
        self._norms = torch.zeros(len(buckets.buckets), dtype=torch.float32, device=device)
        self._digests = torch.zeros(len(buckets.buckets), dtype=torch.int64, device=device)
        self._has_digests = False
        if at_once:
            buckets.before_reduce = self._take

    def _take(self, i: int, gradients: torch.Tensor) -> None:
        torch.linalg.vector_norm(gradients, out=self._norms[i])
        self._has_digests = self.exact and self.whole
        if self._has_digests:
            torch.sum(gradients.view(torch.int64), dim=0, out=self._digests[i])

    def read(self) -> list[float]:
        """Those of the last computation, before its gradients are clipped: norms, then digests where they were taken. Waits for the GPU."""
        for i, gradients in enumerate(self._buckets):
            self._take(i, gradients)
        digests: list[float] = self._digests.tolist() if self._has_digests else []
        return [*self._norms.tolist(), *digests]


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
        self._at_once = world.size > 1 if at_once is None else at_once
        self._prints = Prints(buckets, exact=exact, at_once=self._at_once)
        self.suspicion = StepSuspicion()
        self._noise: tuple[float, ...] | None = None
        self._made = 0

    def check(self, step: int, made: StepNumbers, compute: Callable[[], StepNumbers]) -> StepNumbers:
        """The numbers of a step, computed again where its norm is suspicious: `compute` makes the gradients again, on every
        rank. Raises SilentCorruption where this rank did not get the same each time."""
        try:
            return self._check(step, made, compute)
        finally:
            self._prints.whole = not self._at_once or self.suspicion.is_audit(step + 1)

    def _check(self, step: int, made: StepNumbers, compute: Callable[[], StepNumbers]) -> StepNumbers:
        self._made += 1
        if not self._prints.exact and self._made == _NOISE_AT:
            made = self._measure(compute)
        why = self.suspicion.judge(step, made.norm)
        if not why or (not self._prints.exact and self._noise is None):
            return made
        first, repeats, now = self._prints.read(), [], made
        self._prints.whole = True
        for _ in range(REPEATS):
            now = compute()
            repeats.append(self._prints.read())
        self.suspicion.note_repeats(REPEATS)
        # Of what was not taken the first time only the repeats are compared.
        found = judge_repeats([*first, *repeats[0][len(first) :]], repeats, self._noise)
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
