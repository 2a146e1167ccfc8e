"""Any task that is two small files: infer.py says what to ask the model, score.py what an answer is worth.

    data.jsonl   one row a line (or `data = "path"` in the task's options, or `rows()` in infer.py)
    infer.py     def prompt(row): ...            what to send for a row; the worker sends it
              or def infer(model, rows): ...     the calls themselves, on the worker; one output a row
    score.py     def score(row, output): ...     a number, True/False, or {"metric": number}
                 def aggregate(values): ...      optional: {"metric": [numbers]} -> {"metric": number or (number, stderr)}
                 THREADS = 8                     optional: rows scored at once, for scorers that wait (a judge)

`prompt` returns a text or chat messages to continue; {"prompt": ..., "max_tokens": 256, "stop": [...],
"temperature": 0}; {"context": text, "choices": [text, ...]} for log-probabilities; or a list of these.
A score of None, or `unbroken.evaluate.scoring.judge.Unscored` raised, is no verdict: counted apart from wrong.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import DatasetMissing, EvaluationError, InputError, ModelDoesNotLoad, UnknownKey, UnknownTask
from .. import staged
from ..contracts import (
    Answer,
    Conditions,
    Json,
    Metric,
    Model,
    ModelSpec,
    PreparedTask,
    Request,
    Sample,
    SampleNote,
    Score,
    Suite,
    Task,
    digest,
    prompt_hash,
)
from ..scoring import watch
from ..scoring.judge import Unscored
from .asking import problem_of, run_requests
from .chat import chat_of, check_kinds

_OPTIONS = frozenset({"data", "higher_is_better", "max_tokens"})


@dataclass(frozen=True)
class Folder:
    """A task's folder, with its two files there."""

    path: Path

    @classmethod
    def find(cls, task: Task, suite: Suite, known: Sequence[str]) -> Folder:
        """The folder that the task names, relative to the suite. Raises UnknownTask, UnknownKey."""
        for key in task.options:
            if key not in _OPTIONS:
                raise UnknownKey(key, _OPTIONS, where=f"task '{task.name}'")
        path = (Path(suite.folder or ".") / task.harness_name).resolve()
        if not (path / "infer.py").is_file() or not (path / "score.py").is_file():
            raise UnknownTask(
                task.harness_name, known, where=f"plain: a folder with infer.py and score.py, {path}"
            )
        return cls(path)

    @property
    def code(self) -> str:
        """Hash of the folder's Python files: the task's version."""
        return digest([[p.name, p.read_text()] for p in sorted(self.path.glob("*.py"))])

    def load(self, name: str) -> Any:
        """One of its files as a module; files beside it can be imported. Raises InputError with the line."""
        file = self.path / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"unbroken_plain_{digest(str(file))[:12]}_{name}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(self.path))
        try:
            spec.loader.exec_module(module)
        except Exception as e:
            raise InputError(
                f"{file.name} cannot be imported: {type(e).__name__}: {e}", where=str(file)
            ) from e
        finally:
            sys.path.remove(str(self.path))
        return module


class PlainHarness:
    """The adapter of infer.py / score.py pairs."""

    def __init__(self) -> None:
        self._infer: dict[str, Any] = {}

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
        infer = source.load("infer")
        _check_score(source)
        rows = list(_rows(task, suite, source, infer))[: task.limit]
        if not rows:
            raise InputError(f"task '{task.name}' has no rows", where=str(source.path))
        samples = list(_samples(rows, infer, source, task, spec, model_files))
        check_kinds(spec, {r.kind for s in samples for r in s.requests} - {"plain"}, task.name)
        wrote = staged.write_samples(folder, samples, block=spec.block)
        (folder / "plain.json").write_text(json.dumps({"source": str(source.path)}))
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
        )

    def data_of(self, task: Task, suite: Suite) -> tuple[int, str]:
        """(rows, where they are read from). Raises DatasetMissing, InputError, UnknownTask."""
        source = Folder.find(task, suite, self.list_tasks(suite))
        return len(list(_rows(task, suite, source, source.load("infer")))), str(source.path)

    def build_requests(self, prepared: PreparedTask, block: int) -> list[Sample]:
        """The samples of one block, from the staged file."""
        return staged.read_block(prepared, block)

    def run(self, model: Model, prepared: PreparedTask, samples: Sequence[Sample]) -> list[Answer]:
        """The worker's calls for one block: those that `prompt` asked for, or `infer`'s own."""
        if any(r.kind != "plain" for s in samples for r in s.requests) or isinstance(model, PlainModel):
            return run_requests(model, samples)
        infer = self._module(prepared).infer
        try:
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
        source = Folder(Path(json.loads((Path(prepared.folder) / "plain.json").read_text())["source"]))
        module = source.load("score")
        rows = [s.requests[0].arguments[0] if s.document is None else s.document
                for s in staged.iter_samples(Path(prepared.folder))]  # fmt: skip
        verdicts = _score_all(module, rows, answers)
        notes = tuple(v for v in verdicts if isinstance(v, SampleNote))
        values: dict[str, list[float]] = {}
        for v in verdicts:
            if isinstance(v, dict):
                for name, number in v.items():
                    values.setdefault(name, []).append(number)
        higher = bool(prepared.task.options.get("higher_is_better", True))
        metrics = _aggregate(module, values, higher)
        headline = metrics[0].name if metrics else ""
        return Score(
            task=prepared.task.name,
            metrics=metrics,
            samples=len(answers),
            scored=len(answers) - len(notes),
            notes=notes,
            version=prepared.version,
            prompt_hash=prepared.prompt_hash,
            per_sample=tuple(v.get(headline) if isinstance(v, dict) else None for v in verdicts)
            if headline in values
            else (),
            seconds=time.monotonic() - started,
        )

    def combine(self, group: str, prepared: Sequence[PreparedTask], scores: Sequence[Score]) -> Score | None:
        """None: these tasks have no groups."""
        return None

    def _module(self, prepared: PreparedTask) -> Any:
        if prepared.folder not in self._infer:
            source = json.loads((Path(prepared.folder) / "plain.json").read_text())["source"]
            self._infer[prepared.folder] = Folder(Path(source)).load("infer")
        return self._infer[prepared.folder]


