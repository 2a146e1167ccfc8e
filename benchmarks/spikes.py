"""False alarms and delays of the watch over the loss: real curves, their noise over trends, and injected divergences.

    python benchmarks/spikes.py [--data ../shared/data/loss_curves] [--seeds 1 2 3] [-o RESULT.json]

Real: every curve of the folder, whole and from each of its thousands on. Noise: what the real curve has beside its median
is laid, in its own order and from a place by chance, over trends that a healthy run has (flat, decay, warm restart, rewarming, steps
down). Spikes that heal: of 1 to 30 steps, up to +8, and the one of BLOOM (0.24 to 960 in the norm, healed in 30 steps).
Divergences: jumps, ramps and exponential growth, at 200 places; of each the delay. NaN. A slow ramp is to be told as slow.
Exits 1 where a healthy curve was rolled back, or a divergence or NaN was missed.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from unbroken.detect import Level
from unbroken.detect.loss import LossFinding, LossKind, LossWatch

try:
    from machine import describe_machine
except ImportError:  # imported by a test
    from benchmarks.machine import describe_machine

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "loss_curves"
LENGTH = 3000
Shape = Callable[[int, float], float]
"""(steps since it began, spread of the noise) -> what is added to the loss."""

TRENDS: dict[str, Callable[[int], float]] = {
    "flat": lambda i: 3.0,
    "power law": lambda i: 2.0 + 8.0 * (i + 1) ** -0.35,
    "cosine end": lambda i: 2.6 + 0.6 * (1 + math.cos(math.pi * i / LENGTH)) / 2,
    "warm restarts": lambda i: 2.6 + 0.35 * min(1.0, (i % 1000) / 50) * math.exp(-(i % 1000) / 300),
    "rewarming over 500 steps": lambda i: 2.8 + 0.1 * min(max(i - 1000, 0), 500) / 500,
    "step down": lambda i: 3.2 if i < 1500 else 2.7,
    "next stage of the data, higher": lambda i: 3.0 if i < 1500 else 3.2,
}
HEALING: dict[str, Shape] = {
    "one step, +8": lambda k, s: 8.0 if k == 0 else 0.0,
    "five steps, +2": lambda k, s: 2.0 if k < 5 else 0.0,
    "ten steps, +1": lambda k, s: 1.0 if k < 10 else 0.0,
    "+4, falls to nothing in 30 steps": lambda k, s: max(0.0, 4.0 * (1 - k / 30)),
    "+6, halves every 5 steps": lambda k, s: 6.0 * 0.5 ** (k / 5),
    "+3 within two steps, halves every 10": lambda k, s: min(1.0, (k + 1) / 2) * 3.0 * 0.5 ** (k / 10),
}
DIVERGING: dict[str, Shape] = {
    "jump by 10 spreads": lambda k, s: 10 * s,
    "jump by 1": lambda k, s: 1.0,
    "jump to a random guess": lambda k, s: 7.0,
    "ramp of 0.1 a step": lambda k, s: 0.1 * (k + 1),
    "doubles every two steps": lambda k, s: 0.05 * (2 ** min(k / 2, 30) - 0.5),
}
SLOWER: dict[str, Shape] = {
    "ramp of half a spread a step": lambda k, s: 0.5 * s * (k + 1),
    "spike of +4 that heals to +1 and stays": lambda k, s: 1.0 + 3.0 * 0.5**k,
    "jump by 5 spreads, then a ramp of a tenth of one": lambda k, s: s * (5 + 0.1 * k),
}
"""Found too, but not promised within 20 steps: they look like what heals, or lie below 15 % of the loss at first."""


def watch(losses: Sequence[float], norms: Sequence[float] | None = None) -> list[LossFinding]:
    """All findings on a curve; steps count from 1."""
    w = LossWatch()
    found = [w.observe(i + 1, x, norms[i] if norms else None) for i, x in enumerate(losses)]
    return [f for f in found if f is not None]


def declared(findings: Sequence[LossFinding]) -> LossFinding | None:
    return next((f for f in findings if f.level is Level.DECLARED), None)


def read_curve(path: Path) -> list[float]:
    with path.open() as f:
        return [float(row["train_loss"]) for row in csv.DictReader(f)]


def find_noise(curve: Sequence[float], skip: int = 300, half: int = 50) -> list[float]:
    """What a curve has beside its running median, spikes and all, without its steep beginning."""
    return [
        curve[i] - median(curve[i - half : i + half + 1]) for i in range(max(skip, half), len(curve) - half)
    ]


def lay(noise: Sequence[float], trend: Callable[[int], float], start: int, length: int) -> list[float]:
    return [trend(i) + noise[(start + i) % len(noise)] for i in range(length)]


def describe_delays(delays: Sequence[int | None]) -> dict[str, Any]:
    seen = sorted(d for d in delays if d is not None)
    return {
        "injected": len(delays),
        "missed": sum(d is None for d in delays),
        "within_20_steps": sum(d is not None and d <= 20 for d in delays),
        "median_steps": median(seen) if seen else None,
        "most_steps": max(seen, default=None),
    }


def inject(noise: Sequence[float], shape: Shape, draw: random.Random) -> int | None:
    """How many steps after it began a divergence was declared; None where it was not within 200, or before it began."""
    spread = 1.4826 * median(abs(x) for x in noise)
    at = draw.randint(300, 600)
    losses = lay(noise, TRENDS[draw.choice(list(TRENDS)[:3])], draw.randrange(len(noise)), at + 200)
    losses = [x if i < at else x + shape(i - at, spread) for i, x in enumerate(losses)]
    found = declared(watch(losses))
    return None if found is None or found.step <= at else found.step - at


def main() -> int:
    """Runs everything; prints and writes one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--places", type=int, default=200, help="of each shape, for each seed")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1], help="1 is the one that the rule was tuned on"
    )
    parser.add_argument("-o", "--out", type=Path)
    args = parser.parse_args()
    curves = {p.name: read_curve(p) for p in sorted(args.data.glob("*.csv"))}
    if not curves:
        print(f"there is no curve in {args.data}", file=sys.stderr)
        return 2
    draws = [random.Random(seed) for seed in args.seeds]
    places = [draw for draw in draws for _ in range(args.places)]
    result: dict[str, Any] = {
        "machine": describe_machine(),
        "seeds": args.seeds,
        "real": {},
        "trends": {},
        "healing": {},
        "diverging": {},
        "slower": {},
    }
    wrong = 0
    for name, curve in curves.items():
        steps = rollbacks = slow = 0
        for start in range(0, len(curve), 1000):
            findings = watch(curve[start:])
            steps += len(curve) - start
            rollbacks += declared(findings) is not None
            slow += sum(f.kind is LossKind.SLOW for f in findings)
        result["real"][name] = {"steps": steps, "rollbacks": rollbacks, "told_as_slow": slow}
        wrong += rollbacks + slow
    noise = [x for curve in curves.values() for x in find_noise(curve)]
    for name, trend in TRENDS.items():
        rollbacks = slow = 0
        for draw in draws * 20:
            findings = watch(lay(noise, trend, draw.randrange(len(noise)), LENGTH))
            rollbacks += declared(findings) is not None
            slow += sum(f.kind is LossKind.SLOW for f in findings)
        result["trends"][name] = {
            "steps": 20 * len(draws) * LENGTH,
            "rollbacks": rollbacks,
            "told_as_slow": slow,
        }
        wrong += rollbacks
    for name, shape in HEALING.items():
        delays = [inject(noise, shape, draw) for draw in places]
        result["healing"][name] = {"injected": len(delays), "rollbacks": sum(d is not None for d in delays)}
        wrong += result["healing"][name]["rollbacks"]
    for name, shape in DIVERGING.items():
        result["diverging"][name] = describe_delays([inject(noise, shape, draw) for draw in places])
        wrong += len(places) - result["diverging"][name]["within_20_steps"]
    for name, shape in SLOWER.items():
        result["slower"][name] = describe_delays([inject(noise, shape, draw) for draw in places])
    result["nan"] = inject_nan(noise, places)
    wrong += result["nan"]["not_seen_at_once"]
    result["slow_ramps"] = {str(rate): find_slow(noise, rate, draws[0]) for rate in (0.02, 0.1, 0.3, 1.0)}
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    return 1 if wrong else 0


