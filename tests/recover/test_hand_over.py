"""From a decision to a page a verdict is handed over once: into an `Incident`, which is what is written, read and drawn."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "src" / "unbroken"
BEFORE = ("diagnose/", "rehearse/", "simulate/", "recover/decide/")
"""Where verdicts come from, and where it is decided what follows from them."""


def named(annotation: ast.expr | None) -> set[str]:
    """The names in an annotation."""
    return (
        {n.id for n in ast.walk(annotation) if isinstance(n, ast.Name)} if annotation is not None else set()
    )


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).with_suffix("").as_posix()
        if not name.startswith(BEFORE) and "verdict" in (text := path.read_text()).lower():
            yield name, ast.parse(text)


def holders() -> list[str]:
    """Classes with a field that is a verdict."""
    return [
        f"{name}:{c.name}"
        for name, tree in trees()
        for c in ast.walk(tree)
        if isinstance(c, ast.ClassDef)
        and any(isinstance(f, ast.AnnAssign) and "Verdict" in named(f.annotation) for f in c.body)
    ]


def hand_overs() -> list[str]:
    """Functions that are given a verdict together with what was decided about it."""
    found = []
    for name, tree in trees():
        for f in ast.walk(tree):
            if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef):
                given = [a.annotation for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)]
                if {"Verdict", "Decision"} <= set().union(*map(named, given)):
                    found.append(f"{name}:{f.name}")
    return found


def test_a_verdict_is_handed_over_once_from_decision_to_page() -> None:
    assert holders() == ["progress/records/incident:Incident"]
    assert hand_overs() == ["progress/records/incident:decide"]


def test_the_page_draws_what_the_incident_says() -> None:
    page = ast.parse((ROOT / "status" / "page.py").read_text())
    drawn = {
        n
        for f in ast.walk(page)
        if isinstance(f, ast.FunctionDef)
        for a in f.args.args
        for n in named(a.annotation)
    }
    assert "Incident" in drawn and not {"Verdict", "Decision"} & drawn
