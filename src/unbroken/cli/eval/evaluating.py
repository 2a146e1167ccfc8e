"""One evaluation: run until it ends or is stopped, and what it leaves in its folder."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import ModelDoesNotLoad, RunInterrupted, UnknownKey

if TYPE_CHECKING:
    from ...evaluate.contracts import ModelSpec, Report, Suite
    from ...evaluate.engines import Engine
    from ...evaluate.processes.imports import Imports
    from ...evaluate.result.folder import EvalDir
    from ...evaluate.run.settings import Settings
    from . import options

AGAIN_S = 2.0
"""A signal that comes so much later than the first one ends the command at once; sooner, the two are one."""


def run_evaluation(
    suite: Suite, spec: ModelSpec, folder: EvalDir, engine: Engine, settings: Settings, quiet: bool, harnesses: Imports | None = None,
) -> Report:  # fmt: skip
    """Evaluates, stops at a signal, and returns the report. `harnesses`: where the processes that prepare and score are
    forked from. Raises UnbrokenError."""
    from ...evaluate.run.coordinator import Coordinator
    from ...evaluate.run.job import Job, Launchers
    from ...evaluate.run.screen import Screen
    from ...evaluate.scoring.pool import open_pool

    folder.open()
    with (
        _stdout_for_the_answer(),
        Screen(folder.root / "progress.json", title=f"{suite.name} of {spec.title}", quiet=quiet) as screen,
    ):
        launchers = Launchers(engine, functools.partial(open_pool, imports=harnesses), harnesses)
        coordinator = Coordinator(Job(suite, spec, folder), launchers, settings, watcher=screen)
        first: list[float] = []

        def stop(number: int, _: object) -> None:
            now = time.monotonic()
            if first and now - first[0] > AGAIN_S:
                sys.stderr.write(f"unbroken eval: ended at once by another {signal.Signals(number).name}\n")
                os._exit(RunInterrupted.exit_code)  # a store may not answer, and threads wait for it
            first.append(now)
            coordinator.stop(signal.Signals(number).name)

        before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            return coordinator.run()
        finally:
            for s, handler in before.items():
                signal.signal(s, handler)
            shutdown = getattr(engine, "shutdown", None)
            if shutdown is not None:
                shutdown()


def by_transformers(
    e: ModelDoesNotLoad, spec: ModelSpec, asked: options.Evaluating, folder: EvalDir
) -> ModelSpec:
    """The same model with the backend that needs nothing else, which is said. Raises `e` where the engine was asked for, has
    answered in this folder before, or options are given that only it knows."""
    from ...evaluate.suite.registry import check_options

    otherwise = replace(spec, backend="transformers")
    if asked.backend or folder.began_with() or spec.backend == otherwise.backend:
        raise e
    try:
        check_options(otherwise)
    except UnknownKey:
        raise e from None
    print(f"unbroken eval: {e.message}. So transformers answers; --backend {spec.backend} insists", file=sys.stderr)  # fmt: skip
    return otherwise


@contextlib.contextmanager
def _stdout_for_the_answer() -> Iterator[None]:
    """Sends what libraries print meanwhile (Ray, about nodes that died) to standard error: --json is one object."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def write_results(report: Report, folder: EvalDir) -> None:
    """Writes the table, lm_eval's own format and the page. Raises EvaluationError if they cannot be written."""
    from ... import atomic
    from ...evaluate.result.folder import read_json, unwritable
    from ...evaluate.result.page import render
    from ...evaluate.result.results import finite, table
    from ...evaluate.show import as_lm_eval, recipes_of
    from ...page.shell import write_beside

    report = folder.last_report() or report  # it keeps the times of the run that took any
    try:
        atomic.write_text(folder.table, table(report))
        atomic.write_json(
            folder.lm_eval, finite(as_lm_eval(report, read_json(folder.asked), recipes_of(folder, report)))
        )
        write_beside(folder.page, lambda: render(report))
    except OSError as e:
        raise unwritable(e, folder.root) from e
