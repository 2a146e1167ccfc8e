"""What an evaluation holds, for other tools and for reading: lm_eval's results file, samples one by one, many models in one table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import InputError, UnbrokenError, UnknownTask
from ..journal.codec import decode
from .contracts import Json, PreparedTask, Report, Score
from .harness.lm_eval.results import TARGETS
from .result.folder import EvalDir, read_json
from .result.journal import events
from .result.results import columns, number
from .result.sameness import SUFFIX
from .suite import staged


@dataclass(frozen=True)
class Shown:
    """One sample as people look at it."""

    task: str
    sample: int
    prompts: tuple[Json, ...]
    """What was sent: a text each, or messages; with a continuation where its likelihood was asked."""
    answers: tuple[Json, ...]
    target: Json = None
    scores: Mapping[str, float | None] = field(default_factory=dict)
    note: str = ""
    """Why it has no verdict."""
    partial: str = ""
    """Why its answer was cut short."""
    exactly: tuple[Json, ...] = ()
    """What was answered in the harness's own batches, where that was asked too and differs."""

    def as_json(self) -> Json:
        """One object."""
        return {
            "task": self.task, "sample": self.sample, "prompts": list(self.prompts), "answers": list(self.answers),
            "target": self.target, "scores": dict(self.scores), **({"note": self.note} if self.note else {}),
            **({"partial": self.partial} if self.partial else {}), **({"exactly": list(self.exactly)} if self.exactly else {}),
        }  # fmt: skip

    def as_text(self) -> str:
        """A few lines."""
        lines = [
            f"== {self.task} {self.sample} " + "  ".join(f"{k} {_short(v)}" for k, v in self.scores.items())
        ]
        for i, p in enumerate(self.prompts):
            lines += [f"-- prompt{'' if len(self.prompts) == 1 else f' {i + 1}'}", _text(p)]
            if i < len(self.answers):
                lines += ["-- answer", _text(self.answers[i])]
            if i < len(self.exactly):
                lines += ["-- in the harness's own batches", _text(self.exactly[i])]
        if self.partial:
            lines.append(f"-- cut short: {self.partial}")
        if self.target is not None:
            lines += ["-- target", _text(self.target)]
        return "\n".join([*lines, *([f"-- no verdict: {self.note}"] if self.note else [])]) + "\n"


def samples_of(out: Path, tasks: Sequence[str] = (), *, differ: bool = False) -> Iterator[Shown]:
    """The samples of an evaluation, task by task; `differ`: only those whose answers differ between the fast way and the harness's own
    batches, with both. Raises InputError where there is none, UnknownTask."""
    folder = EvalDir(out, out if (out / "tasks").is_dir() else out.parent)
    began = [e for e in events(folder.journal) if e["event"] == "begin"]
    report = folder.last_report()
    if not began or report is None:
        raise InputError("there is no finished evaluation", where=str(out), hint="Give the --out of `unbroken eval run`")  # fmt: skip
    scores = {s.task: s for s in report.scores}
    for name in tasks:
        if name not in scores:
            raise UnknownTask(name, scores, where=str(out))
    others = {c.task: c.differ for c in report.checks}
    key = str(began[-1]["key"])
    for name in tasks or scores:
        found = _of_task(folder, key, name, scores[name])
        yield from _with_both(folder, key, name, found, others.get(name, ())) if differ else found


def _with_both(
    folder: EvalDir, key: str, name: str, shown: Iterator[Shown], ids: Sequence[int]
) -> Iterator[Shown]:
    """The samples of these ids, with the answers of the check."""
    place = folder.exact_answers(key, name + SUFFIX)
    if not ids or not place.exists():
        return
    wanted = set(ids)
    with open(place, "rb") as lines:
        for one, line in zip(shown, lines, strict=False):
            if one.sample in wanted:
                yield replace(one, exactly=staged.decode_answer(line).outputs)


def _of_task(folder: EvalDir, key: str, name: str, score: Score) -> Iterator[Shown]:
    answers_file = folder.exact_answers(key, name)
    if not answers_file.exists():
        return
    prepared = decode(PreparedTask, read_json(folder.prepared(name))["prepared"])
    place = folder.task(name)
    try:
        targets: list[Json] = json.loads((place / TARGETS).read_text())
    except (OSError, ValueError):
        targets = []
    notes = {n.sample: f"{n.status}: {n.why}" for n in score.notes}
    numbers = {m.name: score.of(m.name) for m in score.metrics if score.of(m.name)}
    with open(answers_file, "rb") as lines:
        for sample, line in zip(staged.iter_samples(place), lines, strict=False):
            answer = staged.decode_answer(line)
            if answer.prompt_hash != sample.prompt_hash:
                continue  # prompts that were built since
            target = targets[sample.id] if sample.id < len(targets) else sample.document
            prompts = tuple(_prompt(r.kind, r.arguments) for r in sample.requests)
            own = {k: v[sample.id] for k, v in numbers.items() if sample.id < len(v)}
            yield Shown(
                prepared.task.name,
                sample.id,
                prompts,
                answer.outputs,
                target,
                own,
                notes.get(sample.id, ""),
                answer.partial,
            )


