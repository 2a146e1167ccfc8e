"""`unbroken eval samples` and `unbroken eval table`: what was asked, answered and scored, and many models side by side."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from ...errors import UsageError


def samples(
    out: Path = typer.Argument(help="Folder of an evaluation"),
    task: list[str] = typer.Option([], "--task", help="Only this task (again for more)"),
    below: float | None = typer.Option(None, "--below", help="Only samples whose headline metric is below this: 1 shows what is not right"),
    differ: bool = typer.Option(False, "--differ", help="Only samples that were asked both ways and answered differently, with both answers"),
    first: int | None = typer.Option(None, "--first", min=1, help="Only so many of each task"),
    as_json: bool = typer.Option(False, "--json", help="One JSON object a line"),
) -> None:  # fmt: skip
    """Show samples one by one: prompt, answer, target, scores."""
    from ...evaluate.show import samples_of

    counts: dict[str, int] = {}
    for s in samples_of(out, task, differ=differ):
        headline = next(iter(s.scores.values()), None)
        if below is not None and headline is not None and headline >= below:
            continue
        counts[s.task] = counts.get(s.task, 0) + 1
        if first is None or counts[s.task] <= first:
            print(json.dumps(s.as_json(), ensure_ascii=True) if as_json else s.as_text())


def table(
    outs: list[Path] = typer.Argument(help="Folders of evaluations, a column each"),
    every_metric: bool = typer.Option(False, "--all", help="Every metric, not each task's headline alone"),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on standard output"),
) -> None:
    """One table over many models."""
    from ...evaluate.result.results import finite
    from ...evaluate.show import many, names
    from .compare import read_report

    reports = [read_report(o) for o in outs]
    if not reports:
        raise UsageError("no folder of an evaluation is given")
    if not as_json:
        print(many(reports, every_metric=every_metric), end="")
        return
    body = {
        name: {s.task: {m.name: m.value for m in s.metrics} for s in (*r.scores, *r.groups)}
        for name, r in zip(names(reports), reports, strict=True)
    }
    print(json.dumps(finite({"models": body})))
