"""How long a task takes: what the suite says, what past evaluations measured, what this one measures as it goes.

Everything is log-normal: a run time is a product of causes (length, model, device, batch), and an error of a factor
of two is as likely above as below. Sources, best first:

1. measured on this task with a model of about this size on this device;
2. measured on this task with another size, or on another device: scaled by parameters;
3. the suite's own prior, scaled likewise;
4. a fit of seconds per sample to characters read, tokens written and requests, over all that was measured;
5. the same with constants for a 7B model on one A100-class GPU.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ... import atomic
from ...errors import ContractError
from ...journal.codec import decode, encode
from ..contracts import PreparedTask, TaskPrior

SCHEMA = 1
START = "(a worker's start)"
"""The row that holds it; no task can be called so."""
IMPORTS_S, PER_B_S = 8.0, 1.0
"""Seconds of a start where none was measured: imports, and for each billion parameters their load from a fast disk."""
SIZE_EXPONENT = 0.9
"""Seconds grow with parameters to this power: decoding is bound by weight reads, prefill by FLOPs, both linear; launch
overheads are not. Taken from the measured small-to-large ratios of public in-loop evaluation times."""
SMALLEST_B = 0.1
"""Below this, kernel launches and Python set the pace, not the weights."""
PER_CHAR, PER_TOKEN, PER_REQUEST = 2.5e-5, 2.0e-3, 4.0e-3
"""Seconds on one A100-class GPU, 7B, bf16, batched: reading a character, writing a token, one request."""


@dataclass(frozen=True)
class Features:
    """What is known of a task before it ran; per sample."""

    prompt_chars: float = 0.0
    output_tokens: float = 0.0
    requests: float = 1.0

    def row(self) -> tuple[float, float, float]:
        """The regressors."""
        return (self.prompt_chars, self.output_tokens, self.requests)


@dataclass(frozen=True)
class Expected:
    """A prior: seconds of inference on one worker and of the metric on one CPU worker."""

    seconds: float
    spread: float
    """Geometric standard deviation."""
    score_s: float
    source: str


@dataclass(frozen=True)
class TaskMoments:
    """All that was seen of one task, one model size and one device: moments of log seconds per sample."""

    task: str
    model_b: float
    device: str
    count: float = 0.0
    mean_log: float = 0.0
    m2: float = 0.0
    samples: float = 0.0
    features: Features = Features()
    score_count: float = 0.0
    score_mean: float = 0.0
    """CPU seconds per sample."""
    size: int = 0
    """Samples of the whole task, though an evaluation may have asked fewer; 0: not known."""

    def add(self, samples: int, seconds: float) -> TaskMoments:
        """With one more observation, weighed by its number of samples (Welford's update; Chan et al. 1983)."""
        if samples <= 0 or seconds <= 0:
            return self
        x, weight = math.log(seconds / samples), float(samples)
        total = self.samples + weight
        delta = x - self.mean_log
        mean = self.mean_log + delta * weight / total
        return replace(
            self, count=self.count + 1, samples=total, mean_log=mean, m2=self.m2 + weight * delta * (x - mean)
        )

    def add_score(self, samples: int, seconds: float) -> TaskMoments:
        """With one more scoring."""
        if samples <= 0:
            return self
        n = self.score_count + 1
        return replace(
            self, score_count=n, score_mean=self.score_mean + (seconds / samples - self.score_mean) / n
        )

    @property
    def spread(self) -> float:
        """Geometric standard deviation between observations, with a floor and one pseudo-observation of a factor 1.3."""
        variance = self.m2 / self.samples if self.samples else 0.0
        prior = math.log(1.3) ** 2
        return math.exp(math.sqrt((variance * self.count + prior) / (self.count + 1)))


WAYS = {"transformers": ("exact", ""), "vllm": ("vllm", "vllm"), "sglang": ("sglang", "sglang")}
"""What stands behind a device's name: of the harness's own batches, and of the fast way."""


def measured_on(device: str, backend: str, *, exact: bool) -> str:
    """The name under which run times are remembered: the device, and the engine where it is not the usual one.

    Ways of asking differ by a factor of ten on one GPU, as two GPUs do: what was seen of one is a guess for another.
    """
    way = WAYS.get(backend, ("", ""))[0 if exact else 1]
    return f"{device} ({way})" if way else device


@dataclass(frozen=True)
class Observation:
    """One finished task of one evaluation: what `save_merged` adds to the history."""

    task: str
    model_b: float
    device: str
    samples: int
    seconds: float
    """Inference; 0: not measured."""
    features: Features = Features()
    score_s: float | None = None
    size: int = 0
    """Samples of the whole task, answered here or not; 0: not known."""


@dataclass(frozen=True)
class PriorBook:
    """The history of a user or team; immutable, saved with `save_merged`."""

    rows: Mapping[tuple[str, float, str], TaskMoments] = field(default_factory=dict)

    def observe(self, seen: Observation) -> PriorBook:
        """With one more observation."""
        row = self.row(seen.task, seen.model_b, seen.device).add(seen.samples, seen.seconds)
        if seen.score_s is not None:
            row = row.add_score(seen.samples, seen.score_s)
        row = replace(row, features=seen.features, size=max(row.size, seen.size))
        return PriorBook({**self.rows, (row.task, row.model_b, row.device): row})

    def row(self, task: str, model_b: float, device: str) -> TaskMoments:
        """The row of this task, model size (rounded to two digits) and device; an empty one if new."""
        size = round_size(model_b)
        return self.rows.get((task, size, device)) or TaskMoments(task, size, device)

    def size(self, task: str) -> int:
        """Samples of the task as far as it has been measured; 0: not known."""
        return max((r.size for r in self.rows.values() if r.task == task), default=0)

    def start_s(self, model_b: float, device: str) -> float:
        """Seconds from a worker's start to its first block: as measured for this size and device, or for the nearest size,
        corrected by what the difference in size takes to load; where nothing was measured, by a rule of thumb."""
        model_b = model_b or 7.0
        seen = [r for r in self.rows.values() if r.task == START and r.count]
        here = [r for r in seen if r.device == device]
        if not (here or seen):
            return IMPORTS_S + PER_B_S * model_b
        best = min(here or seen, key=lambda r: abs(math.log(r.model_b / model_b)))
        measured = math.exp(best.mean_log)
        if best.model_b == round_size(model_b):
            return measured
        return max(measured + PER_B_S * (model_b - best.model_b), min(measured, 1.0), measured / 4)

    def expect(
        self,
        task: str,
        samples: int,
        features: Features,
        model_b: float,
        device: str,
        said: TaskPrior | None = None,
    ) -> Expected:
        """What to expect of `samples` samples of a task."""
        model_b = model_b or 7.0
        score_s = self._score(task, samples, said)
        exact = self.row(task, model_b, device)
        if exact.count:
            return Expected(math.exp(exact.mean_log) * samples, exact.spread, score_s, "measured")
        near = [r for r in self.rows.values() if r.task == task and r.count]
        if near:
            best = min(near, key=lambda r: (r.device != device, abs(math.log(r.model_b / model_b)), r.device))
            factor = scale(best.model_b, model_b)
            spread = best.spread * (1.15 if best.device == device else 1.6)
            return Expected(
                math.exp(best.mean_log) * samples * factor, spread, score_s, f"scaled from {best.model_b:g}B"
            )
        if said is not None and said.seconds > 0:
            share = samples / said.samples if said.samples else 1.0
            return Expected(
                said.seconds * share * scale(said.model_b, model_b), said.spread, score_s, "suite"
            )
        if said is not None and said.prompt_chars + said.output_tokens > 0:
            features = Features(said.prompt_chars, said.output_tokens, said.requests_per_sample)
        return self._fitted(samples, features, model_b, device, score_s)

    def _score(self, task: str, samples: int, said: TaskPrior | None) -> float:
        seen = [r for r in self.rows.values() if r.task == task and r.score_count]
        if seen:
            weight = sum(r.score_count for r in seen)
            return samples * sum(r.score_mean * r.score_count for r in seen) / weight
        if said is not None:
            return said.score_s * (samples / said.samples if said.samples else 1.0)
        return 0.0

    def _fitted(
        self, samples: int, features: Features, model_b: float, device: str, score_s: float
    ) -> Expected:
        seen = [r for r in self.rows.values() if r.count and r.task != START and sum(r.features.row()) > 0]
        here = [r for r in seen if r.device == device]
        seen = here if len(here) >= 4 else seen
        rates, spread, source = (PER_CHAR, PER_TOKEN, PER_REQUEST), 2.5, "guessed from lengths"
        if len(seen) >= 4:
            rows = [r.features.row() for r in seen]
            y = [math.exp(r.mean_log) * scale(r.model_b, 7.0) for r in seen]
            rates, spread = fit_rates(rows, y)
            source = f"fitted to {len(seen)} tasks"
        each = max(sum(a * b for a, b in zip(rates, features.row(), strict=True)), 1e-6)
        return Expected(each * samples * scale(7.0, model_b), max(spread, 1.2), score_s, source)


def round_size(model_b: float) -> float:
    """Two significant digits, so that 6.74 and 6.7 billion are one size."""
    return float(f"{model_b:.2g}")


def scale(known_b: float, wanted_b: float) -> float:
    """Factor on seconds from a model of `known_b` billion parameters to one of `wanted_b`."""
    if known_b <= 0 or wanted_b <= 0:
        return 1.0
    return math.pow(max(wanted_b, SMALLEST_B) / max(known_b, SMALLEST_B), SIZE_EXPONENT)


def fit_rates(
    rows: Sequence[tuple[float, float, float]], y: Sequence[float]
) -> tuple[tuple[float, float, float], float]:
    """Non-negative rates that fit y = rows @ rates in relative terms, and the geometric spread of what remains.

    Multiplicative updates (Lee and Seung 1999) on rows divided by y: no negative rates, no linear algebra library.
    """
    a = [[v / t for v in row] for row, t in zip(rows, y, strict=True)]
    rates = [PER_CHAR, PER_TOKEN, PER_REQUEST]
    top = [sum(r[j] for r in a) for j in range(3)]
    for _ in range(2000):
        found = [sum(c * x for c, x in zip(r, rates, strict=True)) for r in a]
        below = [sum(r[j] * f for r, f in zip(a, found, strict=True)) for j in range(3)]
        rates = [x * t / b if b > 0 else x for x, t, b in zip(rates, top, below, strict=True)]
    logs = [math.log(max(sum(c * x for c, x in zip(r, rates, strict=True)), 1e-9)) for r in a]
    variance = sum(v * v for v in logs) / max(1, len(logs) - 3)
    return (rates[0], rates[1], rates[2]), math.exp(math.sqrt(variance))


def features_of(prepared: PreparedTask) -> Features:
    """What a prepared task says of itself. Of the tokens that may be generated a third is expected: most answers stop."""
    return Features(prepared.prompt_chars, prepared.output_tokens / 3, prepared.requests_per_sample)


def load_book(path: Path) -> PriorBook:
    """The stored history; empty where there is none. Raises ContractError for a file of a newer version."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return PriorBook()
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise ContractError("the stored run times cannot be read", where=str(path),
                            hint="Remove the file; it is built again") from e  # fmt: skip
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise ContractError(
            "the stored run times have another schema", where=str(path), hint="Use --priors with another file"
        )
    rows = [decode(TaskMoments, r, where=str(path)) for r in value["rows"]]
    return PriorBook({(r.task, r.model_b, r.device): r for r in rows})


def save_merged(path: Path, seen: Sequence[Observation]) -> None:
    """Adds observations to the stored history, under a lock: several evaluations may share it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        book = load_book(path)
        for one in seen:
            book = book.observe(one)
        kept = [encode(book.rows[k]) for k in sorted(book.rows)]
        atomic.write_json(path, {"schema": SCHEMA, "rows": kept})


def default_store() -> Path:
    """$XDG_STATE_HOME/unbroken/eval-priors.json."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "unbroken" / "eval-priors.json"


class Correction:
    """Learns, while a run goes, how far the priors are off: one factor for all tasks, one for each.

    The common factor carries the device and the model; a task's own one carries its lengths. Both are means of log
    ratios, shrunk towards 1 by one pseudo-observation, so that a single odd block moves little.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[int, float, float]] = {}  # count, weight, weight * log ratio
        self._common = 0.0

    def observe(self, task: str, expected_s: float, actual_s: float) -> None:
        """Notes a finished piece of a task, weighed by its expected seconds."""
        if expected_s > 0 and actual_s > 0:
            n, w, wx = self._sums.get(task, (0, 0.0, 0.0))
            self._sums[task] = (n + 1, w + expected_s, wx + expected_s * math.log(actual_s / expected_s))
            self._common = sum(x / v for _, v, x in self._sums.values()) / (len(self._sums) + 1.0)

    def factor(self, task: str) -> float:
        """What the prior of a task is to be multiplied by now."""
        if task not in self._sums:
            return math.exp(self._common)
        n, w, wx = self._sums[task]
        return math.exp(self._common + (wx / w - self._common) * n / (n + 0.25))
