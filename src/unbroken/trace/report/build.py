"""From a store to a report: findings, figures, and the sentences on top."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...page.charts.scales import amount, seconds
from ...page.charts.spec import Figure
from ...samples.tables import Findings, Note, Rejected
from ...version import __version__
from ..figures import Section, build
from ..figures.reference import Reference
from ..figures.sentences import pct
from ..inference import InferenceRule
from ..settings import ReportSettings
from ..statistics import clusters, compute
from ..store import Store


@dataclass(frozen=True)
class TraceReport:
    """Everything that a report shows. `files`: (name, format). `rejected`: the first rows that were rejected."""

    title: str
    files: tuple[tuple[str, str], ...]
    sections: tuple[tuple[Section, tuple[Figure, ...], tuple[tuple[str, str], ...]], ...]
    findings: Findings
    notes: tuple[Note, ...]
    rejected: tuple[Rejected, ...]
    rejected_count: int
    references: tuple[Reference, ...]
    settings: ReportSettings

    @property
    def figures(self) -> list[Figure]:
        """All figures in order."""
        return [f for _, figures, _ in self.sections for f in figures]

    def as_json(self) -> dict[str, Any]:
        """The whole report as one JSON object."""
        return {
            "unbroken": __version__,
            "title": self.title,
            "files": [{"name": n, "format": f} for n, f in self.files],
            "figures": [
                {
                    "key": f.key,
                    "number": f.number,
                    "title": f.title,
                    "sentence": f.sentence,
                    "tables": list(f.results),
                }
                for f in self.figures
            ],
            "missing": [{"what": w, "needs": n} for _, _, missing in self.sections for w, n in missing],
            "tables": {name: r.as_json() for name, r in self.findings.results.items()},
            "compared_with": {
                r.label: {name: t.as_json() for name, t in r.findings.results.items()}
                for r in self.references
            },
            "notes": [n.as_json() for n in self.notes],
            "declared": self.settings.sentences(),
            "set_aside": {
                "rows": self.rejected_count,
                "first": [{"source": r.source, "reason": r.reason, "text": r.text} for r in self.rejected],
            },
        }


def build_report(
    store: Store,
    files: Sequence[tuple[str, str]],
    *,
    settings: ReportSettings | None = None,
    rules: Sequence[InferenceRule] | None = None,
    references: Sequence[Reference] = (),
    title: str | None = None,
) -> TraceReport:
    """Computes everything and draws what can be drawn."""
    settings = settings or ReportSettings()
    many = clusters.count(store) > clusters.MANY
    each = clusters.each(store) if many else []
    if each:
        clusters.fold(store, each[0])
    found = compute(store, settings, rules)
    if each:
        clusters.largest_first(found, each[0])
    for result in each:
        found.add(result)
    notes = list(found.notes)
    notes += [differences(r) for r in references if r.fitted and found.get("summary")][:1]
    sections = build(found, references, settings)
    summary = found.get("summary")
    names = [str(c) for c in summary.column("cluster")] if summary else []
    if each:
        names = [f"{len(each[0].rows)} clusters"]
    return TraceReport(
        title or (" and ".join(names) if names else "The cluster"),
        tuple(files),
        tuple((s, tuple(f), tuple(m)) for s, f, m in sections),
        found,
        tuple(notes),
        tuple(store.rejected(200)),
        store.rejected_count(),
        tuple(references),
        settings,
    )


def differences(reference: Reference) -> Note:
    """What has to be known about the published curves before they are compared with."""
    return Note(
        "difference",
        "the published curves are drawn from parameters fitted to the study's figures (within about 1 to 4 percentage points, "
        "up to 6.5 for queue times of Kalos). The study's own curves and its summary table come from slightly different "
        "populations (medians differ by seconds), its durations in Kalos contain the queue, its power curve of Seren has 8 % "
        "of GPUs above 400 W where its text says 22 %, and its two series of tensor activity are identical",
    )


def cards(found: Findings) -> list[tuple[str, str]]:
    """(number, what it is): the row of numbers on top."""
    out: list[tuple[str, str]] = []
    table = found.get("summary")
    rows = list(table.dicts())
    if rows:
        out.append((f"{sum(r['jobs'] for r in rows):,}", "jobs"))
        gpu = sum(r["gpu_jobs"] or 0 for r in rows)
        if gpu:
            out.append((f"{gpu:,}", "GPU jobs"))
            out.append((amount(sum(r["gpu_h"] or 0 for r in rows), 0), "GPU hours"))
            of = f", {rows[0]['cluster']}" if len(rows) > 1 else ""
            run, wait = rows[0]["median_run_s"], rows[0]["mean_queue_s"]
            if each := list(found.get("clusters").dicts()):  # many: of all of them
                of, curve = "", found.get("cluster_run_cdf").where(cluster=None)
                run = next((r["x_s"] for r in curve.dicts() if r["cdf_pct"] == 50), run)
                known = [(r["mean_queue_s"], r["gpu_jobs"]) for r in each if r["mean_queue_s"] is not None]
                wait = sum(s * n for s, n in known) / max(1, sum(n for _, n in known)) if known else wait
            out.append((seconds(run), "median duration of a GPU job" + of))
            out.append((seconds(wait), "mean queue time" + of))
    states = found.get("by_state")
    for state, what in (("FAILED", "of the GPU time failed"), ("CANCELLED", "of the GPU time cancelled")):
        total = sum(r["gpu_h"] or 0 for r in states.dicts())
        if total:
            out.append(
                (pct(100 * sum(r["gpu_h"] or 0 for r in states.dicts() if r["state"] == state) / total), what)
            )
    polar = found.get("polarisation")
    busy = next((r for r in polar.dicts() if r["metric"] == "gpu_util_pct"), None)
    if busy:
        out.append((pct(busy["idle_pct"]), "of GPU readings idle"))
    return out[:8]


def highlights(report: TraceReport) -> list[str]:
    """The sentences that matter most, for the top of the page."""
    wanted = ("states", "cancelled", "failures", "types", "sizes", "fairness", "utilisation")
    by_key = {f.key: f for f in report.figures}
    return [by_key[k].sentence for k in wanted if k in by_key and by_key[k].sentence][:6]
