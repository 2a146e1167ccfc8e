"""What keeps a rehearsal from touching real files, and what makes time and chance stand still. No torch."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_CHANGING = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree", "shutil.move")
_NAMING = ("os.rename", "os.link", "os.symlink", "shutil.move")
"""Their second argument is a name that is made, or that is another file's from then on."""


class WouldOverwrite(RuntimeError):
    """The script would have written to files that are not the rehearsal's."""


class Guard:
    """Refuses what would change files below `protected`, but in `allowed` and caches of bytecode.

    It sees what Python itself opens, renames and removes, torch.save and safetensors; not what other native code writes.
    """

    def __init__(self, protected: str, allowed: str, say: Callable[[str], None]) -> None:
        self._protected = os.path.realpath(protected) if protected else ""
        self._allowed = os.path.realpath(allowed) if allowed else ""
        self._say = say
        self._busy: set[int] = set()
        """Threads that are inside of a check: what it does itself is not looked at."""

    def install(self) -> None:
        """For the life of the process, and of those that it forks."""
        if self._protected:
            sys.addaudithook(self._audit)

    def check(self, path: Any) -> None:
        """Raises WouldOverwrite for a path that is not to be written."""
        if real := _real(path):
            self._check_real(real)

    def check_save(self, path: Any) -> None:
        """As `check`, for a checkpoint: it may lie nowhere but in the rehearsal's folder, a cache or a folder for temporary
        files. Beside those of the real training, wherever they are, it would be taken for one of them."""
        if not (real := _real(path)):
            return
        self._check_real(real)
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        free = [f for f in (self._allowed, tempfile.gettempdir(), cache) if f]
        if self._protected and not any(_is_below(real, os.path.realpath(f)) for f in free):
            self._refuse(real)

    def _check_name(self, path: Any) -> None:
        """As `check`, for a name that may be a link's: it is replaced itself, not what it points to."""
        try:
            folder, name = os.path.split(os.fsdecode(path))
        except TypeError:
            return
        self._check_real(os.path.join(os.path.realpath(folder), name))

    def _check_real(self, real: str) -> None:
        if not self._protected or (self._allowed and _is_below(real, self._allowed)):
            return
        if _is_below(real, self._protected) and "__pycache__" not in real:
            self._refuse(real)

    def _refuse(self, real: str) -> None:
        why = (
            f"the script writes to {real}, which is not the rehearsal's: write {{dir}} in its arguments where it is "
            "told its folder for output, such as `-- train.py --out {dir}`"
        )
        self._say(why)
        raise WouldOverwrite(why)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            if not isinstance(path, str | bytes | os.PathLike):
                return
            writes = (
                any(c in mode for c in "wax+") if isinstance(mode, str) else bool((flags or 0) & _WRITING)
            )
        elif event in _CHANGING or event in _NAMING:
            path, writes = args[0], event in _CHANGING
        else:
            return
        thread = threading.get_ident()
        if thread in self._busy:
            return
        self._busy.add(thread)
        try:
            if writes:
                self.check(path)
            if event in _NAMING:
                self._check_name(args[1])
        finally:
            self._busy.discard(thread)


def _real(path: Any) -> str:
    """Where a path leads; empty for what is none, such as a descriptor."""
    try:
        return os.fsdecode(os.path.realpath(os.fspath(path)))
    except (TypeError, ValueError):
        return ""


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def fix_entropy() -> None:
    """Whatever asks the system for chance gets the same in every process."""
    import random
    import secrets
    import uuid

    import numpy as np
    import torch

    state = [0]

    def same(n: int) -> bytes:
        state[0] += 1
        return random.Random(state[0]).randbytes(n)

    seed = random.Random.seed
    default = np.random.default_rng

    class Fixed(np.random.RandomState):
        def __init__(self, seed: Any = None) -> None:
            super().__init__(0 if seed is None else seed)

    _replace(
        random.Random, "seed", lambda self, a=None, version=2: seed(self, 0 if a is None else a, version)
    )
    _replace(random.Random, "__init__", lambda self, x=None: self.seed(x))
    _replace(random, "seed", random.random.__self__.seed)  # type: ignore[attr-defined]
    _replace(os, "urandom", same)
    _replace(random, "_urandom", same)
    _replace(secrets, "token_bytes", lambda nbytes=None: same(nbytes or 32))
    _replace(uuid, "uuid4", lambda: uuid.UUID(bytes=same(16), version=4))
    _replace(np.random, "default_rng", lambda seed=None: default(0 if seed is None else seed))
    _replace(np.random, "RandomState", Fixed)
    _replace(torch, "seed", lambda: torch.manual_seed(0).initial_seed())
    random.seed(0)
    np.random.seed(0)


FROZEN = 1_750_000_000.0


def freeze_time() -> None:
    """The clock that tells the time of day stands still. Those that measure durations go on for libraries; for the script they
    move by a millisecond with each look, and by what it sleeps: a script that divides by what it measured, or waits in a loop,
    still runs, and finds the same each time."""
    import datetime
    import time

    from .collect import is_library

    real: Any = datetime.datetime
    gmtime, localtime = time.gmtime, time.localtime

    class Frozen(real):  # type: ignore[misc]
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return real.fromtimestamp(FROZEN, tz)

        @classmethod
        def utcnow(cls) -> Any:
            return real.fromtimestamp(FROZEN, datetime.UTC).replace(tzinfo=None)

        @classmethod
        def today(cls) -> Any:
            return real.fromtimestamp(FROZEN)

    shown = threading.local()

    def counted(clock: Callable[[], Any], per_ms: Any) -> Callable[[], Any]:
        def now() -> Any:
            if is_library(sys._getframe(1).f_code.co_filename):
                return clock()
            return advance(1) * per_ms

        return now

    def advance(ms: int) -> int:
        shown.ms = getattr(shown, "ms", 0) + ms
        return int(shown.ms)

    sleep = time.sleep

    def slept(seconds: float) -> None:
        sleep(seconds)
        if not is_library(sys._getframe(1).f_code.co_filename):
            advance(round(seconds * 1e3))

    _replace(time, "sleep", slept)
    for name in ("monotonic", "perf_counter", "process_time"):
        _replace(time, name, counted(getattr(time, name), 1e-3))
        _replace(time, f"{name}_ns", counted(getattr(time, f"{name}_ns"), 10**6))
    _replace(datetime, "datetime", Frozen)
    _replace(time, "time", lambda: FROZEN)
    _replace(time, "time_ns", lambda: int(FROZEN * 1e9))
    _replace(time, "gmtime", lambda s=None: gmtime(FROZEN if s is None else s))
    _replace(time, "localtime", lambda s=None: localtime(FROZEN if s is None else s))


def _replace(holder: Any, name: str, value: Any) -> None:
    setattr(holder, name, value)
