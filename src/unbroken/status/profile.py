"""What a training measured of itself: activity of its GPUs, MFU, memory by category, as figures and rows of a page.

A *profile* is what rank 0 of `unbroken train` writes (`attempts/NNNN/profile.json`), or one plan's part of `unbroken train profile`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..page.charts.spec import Bars, LineChart, Series
from ..page.charts.svg import render as draw
from ..page.palette import series
from ..progress import RunDir

CURVES = (
    ("sm_active_pct", "SM active, %", 1.0), ("tensor_active_pct", "tensor cores active, %", 1.0),
    ("dram_active_pct", "DRAM active, %", 1.0), ("nvlink_tx_bytes_per_s", "NVLink sent, GB/s", 1e-9),
    ("pcie_rx_bytes_per_s", "PCIe received, GB/s", 1e-9),
)  # fmt: skip
_CATEGORIES = ("parameters", "gradients", "optimizer", "activations")


@dataclass(frozen=True)
class ProfileSection:
    """The newest profile of a run, as its report shows it."""

    title: str
    figures: list[Any]
    rows: list[tuple[str, list[str]]]
    formulas: Mapping[str, str]
    not_measured: Mapping[str, str]


def profile_section(run_dir: RunDir) -> ProfileSection | None:
    """Of the newest attempt that has a profile; None where none has one that can be read."""
    for attempt in reversed(run_dir.attempt_numbers()):
        try:
            found = json.loads(run_dir.profile(attempt).read_text())
            name = f"attempt {attempt}, steps {found['first_step']} to {found['last_step']}"
            shown = {name: found}
            return ProfileSection(
                name, [draw(c) for c in figures(shown)], rows(shown), found["formulas"], found["not_measured"]
            )
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def figures(profiles: Mapping[str, Any]) -> list[LineChart | Bars]:
    """Activity over time, a line for each plan (mean over its GPUs); time by kinds of kernels; memory by category and rank."""
    found: list[LineChart | Bars] = []
    for metric, label, scale in CURVES:
        lines = [(name, _curve(p["activity"], metric, scale)) for name, p in profiles.items()]
        if any(points for _, points in lines):
            found.append(LineChart(label, "seconds", label, tuple(Series(n, x, series(i)) for i, (n, x) in enumerate(lines))))  # fmt: skip
    traced = {n: p["by_rank"][0]["kernels"]["seconds_by_kind"] for n, p in profiles.items() if p["by_rank"][0]["kernels"]}  # fmt: skip
    if traced:
        kinds = sorted({k for t in traced.values() for k in t})
        groups = tuple((n, series(i), tuple(500 * t.get(k, 0.0) for k in kinds)) for i, (n, t) in enumerate(traced.items()))  # fmt: skip
        found.append(Bars("Milliseconds of a step by kind of kernel, rank 0", "ms", tuple(kinds), groups))
    for name, p in profiles.items():
        categories = [c for c in _CATEGORIES if any(c in r["bytes"] for r in p["by_rank"])]
        groups = tuple((c, series(i), tuple(r["bytes"].get(c, 0) / 1e9 for r in p["by_rank"])) for i, c in enumerate(categories))  # fmt: skip
        found.append(Bars(f"Memory of each rank, {name}, GB", "GB", tuple(str(r["rank"]) for r in p["by_rank"]), groups, stacked=True, digits=3))  # fmt: skip
    return found


def _curve(samples: list[dict[str, float]], metric: str, scale: float) -> tuple[tuple[float, float], ...]:
    at: dict[float, list[float]] = {}
    for s in samples:
        if metric in s:
            at.setdefault(s["at"], []).append(s[metric] * scale)
    return tuple((t, sum(v) / len(v)) for t, v in sorted(at.items()))


def rows(profiles: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """(what, its value for each plan); what was not measured is a dash."""
    ps = list(profiles.values())

    def mean(p: Mapping[str, Any], metric: str) -> float | None:
        values = [m[metric] for m in p["activity_means"].values() if metric in m]
        return sum(values) / len(values) if values else None

    def most(p: Mapping[str, Any], category: str) -> float | None:
        values = [r["bytes"][category] for r in p["by_rank"] if category in r["bytes"]]
        return max(values) / 1e9 if values else None

    found = [("plan", [p["plan"] for p in ps]), ("device", [f"{p['ranks']} x {p['device']}" for p in ps])]
    numbers: list[tuple[str, str, list[float | None]]] = [
        ("tokens/s of a rank", ",.0f", [p["tokens_per_second_per_rank"] for p in ps]),
        ("step, ms", ",.1f", [1e3 * p["step_seconds"] for p in ps]),
        ("MFU, %", ".1f", [100 * p["mfu"] if p["mfu"] else None for p in ps]),
        ("HFU, %", ".1f", [100 * p["hfu"] if p["hfu"] else None for p in ps]),
    ]
    for metric, label, scale in CURVES:
        numbers.append((label, ".1f", [None if (v := mean(p, metric)) is None else v * scale for p in ps]))
    numbers += [(f"{c} of a rank at most, GB", ".3f", [most(p, c) for p in ps]) for c in _CATEGORIES]
    return found + [
        (what, ["–" if v is None else format(v, form) for v in values]) for what, form, values in numbers
    ]
