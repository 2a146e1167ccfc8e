"""The learning rate of a step: linear warm-up, then a cosine down to the lowest."""

from __future__ import annotations

import math

from .config import OptimConfig


def learning_rate(c: OptimConfig, step: int, steps: int) -> float:
    """The rate of `step`, counted from 1; keyed by the step alone, so skipped data does not shift it."""
    if step <= c.warmup:
        return c.lr * step / c.warmup
    end = c.decay_steps or steps
    done = min(1.0, (step - c.warmup) / max(1, end - c.warmup))
    return c.min_lr + (c.lr - c.min_lr) * 0.5 * (1 + math.cos(math.pi * done))
