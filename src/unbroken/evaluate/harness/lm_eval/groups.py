"""A group's score from those of its leaves, by the harness's own arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...contracts import Metric, Score
from .task_index import TaskIndex, quiet_lm_eval


def aggregate(index: TaskIndex, target: str, leaves: Mapping[str, Score]) -> tuple[Metric, ...]:
    """The metrics of a group and, behind them, of the groups inside it; empty where none defines any."""
    quiet_lm_eval()
    from lm_eval.api.group import Group

    rows: dict[str, dict[str, Any]] = {name: _row(name, score) for name, score in leaves.items()}
    out: list[list[Metric]] = []
    for entry in index.groups(target):
        group = Group.from_config({**entry.config, "group": entry.name})
        for leaf in index.children(entry):
            group.add(_stub(leaf))
        higher = {m.name: m.higher_is_better for leaf in index.children(entry) for m in _of(leaves, leaf)}
        if not group.has_aggregation:
            continue
        prefix = "" if entry.name == target else f"{entry.name}: "
        out.append(_read(group.aggregate(rows), prefix, higher))
    return tuple(m for metrics in reversed(out) for m in metrics)


def _of(leaves: Mapping[str, Score], leaf: str) -> tuple[Metric, ...]:
    return leaves[leaf].metrics if leaf in leaves else ()


def _row(name: str, score: Score) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "alias": name, "sample_len": score.scored}
    for m in score.metrics:
        metric, _, filter_name = m.name.partition(",")
        row[m.name] = m.value
        row[f"{metric}_stderr,{filter_name}"] = "N/A" if m.stderr is None else m.stderr
    return row


def _read(row: Mapping[str, Any], prefix: str, higher: Mapping[str, bool]) -> list[Metric]:
    out = []
    for key, value in row.items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        stderr = row.get(f"{metric}_stderr,{filter_name}", "N/A")
        out.append(
            Metric(
                prefix + key,
                float(value),
                None if isinstance(stderr, str) else float(stderr),
                higher.get(key, True),
            )
        )
    return out


def _stub(name: str) -> Any:
    """A task that has nothing but its name: aggregation asks for no more, and no data set is loaded."""
    from lm_eval.api.task import ConfigurableTask

    class Stub(ConfigurableTask):  # type: ignore[misc]
        def __init__(self) -> None:
            """Loads nothing."""

        @property
        def task_name(self) -> str:
            return name

    return Stub()
