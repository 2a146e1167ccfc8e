"""What came out: scores, their jobs, and the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .assigned import Assignment, Conditions, WorkerSeen
from .samples import PreparedTask


@dataclass(frozen=True)
class Metric:
    """One number of a score, exactly as the harness computes it."""

    name: str
    """As the harness prints it, such as 'acc,none'."""
    value: float
    stderr: float | None = None
    higher_is_better: bool = True


@dataclass(frozen=True)
class SampleNote:
    """A sample that has no verdict, and why; never counted as wrong."""

    sample: int
    status: str
    """'unscored' (the judge failed), 'crashed' (the scorer raised), 'unanswered' (the model gave no answer)."""
    why: str


@dataclass(frozen=True)
class Score:
    """A task's result."""

    task: str
    metrics: tuple[Metric, ...]
    """The first one is the headline."""
    samples: int
    scored: int
    notes: tuple[SampleNote, ...] = ()
    version: str = ""
    checkpoint: str = ""
    prompt_hash: str = ""
    conditions: tuple[Conditions, ...] = ()
    """Usually one; more where a batch was halved or workers differed."""
    per_sample: tuple[float | None, ...] = ()
    """The headline metric of each sample where it is a mean over samples (pairs for `compare`); else empty."""
    seconds: float = 0.0
    """CPU wall time of the scoring."""
    values: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    """By metric: a number of each sample whose sum the metric follows (its mean, or for perplexities the log-likelihood);
    `compare` pairs these. Metrics that are nothing of the kind are not in it."""
    partial: tuple[int, ...] = ()
    """Samples whose answer was cut short (their time was over), and counts as it is."""
    documents: str = ""
    inputs: str = ""
    """As in PreparedTask: a score is shown again only where they are the same."""

    @property
    def coverage(self) -> float:
        """Share of samples with a verdict."""
        return self.scored / self.samples if self.samples else 0.0

    def of(self, metric: str) -> tuple[float | None, ...]:
        """The samples' numbers behind a metric; empty where there are none."""
        headline = bool(self.metrics) and metric == self.metrics[0].name
        return self.values.get(metric) or (self.per_sample if headline else ())

    def led_by(self, headline: str) -> Score:
        """The same with this metric first ('acc' is also 'acc,none'). Raises KeyError with the names that there are."""
        if not headline or not self.metrics:
            return self
        names = [m.name for m in self.metrics]
        at = next((i for i, n in enumerate(names) if headline in (n, n.partition(",")[0])), -1)
        if at < 0:
            raise KeyError(", ".join(names))
        if at == 0:
            return self
        first = self.metrics[at]
        rest = tuple(m for m in self.metrics if m is not first)
        kept = {**({names[0]: self.per_sample} if self.per_sample else {}), **self.values}
        return replace(self, metrics=(first, *rest), values=kept, per_sample=self.values.get(first.name, ()))


@dataclass(frozen=True)
class ScoreJob:
    """What a scoring worker gets."""

    prepared: PreparedTask
    answers: str
    """A file of `Answer` lines: each sample of the task exactly once, in order. Checked again against requests.jsonl's
    prompt hashes before scoring."""
    result: str
    """Where the Score is written (whole, by `unbroken.atomic`)."""
    checkpoint: str
    conditions: tuple[Conditions, ...] = ()


@dataclass(frozen=True)
class ScoreDone:
    """The end of a ScoreJob: a bar in the CPU part of the Gantt chart."""

    task: str
    worker: str
    started: float
    ended: float
    score: Score | None
    """None: the scorer as a whole failed; `error` says why and what to do."""
    error: str = ""
    parts: tuple[tuple[str, float, float], ...] = ()
    """(worker, start, end) of each part, where its samples were shared out; empty where one worker scored them all."""

    @property
    def seconds(self) -> float:
        """CPU workers' time, all parts together."""
        return sum(end - start for _, start, end in self.bars)

    @property
    def bars(self) -> tuple[tuple[str, float, float], ...]:
        """(worker, start, end) of each piece of work."""
        return self.parts or ((self.worker, self.started, self.ended),)


@dataclass(frozen=True)
class Check:
    """Some samples of a task, answered both ways: fast, and in the harness's own batches."""

    task: str
    samples: int
    """So many were asked both ways."""
    differ: tuple[int, ...] = ()
    """Those whose answers differ: another text, another choice, another greedy token, or a log-probability that is off by more
    than rounding."""
    drawn: bool = False
    """Its texts are drawn at random: they differ whatever the batches are."""
    largest: float = 0.0
    """Largest difference of two log-probabilities, by the larger one (but at least 1)."""
    metric: str = ""
    """The headline, where its samples have numbers of their own."""
    fast: float | None = None
    exact: float | None = None
    """Its mean over these samples."""
    stderr: float | None = None
    """Of the difference."""
    p: float | None = None
    beyond_chance: bool = False
    """It differs more than chance, all tasks considered."""
    why: str = ""
    """Why there is no comparison."""


@dataclass(frozen=True)
class Report:
    """Everything that the page and the result table show about one evaluation."""

    suite: str
    model: str
    checkpoint: str
    started: float
    ended: float
    """Last score finished."""
    scores: tuple[Score, ...]
    errors: Mapping[str, str]
    """Task name to what went wrong with it."""
    trials: tuple[Assignment, ...]
    scorings: tuple[ScoreDone, ...]
    workers: tuple[WorkerSeen, ...]
    lower_bound_s: float
    """No plan on these workers can be shorter, given the measured times."""
    naive_s: float
    """The same measured times, one job per dataset, the model loaded each time, metrics inside the GPU job."""
    busy_fraction: float
    """Share of worker time from `started` to the last assignment's end spent inside `Harness.run`."""
    expected_s: float = 0.0
    """What the plan promised before the start."""
    groups: tuple[Score, ...] = ()
    licences: Mapping[str, str] = field(default_factory=dict)
    reused: int = 0
    """Samples that an earlier command had answered: no time here is theirs."""
    model_b: float = 0.0
    """Billions of parameters; 0: not known."""
    checks: tuple[Check, ...] = ()
    """Where the model was asked the fast way: what the other way would have changed."""

    @property
    def makespan_s(self) -> float:
        """From the start to the last score."""
        return self.ended - self.started
