"""What backends, harnesses and scoring pools have to do."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from .asked import ModelSpec, Suite, Task
from .assigned import Conditions
from .json_values import Json
from .samples import Answer, PreparedTask, Request, Sample
from .scored import Score, ScoreDone, ScoreJob


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


@runtime_checkable
class FedModel(Model, Protocol):
    """What a Model has too that answers requests of many blocks at once, each as soon as it is ready.

    The worker's main thread alone calls it. `respond` answers with nothing else in flight.
    """

    at_once: int
    """So many samples it wants to hold at once; more than 1."""
    tokens_read: int
    tokens_made: int
    """Since it was loaded: tokens of requests, and tokens generated."""

    def put(self, key: Hashable, group: str, requests: Sequence[Request]) -> None:
        """Queues the requests of one key; those of one `group` begin alike. What is wrong with them is given by `take`."""
        ...

    def take(self, within_s: float = 1.0) -> list[tuple[Hashable, list[Json] | Exception]]:
        """Works for a while, and returns the outputs of the keys that are ready, or why one has none; may be empty."""
        ...

    def respond_exactly(self, requests: Sequence[Request]) -> list[Json]:
        """As the harness's own batches answer them; with nothing else in flight."""
        ...

    @property
    def steps(self) -> int:
        """Grows as long as it works at what has not ended."""
        ...


class Backend(Protocol):
    """A way to load models. Its class is made without arguments.

    It may have a method `warm()` that imports what `load` will need and touches no device, and a method
    `warm_devices(devices)` that makes the devices' contexts: workers call them while the model is still on its way,
    the second one once the data are known to be there. It may have a collection `options` of the names that
    `ModelSpec.options` may hold: others are refused before anything is fetched; and `ways`, of "fast" and "exact"
    (`ModelSpec.exact`), the usual one first: without it there is one way only, and it counts as exact.
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
    It may have a method `only_asks(prepared, samples) -> bool`: whether `run` would do nothing but send these samples' requests
    and return the outputs; then a model that can (`FedModel`) answers them together with those of other blocks.
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