class Unanswered(Exception):
    """The model gave no answer to a call of `infer`; its row is asked again in the next run."""


class Handle:
    """What `infer(model, rows)` gets: the backend's model with plain calls."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def generate(
        self,
        prompts: Sequence[Any],
        *,
        max_tokens: int = 256,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
    ) -> list[str]:
        """One continuation per prompt (text or chat messages)."""
        settings = _settings({"max_tokens": max_tokens, "stop": list(stop), "temperature": temperature})
        return [str(o) for o in self._ask([Request("generate_until", (p, settings)) for p in prompts])]

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """(log-probability, is it the greedy one) of each continuation after its context."""
        outputs = self._ask([Request("loglikelihood", (a, b)) for a, b in pairs])
        return [(float(o[0]), bool(o[1])) for o in outputs]

    def _ask(self, requests: Sequence[Request]) -> list[Json]:
        outputs = self.model.respond(requests)
        for o in outputs:
            if why := problem_of(o):
                raise Unanswered(why)
        return outputs


class PlainBackend:
    """Models that infer.py loads itself: `--backend unbroken.evaluate.harness.plain:PlainBackend`.

    `options.infer` names the file, which defines `load(folder, devices)` and `infer(model, rows)`; it is loaded once
    per worker and kept for every task whose infer.py defines `infer`.
    """

    needs_weights = True

    def fingerprint(self, spec: ModelSpec) -> str | None:
        """None: the files of the folder are hashed."""
        return None

    def load(self, spec: ModelSpec, folder: Path | None, devices: Sequence[int]) -> PlainModel:
        """What `load` returns, in a PlainModel. Raises ModelDoesNotLoad."""
        file = Path(str(spec.options.get("infer", "")))
        if not file.is_file():
            raise ModelDoesNotLoad(
                "there is no infer.py to load the model with",
                where=str(file),
                todo="Name it in options.infer",
            )
        module = Folder(file.resolve().parent).load(file.stem)
        try:
            loaded = module.load(str(folder or spec.source), list(devices))
        except Exception as e:
            raise ModelDoesNotLoad(f"load() raised {type(e).__name__}: {e}", where=str(file)) from e
        return PlainModel(spec, module, loaded, devices)


class PlainModel:
    """A model of the user's own; it answers 'plain' requests only."""

    def __init__(self, spec: ModelSpec, module: Any, loaded: Any, devices: Sequence[int]) -> None:
        self._spec, self._module, self._loaded = spec, module, loaded
        self._batch = spec.batch_size
        self._device = f"gpu {','.join(map(str, devices))}" if devices else "cpu"

    def respond(self, requests: Sequence[Request]) -> list[Json]:
        """Calls `infer` with at most `batch_size` rows at a time."""
        out: list[Json] = []
        for at in range(0, len(requests), self._batch):
            out += self._module.infer(self._loaded, [r.arguments[0] for r in requests[at : at + self._batch]])
        return out

    def halve(self) -> bool:
        """Halves the rows per call."""
        if self._batch <= 1:
            return False
        self._batch //= 2
        return True

    def restore(self) -> None:
        """Back to what was asked for."""
        self._batch = self._spec.batch_size

    @property
    def conditions(self) -> Conditions:
        """What is recorded beside the score."""
        return Conditions("plain", self._device, self._spec.dtype, self._batch)

    def close(self) -> None:
        """Drops the model."""
        self._loaded = None


