"""Any task that is two small files: infer.py says what to ask the model, score.py what an answer is worth.

    data.jsonl   one row a line (or `data = "path"` in the task's options, or `rows()` in infer.py)
    infer.py     def prompt(row): ...            what to send for a row; the worker sends it
              or def infer(model, rows): ...     the calls themselves, on the worker; one output a row
    score.py     def score(row, output): ...     a number, True/False, or {"metric": number}
                 def vote(row, output): ...      optional: what counts as the same answer in a majority of `--samples`
                 def aggregate(values): ...      optional: {"metric": [numbers]} -> {"metric": number or (number, stderr)}
                 THREADS = 8                     optional: rows scored at once, for scorers that wait (a judge)
                 APART = False                   optional: one process scores all rows, in order; else several may share
                                                 them (not where there is an `aggregate`, unless APART = True)

`prompt` returns a text or chat messages to continue; {"prompt": ..., "max_tokens": 256, "stop": [...],
"temperature": 0}; {"context": text, "choices": [text, ...]} for log-probabilities; or a list of these.
A score of None, or `unbroken.evaluate.scoring.judge.Unscored` raised, is no verdict: counted apart from wrong.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ....errors import EvaluationError, InputError, unreadable
from ...contracts import (
    Answer,
    Json,
    Model,
    ModelSpec,
    PreparedTask,
    Sample,
    SampleNote,
    Score,
    Suite,
    Task,
    digest,
    prompt_hash,
)
from ...preparation import reads
from ...suite import staged
from ...suite.asking import run_requests
from .. import repeated
from ..chat import check_kinds
from .folder import Folder, check_score, rows_of, samples_of
from .model import Handle, PlainBackend, PlainModel, Unanswered
from .score import Verdict, aggregate, apart, score_all, score_some

__all__ = ["PlainBackend", "PlainHarness"]


class PlainHarness:
    """The adapter of infer.py / score.py pairs."""

    def __init__(self) -> None:
        self._infer: dict[str, Any] = {}
        self._scoring: tuple[tuple[str, str], Any] | None = None
        """The task that is being scored, and its score.py, loaded once for all its parts."""

    def list_tasks(self, suite: Suite) -> Sequence[str]:
        """The folders below the suite's that hold both files."""
        base = Path(suite.folder or ".")
        return sorted(
            str(p.parent.relative_to(base))
            for p in base.glob("*/**/infer.py")
            if (p.parent / "score.py").is_file()
        )

    def expand(self, task: Task, suite: Suite) -> Sequence[Task]:
        """[task]. Raises UnknownTask."""
        Folder.find(task, suite, self.list_tasks(suite))
        return [task]

    def prepare(
        self, task: Task, suite: Suite, spec: ModelSpec, model_files: Path | None, folder: Path
    ) -> PreparedTask:
        """Writes the rows, and what is asked about each. Raises DatasetMissing, InputError, UnknownTask."""
        source = Folder.find(task, suite, self.list_tasks(suite))
        with reads.part() as loaded:
            infer = source.load("infer")
        check_score(source)
        every = list(rows_of(task, suite, source, infer))
        rows = every[: task.limited(len(every))]
        if not rows:
            raise _no_rows(task, source)
        samples = list(samples_of(rows, infer, source, task, spec, model_files))
        count = repeated.count_of(
            [s.requests for s in samples], int(task.options.get("samples", 1)), task.name
        )
        if count > 1:
            whole = [repeated.repeat(s.requests, count) for s in samples]
            samples = [
                Sample(s.id, rs, prompt_hash(rs), s.document) for s, rs in zip(samples, whole, strict=True)
            ]
        check_kinds(spec, {r.kind for s in samples for r in s.requests} - {"plain"}, task.name)
        wrote = staged.write_samples(folder, samples, block=spec.block)
        (folder / "plain.json").write_text(json.dumps({"source": str(source.path), "samples": count}))
        tokens = [
            float(dict(r.arguments[1])["max_gen_toks"])
            for s in samples
            for r in s.requests
            if r.kind == "generate_until"
        ]
        return PreparedTask(
            task=task,
            version=f"plain {source.code[:12]}",
            samples=wrote.samples,
            block=spec.block,
            folder=str(folder),
            prompt_hash=wrote.prompt_hash,
            weights=wrote.weights,
            prompt_chars=wrote.prompt_chars,
            output_tokens=sum(tokens) / len(samples) or float(task.options.get("max_tokens", 0)),
            requests_per_sample=wrote.requests_per_sample,
            asks="requests" if hasattr(infer, "prompt") else _asks(source, loaded),
            documents=digest(rows),
            whole=len(every),
        )

    def size(self, task: Task, suite: Suite) -> int | None:
        """Rows of the task's file; None where infer.py makes them itself. Nothing is imported.

        Raises UnknownTask, DatasetMissing, and InputError with the line where a file does not compile or is no JSON.
        """
        source = Folder.find(task, suite, self.list_tasks(suite))
        names = _defined(source, "infer")
        _defined(source, "score")
        if "data" not in task.options and names & {"rows", "*"}:
            return None
        try:
            count = sum(1 for _ in rows_of(task, suite, source, None))
        except UnicodeDecodeError as e:
            raise InputError(f"the rows cannot be read: {unreadable(e)}", where=str(source.path)) from e
        if not count:
            raise _no_rows(task, source)
        return count

    def data_of(self, task: Task, suite: Suite) -> tuple[int, str]:
        """(rows, where they are read from). Raises DatasetMissing, InputError, UnknownTask."""
        source = Folder.find(task, suite, self.list_tasks(suite))
        return len(list(rows_of(task, suite, source, source.load("infer")))), str(source.path)

    def build_requests(self, prepared: PreparedTask, block: int) -> list[Sample]:
        """The samples of one block, from the staged file."""
        return staged.read_block(prepared, block)

    def only_asks(self, prepared: PreparedTask, samples: Sequence[Sample]) -> bool:
        """Whether infer.py defines `prompt`; `infer` makes calls of its own."""
        return all(r.kind != "plain" for s in samples for r in s.requests)

    def run(self, model: Model, prepared: PreparedTask, samples: Sequence[Sample]) -> list[Answer]:
        """The worker's calls for one block: those that `prompt` asked for, or `infer`'s own."""
        if any(r.kind != "plain" for s in samples for r in s.requests) or isinstance(model, PlainModel):
            with _mixed_settings(model):
                return run_requests(model, samples)
        infer = self._module(prepared).infer
        try:
            with _mixed_settings(model):
                outputs = list(infer(Handle(model), [s.requests[0].arguments[0] for s in samples]))
        except Unanswered as e:
            if len(samples) == 1:
                return [Answer(samples[0].id, samples[0].prompt_hash, (), str(e))]
            # One of them got no answer: each alone, so that the others keep theirs.
            return [a for s in samples for a in self.run(model, prepared, [s])]
        if len(outputs) != len(samples):
            raise EvaluationError(
                f"infer() gave {len(outputs)} outputs for {len(samples)} rows", where=prepared.task.name
            )
        return [Answer(s.id, s.prompt_hash, (o,)) for s, o in zip(samples, outputs, strict=True)]

    def score(self, prepared: PreparedTask, answers: Sequence[Answer]) -> Score:
        """The mean of what `score` gives, with its standard error, or what `aggregate` makes of it."""
        started = time.monotonic()
        module = self._scorer(prepared)
        self._scoring = None  # the next task begins with a module of its own
        verdicts = score_all(module, list(_rows(prepared)), answers, _count(prepared))
        return replace(_whole(prepared, module, verdicts), seconds=time.monotonic() - started)

    def score_part(
        self, prepared: PreparedTask, answers: Sequence[Answer], part: range, for_s: float
    ) -> tuple[list[Json], float] | None:
        """[[metric, number], ...] of each, or {"note": [sample, status, why]}. None where score.py waits for a judge, or
        says APART = False."""
        if part.start == 0:
            self._scoring = None
        module = self._scorer(prepared)
        if not apart(module):
            return None  # what was loaded is for `score`
        rows = itertools.islice(_rows(prepared), part.start, part.stop)
        some = answers[part.start : part.stop]
        found, seconds = score_some(module, rows, some, for_s, _count(prepared))
        # As pairs, for the first metric is the headline, and JSON may be sorted.
        return [
            {"note": [v.sample, v.status, v.why]} if isinstance(v, SampleNote) else list(v.items())
            for v in found
        ], seconds

    def score_of_parts(self, prepared: PreparedTask, verdicts: Sequence[Json]) -> Score:
        """What `score` gives."""
        found = [SampleNote(*v["note"]) if isinstance(v, dict) else dict(v) for v in verdicts]
        score, self._scoring = _whole(prepared, self._scorer(prepared), found), None
        return score

    def combine(self, group: str, prepared: Sequence[PreparedTask], scores: Sequence[Score]) -> Score | None:
        """None: these tasks have no groups."""
        return None

    def _scorer(self, prepared: PreparedTask) -> Any:
        key = prepared.folder, prepared.version
        if self._scoring is None or self._scoring[0] != key:
            self._scoring = key, _source(prepared).load("score")
        return self._scoring[1]

    def _module(self, prepared: PreparedTask) -> Any:
        if prepared.folder not in self._infer:
            self._infer[prepared.folder] = _source(prepared).load("infer")
        return self._infer[prepared.folder]


