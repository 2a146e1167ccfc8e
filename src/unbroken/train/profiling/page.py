"""A profile as people see it: a page with the comparison figure, and a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...page.charts.svg import render as draw
from ...page.shell import render
from ...status.profile import figures, rows


def render_profile(result: Mapping[str, Any]) -> str:
    """The page. Raises MissingExtra without Jinja2."""
    profiles = result["profiles"]
    missing = {m: why for p in profiles.values() for m, why in p["not_measured"].items()}
    return render(
        "train/profiling/profile.html", figures=[draw(c) for c in figures(profiles)], rows=rows(profiles),
        training=" ".join(result["training"]), missing=missing, formulas=next(iter(profiles.values()))["formulas"],
    )  # fmt: skip


def table(result: Mapping[str, Any]) -> str:
    """The same for the terminal, and what is not measured here and why."""
    profiles = result["profiles"]
    lines = [f"{'':34}" + "".join(f"{n:>22}" for n in profiles)]
    for what, values in rows(profiles):
        if what == "plan":
            continue
        lines.append(f"{what:34}" + "".join(f"{v[:21]:>22}" for v in values))
    why: dict[str, list[str]] = {}
    for p in profiles.values():
        for metric, reason in p["not_measured"].items():
            if metric not in why.setdefault(reason, []):
                why[reason].append(metric)
    lines += [f"not measured: {', '.join(m)}: {reason}" for reason, m in why.items()]
    first = next(iter(profiles.values()))
    return "\n".join([*lines, *(f"{k.upper()} = {v}" for k, v in first["formulas"].items())])
