"""What a run was launched with, in digests: code is a suspect like a node, and what is new since it last trained is told first."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .... import atomic
from ....progress import RunDir
from ....units import plural

_log = logging.getLogger("unbroken.supervisor")
SCHEMA = 1
"""Of `code.json`."""
COMMAND = "the command"
_KINDS = (".py", ".toml", ".yaml", ".yml", ".json", ".sh")
_MOST_FILES, _MOST_BYTES, _MOST_ENTRIES = 2000, 1 << 20, 20_000
_WITHIN_S = 2.0
"""A start waits for no folder of a million files, nor for a slow file system."""
_MOST_TOLD = 5
_OTHERS = {"__pycache__", "node_modules", "site-packages"}


@dataclass(frozen=True)
class Code:
    """{file below the working folder, or the command: digest}; `whole` is False where not all could be looked at."""

    files: Mapping[str, str] = field(default_factory=dict)
    whole: bool = True


def digest_code(command: Sequence[str], cwd: Path, run_dir: Path) -> Code:
    """What the ranks may read below `cwd`: sources and settings of at most 1 MiB each, 2,000 of them at most, as far as two seconds go.
    Not hidden folders, environments, or the run's own folder."""
    found = {COMMAND: _digest(json.dumps(list(command)).encode())}
    until, entries = time.monotonic() + _WITHIN_S, 0
    folders = [cwd]
    while folders:
        try:
            with os.scandir(folders.pop(0)) as scan:
                listed = list(itertools.islice(scan, _MOST_ENTRIES))
        except OSError:
            continue
        entries += len(listed)
        for entry in sorted(listed, key=lambda e: e.name):
            if entries >= _MOST_ENTRIES or len(found) > _MOST_FILES or time.monotonic() > until:
                return Code(found, whole=False)
            path = Path(entry.path)
            if entry.name.startswith(".") or entry.name in _OTHERS or entry.is_symlink() or path == run_dir:
                continue
            try:
                if entry.is_dir():
                    if not any((path / mark).exists() for mark in ("pyvenv.cfg", "run.toml")):
                        folders.append(path)
                elif path.suffix in _KINDS and entry.stat().st_size <= _MOST_BYTES:
                    found[str(path.relative_to(cwd))] = _digest(path.read_bytes())
            except OSError:
                continue
    return Code(found)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def keep_code(run_dir: RunDir, attempt: int, command: Sequence[str], cwd: Path) -> None:
    """Writes what an attempt is launched with beside its logs. That it cannot be written ends no run."""
    try:
        path = run_dir.code(attempt)
        path.parent.mkdir(parents=True, exist_ok=True)
        code = digest_code(command, cwd, run_dir.path.absolute())
        atomic.write_json(path, {"schema": SCHEMA, **asdict(code)})
    except OSError as e:
        _log.warning("what attempt %d is launched with could not be noted: %s", attempt, e)


def describe_new(run_dir: RunDir, attempt: int, *, from_outside: bool = False) -> str:
    """What this attempt was launched with that the last one before it that trained was not, in words; "" for nothing.

    One that has made steps itself has trained with it, which is said: what is new may still be at fault (a learning rate, an
    evaluation that comes late). Not of a failure `from_outside`, such as a kill or a lost node: new code that trains has no part in it.
    """
    made = _count_steps(run_dir, attempt)
    if made and from_outside:
        return ""
    now = _read(run_dir, attempt)
    for before in reversed([n for n in run_dir.attempt_numbers() if n < attempt]):
        steps = run_dir.steps(before)
        if not steps.exists() or not steps.stat().st_size:
            continue
        new = find_new(_read(run_dir, before), now)
        more = f" and {len(new) - _MOST_TOLD} more" if len(new) > _MOST_TOLD else ""
        told = f"{', '.join(new[:_MOST_TOLD])}{more}"
        trained = (
            f"attempt {attempt} made {plural(made, 'step')} with it" if made else "the last that trained"
        )
        return f"new since attempt {before}, {trained}: {told}" if new else ""
    return ""


def _count_steps(run_dir: RunDir, attempt: int) -> int:
    """How many steps an attempt has made, as far as they were heard of."""
    try:
        with open(run_dir.steps(attempt), "rb") as f:
            return sum(line.endswith(b"\n") for line in f)
    except OSError:
        return 0


def find_new(then: Code, now: Code) -> list[str]:
    """`train.py changed`, `data.py is new`, `old.py is gone`: what changed first. What was not looked at is neither new nor gone."""
    old, new = then.files, now.files
    found = [f"{name} changed" for name in new if name in old and old[name] != new[name]]
    if old and new and then.whole and now.whole:
        found += [f"{name} is new" for name in new if name not in old]
        found += [f"{name} is gone" for name in old if name not in new]
    return found


def _read(run_dir: RunDir, attempt: int) -> Code:
    try:
        value = json.loads(run_dir.code(attempt).read_bytes())
        return Code({str(k): str(v) for k, v in value["files"].items()}, value["whole"] is True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Code()
