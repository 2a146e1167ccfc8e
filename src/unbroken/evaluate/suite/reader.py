"""Reads a suite from TOML.

[suite]
name = "core"

[defaults]              # any key of a task
harness = "lm_eval"

[[task]]
name = "arc_easy"
shots = 5
metric = "loglikelihood"
licence = "CC-BY-SA-4.0"
[task.prior]            # optional: what is known of its cost
samples = 2376
seconds = 48
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from ...errors import InputError, UnknownKey
from ...journal.codec import decode
from ..contracts import Json, Suite, Task, TaskPrior

METRICS = ("loglikelihood", "match", "code", "judge")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def read_suite(place: str | Path) -> Suite:
    """A suite by its path, or by the name of one that ships with unbroken. Raises InputError, UnknownKey."""
    path = Path(place)
    if not path.suffix and not path.exists() and path.name == str(place):
        path = shipped_suite(str(place))
    try:
        text = path.read_text("utf-8")
    except OSError as e:
        raise InputError(f"the suite cannot be read: {e.strerror}", where=str(path),
                         hint="Give a TOML file or one of: " + ", ".join(shipped_suites())) from e  # fmt: skip
    except UnicodeDecodeError as e:
        raise InputError("the suite is no text", where=str(path), hint="Give a TOML file, in UTF-8") from e
    return parse_suite(text, where=str(path), folder=str(path.resolve().parent))


def parse_suite(text: str, *, where: str = "suite", folder: str = "") -> Suite:
    """A suite from TOML text. Raises InputError, UnknownKey."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise InputError(f"not valid TOML: {e}", where=where) from e
    for key in table:
        if key not in ("suite", "defaults", "task"):
            raise UnknownKey(key, ("suite", "defaults", "task"), where=where)
    head = table.get("suite", {})
    for key in head:
        if key not in ("name", "description"):
            raise UnknownKey(key, ("name", "description"), where=f"{where} [suite]")
    rows = table.get("task", [])
    if not isinstance(rows, list) or not rows:
        raise InputError("the suite has no [[task]]", where=where, hint="Add at least one")
    tasks: list[Task] = []
    priors: dict[str, TaskPrior] = {}
    for i, row in enumerate(rows):
        at = f"{where} task {row.get('name', i + 1)}"
        task, prior = _read_task(row, table.get("defaults", {}), at)
        if any(t.name == task.name for t in tasks):
            raise InputError(
                f"two tasks are called '{task.name}'",
                where=where,
                hint="Rename one; `target` keeps the harness's name",
            )
        tasks.append(task)
        if prior is not None:
            priors[task.name] = prior
    name = str(head.get("name") or Path(where).stem)
    return Suite(name, tuple(tasks), str(head.get("description", "")), priors, folder)


def check_limit(limit: float | None, where: str) -> None:
    """Raises InputError for what is neither a number of samples nor a share of them."""
    if limit is not None and not (0 < limit < 1 or (limit >= 1 and limit == int(limit))):
        raise InputError(
            f"limit {limit}: at least 1 is meant, or a share between 0 and 1",
            where=where,
            hint="Give a number of samples, or a share of them",
        )


def shipped_suites() -> list[str]:
    """Names of the suites that ship with unbroken."""
    folder = resources.files("unbroken.evaluate") / "suites"
    return sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))


def shipped_suite(name: str) -> Path:
    """The path of a shipped suite. Raises UnknownKey."""
    if name not in shipped_suites():
        raise UnknownKey(name, shipped_suites(), what="suite")
    return Path(str(resources.files("unbroken.evaluate") / "suites" / f"{name}.toml"))


OF_A_HARNESS = ("options", "target", "shots", "headline")
"""Keys whose meaning is the harness's own."""


def _defaults_for(row: Mapping[str, Json], defaults: Mapping[str, Json]) -> Mapping[str, Json]:
    """The defaults that are meant for this row: what they say to one harness is nothing to another."""
    theirs = defaults.get("harness", Task.harness)
    if row.get("harness", theirs) == theirs:
        return defaults
    return {k: v for k, v in defaults.items() if k not in OF_A_HARNESS}


def _read_task(
    row: Mapping[str, Json], defaults: Mapping[str, Json], at: str
) -> tuple[Task, TaskPrior | None]:
    merged = {**_defaults_for(row, defaults), **row}
    if isinstance(own := row.get("options"), Mapping) and isinstance(
        given := defaults.get("options"), Mapping
    ):
        merged["options"] = {**given, **own} if "options" in _defaults_for(row, defaults) else dict(own)
    prior = merged.pop("prior", None)
    task = decode(Task, merged, where=at)
    if not _NAME.fullmatch(task.name):
        raise InputError(
            f"'{task.name}' cannot name files", where=at, hint="Use letters, digits, '.', '_' and '-'"
        )
    if task.metric not in METRICS:
        raise UnknownKey(task.metric, METRICS, where=at, what="metric")
    if task.gpus < 1:
        raise InputError("gpus must be at least 1", where=at)
    check_limit(task.limit, at)
    if prior is None:
        return task, None
    read = decode(TaskPrior, prior, where=f"{at} prior")
    if (
        read.spread < 1
        or min(read.samples, read.seconds, read.score_s, read.output_tokens, read.prompt_chars) < 0
    ):
        raise InputError("a prior cannot be negative, nor its spread below 1", where=at)
    return task, read
