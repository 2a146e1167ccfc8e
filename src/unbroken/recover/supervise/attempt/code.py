"""What a run was launched with, in digests: code is a suspect like a node, and what is new since it last trained is told first."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from .... import atomic
from ....progress import RunDir

_log = logging.getLogger("unbroken.supervisor")
SCHEMA = 1
"""Of `code.json`."""
COMMAND = "the command"
_KINDS = (".py", ".toml", ".yaml", ".yml", ".json", ".sh")
_MOST_FILES, _MOST_BYTES = 2000, 1 << 20
_MOST_TOLD = 5
_OTHERS = {"__pycache__", "node_modules", "site-packages"}


def digest_code(command: Sequence[str], cwd: Path, run_dir: Path) -> dict[str, str]:
    """{file below `cwd`, or the command: digest} of what the ranks may read: sources and settings of at most 1 MiB each, 2,000 of
    them at most. Not hidden folders, environments, or the run's own folder."""
    found = {COMMAND: _digest(json.dumps(list(command)).encode())}
    for path in _list_files(cwd, run_dir):
        try:
            if path.stat().st_size <= _MOST_BYTES:
                found[str(path.relative_to(cwd))] = _digest(path.read_bytes())
        except OSError:
            continue
        if len(found) > _MOST_FILES:
            break
    return found


def _list_files(folder: Path, run_dir: Path) -> list[Path]:
    found: list[Path] = []
    folders = [folder]
    while folders and len(found) < _MOST_FILES:
        try:
            entries = sorted(folders.pop(0).iterdir())
        except OSError:
            continue
        for entry in entries:
            if entry.name.startswith(".") or entry.name in _OTHERS or entry.is_symlink() or entry == run_dir:
                continue
            if entry.is_dir():
                if not any((entry / mark).exists() for mark in ("pyvenv.cfg", "run.toml")):
                    folders.append(entry)
            elif entry.suffix in _KINDS:
                found.append(entry)
    return found


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def keep_code(run_dir: RunDir, attempt: int, command: Sequence[str], cwd: Path) -> None:
    """Writes what an attempt is launched with beside its logs. That it cannot be written ends no run."""
    try:
        path = run_dir.code(attempt)
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_json(
            path, {"schema": SCHEMA, "files": digest_code(command, cwd, run_dir.path.absolute())}
        )
    except OSError as e:
        _log.warning("what attempt %d is launched with could not be noted: %s", attempt, e)


def describe_new(run_dir: RunDir, attempt: int) -> str:
    """What this attempt was launched with that the last one before it that trained was not, in words; "" for nothing."""
    now = _read(run_dir, attempt)
    for before in reversed([n for n in run_dir.attempt_numbers() if n < attempt]):
        steps = run_dir.steps(before)
        if not steps.exists() or not steps.stat().st_size:
            continue
        then = _read(run_dir, before)
        new = find_new(then, now) if then and now else []
        more = f" and {len(new) - _MOST_TOLD} more" if len(new) > _MOST_TOLD else ""
        return (
            f"new since attempt {before}, the last that trained: {', '.join(new[:_MOST_TOLD])}{more}"
            if new
            else ""
        )
    return ""


def find_new(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """`train.py changed`, `data.py is new`, `old.py is gone`: what changed first."""
    changed = [f"{name} changed" for name in now if name in then and then[name] != now[name]]
    return [
        *changed, *(f"{name} is new" for name in now if name not in then), *(f"{name} is gone" for name in then if name not in now),
    ]  # fmt: skip


def _read(run_dir: RunDir, attempt: int) -> dict[str, str]:
    try:
        value = json.loads(run_dir.code(attempt).read_bytes())
        return {str(k): str(v) for k, v in value["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
