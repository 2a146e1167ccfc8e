"""A hang of an attempt: who waits for whom, and the file that keeps it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from .... import atomic
from ....detect import HangPicture, ProcessInfo, RankStep, explain_hang
from ....diagnose.read.flight_recorder import analyse
from ....link.runs import pack
from .attempt import Attempt

_log = logging.getLogger("unbroken.supervisor")
SCHEMA = 1
"""Of `waiting.json`."""


def explain(
    attempt: Attempt, processes: Mapping[int, ProcessInfo], dumps: Sequence[Path] = ()
) -> HangPicture:
    """Who holds the others up, as far as anybody can tell from outside, and from NCCL's flight recorders where they have dumps."""
    steps = {r: RankStep(s.step, s.phase, s.finished) for r, s in attempt.ranks.items()}
    return explain_hang(processes, steps, find_missing(processes, dumps))


def find_missing(processes: Mapping[int, ProcessInfo], dumps: Sequence[Path]) -> dict[int, str]:
    """The ranks that others wait for in a collective that these have not entered, and which. None where a rank that could have written
    a dump has none: of it nothing is known."""
    flight = analyse(dumps) if dumps else None
    if flight is None or any(r not in flight.ranks and not p.cannot_run for r, p in processes.items()):
        return {}
    missed = {
        r: next((w.op for w in flight.waits if r in w.members and w.rank != r), "") for r in flight.suspects
    }
    return {r: op for r, op in missed.items() if r in processes}


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
