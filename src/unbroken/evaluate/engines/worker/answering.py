"""One block of a task, answered by a loaded model through the task's harness."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....errors import EvaluationError, OutOfMemory
from ...contracts import Answer, Harness, Json, Model, PreparedTask, Request, Sample
from ...suite.registry import get_harness
from ...suite.staged import decode_sample
from .block_queue import Item


class _Exactly:
    """A FedModel, answering in the harness's own batches; for the harness, a model like any other."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model.exact, name)

    def respond(self, requests: Sequence[Request]) -> list[Json]:
        """As `respond_exactly`."""
        found: list[Json] = self._model.respond_exactly(requests)
        return found


class Answering:
    """The tasks that a worker knows, and their harnesses."""

    def __init__(self) -> None:
        self._tasks: dict[str, PreparedTask] = {}
        self._lines: dict[tuple[str, int], list[str]] = {}
        """Samples that came over the link, where the worker cannot read the shared folder."""
        self._kept: dict[tuple[str, int], list[Sample]] = {}
        self._harnesses: dict[str, Harness] = {}

    def add(self, prepared: PreparedTask) -> None:
        """Blocks of this task may follow."""
        self._tasks[prepared.task.name] = prepared

    def add_lines(self, task: str, block: int, lines: list[str]) -> None:
        """The samples of a block, as they lie in the task's folder."""
        self._lines[(task, block)] = lines

    def is_exact(self, item: Item) -> bool:
        """Whether it is a block of a check: to be answered in the harness's own batches."""
        return self._tasks[item.task].exact

    def requests(self, item: Item) -> list[Sample] | None:
        """The samples of the block, where the harness does nothing but send their requests; None where it does more, and
        `answer` has to be called."""
        harness, prepared = self._harness(item), self._tasks[item.task]
        only_asks = getattr(harness, "only_asks", None)
        if only_asks is None or prepared.exact:
            return None
        samples = self._samples(item)
        if only_asks(prepared, samples):
            return samples
        self._kept[(item.task, item.block)] = samples
        return None

    def answer(self, model: Model, item: Item) -> list[Answer]:
        """One answer per sample of the block. Raises OutOfMemory where one sequence alone does not fit,
        EvaluationError where the harness answers other samples, and whatever harness and model raise."""
        prepared, harness = self._tasks[item.task], self._harness(item)
        samples = self._samples(item)
        while True:
            try:
                answers = harness.run(_Exactly(model) if prepared.exact else model, prepared, samples)
                break
            except OutOfMemory as e:
                if not model.halve():
                    raise OutOfMemory("one sequence alone does not fit on the device", where=f"task {item.task}, block {item.block}",
                                      hint="Lower max_length, or give the task more GPUs") from e  # fmt: skip
        asked = [(s.id, s.prompt_hash) for s in samples]
        if [(a.sample, a.prompt_hash) for a in answers] != asked:
            raise EvaluationError(f"the harness gave {len(answers)} answers to {len(asked)} samples, or to others",
                                  where=f"task {item.task}, block {item.block}")  # fmt: skip
        return answers

    def _harness(self, item: Item) -> Harness:
        name = self._tasks[item.task].task.harness
        found = self._harnesses.get(name)
        if found is None:
            found = self._harnesses[name] = get_harness(name)
        return found

    def _samples(self, item: Item) -> list[Sample]:
        at = item.task, item.block
        if at in self._kept:
            return self._kept.pop(at)
        lines = self._lines.pop(at, None)
        if lines is None:
            return self._harness(item).build_requests(self._tasks[item.task], item.block)
        return [decode_sample(x) for x in lines]