def _rows(task: Task, suite: Suite, source: Folder, infer: Any) -> Iterator[Json]:
    if "data" not in task.options and hasattr(infer, "rows"):
        yield from infer.rows()
        return
    data = task.options.get("data")
    path = Path(suite.folder or ".") / str(data) if data else source.path / "data.jsonl"
    if not path.is_file():
        raise DatasetMissing(
            f"the data of task '{task.name}' are not on this machine",
            where=str(path.resolve()),
            todo="Put one JSON row a line there, or name the file with data = ... in the task's options",
        )
    with open(path, encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except ValueError as e:
                raise InputError(f"a row is no JSON: {e}", where=f"{path}:{number}") from e


def _samples(
    rows: Sequence[Json], infer: Any, source: Folder, task: Task, spec: ModelSpec, model_files: Path | None
) -> Iterator[Sample]:
    ask: Callable[[Json], Any] | None = getattr(infer, "prompt", None)
    if ask is None:
        if not hasattr(infer, "infer"):
            raise InputError(
                "infer.py defines neither prompt(row) nor infer(model, rows)", where=str(source.path)
            )
        for i, row in enumerate(rows):
            whole = (Request("plain", (row,)),)
            yield Sample(i, whole, prompt_hash(whole))
        return
    chat = chat_of(spec, model_files) if spec.chat_template else None
    for i, row in enumerate(rows):
        try:
            asked = ask(row)
            parts = asked if isinstance(asked, list) and not _is_chat(asked) else [asked]
            requests = tuple(r for part in parts for r in _requests(part, chat, task))
        except Exception as e:
            raise InputError(
                f"prompt(row) raised {type(e).__name__}: {e}", where=f"{source.path / 'infer.py'}, row {i}"
            ) from e
        yield Sample(i, requests, prompt_hash(requests), row)


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(isinstance(m, Mapping) and "role" in m for m in value)
    )


def _requests(part: Any, chat: Any, task: Task) -> Iterator[Request]:
    if isinstance(part, Mapping) and "choices" in part:
        yield from (Request("loglikelihood", (part["context"], str(c))) for c in part["choices"])
        return
    given = dict(part) if isinstance(part, Mapping) else {"prompt": part}
    prompt = given.pop("prompt")
    if chat is not None:
        prompt = chat(prompt if _is_chat(prompt) else [{"role": "user", "content": prompt}], True)
    given.setdefault("max_tokens", task.options.get("max_tokens", 256))
    yield Request("generate_until", (prompt, _settings(given)))


def _settings(given: Mapping[str, Any]) -> dict[str, Json]:
    """Generation settings under the names that every backend reads."""
    rest = dict(given)
    temperature = float(rest.pop("temperature", 0.0))
    out: dict[str, Json] = {
        "until": list(rest.pop("stop", [])),
        "max_gen_toks": int(rest.pop("max_tokens", 256)),
        "do_sample": temperature > 0,
    }
    if temperature > 0:
        out["temperature"] = temperature
    return {**out, **rest}


def _check_score(source: Folder) -> None:
    if not hasattr(source.load("score"), "score"):
        raise InputError("score.py defines no score(row, output)", where=str(source.path))


def _score_all(
    module: Any, rows: Sequence[Json], answers: Sequence[Answer]
) -> list[dict[str, float] | SampleNote]:
    threads = int(getattr(module, "THREADS", 1))
    if threads <= 1:
        return [_score_one(module, r, a, watched=True) for r, a in zip(rows, answers, strict=True)]
    with ThreadPoolExecutor(threads) as pool:
        return list(
            pool.map(lambda ra: _score_one(module, *ra, watched=False), zip(rows, answers, strict=True))
        )


def _score_one(module: Any, row: Json, answer: Answer, *, watched: bool) -> dict[str, float] | SampleNote:
    if answer.problem:
        crashed = answer.problem.removeprefix("crashed: ")
        return SampleNote(answer.sample, "crashed" if crashed != answer.problem else "unanswered", crashed)
    output = answer.outputs[0] if len(answer.outputs) == 1 else list(answer.outputs)
    if watched:
        watch.at(answer.sample)
    try:
        verdict = module.score(row, output)
        if verdict is None:
            return SampleNote(answer.sample, "unscored", "score() gave None")
        given = verdict if isinstance(verdict, Mapping) else {"score": verdict}
        return {str(k): float(v) for k, v in given.items()}
    except Unscored as e:
        return SampleNote(answer.sample, "unscored", str(e))
    except Exception as e:  # noqa: BLE001  the user's scorer may raise anything; its sample is reported
        return SampleNote(answer.sample, "crashed", f"{type(e).__name__}: {e}"[:500])
    finally:
        if watched:
            watch.at(-1)


def _aggregate(module: Any, values: Mapping[str, list[float]], higher: bool) -> tuple[Metric, ...]:
    own = getattr(module, "aggregate", None)
    if own is not None and values:
        out = []
        for name, made in own({k: list(v) for k, v in values.items()}).items():
            value, stderr = made if isinstance(made, tuple | list) else (made, None)
            out.append(Metric(str(name), float(value), None if stderr is None else float(stderr), higher))
        return tuple(out)
    return tuple(Metric(k, math.fsum(v) / len(v), _stderr(v), higher) for k, v in values.items())


def _stderr(values: Sequence[float]) -> float | None:
    """Standard error of the mean, with n - 1 in the variance; None for one value."""
    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)
