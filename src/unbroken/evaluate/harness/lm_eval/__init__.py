"""lm-evaluation-harness: its tasks, its prompts, its scores and standard errors, bit for bit.

`prepare` runs the harness up to the model and writes every prompt, on a CPU; GPU workers then need neither the
harness nor a data set; `score` runs the harness again, from recorded answers. See replay.py for how.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .... import atomic
from ....errors import EvaluationError, UnbrokenError, UnknownKey
from ...contracts import Answer, Json, Model, ModelSpec, PreparedTask, Sample, Score, Suite, Task, digest
from ...suite import staged
from ...suite.asking import run_requests
from .. import repeated
from ..chat import chat_of, check_kinds
from .call import keep_data, kept_data, one_process, simple_evaluate
from .replay import (
    CapturedTask,
    Chat,
    PromptsBuilt,
    SampleGuard,
    chat_key,
    collecting_lm,
    one_leaf,
    replaying_lm,
    requests_of,
)
from .results import (
    TARGETS,
    documents_of,
    metrics_of,
    no_documents,
    per_sample,
    targets_of,
    task_version,
    values_of,
    votes_of,
    why_not_prepared,
)
from .task_index import Leaf, TaskIndex, quiet_lm_eval

SANDBOXED = "UNBROKEN_SANDBOX"
"""Set by the sandbox inside it; only there is generated code run."""


@dataclass(frozen=True)
class LmEvalOptions:
    """What a task's `options` may say, each as lm_eval's own option of that name."""

    include: tuple[str, ...] = ()
    """Folders with local YAML tasks; relative ones start at the suite's folder."""
    system_instruction: str | None = None
    fewshot_as_multiturn: bool = True
    """With a chat template: each example is a turn of its own."""
    gen_kwargs: Mapping[str, Json] | None = None
    """Overrides of the task's generation settings."""
    bootstrap_iters: int = 100_000
    metadata: Mapping[str, Json] | None = None
    fewshot_seed: int = 1234
    samples: int = 1
    """Answers to each prompt that asks for a text; no option of lm_eval's (see harness/repeated.py)."""
    in_group: str = ""
    """Set by `expand`: the group through which the task is loaded."""

    @classmethod
    def read(cls, options: Mapping[str, Json], suite_folder: str, where: str) -> LmEvalOptions:
        """The options of a task. Raises UnknownKey."""
        known = set(cls.__dataclass_fields__)
        for key in options:
            if key not in known:
                raise UnknownKey(key, known - {"in_group"}, where=where)
        given = dict(options)
        include = given.pop("include", ())
        folders = [include] if isinstance(include, str) else list(include)
        base = Path(suite_folder or ".")
        return cls(include=tuple(str((base / f).resolve()) for f in folders), **given)


