"""Writes report.html, and gives the report as one JSON object."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import atomic
from ..errors import MissingExtra, StorageError
from ..progress import RunDir
from ..progress.records.incident import Incident
from .data import RunReport, describe_incident, same_command
from .gather import gather
from .page import page, time_split

_log = logging.getLogger("unbroken.report")
SCHEMA = 1


def write_report(run_dir: RunDir, *, to: Path | None = None, report: RunReport | None = None) -> Path:
    """Writes the page (into the run directory, or `to` another file) and returns its path.

    Raises InputError where the folder is no run directory, StorageError where the page cannot be written.
    """
    told = report or gather(run_dir)
    target = (to or run_dir.report).absolute()
    base = os.path.relpath(run_dir.path, target.parent)
    text = page(told, base="" if base == "." else base)
    try:
        # A path may hold bytes that are no text, and the page shows it.
        atomic.write_bytes(target, text.encode(errors="replace"))
    except OSError as e:
        raise StorageError(
            f"the report cannot be written: {e.strerror or e}", where=str(target),
            hint="Choose another file with --output",
        ) from e  # fmt: skip
    return target


def write_report_safely(run_dir: RunDir) -> Path | None:
    """As `write_report`, but a report that fails never fails the run: it is logged, and None comes back."""
    try:
        return write_report(run_dir)
    except MissingExtra as e:
        _log.warning("there is no page of this run: %s. %s", e.message, e.hint)
        return None
    except Exception:  # noqa: BLE001  a run must not end by its report, whatever is wrong with it
        _log.exception("the report could not be written")
        return None


def report_json(report: RunReport, path: Path | None = None) -> dict[str, Any]:
    """The report as plain JSON values. Times are seconds since the epoch, losses also as hex floats."""
    loss = report.loss
    return {
        "schema": SCHEMA,
        "run_dir": str(report.run_dir.path),
        "report": str(path) if path else None,
        "run_id": report.spec.run_id if report.spec else None,
        "command": list(report.spec.command) if report.spec else None,
        "same_command": same_command(report),
        "status": report.status,
        "why": report.why,
        "started": report.started,
        "ended": report.ended,
        "wall_s": round(report.wall_s, 3),
        "paused_s": round(report.paused_s, 3),
        "productive_s": round(report.executions.productive_s, 3),
        "ettr": None if report.ettr is None else round(report.ettr, 6),
        "effective": report.effective,
        "interventions_avoided": report.interventions_avoided,
        "innocent_node_hours": round(report.innocent_node_hours, 6),
        "node_faults": report.node_faults,
        "time": {k: round(s, 3) for k, _, s in time_split(report)},
        "step": report.step,
        "loss": loss if loss is not None and math.isfinite(loss) else None,
        "loss_hex": None if loss is None else loss.hex(),
        "steps_executed": len(report.executions.all),
        "steps_lost": int((~report.executions.counts).sum()),
        "attempts": [asdict(a) for a in report.attempts],
        "incidents": [_incident(i, report) for i in report.incidents],
        "checkpoints": [asdict(c) for c in report.checkpoints],
        "amendments": report.amendments,
        "size": asdict(report.size),
        "nodes": list(report.nodes),
        "epochs": len(report.terms),
        "problems": list(report.problems),
    }


def _incident(i: Incident, report: RunReport) -> dict[str, Any]:
    return {
        **describe_incident(i, report.run_dir),
        "detected_s": round(i.detected_s, 3),
        "resumed_s": None if i.resumed_s is None else round(i.resumed_s, 3),
        "node": i.node,
        "rank": i.rank,
    }
