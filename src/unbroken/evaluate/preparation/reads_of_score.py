"""What scoring a task read, kept beside its score: where it changed, the task is scored again, from the same answers.

SCORE.reads has one line for each process that scored a part of it.
"""

from __future__ import annotations

import json
from pathlib import Path

from .reads import ReadsRecorder, Stamp, unchanged


def note(score: Path, recorder: ReadsRecorder, *, first: bool) -> None:
    """Adds what the recorder saw; `first`: in place of what an earlier scoring noted. Raises OSError."""
    line = {"reads": recorder.reads(blind=False), "own": sorted(recorder.rewritten)}
    score.parent.mkdir(parents=True, exist_ok=True)
    with open(_beside(score), "w" if first else "a") as f:
        f.write(json.dumps(line) + "\n")


def holds(score: Path) -> bool:
    """Whether all that was read for this score is as it was; so it is for the score of a version that did not note it."""
    try:
        lines = [json.loads(line) for line in _beside(score).read_text().splitlines()]
        found: dict[str, Stamp] = {}
        for line in lines:
            for path, seen in line["reads"].items():
                if path in line["own"]:
                    found[path] = seen  # as the scorer left it last
                else:
                    found.setdefault(path, seen)
    except FileNotFoundError:
        return True
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # damaged: the answers are there
    return unchanged(found)


def _beside(score: Path) -> Path:
    return score.with_name(score.name + ".reads")
