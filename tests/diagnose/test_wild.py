"""Logs in words and wrappings that the rules were not written from: what must be found, and what must never be claimed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from unbroken.diagnose import Outcome, Verdict, diagnose

from .wild import CASES, Wild
from .wild_fifth import FIFTH
from .wild_fourth import FOURTH
from .wild_more import MORE
from .wild_sixth import SIXTH
from .wild_third import THIRD

_LOG_ENDS = {
    "Success": Outcome.COMPLETED, "Cancelled": Outcome.CANCELLED, "TimeLimit": Outcome.TIME_LIMIT, "Preempted": Outcome.PREEMPTED,
}  # fmt: skip


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
        v.reason is None and v.outcome is _LOG_ENDS[r] for r in case.reasons if r in _LOG_ENDS
    )
    right |= "Unknown-none" in case.reasons and v.reason is None
    out = [] if right else ["reason"]
    if not right and v.confidence >= 0.8:
        out.append("certain and wrong")
    if v.reason is not None and set(case.reasons) & set(_LOG_ENDS):
        out.append("false alarm")
    if case.evidence != "." and not (v.root and re.search(case.evidence, v.root.text)):
        out.append("line")
    if case.stop is False and v.action.value == "stop":
        out.append("wrong stop")
    if case.stop is True and right and v.action.value != "stop":
        out.append("restarted in vain")
    return out


ALL = [*CASES, *MORE, *THIRD, *FOURTH, *FIFTH, *SIXTH]


@pytest.mark.parametrize("case", ALL, ids=[c.name for c in ALL])
def test_case(case: Wild, tmp_path: Path) -> None:
    v = diagnose([write(case, tmp_path)])
    assert not faults(case, v), (v.outcome, v.reason, v.root, v.decided_by, v.confidence, v.action)


def _stamp(i: int) -> str:
    return f"2026-05-02T11:{i // 60 % 60:02d}:{i % 60:02d}.123456789Z"


WRAPPINGS: dict[str, Callable[[list[str]], list[str]]] = {
    "docker": lambda rows: [json.dumps({"log": x + "\n", "stream": "stderr", "time": _stamp(i)}) for i, x in enumerate(rows)],
    "compose": lambda rows: [f"trainer-1  | {x}" for x in rows],
    "cri": lambda rows: [f"{_stamp(i)} stderr F {x}" for i, x in enumerate(rows)],
    "flat": lambda rows: [f"<web-4> {x.strip()}" for x in rows if x.strip()],
    "zap": lambda rows: [json.dumps({"level": "info", "ts": 1777.1, "caller": "run/exec.go:41", "msg": x}) for x in rows],
}  # fmt: skip


def _plain_cases() -> list[Wild]:
    """The cases of one log that has no decoration which a collector could not have met."""
    alone = [c for c in ALL if len(c.logs) == 1]
    rows = [(c, next(iter(c.logs.values()))) for c in alone]
    return [
        c
        for c, r in rows
        if r[0][:1] not in "{\ufeff"
        and "\r" not in r[-1]
        and not any(x[:1] == "{" and '"' in x for x in r[:5])
    ]


def _compare_wrapped(wrapping: str, cases: list[Wild], tmp_path: Path) -> None:
    wrap = WRAPPINGS[wrapping]
    for case in cases:
        folder = tmp_path / case.name
        folder.mkdir()
        ((name, rows),) = case.logs.items()
        wrapped = replace(case, logs={name: wrap([y for x in rows for y in x.split("\n")])})
        v = diagnose([write(wrapped, folder)])
        assert not faults(case, v), (case.name, v.outcome, v.reason, v.root, v.decided_by, v.confidence)


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_collectors_decoration_changes_no_verdict(wrapping: str, tmp_path: Path) -> None:
    _compare_wrapped(wrapping, _plain_cases()[list(WRAPPINGS).index(wrapping) :: 9], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_collectors_decoration_changes_no_verdict_of_all(wrapping: str, tmp_path: Path) -> None:
    _compare_wrapped(wrapping, _plain_cases(), tmp_path)
