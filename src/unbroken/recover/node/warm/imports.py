"""What the interpreter of a rank recorded of its imports (`startup.ImportRecorder`), and the environment that makes it do so."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

HOOK = Path(__file__).with_name("hook")
_LINES_MAX = 50_000
_LINE_MAX = 8_192


def with_hook(env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The environment with which an interpreter records its imports in `folder`, or makes those that are ordered there."""
    path = os.pathsep.join(p for p in (str(HOOK), env.get("PYTHONPATH", "")) if p)
    return {**env, "PYTHONPATH": path, "UNBROKEN_START": str(folder)}


def can_record(argv: Sequence[str]) -> bool:
    """Whether a rank's command is a Python script or module that is run by this interpreter, with no options of its own."""
    return len(argv) > 2 and argv[1] == "-u" and (argv[2] == "-m" or not argv[2].startswith("-"))


def count_own_words(argv: Sequence[str]) -> int:
    """How many words name interpreter and script; what follows are the script's arguments."""
    return 4 if argv[2] == "-m" else 3


def find_own_folder(argv: Sequence[str], cwd: str) -> str:
    """The folder that the interpreter will put in front of its path."""
    return cwd if argv[2] == "-m" else os.path.dirname(os.path.realpath(os.path.join(cwd, argv[2])))


def read_imports(folder: Path) -> list[str]:
    """The lines that were recorded, oldest first; none where nothing was."""
    try:
        text = (folder / "imports").read_text(errors="replace")
    except OSError:
        return []
    return check_lines([x for x in text.split("\n")[:-1] if x != "#"])


def check_lines(lines: object) -> list[str]:
    """The same lines, as far as they can be a record: also what came from another node."""
    if not isinstance(lines, list) or not all(isinstance(x, str) and len(x) <= _LINE_MAX for x in lines):
        return []
    return lines[:_LINES_MAX]
