"""Compiled bytecode for worker processes where the installation has none, in the user's cache folder.

Container images are often built with PYTHONDONTWRITEBYTECODE, or with site-packages that cannot be written to: then every
process compiles torch and transformers again, six seconds of it. Here what was compiled once is kept, and the first time
all cores compile beside the first worker's imports.

python -m unbroken.evaluate.processes.bytecode compiles into $PYTHONPYCACHEPREFIX what workers import.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import os
import py_compile
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from ... import atomic

ASKED = ("torch", "transformers", "sympy", "lm_eval")
"""Large packages: whether they are compiled is looked at."""
PARTS = {
    "torch": ("",),
    "sympy": ("",),
    "transformers": ("*", "utils", "generation", "integrations", "quantizers", "models/auto", "models/llama"),
}
"""What is compiled after what is in ORDER; '*' are the files at the top alone."""
ORDER = Path(__file__).with_name("bytecode_order.txt")
STEP = 4
"""Files that a process takes at once: few, so that none waits long behind others."""


@cache
def keep_bytecode() -> dict[str, str]:
    """Environment of a child process that keeps its bytecode in our cache; empty where the installation has its own."""
    if sys.flags.optimize or sys.pycache_prefix or not _lacking():
        return {}
    place = _folder()
    try:
        place.mkdir(parents=True, exist_ok=True)
        if not os.access(place, os.W_OK):
            return {}
    except OSError:
        return {}
    env = {"PYTHONPYCACHEPREFIX": str(place), "PYTHONDONTWRITEBYTECODE": ""}
    begun = place / f".begun-{_installation()}"
    if not begun.exists():
        try:
            begun.touch()
            subprocess.Popen(
                [sys.executable, "-m", "unbroken.evaluate.processes.bytecode"], env={**os.environ, **env, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except OSError:
            pass  # imports compile what they need
    return env


def readable_bytecode(paths: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """For a process that may write nothing and sees these paths alone, and what lies below /usr: the environment with
    which it finds the bytecode that is kept for them, and the folders that it must be able to read.

    Bytecode of anything else stays out of its sight: it is as good as the source. Both are empty where none is kept.
    """
    place = sys.pycache_prefix or keep_bytecode().get("PYTHONPYCACHEPREFIX", "")
    found = [f"{place}{path}" for path in (*paths, "/usr") if place and os.path.isdir(f"{place}{path}")]
    return ({"PYTHONPYCACHEPREFIX": place} if found else {}), found


def _folder() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "unbroken" / "bytecode"


def _installation() -> str:
    """Changes with the packages, so that another version is compiled ahead too."""
    stamps = []
    for name in ASKED:
        if (place := _package(name)) is not None:
            stamps.append(f"{place}{place.stat().st_mtime_ns}")
    return f"{zlib.crc32(''.join(stamps).encode()):08x}"


def _lacking() -> bool:
    """Whether a large package that is here was never compiled, and will not be."""
    for name in ASKED:
        place = _package(name)
        if place is None:
            continue
        if not Path(importlib.util.cache_from_source(str(place / "__init__.py"))).exists():
            folder = place / "__pycache__"
            writable = os.access(folder if folder.exists() else place, os.W_OK)
            return sys.dont_write_bytecode or not writable
    return False


def _package(name: str) -> Path | None:
    origin = _origin(name)
    return origin.parent if origin is not None else None


@cache
def _origin(name: str) -> Path | None:
    """The source of a package or module at the top; None where there is none."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


def files() -> Iterator[Path]:
    """What workers import, in the order in which they do: behind an importer that has to compile for itself nothing is gained."""
    seen: set[Path] = set()
    for file in (*_first(), *_rest()):
        if file not in seen:
            seen.add(file)
            yield file


def _first() -> Iterator[Path]:
    """Of each package in ORDER the files of its folder, without those below it."""
    lines = ORDER.read_text().splitlines()
    for name in " ".join(line for line in lines if not line.startswith("#")).split():
        top, *inner = name.split(".")
        origin = _origin(top)
        if origin is None:
            continue
        if origin.name != "__init__.py":
            yield origin
            continue
        place = origin.parent.joinpath(*inner)
        if place.is_dir():
            yield from sorted(place.glob("*.py"), key=lambda f: (f.name != "__init__.py", f.name))
        elif (file := place.with_suffix(".py")).is_file():
            yield file


def _rest() -> Iterator[Path]:
    """What another version, or another model, may need."""
    for name, parts in PARTS.items():
        place = _package(name)
        for part in parts if place is not None else ():
            assert place is not None
            found = place.glob("*.py") if part == "*" else (place / part).rglob("*.py")
            yield from (f for f in sorted(found) if not {"tests", "test", "testing"} & set(f.parts[-4:-1]))


def compile_files(paths: list[str]) -> int:
    """Compiles those that are not compiled, or takes what the installation has of them; how many."""
    done = 0
    for path in paths:
        target = importlib.util.cache_from_source(path)
        if os.path.exists(target):
            continue
        try:
            if not _take(path, target):
                py_compile.compile(path, target, doraise=True)
            done += 1
        except (py_compile.PyCompileError, OSError, SyntaxError, ValueError):
            continue  # importing it says what is wrong, if anybody does
    return done


def _take(path: str, target: str) -> bool:
    """Copies the bytecode that lies beside the source: with a folder of its own Python looks nowhere else."""
    folder, name = os.path.split(path)
    beside = Path(folder, "__pycache__", f"{name.removesuffix('.py')}.{sys.implementation.cache_tag}.pyc")
    try:
        data = beside.read_bytes()
    except OSError:
        return False
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    atomic.write_bytes(
        Path(target), data, durable=False
    )  # of an older source: Python sees that, and compiles
    return True


def main() -> int:
    """All of them, by all cores but one."""
    paths = [str(f) for f in files()]
    workers = max(1, len(os.sched_getaffinity(0)) - 1)
    with concurrent.futures.ProcessPoolExecutor(workers) as pool:
        list(pool.map(compile_files, [paths[i : i + STEP] for i in range(0, len(paths), STEP)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
