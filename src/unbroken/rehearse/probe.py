"""Runs a training script and writes down what each of its steps is made of; kills it where it is told to.

    python probe.py PLAN.json script.py ARGUMENTS...      (or -m module ARGUMENTS...)

It stands in the script's place in `unbroken run`, so that nothing in the script has to be changed: hooks of torch that
are there for everybody (before an optimizer's step, around the outermost module) and torch's loaders, wrapped.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Plan:
    """What one process of a rehearsal is to do."""

    trace: str
    """Folder for the traces."""
    steps: int
    """The process ends itself before the optimizer's step with this number, counted from 0 since the training's start."""
    kill_at: int = -1
    """In the first attempt the process is killed before this step; -1: never."""
    kill_rank: int = 0
    protected: str = ""
    """The folder that the rehearsal was started in: nothing there is written to."""
    allowed: str = ""
    """The rehearsal's own folder."""
    reference: tuple[tuple[str, ...], ...] = ()
    """By rank, the weights before each step of the undisturbed training: a resumed process finds in them where it is."""
    frozen_time: bool = False
    fixed_entropy: bool = False


def main(argv: list[str]) -> None:
    """Never returns normally where the script ends the process."""
    plan = Plan(**json.loads(Path(argv[0]).read_text()))
    if __package__ in (None, ""):
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from unbroken.rehearse.record import rehearsed

    with rehearsed(plan):
        run_script(argv[1:])


def run_script(words: list[str]) -> None:
    """The script, as `python words...` would run it."""
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = words
    sys.path[0] = str(Path(words[0]).parent.absolute())
    runpy.run_path(words[0], run_name="__main__")


def as_json(plan: Plan) -> str:
    """What `main` reads."""
    return json.dumps(asdict(plan))


if __name__ == "__main__":
    arguments: list[Any] = sys.argv[1:]
    main(arguments)
