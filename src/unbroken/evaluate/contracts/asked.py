"""What was asked: tasks, suites, and the model with how it is run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .json_values import Json, digest


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
    exact: bool = True
    """In the harness's own batches; else the fast way: batches as this device likes them, checked against the other."""

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
        parts += [] if self.exact else ["fast"]
        return digest(parts)