def inject_nan(noise: Sequence[float], places: Sequence[random.Random]) -> dict[str, Any]:
    """NaN from a step on: seen at once, declared with the third; a single one is not rolled back."""
    late = single = 0
    for draw in places:
        at = draw.randint(0, 600)
        losses = lay(noise, TRENDS["flat"], draw.randrange(len(noise)), at + 50)
        findings = watch([x if i < at else math.nan for i, x in enumerate(losses)])
        late += not findings or findings[0].step != at + 1 or declared(findings) is None
        single += declared(watch([math.nan if i == at else x for i, x in enumerate(losses)])) is not None
    return {
        "injected": len(places),
        "not_seen_at_once": late,
        "declared_after_steps": 3,
        "single_ones_rolled_back": single,
    }


def find_slow(noise: Sequence[float], rate: float, draw: random.Random) -> dict[str, Any]:
    """A ramp of so much in 1,000 steps: after how many steps it is told, and as what."""
    delays: list[int] = []
    kinds: dict[str, int] = {}
    for _ in range(40):
        losses = lay(noise, TRENDS["flat"], draw.randrange(len(noise)), 4000)
        findings = watch([x + max(0, i - 1000) * rate / 1000 for i, x in enumerate(losses)])
        after = [f for f in findings if f.step > 1000]
        kind = str(after[0].kind) if after else "nothing"
        kinds[kind] = kinds.get(kind, 0) + 1
        delays += [after[0].step - 1000] if after else []
    return {"told_as": kinds, "median_steps": median(delays) if delays else None}


if __name__ == "__main__":
    sys.exit(main())
