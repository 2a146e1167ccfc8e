"""One block of a task, answered by a loaded model through the task's harness."""

from __future__ import annotations

from ...errors import EvaluationError, OutOfMemory
from ..contracts import Answer, Harness, Model, PreparedTask
from ..suite.registry import get_harness
from ..suite.staged import decode_sample
from .block_queue import Item


class Answering:
    """The tasks that a worker knows, and their harnesses."""

    def __init__(self) -> None:
        self._tasks: dict[str, PreparedTask] = {}
        self._lines: dict[tuple[str, int], list[str]] = {}
        """Samples that came over the link, where the worker cannot read the shared folder."""
        self._harnesses: dict[str, Harness] = {}

    def add(self, prepared: PreparedTask) -> None:
        """Blocks of this task may follow."""
        self._tasks[prepared.task.name] = prepared

    def add_lines(self, task: str, block: int, lines: list[str]) -> None:
        """The samples of a block, as they lie in the task's folder."""
        self._lines[(task, block)] = lines

    def answer(self, model: Model, item: Item) -> list[Answer]:
        """One answer per sample of the block. Raises OutOfMemory where one sequence alone does not fit,
        EvaluationError where the harness answers other samples, and whatever harness and model raise."""
        prepared = self._tasks[item.task]
        name = prepared.task.harness
        harness = self._harnesses.get(name)
        if harness is None:
            harness = self._harnesses[name] = get_harness(name)
        lines = self._lines.pop((item.task, item.block), None)
        if lines is None:
            samples = harness.build_requests(prepared, item.block)
        else:
            samples = [decode_sample(x) for x in lines]
        while True:
            try:
                answers = harness.run(model, prepared, samples)
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
