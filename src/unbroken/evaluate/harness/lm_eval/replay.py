"""Takes lm-evaluation-harness apart at its one seam: the model.

Its `simple_evaluate` sets the seeds, loads the task, overrides its settings, builds every prompt, calls the model,
filters, scores and aggregates. Run once with `CollectingLM` it stops at the model, with every prompt built; run again
with `ReplayingLM` it gets the recorded answers and goes on to the scores. All the rest is the harness's own code in
its own order, which is why the scores are its own to the last bit. Neither needs torch, a GPU or the model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....errors import EvaluationError
from ...contracts import Answer, Json, Request, SampleNote, digest, prompt_hash
from ...scoring import watch
from ...scoring.judge import Unscored
from ..repeated import repeat
from .task_index import quiet_lm_eval

Chat = Callable[[list[dict[str, str]], bool], Any]
"""(history, add_generation_prompt) -> the prompt: a string, or the messages themselves for a chat endpoint."""


class PromptsBuilt(Exception):
    """Raised by `CollectingLM` in place of an answer: every prompt of the task is built by then."""


@dataclass
class CapturedTask:
    """The one task of an evaluation, caught on its way through the harness."""

    task: Any = None
    by_sample: list[list[Any]] = field(default_factory=list)

    def sort_instances(self) -> list[list[Any]]:
        """The harness's instances by document, in its order; call after the prompts are built."""
        if not self.by_sample:
            grouped: dict[int, list[Any]] = {}
            for instance in self.task.instances:
                grouped.setdefault(instance.doc_id, []).append(instance)
            self.by_sample = [grouped[i] for i in sorted(grouped)]
        return self.by_sample


def one_leaf(folders: Sequence[str], leaf: str, seen: CapturedTask, guard: SampleGuard | None = None) -> Any:
    """A TaskManager that loads from `folders` alone and hands on only the task `leaf`."""
    tasks = quiet_lm_eval().tasks

    class OneLeaf(tasks.TaskManager):  # type: ignore[misc, name-defined]
        def load(self, task_list: Any) -> Any:
            loaded = super().load(task_list)
            if leaf not in loaded["tasks"]:
                raise EvaluationError(
                    f"the harness has no task '{leaf}' in {', '.join(sorted(loaded['tasks']))}",
                    hint="Its group has changed since the suite was expanded; start the evaluation again",
                )
            task = seen.task = loaded["tasks"][leaf]
            if guard is not None:
                guard.watch_over(task)
            return {"tasks": {leaf: task}, "groups": {}, "group_map": {}}

    return OneLeaf(include_path=list(folders), include_defaults=False)


def requests_of(instances: Sequence[Any], where: str) -> tuple[Request, ...]:
    """What is sent for one document, its repeats written out. Raises EvaluationError for images and sounds."""
    out: list[Request] = []
    for instance in instances:
        arguments = tuple(_json(a, where) for a in instance.args)
        out += [Request(instance.request_type, arguments)] * (instance.repeats or 1)
    return tuple(out)


