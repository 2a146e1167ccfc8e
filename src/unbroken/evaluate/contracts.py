"""What travels through an evaluation, and the protocols of the parts that meet in it.

    suite/        Suite, Task            read from TOML
    Harness       expand, prepare        coordinator's machine, CPU, before a GPU is taken: stages data, writes Samples
    plan/         Shard                  runs of whole blocks of one task, longest first
    engines/      Harness.run            GPU side: Backend.load once, then Samples of one block -> Answers, block by block
    run/          journal, answers       the only writer of files; calls ScoringPool.submit when a task's last block landed
    scoring/      Harness.score          CPU workers: Answers -> Score
    result/page   Report                 what people look at

Long because all that the parts agree on stands in one place, and most of it is said in words.

Who calls what:

* The coordinator calls `Harness.list_tasks` (to name the nearest one), `Harness.expand` (a group becomes its leaf
  tasks), `Harness.prepare` (once per task; in a CPU process; everything that costs CPU and is not scoring belongs
  here: data sets, few-shot prompts, chat templates), and at the end `Harness.combine` for groups.
* A worker (its own process, one per GPU or per group of `ModelSpec.gpus`) calls `Backend.load` once and then
  `Harness.run(model, samples)` with *the samples of exactly one block* at a time. A block is never cut and never
  joined with another one, whatever the number of workers: that, and nothing else, makes answers independent of the
  number of workers. On `OutOfMemory` it calls `Model.halve` and runs the same block again.
* Between blocks the worker hears the coordinator: the tail of its shard may be given to an idle worker.
* A scoring worker calls `Harness.score` with the exact set of answers: every sample id of the task once, in order.

Sample ids are positions 0 .. n-1 in the task's documents, in the order in which `prepare` wrote them. Times are Unix
seconds, durations seconds, sizes bytes. Nothing here imports torch or a harness.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

Json = Any
"""What `json.dumps` takes: str, int, float, bool, None, lists and dictionaries of these."""


# ---------------------------------------------------------------------------------------- what was asked


@dataclass(frozen=True)
class Task:
    """One dataset of a suite, as its TOML says it."""

    name: str
    """Unique in its suite; names files, so letters, digits, '.', '_', '-' only."""
    harness: str = "lm_eval"
    """A name of registry.HARNESSES, or 'package.module:Class' for one of the user's."""
    target: str = ""
    """The harness's own name of the task (or, for `plain`, the folder with infer.py and score.py); empty: `name`."""
    shots: int | None = None
    """Few-shot examples; None: what the task itself says."""
    metric: str = "match"
    """Kind of metric: 'loglikelihood', 'match', 'code' (runs generated code, in the sandbox), 'judge' (calls a model)."""
    licence: str = ""
    """Licence of the data, an SPDX identifier where there is one."""
    limit: int | float | None = None
    """Only the first so many samples; below 1: that share of them, rounded up."""
    gpus: int = 1
    """GPUs that a worker needs for it (long contexts); a worker with more will do."""
    headline: str = ""
    """The metric that stands for the task in curves and comparisons, such as 'acc_norm' or 'acc_norm,none'; empty: the
    harness's first."""
    group: str = ""
    """The group that it was expanded from; set by `Harness.expand`."""
    options: Mapping[str, Json] = field(default_factory=dict)
    """Passed to the harness as it is."""

    @property
    def harness_name(self) -> str:
        """What the harness calls it."""
        return self.target or self.name

    def limited(self, samples: int) -> int:
        """How many of so many samples are asked, as lm_eval counts them."""
        if self.limit is None:
            return samples
        return min(samples, math.ceil(samples * self.limit) if self.limit < 1 else int(self.limit))


@dataclass(frozen=True)
class TaskPrior:
    """What a suite says of a task's cost before anything was measured; all of it optional."""

    samples: int = 0
    requests_per_sample: float = 1.0
    prompt_chars: float = 0.0
    """Mean characters sent per sample, over all its requests."""
    output_tokens: float = 0.0
    """Mean tokens that are really generated per sample."""
    seconds: float = 0.0
    """Inference on one GPU with a model of `model_b`; 0: estimated from the figures above."""
    model_b: float = 7.0
    """Billions of parameters that `seconds` was measured with."""
    spread: float = 2.0
    """Geometric standard deviation of `seconds`: 2 means "within a factor of two, two times in three"."""
    score_s: float = 0.0
    """CPU seconds of the metric."""


