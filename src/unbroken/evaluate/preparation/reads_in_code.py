"""Files that a task's own code names in so many words: what a library written in C reads, Python's audit hooks never see."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence

_PATH = re.compile(r"[\w~.+\-/\\ ]*[\w+\-]\.\w+|/[\w~.+\-/]+")
SEEN_THROUGH = frozenset(
    {"numpy", "pandas", "scipy", "sklearn", "datasets", "yaml", "regex", "PIL", "lm_eval", "unbroken"}
)
"""Libraries that open files through Python, or whose files are found otherwise."""
_ASKS = frozenset({
    "subprocess", "multiprocessing", "ctypes", "mmap", "exists", "lexists", "isfile", "isdir", "is_file", "is_dir", "is_symlink",
    "islink", "stat", "lstat", "getsize", "getmtime", "getctime", "getatime", "readlink", "fromfile", "system", "popen", "Popen",
    "environ", "getenv", "expandvars", "urlopen", "socket", "access", "samefile", "is_mount", "ismount",
    "shelve", "dbm", "read_parquet", "read_orc", "read_hdf", "HDFStore",
})  # fmt: skip
"""Names of what tells a task something without a file of its own being read, or where nobody sees it."""
_ATTACH = re.compile(r"\s*attach\s", re.IGNORECASE)
"""SQL that opens another data base, which SQLite tells nobody."""
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


def is_blind(file: str) -> bool:
    """Whether this Python file may learn things otherwise than by files that Python opens: it starts programs, asks
    whether something exists, or uses a library that reads files in C. Too often said costs a preparation."""
    try:
        with open(file, "rb") as f:
            tree = ast.parse(f.read(), file)
    except (OSError, SyntaxError, ValueError):
        return False
    here = os.path.dirname(file)
    for node in ast.walk(tree):
        named: list[str] = []
        if isinstance(node, ast.Import):
            named = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            named = [node.module or ""]
            if _ASKS & {a.name for a in node.names}:
                return True
        elif (isinstance(node, ast.Attribute) and node.attr in _ASKS) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and _ATTACH.match(node.value)
        ):
            return True
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            asked = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if asked in ("__import__", "import_module"):
                named = [str(node.args[0].value)]
        for name in named:
            top = name.partition(".")[0]
            if top in _ASKS:
                return True
            beside = os.path.exists(os.path.join(here, f"{top}.py")) or os.path.isdir(os.path.join(here, top))
            if top and top not in SEEN_THROUGH and top not in sys.stdlib_module_names and not beside:
                return True
    return False


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
