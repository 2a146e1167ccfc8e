"""The steps of a run, as they lie in steps.jsonl."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Step:
    """One step of the leading rank. `time` is seconds since the epoch; `loss` may be NaN, and the `norm` of the gradient None, where it was not given."""

    step: int
    loss: float
    tokens: int
    time: float
    norm: float | None = None


def step_record(s: Step) -> dict[str, Any]:
    """The line of steps.jsonl: the loss as a hex float keeps every bit."""
    norm = {} if s.norm is None else {"norm": s.norm.hex()}
    return {"step": s.step, "loss": s.loss.hex(), "tokens": s.tokens, "t": round(s.time, 6)} | norm


def read_steps(path: Path) -> list[Step]:
    """Reads steps.jsonl; a torn last line is left out."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return []
    steps = []
    for line in lines:
        try:
            r = json.loads(line)
            norm = float.fromhex(r["norm"]) if "norm" in r else None
            steps.append(Step(r["step"], float.fromhex(r["loss"]), r["tokens"], r["t"], norm))
        except (ValueError, KeyError):
            continue
    return steps


def is_number(loss: float) -> bool:
    """Whether a loss was told at all."""
    return not math.isnan(loss)
