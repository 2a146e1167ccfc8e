"""Back to before a loss that does not come back, and past the data that led to it: from which step, and which samples.

Pure. Samples have absolute numbers (unbroken.data), so what is skipped stays the same at any world size and under any number of
restarts.
"""

from __future__ import annotations

from ...data.position import Position, Ranges, count, normalize, subtract
from ...diagnose.judge.facts import LossFact
from ...progress.records.decision import Rollback

MARGIN = 20
"""So many steps before the first bad one are left out too, and so many after the last: what a step has done shows later."""
NEAR = 1000
"""Another one within so many steps is the same trouble: the budget is used, and the range grows."""


def plan_rollback(loss: LossFact, earlier: int) -> Rollback | None:
    """Where to go back to, and what to skip, after so many `earlier` rollbacks nearby: the range doubles with each.

    None where no checkpoint from before is left. A NaN is met with the same data once more: if it comes again the data or the
    model is the cause, and then its samples are skipped. No sample is skipped where the checkpoints do not tell how many a
    step takes.
    """
    margin = MARGIN * 2**earlier
    usable = [a for a in loss.anchors if a[0] < loss.since]
    if not usable:
        return None
    early = [a for a in usable if a[0] < loss.since - margin]
    step, position = (early or usable[-1:])[0]
    before = max(step, loss.since - margin - 1)
    if loss.kind == "nan" and not earlier:
        return Rollback(before)
    per_step = find_samples_per_step(usable)
    if not per_step:
        return Rollback(before)
    first, last = max(step + 1, loss.since - margin), loss.step + margin
    known = normalize([*position.skips, *loss.skips])
    begin = find_number(position, known, (first - 1 - step) * per_step)
    end = find_number(position, known, (last - step) * per_step)
    return Rollback(before, subtract([(begin, end)], known))


def find_samples_per_step(anchors: list[tuple[int, Position]]) -> int:
    """How many samples a step takes, by what lies between two checkpoints, or before one; 0 where it is no whole number."""
    (step, position), *older = anchors
    before, less = next(((s, p.consumed()) for s, p in older if s < step), (0, 0))
    samples, steps = position.consumed() - less, step - before
    return samples // steps if steps > 0 and samples > 0 and samples % steps == 0 else 0


def find_number(position: Position, skips: Ranges, samples: int) -> int:
    """The absolute number at which a training stands after so many more samples, without those that it skips."""
    at = position.samples[-1][1] if position.samples else 0
    end = at + samples
    while (missing := samples - (end - at - count(_within(skips, at, end)))) > 0:
        end += missing
    return end


def _within(ranges: Ranges, start: int, stop: int) -> Ranges:
    return normalize((max(a, start), min(b, stop)) for a, b in ranges if a < stop and b > start)


def describe(rollback: Rollback) -> str:
    """In words, for the incident."""
    skipped = ", ".join(f"[{a}, {b})" for a, b in rollback.skip)
    what = f"samples {skipped} are skipped" if skipped else "no sample is skipped"
    return f"back to a checkpoint of step {rollback.before} or before; {what}"
