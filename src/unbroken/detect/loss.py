"""Sees in the loss of each step whether a training diverges, and leaves spikes alone that heal by themselves. See docs/loss.md.

Pure: losses in, findings out. Everything is measured against the run's own noise: the median of the last good steps, and their
spread as the median deviation says it, so that a single spike moves neither.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from .hang import Level


class LossKind(StrEnum):
    """What is wrong with the loss."""

    NAN = "nan"
    DIVERGENCE = "divergence"
    SLOW = "slow divergence"


@dataclass(frozen=True)
class LossSettings:
    """When a loss is judged, and how. The defaults roll back no step of the real curves that we know (docs/loss.md)."""

    window: int = 128
    """So many good steps say what is usual."""
    warm: int = 32
    """Before so many steps only numbers that are none are noticed."""
    unusual: float = 4.0
    """A step so many spreads above the usual one is no good step: it says nothing of what is usual."""
    bad: float = 5.0
    """Half of the last `steps` have to lie so many spreads above."""
    share: float = 0.15
    """And above the usual loss by this share of it: what is less may be a new learning rate, or another part of the data."""
    steps: int = 10
    """So many steps are looked at together."""
    since: int = 10
    """So long it has lasted: an excursion that is shorter is a spike."""
    since_growing: int = 8
    """And so long where it still grows: the newest steps are `growing` times as far out as its first ones."""
    growing: float = 1.5
    held: int = 3
    """And for so many steps all of this has to hold, with nothing but dips between."""
    healing: float = 0.85
    """An excess of the last `healing_steps` whose newer half is below this share of the older half is healing, and left alone;
    so is one of twice as many steps, once it has lasted so long: near its end the noise hides what twelve steps fall."""
    healing_steps: int = 12
    most_healing: int = 200
    """For so many steps at most."""
    nans: int = 3
    """So many steps in a row without a number: one alone may be a step that a loss scaler leaves out."""
    block: int = 64
    """Slow divergence is looked for in medians of so many steps."""
    rising_blocks: int = 4
    """So many of them rise one after the other."""
    slow_share: float = 0.03
    """The last lies so much of the best one above it,"""
    slow_spreads: float = 0.2
    """and so many spreads above the first of them."""


@dataclass(frozen=True)
class LossFinding:
    """What was noticed at `step`; it began with `since`, the first bad step. `usual` and `spread` are those of the good steps
    before. DECLARED asks for an action, SUSPECT for attention; a slow divergence is never more than SUSPECT."""

    kind: LossKind
    level: Level
    step: int
    since: int
    loss: float
    usual: float
    spread: float
    why: str


class LossWatch:
    """Watches the loss of one attempt; a new one for each."""

    def __init__(self, settings: LossSettings = LossSettings()) -> None:
        self._s = settings
        self._good: deque[float] = deque(maxlen=settings.window)
        self._excess: deque[float] = deque(maxlen=settings.healing_steps)
        self._onset: int | None = None
        self._outs: list[float] = []
        """The excess of each step since then, and how many of them are out."""
        self._out_count = 0
        self._held = 0
        self._nans = 0
        self._first_nan = -1
        self._norm_good: deque[float] = deque(maxlen=settings.window)
        self._norm_excess: deque[float] = deque(maxlen=settings.steps)
        self._block: list[float] = []
        self._best_block = math.inf
        self._rising: list[float] = []
        self._slow_since = -1
        self._slow_said = False

    def remember(self, losses: Sequence[float]) -> None:
        """Takes losses of the steps before the first one, of an earlier attempt: what was usual there is usual here."""
        self._good.extend([x for x in losses if math.isfinite(x)][-self._s.window :])

    def observe(self, step: int, loss: float, norm: float | None = None) -> LossFinding | None:
        """Takes one step's loss, the mean of all ranks, and the norm of its gradient where that is known; what is wrong, if
        anything. A spike is a finding when it is declared, and no earlier."""
        if not math.isfinite(loss) or (norm is not None and not math.isfinite(norm)):
            return self._note_nan(step, loss)
        self._nans = 0
        if len(self._good) < self._s.warm:
            self._good.append(loss)
            self._take_norm(norm)
            return None
        usual, spread = self._find_usual()
        excess = (loss - usual) / spread
        if excess < self._s.unusual:
            self._good.append(loss)
        self._take_norm(norm)
        self._excess.append(excess)
        self._note_excursion(step, excess)
        return self._find_divergence(step, loss, usual, spread, excess) or self._find_slow(
            step, loss, usual, spread
        )

    def _note_excursion(self, step: int, excess: float) -> None:
        """When what is going on began. One or two steps that are out by chance a moment before are no part of it: in real noise each 70th step
        is out alone, and counted with a spike of ten steps it makes a divergence of it."""
        is_out = excess >= self._s.unusual
        if is_out and (self._onset is None or (self._outs[-1] < self._s.unusual and self._out_count < 3)):
            self._onset, self._outs, self._out_count = step, [], 0
        if self._onset is not None:
            self._outs.append(excess)
            self._out_count += is_out

    def _is_growing(self) -> bool:
        first, last = median(self._outs[:3]), median(self._outs[-3:])
        return last > self._s.growing * first

    def _note_nan(self, step: int, loss: float) -> LossFinding:
        self._nans += 1
        if self._nans == 1:
            self._first_nan = step
        sure = self._nans >= self._s.nans
        usual, spread = self._find_usual() if self._good else (math.nan, math.nan)
        why = f"no number as loss or gradient norm for {self._nans} step{'s' if self._nans > 1 else ''}, first at step {self._first_nan}"
        level = Level.DECLARED if sure else Level.SUSPECT
        return LossFinding(LossKind.NAN, level, step, self._first_nan, loss, usual, spread, why)

    def _find_usual(self) -> tuple[float, float]:
        """(median, spread) of the good steps; a run without any noise still differs in its last digits."""
        return _measure(self._good)

    def _take_norm(self, norm: float | None) -> None:
        """Norms vary by factors, so their logarithm is measured."""
        if norm is None or norm <= 0:
            return
        value = math.log(norm)
        if len(self._norm_good) < self._s.warm:
            self._norm_good.append(value)
            return
        usual, spread = _measure(self._norm_good)
        excess = (value - usual) / spread
        self._norm_excess.append(excess)
        if excess < self._s.unusual:
            self._norm_good.append(value)

    def _find_divergence(
        self, step: int, loss: float, usual: float, spread: float, excess: float
    ) -> LossFinding | None:
        s = self._s
        if len(self._excess) < s.steps or self._onset is None:
            return None
        recent = list(self._excess)
        middle = median(recent[-s.steps :])
        if median(recent[-3:]) < s.unusual / 2:
            self._onset, self._held = None, 0  # it healed
            return None
        # Where the gradients have left their band too, less of the loss is needed.
        norm_out = len(self._norm_excess) == s.steps and median(self._norm_excess) > s.bad
        least = max(s.bad / 2 if norm_out else s.bad, s.share * abs(usual) / spread)
        since = s.since_growing if self._is_growing() else s.since
        if middle < least or step - self._onset + 1 < since:
            self._held = 0
            return None
        if excess < s.unusual:
            return (
                None  # one that is good itself declares nothing: it may be the first after a spike, or a dip
            )
        lasting = self._outs[-2 * s.healing_steps :]
        healing = _is_falling(recent, s.healing) or (
            len(lasting) == 2 * s.healing_steps and _is_falling(lasting, s.healing)
        )
        if healing and step - self._onset < s.most_healing:
            self._held = 0
            return None
        self._held += 1
        if self._held < s.held:
            return None
        why = (
            f"the loss left its band at step {self._onset} and does not come back: {loss:.4g} where {usual:.4g} +- {spread:.2g} was usual"
            f"{', and so did the gradient norm' if norm_out else ''}"
        )
        return LossFinding(LossKind.DIVERGENCE, Level.DECLARED, step, self._onset, loss, usual, spread, why)

    def _find_slow(self, step: int, loss: float, usual: float, spread: float) -> LossFinding | None:
        """A loss that rises block after block, each too little to be noticed alone."""
        s = self._s
        self._block.append(loss)
        if len(self._block) < s.block:
            return None
        middle, self._block = median(self._block), []
        if middle < self._best_block:
            self._best_block, self._rising, self._slow_said = middle, [], False
            return None
        if self._rising and middle <= self._rising[-1]:
            self._rising = []
        if not self._rising:
            self._slow_since = step - s.block + 1
        self._rising.append(middle)
        above = middle - self._best_block
        is_high = above >= max(s.slow_share * abs(self._best_block), spread)
        is_rising = self._rising[-1] - self._rising[0] >= s.slow_spreads * spread
        if self._slow_said or len(self._rising) < s.rising_blocks or not (is_high and is_rising):
            return None
        self._slow_said = True
        why = (
            f"the loss has been rising since step {self._slow_since}: medians of {s.block} steps {', '.join(f'{m:.4g}' for m in self._rising)}, "
            f"{self._best_block:.4g} at best"
        )
        return LossFinding(LossKind.SLOW, Level.SUSPECT, step, self._slow_since, loss, usual, spread, why)


def _is_falling(values: Sequence[float], share: float) -> bool:
    """Whether the median of the newer half is below this share of the older half's."""
    half = len(values) // 2
    return median(values[half:]) < share * median(values[:half])


def _measure(values: Sequence[float]) -> tuple[float, float]:
    middle = median(values)
    spread = 1.4826 * median(abs(v - middle) for v in values)
    return middle, max(spread, 1e-3 * abs(middle), 1e-9)
