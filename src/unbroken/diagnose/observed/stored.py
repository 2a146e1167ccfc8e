"""The facts behind an incident's verdict, kept with its attempt: with them `unbroken diagnose RUN_DIR` comes to the same verdict.

They lie in a file of their own, because status and report read every incident, and facts grow with the ranks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ... import atomic
from ...errors import InputError, UnknownKey
from ...journal.codec import decode, encode
from ...progress import RunDir
from ..judge.facts import Facts

SCHEMA = 5
"""1 had `stopped_by_user`, which nobody ever set; 2 had no `corruption`; 3 did not name the ranks that hold the others up in a hang; 4 had no `oom_counted`."""


def write_facts(run_dir: RunDir, attempt: int, facts: Facts) -> None:
    """Writes the facts of an attempt's end, whole. Raises OSError."""
    atomic.write_json(run_dir.facts(attempt), {"schema": SCHEMA, "facts": encode(facts)})


def read_facts(path: Path) -> Facts:
    """Reads what `write_facts` wrote, also of an earlier or newer version. Raises InputError for anything else, OSError."""
    try:
        value: Any = json.loads(path.read_bytes())
        schema, facts = int(value["schema"]), value["facts"]
        if schema == 1:
            facts.pop("stopped_by_user", None)
        return decode(Facts, facts, where=str(path), newer=schema > SCHEMA)
    except (ValueError, KeyError, TypeError, AttributeError, UnknownKey) as e:
        raise InputError(f"no facts of an attempt: {e}", where=str(path)) from None


def find_facts(paths: Sequence[Path | str]) -> tuple[Facts | None, tuple[str, ...]]:
    """The facts of a run directory's last attempt, if `paths` is one and it ended in an incident, and notes.

    Runs of earlier versions kept none: then a diagnosis has the logs alone.
    """
    if len(paths) != 1 or str(paths[0]) == "-" or not (Path(paths[0]) / "run.toml").is_file():
        return None, ()
    run = RunDir(Path(paths[0]))
    try:
        return next((read_facts(run.facts(n)) for n in run.attempt_numbers()[-1:]), None), ()
    except FileNotFoundError:
        return None, ()
    except (OSError, InputError) as e:
        return None, (f"what the supervisor saw cannot be read, the logs alone are judged: {e}",)
