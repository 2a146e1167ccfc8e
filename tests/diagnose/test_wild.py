"""Logs in words and wrappings that the rules were not written from: what must be found, and what must never be claimed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from unbroken.diagnose import Outcome, Verdict, diagnose

from .wild import CASES, Wild
from .wild_more import MORE
from .wild_third import THIRD

_ENDINGS = {"Success": Outcome.COMPLETED, "Cancelled": Outcome.CANCELLED}


def write(case: Wild, folder: Path) -> Path:
    """The case's logs as files."""
    for name, lines in case.logs.items():
        text = "\n".join(lines) + ("" if case.name.startswith("cut-off") else "\n")
        utf16 = text[:1] == "\ufeff"
        (folder / name).write_bytes(text.encode("utf-16-le" if utf16 else "utf-8"))
    return folder


def faults(case: Wild, v: Verdict) -> list[str]:
    """What is wrong with a verdict on a case."""
    right = v.reason in case.reasons or any(
        v.reason is None and v.outcome is _ENDINGS[r] for r in case.reasons if r in _ENDINGS
    )
    right |= "Unknown-none" in case.reasons and v.reason is None
    out = [] if right else ["reason"]
    if not right and v.confidence >= 0.8:
        out.append("certain and wrong")
    if v.reason is not None and set(case.reasons) & {"Success", "Cancelled"}:
        out.append("false alarm")
    if case.evidence != "." and not (v.root and re.search(case.evidence, v.root.text)):
        out.append("line")
    if case.stop is False and v.action.value == "stop":
        out.append("wrong stop")
    if case.stop is True and right and v.action.value != "stop":
        out.append("restarted in vain")
    return out


@pytest.mark.parametrize("case", [*CASES, *MORE, *THIRD], ids=[c.name for c in [*CASES, *MORE, *THIRD]])
def test_case(case: Wild, tmp_path: Path) -> None:
    v = diagnose([write(case, tmp_path)])
    assert not faults(case, v), (v.outcome, v.reason, v.root, v.decided_by, v.confidence, v.action)