@dataclass(frozen=True)
class Suite:
    """A named list of tasks."""

    name: str
    tasks: tuple[Task, ...]
    description: str = ""
    priors: Mapping[str, TaskPrior] = field(default_factory=dict)
    """By task name."""
    folder: str = ""
    """Where its file lies; relative paths in it start there."""


@dataclass(frozen=True)
class ModelSpec:
    """A model and how it is to be run. Everything here but `source`, the batch size and `gpus` is part of its identity."""

    source: str
    """A Hugging Face folder, one of our checkpoints, s3://bucket/prefix, or the base URL of an endpoint."""
    backend: str = "transformers"
    """A name of registry.BACKENDS, or 'package.module:Class'."""
    name: str = ""
    """Shown to people, and the model's name at an endpoint; empty: the last part of `source`."""
    dtype: str = "auto"
    batch_size: int = 8
    """Sequences per forward pass."""
    batch_auto: bool = False
    """`batch_size` is the most that is tried: where it does not fit, what did is begun with the next time."""
    block: int = 32
    """Samples per block (see above); part of the identity, because padding follows it."""
    max_length: int | None = None
    chat_template: bool = False
    tokenizer: str = ""
    """Folder of the tokenizer where `source` has none."""
    gpus: int = 1
    """GPUs per worker: 1, or the tensor-parallel degree."""
    options: Mapping[str, Json] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """A short name for people."""
        return self.name or self.source.rstrip("/").rsplit("/", 1)[-1]

    def key(self, checkpoint: str, beside: str = "") -> str:
        """The identity of "these weights run this way": answers are reused only under the same key.

        `checkpoint` is the hash of the weights' content, `beside` that of other files that are named here (a tokenizer,
        an adapter), empty where there are none. The batch size inside a block is not part of it: it is
        recorded with every answer instead, since it is halved when memory runs out.
        """
        parts = [checkpoint, self.backend, self.name, self.dtype, self.block, self.max_length]
        parts += [self.chat_template, self.tokenizer, dict(self.options)]
        parts += [beside] if beside else []
        return digest(parts)


# ------------------------------------------------------------------------------- what is sent to a model


