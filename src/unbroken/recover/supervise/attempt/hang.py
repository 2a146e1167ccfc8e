"""A hang of an attempt: who waits for whom, and the file that keeps it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from .... import atomic
from ....detect import HangPicture, ProcessInfo, RankStep, explain_hang
from ....link.runs import pack
from .attempt import Attempt

_log = logging.getLogger("unbroken.supervisor")
SCHEMA = 1
"""Of `waiting.json`."""


def explain(attempt: Attempt, processes: Mapping[int, ProcessInfo]) -> HangPicture:
    """Who holds the others up, as far as anybody can tell from outside."""
    steps = {r: RankStep(s.step, s.phase, s.finished) for r, s in attempt.ranks.items()}
    return explain_hang(processes, steps)


def write_picture(picture: HangPicture, path: Path) -> None:
    """Writes `waiting.json`: the ranks that hold the others up, and where all stand, in groups."""
    value = {
        "schema": SCHEMA,
        "why": picture.why,
        "culprits": [asdict(c) for c in picture.culprits],
        "groups": [{**asdict(g), "ranks": pack(g.ranks)} for g in picture.groups],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_json(path, value)
    except OSError as e:
        _log.warning("%s could not be written: %s", path.name, e)
