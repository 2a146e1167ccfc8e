"""`unbroken eval compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ...errors import ContractError, InputError, UsageError
from . import options

if TYPE_CHECKING:
    from ...evaluate.contracts import Report


def compare(
    before: Path = typer.Argument(help="Folder of an evaluation, or its report.json"),
    after: Path = typer.Argument(help="Another one"),
    alpha: float = typer.Option(0.01, "--alpha", help="Chance of flagging anything where nothing differs"),
    metric: list[str] = typer.Option(
        [], "--metric", help="Only this metric (again for more): fewer comparisons, less correction"
    ),
    as_json: bool = options.JSON,
) -> None:
    """Say which metrics of which tasks differ between two evaluations by more than chance."""
    from ...evaluate.result.results import compare as compare_scores
    from ...evaluate.result.results import comparison, finite, left_out, side
    from ...journal.codec import encode

    if not 0 < alpha < 1:
        raise UsageError("--alpha lies between 0 and 1")
    old, new = read_report(before), read_report(after)
    scores = (*old.scores, *old.groups), (*new.scores, *new.groups)
    found, alone = compare_scores(*scores, alpha=alpha, every_metric=True, metrics=metric), left_out(*scores)
    if not found:
        raise InputError("the two evaluations have no metric of a task in common", where=f"{before}, {after}")
    if as_json:
        body = {"before": side(old), "after": side(new), "differences": encode(found), "left_out": alone}
        print(json.dumps(finite(body)))
    else:
        print(comparison(old, new, found, alone), end="")


def read_report(place: Path) -> Report:
    """The report of an evaluation's folder, or of its report.json. Raises InputError where there is none that can be read."""
    from ...evaluate.contracts import Report
    from ...evaluate.result.folder import EvalDir, read_json
    from ...journal.codec import decode

    path = EvalDir(place).report if place.is_dir() else place
    if not path.is_file():
        raise InputError(
            "there is no finished evaluation", where=str(place), hint="Give the --out of `unbroken eval run`"
        )
    try:
        return decode(Report, read_json(path), where=str(path))
    except ContractError as e:
        raise InputError(
            f"this is no report of an evaluation: {e.message}",
            where=str(path),
            hint="Give the --out of `unbroken eval run`, or the report.json in it",
        ) from e
