"""The figures and tables of the report, numbered as in the study where it has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...page.charts.spec import Figure
from ...samples.tables import Findings
from ..settings import ReportSettings
from . import clusters, hardware, outcomes, people, workloads
from .reference import Reference

__all__ = ["SECTIONS", "Section", "build"]

Builder = Callable[[Findings, Sequence[Reference], ReportSettings], "Figure | None"]


@dataclass(frozen=True)
class Section:
    """A chapter of the report: its figures, and what is said where one cannot be drawn."""

    key: str
    title: str
    builders: tuple[tuple[Builder, str, str], ...]
    """(builder, the figure's number and title, what it needs)."""


SECTIONS = (
    Section(
        "workloads",
        "What runs",
        (
            (clusters.clusters, "clusters, largest first", "more clusters than can be compared by colour"),
            (workloads.summary, "Table 2, the trace in numbers", "jobs"),
            (
                workloads.durations_and_use,
                "Figure 2, duration and GPU utilisation",
                "jobs with start and end",
            ),
            (workloads.sizes, "Figure 3, jobs and GPU time by size", "jobs with a number of GPUs"),
            (workloads.types, "Figure 4, workload types", "jobs with a number of GPUs"),
            (workloads.demand, "Figure 5, GPUs asked for by type", "jobs with a number of GPUs"),
            (workloads.durations, "Figure 6, duration and queue by type", "jobs with submit, start and end"),
            (workloads.arrivals, "arrivals", "jobs with a time of submission"),
            (workloads.busy, "GPUs held over time", "jobs with start, end and GPUs"),
        ),
    ),
    Section(
        "outcomes",
        "How it ends",
        (
            (outcomes.states, "Figure 17, final states", "jobs with a final state"),
            (outcomes.cancelled, "what cancelled jobs spent", "cancelled jobs"),
            (outcomes.failures, "Table 3, failures by reason", "incidents, or failed jobs"),
            (outcomes.to_failure, "time to failure", "failed jobs with a duration"),
            (outcomes.mttf, "MTTF and ETTR by size", "jobs with a duration and a number of GPUs"),
        ),
    ),
    Section(
        "people",
        "Who uses it, and who waits",
        (
            (people.fairness, "queueing by size", "jobs with a queue time"),
            (people.users, "users", "jobs with a user"),
            (people.teams, "teams and weeks", "jobs with a team, account or virtual cluster"),
        ),
    ),
    Section(
        "hardware",
        "What the hardware does",
        (
            (
                hardware.utilisation,
                "Figure 7, utilisation",
                "samples (unbroken telemetry record, or DCGM and Prometheus)",
            ),
            (hardware.power, "Figure 8, power", "samples of power"),
            (
                hardware.modules,
                "Figure 9, power by part of the server",
                "samples of server power by part (IPMI)",
            ),
            (hardware.temperature, "temperature", "samples of temperature"),
            (hardware.energy, "energy and carbon", "samples of power"),
            (hardware.over_time, "hardware over time", "samples"),
            (
                hardware.heat,
                "failures against temperature and load",
                "samples of temperature, and incidents with nodes",
            ),
        ),
    ),
)


def build(
    found: Findings, references: Sequence[Reference], settings: ReportSettings
) -> list[tuple[Section, list[Figure], list[tuple[str, str]]]]:
    """Each section with the figures that the findings allow, and (what, needs) of those they do not."""
    out = []
    for section in SECTIONS:
        figures, missing = [], []
        for builder, what, needs in section.builders:
            figure = builder(found, references, settings)
            if figure is None and builder is clusters.clusters:
                continue
            if figure is None:
                missing.append((what, needs))
            else:
                figures.append(figure)
        out.append((section, figures, missing))
    return out
