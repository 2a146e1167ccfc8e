"""Files that a task's own code names in so many words: what a library written in C reads, Python's audit hooks never see."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator, Sequence

_PATH = re.compile(r"[\w~.+\-/\\ ]*[\w+\-]\.\w+|/[\w~.+\-/]+")
LONGEST = 2000
"""Characters of a constant that is looked at: longer ones are texts."""


def named_in(files: Sequence[str], folders: Iterable[str]) -> list[str]:
    """Files that are there and that these Python files name: as they stand, relative to the code or to one of the
    folders, or as a name beside a folder that is named too."""
    found: dict[str, None] = {}
    for file in files:
        here = os.path.dirname(file)
        words = list(dict.fromkeys(_constants(file)))
        bases = [here, os.getcwd(), *folders]
        bases += [f for w in words for b in (here, os.getcwd()) if _is_inner(f := _under(b, w), b)]
        for word in words:
            for name in {word, word.lstrip("/")}:
                for base in dict.fromkeys(bases):
                    path = _under(base, name)
                    if os.path.isfile(path):
                        found[path] = None
    return [f for f in found if f not in files]


def _under(base: str, word: str) -> str:
    return os.path.normpath(os.path.join(base, os.path.expanduser(word)))


def _is_inner(path: str, base: str) -> bool:
    """A folder that stands for data, not the whole machine."""
    return path not in (base, os.sep, os.path.expanduser("~")) and os.path.isdir(path)


def _constants(file: str) -> Iterator[str]:
    try:
        with open(file, "rb") as f:
            tree = ast.parse(f.read(), file)
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and 0 < len(node.value) <= LONGEST:
            text = node.value
            if "\n" not in text and "\0" not in text:
                yield text
            if len(text) > 2 and "\0" not in text:
                yield from (m[0].strip() for m in _PATH.finditer(text) if m[0].strip() != text)
