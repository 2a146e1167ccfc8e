"""`unbroken eval watch`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ...errors import ModelDoesNotLoad, UsageError
from .._shared_options import takes
from . import options
from .asked import spec_of, suite_asked
from .evaluating import by_transformers, run_evaluation, write_results
from .workers import engine_of, harness_imports, settings_of, slots_of, worker_imports

if TYPE_CHECKING:
    from ...evaluate.contracts import ModelSpec, Report, Suite
    from ...evaluate.result.folder import EvalDir


@takes(options.Evaluating)
def watch(
    run_dir: str = typer.Argument(metavar="RUN", help="A run directory, or a folder or bucket of checkpoints"),
    suite: str = typer.Option(..., "--suite", "-s", help="As for `run`"),
    out: Path | None = typer.Option(None, "--out", "-o", help="Default: RUN/evaluations/SUITE"),
    like: Path | None = typer.Option(None, "--like", help="Hugging Face folder with configuration and tokenizer; checkpoints are exported to it"),
    prefix: str | None = typer.Option(None, "--prefix", help="Part of the state that is the model"),
    once: bool = typer.Option(False, "--once", help="Evaluate what is there, then end"),
    last_step: int | None = typer.Option(None, "--last-step", help="End after the checkpoint of this step"),
    newest_only: bool = typer.Option(False, "--newest-only", help="Pass over checkpoints that were superseded meanwhile"),
    hold: int = typer.Option(0, "--hold", min=0, help="Keep only so many checkpoints from removal until their turn comes, the newest; 0: all, while there is room"),
    poll: float = typer.Option(10.0, "--poll", help="Seconds between looks"),
    as_json: bool = options.JSON, *, asked: options.Evaluating,
) -> None:  # fmt: skip
    """Evaluate every committed checkpoint of a run as it appears: curves over steps, regressions flagged."""
    from ...evaluate.processes.bytecode import keep_bytecode
    from ...evaluate.result.folder import EvalDir
    from ...evaluate.run.watching.curves import curves_text
    from ...evaluate.run.watching.watch import (
        Watch,
        checkpoints_of,
        refuse_unlike,
        refuse_unloadable,
        shortfall,
        wait_for_checkpoints,
    )
    from ...evaluate.run.watching.watch import watch as watch_run
    from ...journal.codec import encode

    keep_bytecode()
    whole = suite_asked(suite, asked)
    if out is None:
        if "://" in run_dir:
            raise UsageError("a bucket of checkpoints needs --out", where=run_dir)
        out = Path(run_dir) / "evaluations" / whole.name
    before = next((EvalDir(p.parent) for p in sorted(out.glob("*/evaluation.json"))), None)
    spec = spec_of("checkpoint", "", asked, before)  # one curve, one way
    slots = slots_of(asked, spec)
    settings = settings_of(slots, asked)

    def evaluate(s: Suite, m: ModelSpec, folder: EvalDir) -> Report:
        try:
            started = engine_of(asked, folder, slots, imports)
            report = run_evaluation(s, m, folder, started, settings, True, harnesses)
        except ModelDoesNotLoad as e:
            otherwise = by_transformers(e, m, asked, folder)
            report = run_evaluation(s, otherwise, folder, engine_of(asked, folder, slots), settings, True, harnesses)  # fmt: skip
        write_results(report, folder)
        return report

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    watched = Watch(whole, spec, out, like, prefix, poll, once, last_step, newest_only, hold)
    refuse_unlike(watched)
    EvalDir(out).refuse_file()
    storage = checkpoints_of(run_dir) if once else wait_for_checkpoints(run_dir, say)
    refuse_unloadable(watched, storage)
    EvalDir(out).open()
    if not once and not storage.folders():
        say(f"no checkpoint is in {storage.url.removeprefix('file://')} yet; waiting for the first")
    began = time.time()
    with (  # made once, for all checkpoints
        worker_imports("" if asked.cluster else asked.engine, slots, spec, EvalDir(out)) as imports,
        harness_imports(whole, EvalDir(out)) as harnesses,
    ):
        points = watch_run(watched, storage, evaluate, say)
    if not points:
        say("no committed checkpoint is here")
    if as_json:
        print(json.dumps({"out": str(out), "points": encode(points)}))
    else:
        print(curves_text(points), end="")
    lacking, code = shortfall([p for p in points if p.at >= began])
    if code:  # with --json its object is printed already, and says the same
        say(f"unbroken eval: {lacking}")
        raise typer.Exit(code)