class LmEvalHarness:
    """The adapter; light to make: lm_eval is imported when a task is looked at."""

    runs_code_itself = True
    """Its code metrics run generated programs in their own process: such tasks are scored inside the sandbox."""

    def __init__(self) -> None:
        self._indexes: dict[tuple[str, ...], TaskIndex] = {}

    def warm(self) -> None:
        """Imports what preparing and scoring need."""
        quiet_lm_eval()
        import torch  # noqa: F401  it is seeded for every task

    def list_tasks(self, suite: Suite) -> Sequence[str]:
        """Every task, group and tag of the harness and of the suite's local folders."""
        include: dict[str, None] = {}
        for task in suite.tasks:
            if task.harness == "lm_eval":
                include.update(dict.fromkeys(self._options(task, suite).include))
        if not suite.tasks and suite.folder and any(Path(suite.folder).glob("*.yaml")):
            include[suite.folder] = None
        return self._index(tuple(include)).names()

    def expand(self, task: Task, suite: Suite) -> Sequence[Task]:
        """[task] itself, or the leaf tasks of a group or tag. Raises UnknownTask with the nearest names."""
        options = self._options(task, suite)
        index = self._index(options.include)
        entry = index.find(task.harness_name)
        if entry.kind == "task":
            return [task]
        out = []
        for leaf in index.leaves(task.harness_name):
            name = re.sub(r"[^A-Za-z0-9._-]+", "-", leaf.name)
            if not (name.startswith(task.name + "_") and task.name == task.harness_name):
                name = f"{task.name}.{name}"
            inside = {"in_group": task.harness_name} if entry.kind == "group" else {}
            out.append(
                replace(
                    task, name=name, target=leaf.name, group=task.name, options={**task.options, **inside}
                )
            )
        return out

    def prepare(
        self, task: Task, suite: Suite, spec: ModelSpec, model_files: Path | None, folder: Path
    ) -> PreparedTask:
        """Writes every prompt of the task, exactly those that lm_eval would send. Raises DatasetMissing, UnknownTask."""
        options = self._options(task, suite)
        leaf = self._leaf(task, options)
        chat: Chat | None = None
        kept: dict[str, Json] = {}
        if spec.chat_template:
            chat, kept = _recording(chat_of(spec, model_files))
        seen = CapturedTask()
        recipe = {
            "leaf": leaf.name,
            "spec": leaf.spec,
            "folders": list(leaf.folders),
            "shots": task.shots,
            "limit": task.limit,
            "chat": spec.chat_template,
            "options": {
                "system_instruction": options.system_instruction,
                "fewshot_as_multiturn": options.fewshot_as_multiturn,
                "gen_kwargs": dict(options.gen_kwargs) if options.gen_kwargs else None,
                "bootstrap_iters": options.bootstrap_iters,
                "fewshot_random_seed": options.fewshot_seed,
                "metadata": dict(options.metadata) if options.metadata else None,
            },
        }
        try:
            simple_evaluate(recipe, collecting_lm(chat), one_leaf(leaf.folders, leaf.name, seen), unsafe=True)
        except PromptsBuilt:
            pass
        except UnbrokenError:
            raise
        except Exception as e:
            raise why_not_prepared(e, task, seen) from e
        if not seen.sort_instances():
            raise no_documents(task)
        if getattr(seen.task, "UNSAFE_CODE", False):
            task = replace(task, metric="code")
            recipe["data"] = keep_data(seen.task, folder)
        asked = [requests_of(instances, task.name) for instances in seen.sort_instances()]
        recipe["samples"] = repeated.count_of(asked, options.samples, task.name)
        requests = [repeated.repeat(rs, recipe["samples"]) for rs in asked]
        check_kinds(spec, {r.kind for rs in requests for r in rs}, task.name)
        wrote = staged.write_samples(folder, requests, block=spec.block)
        atomic.write_json(folder / TARGETS, targets_of(seen.task, seen.sort_instances()), indent=None)
        atomic.write_json(folder / "chat.json", kept)
        shown = dict(seen.task.dump_config())
        recipe["n_shot"] = int(shown.get("num_fewshot") or 0)
        recipe["config"] = json.loads(json.dumps(shown, default=str))
        atomic.write_json(folder / "lm_eval.json", recipe)
        tokens = [
            float(dict(r.arguments[1]).get("max_gen_toks", 256))
            for rs in requests
            for r in rs
            if r.kind == "generate_until"
        ]
        return PreparedTask(
            task=task,
            version=task_version(seen.task),
            samples=wrote.samples,
            block=spec.block,
            folder=str(folder),
            prompt_hash=wrote.prompt_hash,
            weights=wrote.weights,
            prompt_chars=wrote.prompt_chars,
            output_tokens=sum(tokens) / len(requests),
            requests_per_sample=wrote.requests_per_sample,
            combine={"group": options.in_group, "leaf": leaf.name, "include": list(options.include)},
            asks="requests",
            documents=documents_of(seen.sort_instances()),
            whole=wrote.samples if task.limit is None else _count(seen.task.eval_docs),
        )

    def data_of(self, task: Task, suite: Suite) -> tuple[int, str]:
        """(documents, name of the data set), after loading it. Raises DatasetMissing, UnknownTask."""
        options = self._options(task, suite)
        leaf = self._leaf(task, options)
        seen = CapturedTask()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                one_leaf(leaf.folders, leaf.name, seen).load([leaf.spec])
            documents = len(seen.task.eval_docs)
        except Exception as e:
            raise why_not_prepared(e, task, seen) from e
        source = str(seen.task.DATASET_PATH or "its own code")
        files = (seen.task.get_config("dataset_kwargs") or {}).get("data_files")
        return documents, f"{source} {files}" if files else " ".join(
            filter(None, (source, seen.task.DATASET_NAME))
        )

    def build_requests(self, prepared: PreparedTask, block: int) -> list[Sample]:
        """The samples of one block, from the staged file."""
        return staged.read_block(prepared, block)

    def only_asks(self, prepared: PreparedTask, samples: Sequence[Sample]) -> bool:
        """Always: lm_eval's tasks make their requests before the model is there."""
        return True

    def run(self, model: Model, prepared: PreparedTask, samples: Sequence[Sample]) -> list[Answer]:
        """One answer per sample; all requests of the block in one call."""
        return run_requests(model, samples)

    def score(self, prepared: PreparedTask, answers: Sequence[Answer]) -> Score:
        """lm_eval's own filters, metrics and standard errors, from recorded answers.

        A sample whose scorer raises, or that has no answer, becomes a note, and the metrics are those of the rest.
        Raises EvaluationError where an answer belongs to another prompt than the harness builds now.
        """
        recipe = json.loads((Path(prepared.folder) / "lm_eval.json").read_text())
        count = int(recipe.get("samples", 1))
        if count == 1:
            return self._score_draw(prepared, answers, recipe, 0)[0]
        draws = [self._score_draw(prepared, answers, recipe, draw) for draw in range(count)]
        return repeated.score_of([s for s, _ in draws], [v for _, v in draws])

    def _score_draw(
        self, prepared: PreparedTask, answers: Sequence[Answer], recipe: dict[str, Any], draw: int
    ) -> tuple[Score, dict[str, list[Json]]]:
        """The score with one of the answers to each prompt, and by metric what each sample answered."""
        started = time.monotonic()
        prompts = json.loads((Path(prepared.folder) / "chat.json").read_text())
        seen = CapturedTask()
        guard = SampleGuard(seen, answers)
        lm = replaying_lm(seen, answers, prompts, prepared.task.name, (draw, int(recipe.get("samples", 1))))
        manager = one_leaf(recipe["folders"], recipe["leaf"], seen, guard)
        inside = bool(os.environ.get(SANDBOXED))
        if prepared.task.metric == "code" and not inside:
            raise EvaluationError(
                "this task runs generated code, and this process is not in the sandbox",
                where=prepared.task.name,
                hint="Score it with `unbroken eval`, which puts it there",
            )
        with one_process(), kept_data(recipe.get("data")):
            results = simple_evaluate(recipe, lm, manager, unsafe=inside)
        if results is None:
            raise EvaluationError("lm_eval gave no result", where=prepared.task.name)
        metrics = metrics_of(results, recipe["leaf"], seen.task)
        effective = int(results["n-samples"][recipe["leaf"]]["effective"])
        values = values_of(results, recipe["leaf"], seen.task, metrics, len(answers))
        score = Score(
            task=prepared.task.name,
            metrics=metrics,
            values=values,
            samples=len(answers),
            scored=min(effective, len(answers) - len(guard.notes)),
            notes=tuple(guard.notes[i] for i in sorted(guard.notes)),
            version=prepared.version,
            prompt_hash=prepared.prompt_hash,
            per_sample=per_sample(values, seen.task, metrics),
            seconds=time.monotonic() - started,
        )
        return score, votes_of(results, recipe["leaf"], metrics, len(answers))

    def combine(self, group: str, prepared: Sequence[PreparedTask], scores: Sequence[Score]) -> Score | None:
        """The group's own aggregation of its leaves' metrics; None for tags and for groups that define none.

        Groups inside the group follow as metrics named 'subgroup: acc,none'.
        """
        about = [p.combine or {} for p in prepared]
        target = next((a["group"] for a in about if a.get("group")), "")
        if not target or not scores:
            return None
        from .groups import aggregate

        index = self._index(tuple(about[0].get("include", ())))
        leaves = {a["leaf"]: s for a, s in zip(about, scores, strict=True)}
        metrics = aggregate(index, target, leaves)
        if not metrics:
            return None
        return Score(
            task=group,
            metrics=metrics,
            samples=sum(s.samples for s in scores),
            scored=sum(s.scored for s in scores),
            version=digest([s.version for s in scores]),
            checkpoint=scores[0].checkpoint,
            conditions=tuple(dict.fromkeys(c for s in scores for c in s.conditions)),
        )

    def _options(self, task: Task, suite: Suite) -> LmEvalOptions:
        return LmEvalOptions.read(task.options, suite.folder, f"task '{task.name}'")

    def _index(self, include: tuple[str, ...]) -> TaskIndex:
        if include not in self._indexes:
            self._indexes[include] = TaskIndex([Path(p) for p in include])
        return self._indexes[include]

    def _leaf(self, task: Task, options: LmEvalOptions) -> Leaf:
        leaves = self._index(options.include).leaves(options.in_group or task.harness_name)
        for leaf in leaves:
            if leaf.name == task.harness_name:
                return leaf
        raise EvaluationError(
            f"'{task.harness_name}' is a group of {len(leaves)} tasks",
            where=task.name,
            hint="Expand it first",
        )


def _recording(chat: Chat) -> tuple[Chat, dict[str, Json]]:
    """The chat template, and what it rendered: scoring then needs no tokenizer."""
    kept: dict[str, Json] = {}

    def rendered(history: list[dict[str, str]], add_generation_prompt: bool) -> Any:
        text = chat(history, add_generation_prompt)
        kept[chat_key(history, add_generation_prompt)] = text
        if isinstance(text, str):
            return text
        from .replay import as_chat

        return as_chat(text)

    return rendered, kept


def _count(documents: Any) -> int:
    """How many there are; 0 where counting would mean to make them all."""
    return len(documents) if hasattr(documents, "__len__") else 0