def _json(value: Any, where: str) -> Json:
    if type(value).__name__ == "JsonChatStr":
        import json

        return json.loads(value.prompt)
    if isinstance(value, Mapping):
        return {str(k): _json(v, where) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(v, where) for v in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return value.item()
    raise EvaluationError(
        f"a request holds a {type(value).__name__}, which is no text",
        where=where,
        hint="Tasks with images or sounds are not supported yet",
    )


def _lm_base() -> Any:
    quiet_lm_eval()
    from lm_eval.api.model import LM

    return LM


def collecting_lm(chat: Chat | None) -> Any:
    """A model that answers nothing: it raises PromptsBuilt at the first question."""

    class CollectingLM(_lm_base()):  # type: ignore[misc]
        tokenizer_name = "unbroken"

        def _stop(self, requests: Any) -> Any:
            raise PromptsBuilt

        loglikelihood = loglikelihood_rolling = generate_until = _stop

        def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> Any:
            if chat is None:
                raise EvaluationError("this model has no chat template", hint="Set chat_template = false")
            return chat(chat_history, add_generation_prompt)

    return CollectingLM()


class SampleGuard:
    """Keeps one sample's failure from becoming the task's: it is noted, left out, and the rest is scored."""

    def __init__(self, seen: CapturedTask, answers: Sequence[Answer]) -> None:
        self._seen = seen
        self.notes: dict[int, SampleNote] = {}
        for i, a in enumerate(answers):
            if a.problem:
                crashed = a.problem.removeprefix("crashed: ")
                status = "crashed" if crashed != a.problem else "unanswered"
                self.notes[i] = SampleNote(i, status, crashed)

    def watch_over(self, task: Any) -> None:
        """Wraps the task's per-document functions."""
        process, filters = task.process_results, task.apply_filters
        turn = itertools.count()

        def process_results(doc: Any, results: Any) -> Any:
            # The harness visits the documents in order, once a filter.
            samples = self._seen.sort_instances()
            sample = next(turn) % len(samples)
            if sample in self.notes:
                return {}
            watch.at(sample)
            try:
                return process(doc, results)
            except Unscored as e:
                self.notes[sample] = SampleNote(sample, "unscored", str(e)[:500])
                return {}
            except Exception as e:  # noqa: BLE001  the task's own code: it may raise anything
                self.notes[sample] = SampleNote(sample, "crashed", f"{type(e).__name__}: {e}"[:500])
                return {}
            finally:
                watch.at(-1)

        def apply_filters() -> Any:
            try:
                return filters()
            except Exception:  # noqa: BLE001  the filter's own code; found again below, sample by sample
                self._filter_one_by_one(task)
                return None

        task.process_results, task.apply_filters = process_results, apply_filters

    def _filter_one_by_one(self, task: Any) -> None:
        for i, instances in enumerate(self._seen.sort_instances()):
            for f in task._filters:
                try:
                    f.apply(instances)
                except Exception as e:  # noqa: BLE001  as above
                    self.notes.setdefault(
                        i, SampleNote(i, "crashed", f"filter: {type(e).__name__}: {e}"[:500])
                    )
                    for instance in instances:
                        instance.filtered_resps[f.name] = None


def replaying_lm(
    seen: CapturedTask,
    answers: Sequence[Answer],
    prompts: Mapping[str, Json],
    where: str,
    draw: tuple[int, int] = (0, 1),
) -> Any:
    """A model that repeats `answers`, after checking that each was given to this very prompt; `draw`: which one of how many
    answers to each prompt."""

    class ReplayingLM(_lm_base()):  # type: ignore[misc]
        tokenizer_name = "unbroken"

        def __init__(self) -> None:
            super().__init__()
            self._outputs: dict[int, list[Json]] | None = None

        def _replay(self, requests: Sequence[Any]) -> list[Any]:
            if self._outputs is None:
                self._outputs = _match(seen.sort_instances(), answers, where, *draw)
            return [_output(r.request_type, self._outputs[id(r)].pop(0)) for r in requests]

        loglikelihood = loglikelihood_rolling = generate_until = _replay

        def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> Any:
            text = prompts[chat_key(chat_history, add_generation_prompt)]
            return text if isinstance(text, str) else as_chat(text)

    return ReplayingLM()


def chat_key(history: Any, add_generation_prompt: bool) -> str:
    """What a rendered chat is kept under."""
    return digest([history, add_generation_prompt])


def as_chat(messages: Json) -> Any:
    """Messages in the form in which the harness hands them to an endpoint."""
    import json

    from lm_eval.models.api_models import JsonChatStr

    return JsonChatStr(json.dumps(messages, ensure_ascii=False))


def _match(
    samples: list[list[Any]], answers: Sequence[Answer], where: str, draw: int, count: int
) -> dict[int, list[Json]]:
    if len(samples) != len(answers):
        raise EvaluationError(
            f"the task has {len(samples)} documents now, but {len(answers)} were answered",
            where=where,
            hint="The data set changed since the prompts were written; start the evaluation in a new folder",
        )
    out: dict[int, list[Json]] = {}
    for i, (instances, answer) in enumerate(zip(samples, answers, strict=True)):
        requests = repeat(requests_of(instances, where), count)
        if answer.sample != i or answer.prompt_hash != prompt_hash(requests):
            raise EvaluationError(
                f"sample {i} was answered for another prompt than the harness builds now",
                where=where,
                hint="The data set, the task or the harness changed in between; start the evaluation in a new folder",
            )
        outputs = [None] * len(requests) if answer.problem else list(answer.outputs)
        if len(outputs) != len(requests):
            raise EvaluationError(
                f"sample {i} has {len(outputs)} outputs for {len(requests)} requests", where=where
            )
        outputs = outputs[draw::count]
        at = 0
        for instance in instances:
            repeats = instance.repeats or 1
            out[id(instance)] = outputs[at : at + repeats]
            at += repeats
    return out


def _output(kind: str, value: Json) -> Any:
    """An output as the harness's models return it; a placeholder where there is none (its sample is noted)."""
    if kind in ("loglikelihood", "multiple_choice"):
        return (math.nan, False) if value is None else (value[0], bool(value[1]))
    if kind == "loglikelihood_rolling":
        return math.nan if value is None else value
    return "" if value is None else value