@contextlib.contextmanager
def _mixed_settings(model: Model) -> Iterator[None]:
    """Inside, rows that differ in their length and stop strings alone may share a batch: there is no harness to agree with."""
    if not hasattr(model, "mix_settings"):
        yield
        return
    model.mix_settings = True
    try:
        yield
    finally:
        model.mix_settings = False


def _asks(source: Folder, loaded: Sequence[str]) -> str:
    """What the answers of infer(model, rows) depend on beside the rows: its code, and what that read when it was loaded."""
    code = [p for p in source.path.glob("*.py") if p.name != "score.py"]
    files = {str(p): reads.stamp(str(p)) for p in [*map(Path, loaded), *code]}
    return f"infer {reads.content(files)}"


def _no_rows(task: Task, source: Folder) -> InputError:
    return InputError(f"task '{task.name}' has no rows", where=str(source.path))


def _defined(source: Folder, name: str) -> set[str]:
    """Names that one of the files gives itself; '*' if it takes all of another module's. Raises InputError."""
    file = source.path / f"{name}.py"
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as e:  # as importing it would say
        raise InputError(f"{file.name} cannot be imported: {type(e).__name__}: {e}", where=str(file)) from e
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _source(prepared: PreparedTask) -> Folder:
    return Folder(Path(json.loads((Path(prepared.folder) / "plain.json").read_text())["source"]))


