"""The end of an evaluation: the report of what was seen, and the runtime estimates that the next plan learns from it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ... import atomic
from ...journal.codec import encode
from ..contracts import Check, Report, Score
from ..plan.outcome import Measured, report, with_times_of
from ..plan.priors import START, Observation, features_of, save_merged
from .state import EvaluationRun


def write_report(
    run: EvaluationRun, scores: Mapping[str, Score], groups: Sequence[Score], prepare_s: Mapping[str, float], expected_s: float,
    checks: Sequence[Check] = (),
) -> Report:  # fmt: skip
    """Writes the report, and returns it. `prepare_s`: by task; `expected_s`: the planned makespan. Raises UnbrokenError."""
    observed, table, suite = run.observed, run.table, run.job.suite
    for task, state in table.states.items():
        if state != "scored" and task not in table.errors:
            table.errors[task] = (
                f"it ended as '{state}' without a score: a defect of unbroken; the same command tries again"
            )
    started = observed.started or min((s.started for s in observed.scorings), default=time.time())
    order = {t: i for i, t in enumerate(table.states)}  # as the suite has them
    seen = Measured(suite.name, run.job.spec.title, run.located.checkpoint, started, observed.assignments, observed.blocks,
                    observed.scorings, observed.workers, prepare_s, run.settings.cpu_workers, expected_s, observed.reused)  # fmt: skip
    ordered = sorted(scores.values(), key=lambda s: order.get(s.task, len(order)))
    found = replace(report(seen, table.prepared, ordered, groups, table.errors), checks=tuple(checks),
                    model_b=run.located.model_b or 0.0)  # fmt: skip
    folder = run.job.folder
    try:
        atomic.write_json(folder.report, encode(with_times_of(found, folder.last_report())))
    except OSError as e:
        raise run.control.unwritable(e) from e
    return found


def note_end(run: EvaluationRun, found: Report) -> None:
    """The journal's last event."""
    gaps = sorted(run.observed.gaps)
    run.log.note("end", makespan_s=found.makespan_s, lower_bound_s=found.lower_bound_s, busy=found.busy_fraction, gaps=len(gaps),
                 gap_max_s=max(gaps, default=0.0), gap_median_s=gaps[len(gaps) // 2] if gaps else 0.0)  # fmt: skip


def save_estimates(run: EvaluationRun) -> None:
    """Adds what was measured to the file of learnt run times, if there is one."""
    observed, settings = run.observed, run.settings
    if settings.priors is None or not (observed.blocks or observed.scorings):
        return
    model_b, device = run.located.model_b or 7.0, run.measured_on
    scoring = {s.task: s.seconds for s in observed.scorings if s.score is not None}
    found = []
    for name, p in run.table.prepared.items():
        mine = [b for b in observed.blocks if b.task == name]
        samples = sum(len(p.samples_of(b.block)) for b in mine)
        score_s = scoring[name] * samples / p.samples if name in scoring and samples else None
        if mine:
            seconds = sum(b.seconds for b in mine)
            found.append(Observation(name, model_b, device, samples, seconds, features_of(p), score_s,
                                     p.whole or (0 if p.task.limit else p.samples)))  # fmt: skip
    starts = [w.ready - w.started for w in observed.workers if w.ready > w.started > 0 and w.start_s]
    if starts:  # of our own engine: nobody knows since when a joiner has waited
        found.append(Observation(START, model_b, device, len(starts), sum(starts)))
    with contextlib.suppress(OSError):  # the next plan is less exact; the scores are here
        save_merged(settings.priors, found)
