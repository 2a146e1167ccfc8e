"""`unbroken eval run`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ...errors import EvaluationIncomplete, ModelDoesNotLoad
from .._shared_options import takes
from . import options
from .asked import spec_of, suite_asked
from .evaluating import by_transformers, run_evaluation, write_results
from .workers import engine_of, harness_imports, settings_of, slots_of, worker_imports

if TYPE_CHECKING:
    from ...evaluate.contracts import ModelSpec, Report, Suite
    from ...evaluate.result.folder import EvalDir


@takes(options.Evaluating)
def run(
    suite: str = options.SUITE,
    model: str = typer.Option(
        ..., "--model", "-m", help="A Hugging Face folder, s3://bucket/prefix, or an endpoint's URL"
    ),
    out: Path = typer.Option(
        ..., "--out", "-o", help="Folder of the evaluation; the same command there goes on"
    ),
    name: str = typer.Option("", "--name", help="The model's name for people, and at an endpoint"),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="No progress"),
    as_json: bool = options.JSON,
    *,
    asked: options.Evaluating,
) -> None:
    """Evaluate a model on a suite; run the same command again to go on after anything."""
    from ...evaluate.processes.bytecode import keep_bytecode
    from ...evaluate.result.folder import EvalDir

    keep_bytecode()  # where there is none it is compiled from here on, beside all that follows
    folder = EvalDir(out)
    spec = spec_of(model, name, asked, folder)
    wanted = suite_asked(suite, asked)
    try:
        report = _evaluate(wanted, spec, folder, asked, quiet or as_json)
    except ModelDoesNotLoad as e:
        report = _evaluate(wanted, by_transformers(e, spec, asked, folder), folder, asked, quiet or as_json)
    _show(report, folder, as_json)


def _evaluate(
    suite: Suite, spec: ModelSpec, folder: EvalDir, asked: options.Evaluating, quiet: bool
) -> Report:
    slots = slots_of(asked, spec)
    settings = settings_of(slots, asked)
    kind = asked.cluster or asked.engine
    with (
        worker_imports(kind, slots if len(slots) > 1 else (), spec, folder) as imports,
        harness_imports(suite, folder) as harnesses,
    ):
        started = engine_of(asked, folder, slots, imports)
        return run_evaluation(suite, spec, folder, started, settings, quiet, harnesses)


def _show(report: Report, folder: EvalDir, as_json: bool) -> None:
    from ...evaluate.result.results import table
    from ...journal.codec import encode

    write_results(report, folder)
    if as_json:
        kept = folder.last_report() or report  # as the page has it: with the times of the run that took any
        body = encode(kept)
        for heavy in ("trials", "scorings"):
            del body[heavy]
        print(
            json.dumps(
                {
                    **body,
                    "makespan_s": kept.makespan_s,
                    "asked_now": bool(report.trials),
                    "out": str(folder.root),
                }
            )
        )
    else:
        print(table(report), end="")
        print(f"Page: {folder.page}")
    lost = [s for s in report.scores if s.scored < s.samples]
    if report.errors or lost:
        parts = (("without a score", [*report.errors]), ("scored in part", [s.task for s in lost]))
        e = EvaluationIncomplete("; ".join(_named(what, names) for what, names in parts if names),
                                 where=str(folder.root), hint="The same command tries again what is missing")  # fmt: skip
        if as_json:  # its object is printed already, and says the same
            print(f"unbroken eval: {e}", file=sys.stderr)
            raise typer.Exit(e.exit_code)
        raise e


def _named(what: str, names: list[str]) -> str:
    return f"{what}: {', '.join(names[:5])}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")
