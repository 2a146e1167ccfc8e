"""Statistics: each a function from the tables of a store to a small table."""

from __future__ import annotations

from collections.abc import Sequence

from ...samples.tables import Findings
from ..inference import InferenceRule, build_work
from ..settings import ReportSettings
from ..store import Store
from . import counts, distributions, hardware, people, reliability, timeline
from .cubes import build_cubes

__all__ = ["compute"]


def compute(
    store: Store, settings: ReportSettings | None = None, rules: Sequence[InferenceRule] | None = None
) -> Findings:
    """Everything that the store's data allows, by name."""
    settings = settings or ReportSettings()
    found = Findings()
    if store.has("jobs"):
        build_work(store, settings, rules)
        build_cubes(store)
        for module in (counts, distributions, timeline, people):
            for result in module.results(store, settings):
                found.add(result)
    for result in reliability.results(store, settings):
        found.add(result)
    if store.has("samples"):
        for result in hardware.results(store, settings):
            found.add(result)
    found.notes = list(store.notes)
    return found
