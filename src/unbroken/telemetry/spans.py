"""Spans of time from what runs and evaluations leave: attempts of a training, phases of evaluation assignments.

A span says that something had a node, or one GPU of it, from a start to an end (exclusive), in seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Span:
    """`label` is the job, run or task, `part` what it did then; `gpu` None means the whole node."""

    label: str
    part: str | None
    node: str
    gpu: int | None
    start: float
    end: float


def spans_of_run(records: Iterable[Mapping[str, Any]], label: str) -> tuple[list[Span], str | None]:
    """The attempts of a run on each of their nodes, from its journal, and the host that its supervisor ran on.

    Parts are `start` (launch to first step, with restore) and `train` (first step to the attempt's end). An attempt
    whose end is not in the journal ends where the journal does.
    """
    spans: list[Span] = []
    host: str | None = None
    nodes: list[str] = []
    began: float | None = None
    first: float | None = None
    last = 0.0

    def close(end: float) -> None:
        if began is None:
            return
        for node in nodes:
            spans.append(Span(label, "start", node, None, began, first if first is not None else end))
            if first is not None and end > first:
                spans.append(Span(label, "train", node, None, first, end))

    for r in records:
        kind, last = r.get("kind"), float(r.get("t", last))
        if kind == "epoch":
            host = r.get("host") or host
        elif kind == "attempt":
            close(last)
            nodes, began, first = list(r.get("slots", ())), last, None
        elif kind == "first_step":
            first = last
        elif kind == "ended":
            close(last)
            began = None
    close(last)
    return [s for s in spans if s.end > s.start], host


def spans_of_evaluation(events: Iterable[Mapping[str, Any]]) -> list[Span]:
    """The assignments of an evaluation on each GPU of their worker, and the loading before them, from its journal.

    An assignment has its task for a label and the part `trial`; loading has the label `model` and the parts `fetch` (from
    storage to the node) and `load` (onto the GPU). Workers without a GPU have spans on their whole node.
    """
    places: dict[str, tuple[str, list[int | None]]] = {}
    spans: list[Span] = []
    for e in events:
        kind, worker = e.get("event"), str(e.get("worker"))
        if kind == "join":
            places[worker] = (str(e["node"]), list(e["gpus"]) or [None])
        if worker not in places:
            continue
        node, gpus = places[worker]
        if kind == "ready":
            at, load, fetch = float(e["at"]), float(e.get("load_s", 0)), float(e.get("fetch_s", 0))
            parts = [("model", "load", at - load, at), ("model", "fetch", at - load - fetch, at - load)]
        elif kind == "trial":
            parts = [(str(e["task"]), "trial", float(e["started"]), float(e["ended"]))]
        else:
            continue
        spans += [Span(label, part, node, g, a, b) for label, part, a, b in parts if b > a for g in gpus]
    return spans
