"""Whether a run's command can be run here: asked where the ranks are, in words for whoever wrote it."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from ....errors import InputError, UnbrokenError, UsageError
from ...wire import Message


def check_words(command: Sequence[str]) -> None:
    """Raises UsageError unless there is a command at all."""
    if not command:
        raise UsageError(
            "there is no command after '--'",
            hint="Write it like: unbroken run --nproc 8 -- train.py --lr 3e-4",
        )
    if command[0] == "-m" and len(command) < 2:
        raise UsageError("'-m' needs a module name after it")


def check_command(command: Sequence[str], cwd: Path) -> None:
    """Raises UsageError or InputError unless the command names something that can be run here, in `cwd`."""
    check_words(command)
    first = command[0]
    if first == "-m":
        _check_module(command[1], cwd)
        return
    if first.endswith(".py"):
        _check_readable(cwd / first)
        return
    if first in ("python", "python3"):
        script = python_script(command[1:])
        if script is not None and script.endswith(".py"):
            _check_readable(cwd / script)
        return
    if shutil.which(first) is None:
        raise InputError(
            f"there is no program or script '{first}'",
            where=str(cwd),
            hint="Name a .py file, '-m module', or a program on the PATH",
        )


def find_refusal(command: list[str], cwd: Path) -> Message:
    """Why a command cannot be run on this node, and what helps; nothing where it can."""
    if not cwd.is_dir():
        return {
            "refused": "the working directory is not there",
            "hint": "Start the run in a folder that every node has, such as one of a shared file system",
        }
    try:
        check_command(command, cwd)
    except UnbrokenError as e:
        return {"refused": e.message, "hint": e.hint}
    return {}


def python_script(arguments: Sequence[str]) -> str | None:
    """The script among the arguments of a Python interpreter; None for -c, -m and standard input."""
    words = iter(arguments)
    for word in words:
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            next(words, None)
        elif not word.startswith("-"):
            return word
        elif word == "-" or (not word.startswith(("--", "-W", "-X")) and ("c" in word or "m" in word)):
            return None
    return None


def _check_module(name: str, cwd: Path) -> None:
    """Raises InputError unless the module's top package is there; it is looked for as `python -m` does, not imported."""
    top = name.partition(".")[0]
    try:
        found = PathFinder.find_spec(top, [str(cwd), *sys.path]) or importlib.util.find_spec(top)
    except ValueError:
        found = None
    if found is None:
        raise InputError(
            f"there is no module '{top}'",
            where=f"-m {name}, in {cwd}",
            hint="Check the name, install it beside unbroken, or start from the folder that it lies in",
        )


def _check_readable(path: Path) -> None:
    if not path.exists():
        raise InputError("the script does not exist", where=str(path), hint="Check the path after '--'")
    if path.is_dir():
        raise InputError("the script is a folder", where=str(path), hint="Name the .py file")
    try:
        with open(path, "rb") as f:
            f.read(1)
    except OSError as e:
        raise InputError(f"the script cannot be read: {e.strerror}", where=str(path)) from e