def _prompt(kind: str, arguments: Sequence[Json]) -> Json:
    if kind in ("loglikelihood", "multiple_choice"):
        return {"context": arguments[0], "continuation": arguments[1]}
    return arguments[0]


def _text(value: Json) -> str:
    if isinstance(value, dict) and set(value) == {"context", "continuation"}:
        return f"{value['context']}[[{value['continuation']}]]"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def as_lm_eval(report: Report, asked: Mapping[str, Json], recipes: Mapping[str, Json]) -> Json:
    """The object that lm_eval writes to results_*.json, as far as an evaluation has it. `asked`: evaluation.json;
    `recipes`: `recipes_of`."""
    model = asked.get("model") or {}
    scores = (*report.scores, *report.groups)
    options = [r["options"] for r in recipes.values() if r.get("options")]
    return {
        "results": {s.task: _row(s) for s in scores},
        **({"groups": {s.task: _row(s) for s in report.groups}} if report.groups else {}),
        "versions": {s.task: s.version for s in scores},
        "higher_is_better": {
            s.task: {m.name.partition(",")[0]: m.higher_is_better for m in s.metrics} for s in scores
        },
        "n-samples": {s.task: {"original": s.samples, "effective": s.scored} for s in report.scores},
        "config": {
            "model": model.get("backend", ""),
            "model_args": f"pretrained={model.get('source', '')},dtype={model.get('dtype', '')}",
            "batch_size": max((c.batch_size for s in report.scores for c in s.conditions), default=None),
            "device": next((c.device for s in report.scores for c in s.conditions), None),
            "limit": _one_of([r.get("limit") for r in recipes.values()]),
            "bootstrap_iters": _one_of([o.get("bootstrap_iters") for o in options]),
            "gen_kwargs": _one_of([o.get("gen_kwargs") for o in options]),
            "fewshot_seed": _one_of([o.get("fewshot_random_seed") for o in options]),
        },
        "configs": {t: r["config"] for t, r in recipes.items() if "config" in r},
        "n-shot": {t: r["n_shot"] for t, r in recipes.items() if "n_shot" in r},
        "chat_template": bool(model.get("chat_template")),
        "system_instruction": _one_of([o.get("system_instruction") for o in options]),
        "date": report.started,
        "model_name": report.model,
        "model_source": model.get("source", ""),
        "checkpoint": report.checkpoint,
        "total_evaluation_time_seconds": str(report.makespan_s),
    }


def recipes_of(folder: EvalDir, report: Report) -> dict[str, Json]:
    """What each task was prepared with: the arguments of lm_eval's call, or a plain task's limit and settings."""
    found: dict[str, Json] = {}
    for s in report.scores:
        try:
            task = decode(PreparedTask, read_json(folder.prepared(s.task))["prepared"]).task
        except (OSError, UnbrokenError, KeyError):
            continue
        try:
            found[s.task] = read_json(folder.task(s.task) / "lm_eval.json")
        except (OSError, UnbrokenError):
            found[s.task] = {"limit": task.limit, "n_shot": 0}
    return found


def _one_of(values: Sequence[Json]) -> Json:
    """What they all are; where they differ, nothing: `configs` and `n-samples` have each."""
    return values[0] if values and all(v == values[0] for v in values) else None


def _row(s: Score) -> Json:
    row: dict[str, Json] = {"alias": s.task}
    for m in s.metrics:
        metric, _, name = m.name.partition(",")
        row[m.name] = None if math.isnan(m.value) else m.value
        row[f"{metric}_stderr" + (f",{name}" if name else "")] = "N/A" if m.stderr is None else m.stderr
    return row


def many(reports: Sequence[Report], *, every_metric: bool = False) -> str:
    """One table: a row for each task (and metric), a column for each model."""
    rows: dict[tuple[str, str], list[str]] = {}
    for i, r in enumerate(reports):
        for s in (*r.scores, *r.groups):
            for m in s.metrics if every_metric else s.metrics[:1]:
                cells = rows.setdefault((s.task, m.name), ["-"] * len(reports))
                cells[i] = number(m) + ("" if s.scored == s.samples else f" ({s.scored}/{s.samples})")
    head = ("task", "metric", *names(reports))
    return "\n".join(columns([head, *((*k, *cells) for k, cells in rows.items())])) + "\n"


def names(reports: Sequence[Report]) -> list[str]:
    """What each column is called: the model, and its checkpoint where two are called the same."""
    found = [r.model for r in reports]
    return [
        n if found.count(n) == 1 else f"{n} ({r.checkpoint[:6]})" for n, r in zip(found, reports, strict=True)
    ]
