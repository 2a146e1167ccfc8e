"""A run in Prometheus' text format (exposition format 0.0.4): a file in the run directory, for node_exporter's textfile collector or any
scraper of files; written whole, so that nobody reads half of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ...progress.records.state import RunState

_KINDS = {
    "step": ("gauge", "The highest completed step."),
    "durable_step": ("gauge", "The step of the newest durable checkpoint."),
    "attempts_total": ("counter", "Attempts that were begun."),
    "incidents_total": ("counter", "Incidents."),
    "incidents_by_cause_total": (
        "counter",
        "Incidents since the command was last given, by the budget that they are charged to.",
    ),
    "cordoned_nodes": ("gauge", "Nodes out of use for this run."),
    "lost_nodes": ("gauge", "Nodes that are lost."),
    "suspect_nodes": ("gauge", "Nodes that left without anybody being certain of them, and are tested."),
    "node_faults_total": ("counter", "Nodes that were lost, or put out of use."),
    "innocent_node_seconds_total": (
        "counter",
        "How long nodes were out of use that returned with nothing found.",
    ),
    "rollbacks_total": ("counter", "Attempts of which later steps do not count any more."),
    "loss": ("gauge", "The newest loss that was reported."),
    "step_seconds": ("gauge", "How long a step takes, smoothed."),
    "up": ("gauge", "1 while the supervisor is at work, 0 once the run has ended."),
    "updated_seconds": (
        "gauge",
        "When this was written, in seconds since the epoch: what is old says that nobody supervises.",
    ),
}


def render_metrics(
    run_id: str, state: RunState, now: float, *, step: int, loss: float | None, step_s: float | None, up: bool
) -> str:
    """All metrics of a run at a moment (seconds since the epoch)."""
    durable = max((s for s, _ in state.durable), default=-1)
    values: list[tuple[str, Mapping[str, str], float]] = [
        ("step", {}, max(step, state.step)), ("durable_step", {}, durable), ("attempts_total", {}, state.attempt),
        ("incidents_total", {}, state.incident), ("cordoned_nodes", {}, len(state.cordoned)), ("lost_nodes", {}, len(state.lost)),
        ("suspect_nodes", {}, len(state.suspects)), ("node_faults_total", {}, state.faults),
        ("innocent_node_seconds_total", {}, state.innocent_s), ("rollbacks_total", {}, len(state.rollbacks)), ("up", {}, float(up)), ("updated_seconds", {}, now),
    ]  # fmt: skip
    causes = Counter(p.cause for p in state.history)
    values += [("incidents_by_cause_total", {"cause": c}, n) for c, n in sorted(causes.items())]
    if loss is not None:
        values.append(("loss", {}, loss))
    if step_s is not None:
        values.append(("step_seconds", {}, step_s))
    return "".join(_lines(run_id, values))


def _lines(run_id: str, values: Iterable[tuple[str, Mapping[str, str], float]]) -> Iterable[str]:
    told: set[str] = set()
    for name, labels, value in sorted(values, key=lambda v: list(_KINDS).index(v[0])):
        if name not in told:
            told.add(name)
            kind, text = _KINDS[name]
            yield f"# HELP unbroken_{name} {text}\n# TYPE unbroken_{name} {kind}\n"
        shown = ",".join(f'{k}="{_escape(v)}"' for k, v in {"run": run_id, **labels}.items())
        yield (
            f"unbroken_{name}{{{shown}}} {value:g}\n"
            if abs(value) < 1e6
            else f"unbroken_{name}{{{shown}}} {value!r}\n"
        )


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
