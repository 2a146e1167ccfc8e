"""False alarms and delays of the watch over the loss: real curves, their noise over trends, and injected divergences.

    python benchmarks/spikes.py [--data ../shared/data/loss_curves] [--seeds 1 2 3] [--jobs 2] [-o RESULT.json]

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
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
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
SHAPES = {"healing": HEALING, "diverging": DIVERGING, "slower": SLOWER}
RAMPS = (0.02, 0.1, 0.3, 1.0)


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


# --- pieces: each a few seconds of one process


@dataclass(frozen=True)
class Piece:
    """One part of the work: `count` places by chance of one case with one seed; of a real curve (`seed` is then its first step) the whole."""

    part: str
    case: str
    seed: int
    count: int = 0


@dataclass(frozen=True)
class Curves:
    """What every process needs: the real curves, and the noise of all of them."""

    real: Mapping[str, Sequence[float]]
    noise: Sequence[float]


def work(curves: Curves, piece: Piece) -> list[Any]:
    """What came of each place: of a divergence its delay, else (rolled back, told as slow) or what `look_at_nan`, `look_at_ramp` say."""
    draw = random.Random(f"{piece.seed} {piece.part} {piece.case}")
    noise, places = curves.noise, range(piece.count)
    if piece.part == "real":
        return [count_findings(watch(curves.real[piece.case][piece.seed :]))]
    if piece.part == "trends":
        trend = TRENDS[piece.case]
        return [count_findings(watch(lay(noise, trend, draw.randrange(len(noise)), LENGTH))) for _ in places]
    if piece.part == "nan":
        return [look_at_nan(noise, draw) for _ in places]
    if piece.part == "slow_ramps":
        return [look_at_ramp(noise, float(piece.case), draw) for _ in places]
    return [inject(noise, SHAPES[piece.part][piece.case], draw) for _ in places]


def count_findings(findings: Sequence[LossFinding]) -> tuple[bool, int]:
    """(whether it was rolled back, how often it was told as slow)."""
    return declared(findings) is not None, sum(f.kind is LossKind.SLOW for f in findings)


def look_at_nan(noise: Sequence[float], draw: random.Random) -> tuple[bool, bool]:
    """NaN from a step on: (whether it was not seen at once, or not declared; whether a single one was rolled back)."""
    at = draw.randint(0, 600)
    losses = lay(noise, TRENDS["flat"], draw.randrange(len(noise)), at + 50)
    findings = watch([x if i < at else math.nan for i, x in enumerate(losses)])
    late = not findings or findings[0].step != at + 1 or declared(findings) is None
    return late, declared(watch([math.nan if i == at else x for i, x in enumerate(losses)])) is not None


def look_at_ramp(noise: Sequence[float], rate: float, draw: random.Random) -> tuple[str, int | None]:
    """A ramp of so much in 1,000 steps: as what it is told, and after how many steps."""
    losses = lay(noise, TRENDS["flat"], draw.randrange(len(noise)), 4000)
    findings = watch([x + max(0, i - 1000) * rate / 1000 for i, x in enumerate(losses)])
    after = [f for f in findings if f.step > 1000]
    return (str(after[0].kind), after[0].step - 1000) if after else ("nothing", None)


def list_pieces(curves: Curves, seeds: Sequence[int], places: int) -> list[Piece]:
    """All of them; the longest, the real curves, first."""
    real = [Piece("real", name, start) for name, c in curves.real.items() for start in range(0, len(c), 1000)]
    tried = [Piece("trends", name, seed, 20) for seed in seeds for name in TRENDS]
    shaped = [Piece(part, name, seed, places) for seed in seeds for part in SHAPES for name in SHAPES[part]]
    ramps = [Piece("slow_ramps", str(rate), seeds[0], 40) for rate in RAMPS]
    return [*real, *tried, *ramps, *shaped, *(Piece("nan", "", seed, places) for seed in seeds)]


# --- all of them together


def summarise(
    found: Mapping[tuple[str, str], list[Any]], curves: Curves
) -> tuple[dict[str, dict[str, Any]], int]:
    """(the result's parts, how many of the promises were broken)."""
    parts: dict[str, dict[str, Any]] = {p: {} for p in ("real", "trends", *SHAPES, "nan", "slow_ramps")}
    wrong = 0
    for (part, case), all_of in found.items():
        if part in ("real", "trends"):
            rolled, slow = sum(r for r, _ in all_of), sum(n for _, n in all_of)
            starts = range(0, len(curves.real.get(case, ())), 1000)
            steps = (
                sum(len(curves.real[case]) - i for i in starts) if part == "real" else LENGTH * len(all_of)
            )
            parts[part][case] = {"steps": steps, "rollbacks": rolled, "told_as_slow": slow}
            wrong += rolled + (slow if part == "real" else 0)
        elif part == "healing":
            rolled = sum(d is not None for d in all_of)
            parts[part][case] = {"injected": len(all_of), "rollbacks": rolled}
            wrong += rolled
        elif part in SHAPES:
            parts[part][case] = row = describe_delays(all_of)
            wrong += row["injected"] - row["within_20_steps"] if part == "diverging" else 0
        elif part == "nan":
            late, single = sum(x for x, _ in all_of), sum(x for _, x in all_of)
            parts[part] = {
                "injected": len(all_of), "not_seen_at_once": late, "declared_after_steps": 3, "single_ones_rolled_back": single,
            }  # fmt: skip
            wrong += late
        else:
            delays = [d for _, d in all_of if d is not None]
            kinds = dict(Counter(k for k, _ in all_of))
            parts[part][case] = {"told_as": kinds, "median_steps": median(delays) if delays else None}
    return parts, wrong


def main() -> int:
    """Runs everything; prints and writes one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--places", type=int, default=200, help="of each shape, for each seed")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1], help="1 is the one that the rule was tuned on"
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="processes; the answer is the same for any number"
    )
    parser.add_argument("-o", "--out", type=Path)
    args = parser.parse_args()
    real = {p.name: read_curve(p) for p in sorted(args.data.glob("*.csv"))}
    if not real:
        print(f"there is no curve in {args.data}", file=sys.stderr)
        return 2
    began = time.monotonic()
    curves = Curves(real, [x for curve in real.values() for x in find_noise(curve)])
    pieces = list_pieces(curves, args.seeds, args.places)
    found: dict[tuple[str, str], list[Any]] = {}
    with ProcessPoolExecutor(args.jobs) as pool:
        for piece, rows in zip(pieces, pool.map(partial(work, curves), pieces), strict=True):
            found.setdefault((piece.part, piece.case), []).extend(rows)
    parts, wrong = summarise(found, curves)
    result: dict[str, Any] = {"machine": describe_machine(), "seeds": args.seeds, **parts, "wrong": wrong}
    result["seconds"] = round(time.monotonic() - began)
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