@dataclass(frozen=True, slots=True)
class Request:
    """One call of a model: `kind` is lm-eval's request type or 'plain'; `arguments` is JSON."""

    kind: str
    """'loglikelihood' [context, continuation], 'loglikelihood_rolling' [text], 'generate_until' [context, settings],
    'multiple_choice', or 'plain' [row]."""
    arguments: tuple[Json, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One document of a task with the requests that it needs, ready to send; one line of a task's requests.jsonl."""

    id: int
    requests: tuple[Request, ...]
    prompt_hash: str
    """`prompt_hash(requests)`: answers are reused, and scored, only where it matches."""
    document: Json = None
    """What the scorer needs beside the answer, where the harness cannot find it again by id."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said to one sample; one line of an answers file."""

    sample: int
    prompt_hash: str
    outputs: tuple[Json, ...]
    """One per request of the sample, in their order: [logprob, is_greedy], text, ..."""
    problem: str = ""
    """Not empty: there is no answer (an endpoint refused it, ...). Tried again, then counted as unanswered."""


@dataclass(frozen=True)
class PreparedTask:
    """A task whose data lie on this machine and whose requests are written: `folder`/requests.jsonl."""

    task: Task
    version: str
    """Changes when answers to the same prompts would be judged differently or asked differently: the harness's
    version, the task's own version and its configuration."""
    samples: int
    block: int
    folder: str
    """Where requests.jsonl, requests.idx (see staged.py) and the harness's own files lie."""
    prompt_hash: str
    """Over the samples' prompt hashes, in order."""
    weights: tuple[float, ...] = ()
    """Expected relative cost of each block; empty: by number of samples."""
    prompt_chars: float = 0.0
    """Mean characters sent per sample, over all its requests."""
    output_tokens: float = 0.0
    """Mean tokens to generate per sample at most; 0 for likelihoods."""
    requests_per_sample: float = 1.0
    combine: Json = None
    """Whatever `Harness.combine` needs for the group."""
    asks: str = ""
    """What answers depend on beside the model and the prompts; empty: `version`. The same prompts are not asked again
    because a metric has changed."""
    documents: str = ""
    """Hash of the documents behind the prompts, with what is held right; empty: not known."""
    inputs: str = ""
    """Hash of what the files hold that the preparation read (see reads.py); set by whoever calls `prepare`."""

    @property
    def blocks(self) -> int:
        """Number of blocks; the last one may be short."""
        return -(-self.samples // self.block)

    def samples_of(self, block: int) -> range:
        """The sample ids of a block."""
        return range(block * self.block, min((block + 1) * self.block, self.samples))


def prompt_hash(requests: Iterable[Request]) -> str:
    """The hash of all that is sent for one sample."""
    return digest([[r.kind, list(r.arguments)] for r in requests])


def digest(value: Json) -> str:
    """32 hex digits of the SHA-256 of a JSON value, with sorted keys."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


# ------------------------------------------------------------------------------------- who does it, when


@dataclass(frozen=True)
class Shard:
    """Some whole blocks of one task, for one worker."""

    task: str
    blocks: tuple[int, ...]
    expected_s: float = 0.0
    """Inference on one worker, without load and switch."""
    gpus: int = 1


@dataclass(frozen=True)
class Trial:
    """One worker's visit to one shard: a bar of the Gantt chart."""

    task: str
    worker: str
    blocks: tuple[int, ...]
    """Those that were answered in it."""
    started: float
    ended: float
    busy_s: float
    """Time inside `Harness.run`; the rest is switching and waiting."""
    outcome: str = "done"
    """'done', 'shared' (its tail went to another worker), 'lost' (the worker died), 'failed'."""
    why: str = ""
    expected_s: float = 0.0


@dataclass(frozen=True)
class WorkerSeen:
    """One worker from its start to its end, with what it spent before its first trial."""

    name: str
    node: str
    gpus: tuple[int, ...]
    started: float
    fetch_s: float = 0.0
    load_s: float = 0.0
    ready: float = 0.0
    ended: float = 0.0
    why: str = ""
    start_s: float = 0.0
    """From `started` until it had connected: what was left of its imports, and of making its devices ready."""
    uncompiled: int = 0
    """Modules that it imported without compiled bytecode, and that every other start will have to compile too."""


@dataclass(frozen=True)
class Conditions:
    """What may move a score's last digits, recorded beside it."""

    engine: str
    """Backend and version, such as 'transformers 5.3'."""
    device: str
    dtype: str
    batch_size: int
    padding: str = ""
    """'left', 'right' or 'none'."""


# ------------------------------------------------------------------------------------------- what came out


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
        """(worker, start, end) of each stretch of work."""
        return self.parts or ((self.worker, self.started, self.ended),)


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
    trials: tuple[Trial, ...]
    scorings: tuple[ScoreDone, ...]
    workers: tuple[WorkerSeen, ...]
    lower_bound_s: float
    """No plan on these workers can be shorter, given the measured times."""
    naive_s: float
    """The same measured times, one trial per dataset, the model loaded each time, metrics inside the GPU job."""
    busy_fraction: float
    """Share of worker time from `started` to the last trial's end spent inside `Harness.run`."""
    expected_s: float = 0.0
    """What the plan promised before the start."""
    groups: tuple[Score, ...] = ()
    licences: Mapping[str, str] = field(default_factory=dict)
    reused: int = 0
    """Samples that an earlier command had answered: no time here is theirs."""

    @property
    def makespan_s(self) -> float:
        """From the start to the last score."""
        return self.ended - self.started


# -------------------------------------------------------------------------------------------- the protocols


@runtime_checkable
class Model(Protocol):
    """A loaded model, in a worker."""

    def respond(self, requests: Sequence[Request]) -> list[Json]:
        """One output per request, in order. Raises `OutOfMemory` when a batch does not fit; leaves the model usable."""
        ...

    def halve(self) -> bool:
        """Halves the batch size until `restore`; False if it is 1 already."""
        ...

    def restore(self) -> None:
        """Back to the batch size that was asked for."""
        ...

    @property
    def conditions(self) -> Conditions:
        """As it runs now."""
        ...

    def close(self) -> None:
        """Frees the device."""
        ...


class Backend(Protocol):
    """A way to load models. Its class is made without arguments.

    It may have a method `warm()` that imports what `load` will need and touches no device, and a method
    `warm_devices(devices)` that makes the devices' contexts: workers call them while the model is still on its way,
    the second one once the data are known to be there. It may have a collection `options` of the names that
    `ModelSpec.options` may hold: others are refused before anything is fetched.
    """

    needs_weights: bool
    """Whether `load` wants a local folder; an endpoint does not, and then no model is fetched."""

    def fingerprint(self, spec: ModelSpec) -> str | None:
        """A hash of what answers (an endpoint: its URL, model name and what it says of itself); None: hash the files."""
        ...

    def load(self, spec: ModelSpec, folder: Path | None, devices: Sequence[int]) -> Model:
        """The model on these GPUs (none: CPU). Raises `ModelDoesNotLoad` with the reason and what to do."""
        ...


class Harness(Protocol):
    """Knows tasks: their data, prompts and scores. Its class is made without arguments; light to import and make.

    It may have a method `size(task, suite) -> int | None`: the samples of a task without its `limit`, where that is known
    at once and nothing need be prepared; None where it is not. `unbroken eval plan` asks it, and shows what it raises
    (`DatasetMissing`, `InputError`, `UnknownTask`) as the run would.
    """

    def list_tasks(self, suite: Suite) -> Sequence[str]:
        """Names that `Task.harness_name` may take, groups included."""
        ...

    def expand(self, task: Task, suite: Suite) -> Sequence[Task]:
        """[task], or the leaf tasks of a group, each with `group` set and a name unique in the suite."""
        ...

    def prepare(
        self, task: Task, suite: Suite, spec: ModelSpec, model_files: Path | None, folder: Path
    ) -> PreparedTask:
        """Stages the data, builds every prompt, writes them with `staged.write_samples(folder, ...)`.

        `model_files` holds the model's small files (tokenizer, chat template, config). Called again for the same
        folder after a crash: must end the same. Raises `DatasetMissing` (which dataset, where it was looked for, how
        to stage it), `UnknownTask`.
        """
        ...

    def check(self, task: Task, suite: Suite) -> None:
        """Raises `DatasetMissing` or `UnknownTask` if `prepare` would; fast (a second), writes nothing.

        All tasks are checked before a GPU is taken; `prepare` then runs while the GPUs load the model.
        """
        ...

    def build_requests(self, prepared: PreparedTask, block: int) -> list[Sample]:
        """The samples of one block, from the staged file; for most harnesses `staged.read_block`."""
        ...

    def run(self, model: Model, prepared: PreparedTask, samples: Sequence[Sample]) -> list[Answer]:
        """One answer per sample, in order, for one block; for most harnesses `staged.run_requests`."""
        ...

    def score(self, prepared: PreparedTask, answers: Sequence[Answer]) -> Score:
        """The harness's own metrics and standard errors, bit for bit; a sample whose scorer raises becomes a note."""
        ...

    def combine(self, group: str, prepared: Sequence[PreparedTask], scores: Sequence[Score]) -> Score | None:
        """The score of a group from those of its leaves; None where the harness defines none."""
        ...


class ScoresInParts(Protocol):
    """What a Harness has too whose samples can be scored apart from each other, by several CPU workers at once."""

    def score_part(
        self, prepared: PreparedTask, answers: Sequence[Answer], part: range, for_s: float
    ) -> tuple[list[Json], float] | None:
        """Verdicts (any JSON) of these samples, in order, and the seconds that they took; `answers` are all the task's.

        Stops after a sample once `for_s` are over. None: this task can only be scored as a whole.
        """
        ...

    def score_of_parts(self, prepared: PreparedTask, verdicts: Sequence[Json]) -> Score:
        """What `score` gives, from the verdicts of all samples."""
        ...


class ScoringPool(Protocol):
    """CPU workers that score while GPUs go on; `scoring.pool.open_pool(workers)` gives one."""

    def submit(self, job: ScoreJob) -> None:
        """Queues a job; returns at once."""
        ...

    def collect(self) -> list[ScoreDone]:
        """What has ended since the last call; returns at once."""
        ...

    @property
    def pending(self) -> int:
        """Jobs submitted and not yet collected."""
        ...

    def close(self) -> None:
        """Ends the workers; jobs not yet done are dropped (their answers stay on disk)."""
        ...
