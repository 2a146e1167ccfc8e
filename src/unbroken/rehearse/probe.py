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
from pathlib import Path
from typing import Any


def main(argv: list[str]) -> None:
    """Never returns normally where the script ends the process."""
    if __package__ in (None, ""):
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from unbroken.rehearse.plan import RehearsalPlan
    from unbroken.rehearse.record import rehearsed

    with rehearsed(RehearsalPlan(**json.loads(Path(argv[0]).read_text()))):
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


if __name__ == "__main__":
    arguments: list[Any] = sys.argv[1:]
    main(arguments)