def _count(prepared: PreparedTask) -> int:
    """Answers to each prompt."""
    return int(json.loads((Path(prepared.folder) / "plain.json").read_text()).get("samples", 1))


def _rows(prepared: PreparedTask) -> Iterator[Json]:
    for s in staged.iter_samples(Path(prepared.folder)):
        yield s.requests[0].arguments[0] if s.document is None else s.document


def _whole(prepared: PreparedTask, module: Any, verdicts: Sequence[Verdict]) -> Score:
    notes = tuple(v for v in verdicts if isinstance(v, SampleNote))
    values: dict[str, list[float]] = {}
    for v in verdicts:
        if isinstance(v, dict):
            for name, number in v.items():
                values.setdefault(name, []).append(number)
    # Of several answers to a prompt: pass@k where every sample has it.
    whole = max(map(len, values.values()), default=0)
    values = {n: v for n, v in values.items() if len(v) == whole or not repeated.is_summary(n)}
    higher = bool(prepared.task.options.get("higher_is_better", True))
    metrics = aggregate(module, values, higher)
    headline = metrics[0].name if metrics else ""
    # An `aggregate` may give another number under the name of one that `score` gave: then its samples do not explain it.
    means = {m.name: m.value for m in metrics if m.name in values and math.isclose(m.value, math.fsum(values[m.name]) / len(values[m.name]))}  # fmt: skip
    return Score(
        task=prepared.task.name,
        metrics=metrics,
        samples=len(verdicts),
        scored=len(verdicts) - len(notes),
        notes=notes,
        version=prepared.version,
        prompt_hash=prepared.prompt_hash,
        values={k: tuple(v.get(k) if isinstance(v, dict) else None for v in verdicts) for k in means},
        per_sample=tuple(v.get(headline) if isinstance(v, dict) else None for v in verdicts)
        if headline in values
        else (),
    )
