"""`unbroken eval run`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ...errors import EvaluationIncomplete
from .asked import spec_of, suite_of
from .evaluating import run_evaluation, write_results
from .options import (
    ADDRESS,
    BACKEND,
    BATCH,
    BLOCK,
    CACHE,
    CACHE_DISK,
    CHAT,
    CPUS,
    DTYPE,
    ENGINE,
    GEN,
    GPUS,
    JSON,
    KEEP,
    LENGTH,
    LIMIT,
    MODEL,
    NAME,
    OPTION,
    OUT,
    PRIORS,
    QUIET,
    SHOTS,
    SUITE,
    TASKS,
    TOKENIZER,
    WIDTH,
    WORKERS,
)
from .workers import (
    engine_of,
    settings_of,
    slots_of,
    worker_imports,
)

if TYPE_CHECKING:
    from ...evaluate.contracts import Report
    from ...evaluate.result.folder import EvalDir


def run(
    suite: str = SUITE, model: str = MODEL, out: Path = OUT, gpus: int | None = GPUS, workers: int | None = WORKERS,
    gpus_per_worker: int = WIDTH, backend: str = BACKEND, dtype: str = DTYPE, batch_size: str = BATCH, block: int | None = BLOCK,
    max_length: int | None = LENGTH, chat_template: bool = CHAT, tokenizer: str = TOKENIZER, name: str = NAME,
    option: list[str] = OPTION, engine: str = ENGINE, ray_address: str = ADDRESS, cpu_workers: int | None = CPUS,
    cache: str = CACHE, cache_disk: list[Path] = CACHE_DISK, priors: str | None = PRIORS, keep_going: bool = KEEP,
    tasks: str = TASKS, limit: float | None = LIMIT, shots: int | None = SHOTS, gen: list[str] = GEN, quiet: bool = QUIET,
    as_json: bool = JSON,
) -> None:  # fmt: skip
    """Evaluate a model on a suite; run the same command again to go on after anything."""
    from ...evaluate.processes.bytecode import kept_bytecode
    from ...evaluate.result.folder import EvalDir

    kept_bytecode()  # where there is none it is compiled from here on, beside all that follows
    spec = spec_of(
        model,
        backend,
        dtype,
        batch_size,
        block,
        max_length,
        chat_template,
        tokenizer,
        name,
        option,
        gpus_per_worker,
    )
    slots = slots_of(engine, gpus, workers, gpus_per_worker, spec)
    settings = settings_of(slots, cpu_workers, cache, cache_disk, priors, keep_going)
    folder = EvalDir(out)
    with worker_imports(engine, slots if len(slots) > 1 else (), spec, folder) as imports:
        started = engine_of(engine, ray_address, folder, slots, imports)
        report = run_evaluation(
            suite_of(suite, tasks, limit, shots, gen), spec, folder, started, settings, quiet or as_json
        )
    _show(report, folder, as_json)


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
