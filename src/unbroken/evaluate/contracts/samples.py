"""What is sent to a model, and what it answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .asked import Task
from .json_values import Json, digest


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
    partial: str = ""
    """Not empty: a text of it was cut short (its time was over). Scored as it is, and counted on the page."""


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
    exact: bool = False
    """Its samples are asked in the harness's own batches, whatever the others are: a check of those."""
    whole: int = 0
    """Samples of the task without its `limit`, for the plan of a later evaluation; 0: not known."""

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
