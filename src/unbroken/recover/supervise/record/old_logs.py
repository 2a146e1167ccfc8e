"""Keeps a run's logs within what it may keep of them: those of attempts that are over compressed, then removed.

The newest attempt and the one before it are never compressed: somebody may be reading them, and lines of a node without the
run directory may still arrive. Where they alone are too much, the middle of the longest is left out while they grow. What an incident quotes is kept with the incident, whatever becomes of the logs.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ....progress import RunDir
from ....progress.growing_logs import drop_middle, open_past_holes, used_bytes
from ....units import Bytes
from ....waiting import wait_within

_log = logging.getLogger("unbroken.supervisor")
_LEFT_AS_THEY_ARE = 2
_SMALL = 4096
"""A block of a file system: compressing less than that saves nothing."""
_PIECE = 4 << 20
_LEVEL = 4
_EVERY_S = 60.0
_SHARE = 100
"""Looking at all logs may take so small a part of the time."""
_SETTLE_S = 5.0
_LEAST_OF_ONE = 256 << 10
"""What is kept of one log at least."""


@dataclass(frozen=True)
class Tidied:
    """`compressed` files, whose bytes fell from `before` to `after`; the attempts whose logs were `removed`."""

    compressed: int = 0
    before: int = 0
    after: int = 0
    removed: tuple[int, ...] = ()


class OldLogs:
    """Tidies in a thread, one at a time; `close` ends that at once, and the next start goes on with it."""

    def __init__(self, run_dir: RunDir, keep: int, say: Callable[[str], None]) -> None:
        """`keep`: bytes that the logs of all attempts may take."""
        self._run_dir, self._keep, self._say = run_dir, keep, say
        self._turn = asyncio.Lock()
        self._cutting = threading.Lock()
        """Who leaves the middle of a log out does it alone: a thread goes on when nobody waits for it any more."""
        self._over = threading.Event()
        self._newest = 0
        self._bounding: asyncio.Task[None] | None = None
        self._refused = ""

    async def tidy(self, newest: int) -> None:
        """Once an attempt is launched, or taken over: what it leaves behind. From then on what grows is kept within its bounds too."""
        self._newest = newest
        if self._bounding is None:
            self._bounding = asyncio.create_task(self._bound_often())
        async with self._turn:
            done = await asyncio.to_thread(tidy_logs, self._run_dir, newest, self._keep, self._over)
        if done.removed:
            shown = ", ".join(map(str, done.removed))
            self._say(
                f"the logs of attempts {shown} were removed: all together they are above {Bytes(self._keep)} (--keep-logs)"
            )

    async def _bound_often(self) -> None:
        while True:
            began = time.monotonic()
            freed, refused = await asyncio.to_thread(self._bound)
            for path, size in freed.items():
                _log.info("%s: %s of its middle left out", path, Bytes(size))
            if refused and refused != self._refused:
                self._refused = refused
                self._say(
                    f"the logs are above {Bytes(self._keep)} (--keep-logs) and cannot be kept smaller: {refused}"
                )
            await asyncio.sleep(max(_EVERY_S, _SHARE * (time.monotonic() - began)))

    async def settle(self) -> None:
        """At the end of the run, which may have grown since it was last looked at: within its bounds once more. Nothing is compressed
        for it, and a file system that hangs holds up no end."""
        self.close()
        with contextlib.suppress(TimeoutError, OSError):
            await wait_within(self._settle(), _SETTLE_S)

    async def _settle(self) -> None:
        async with self._turn:  # whatever is compressed now ends at once
            await asyncio.to_thread(self._settle_now)

    def _bound(self) -> tuple[dict[Path, int], str]:
        with self._cutting:
            return bound_newest(self._run_dir, self._newest, self._keep)

    def _settle_now(self) -> None:
        if self._cutting.acquire(timeout=_SETTLE_S):
            try:
                settle_logs(self._run_dir, self._keep)
            finally:
                self._cutting.release()

    def close(self) -> None:
        self._over.set()
        if self._bounding is not None:
            self._bounding.cancel()


def tidy_logs(run_dir: RunDir, newest: int, keep: int, over: threading.Event | None = None) -> Tidied:
    """Compresses the ranks' logs of attempts before the newest two, then removes the oldest while all logs together are
    above `keep` bytes. Uses half a core at most, and ends soon once `over` is set. What cannot be done is tried again by
    the next call.
    """
    over = over or threading.Event()
    done = before = after = 0
    old = [n for n in run_dir.attempt_numbers() if n <= newest - _LEFT_AS_THEY_ARE]
    for number in old:
        for path in _list_logs(run_dir, number):
            try:
                if path.suffix == ".log" and (size := path.stat().st_size) > _SMALL:
                    smaller = _compress(path, over)
                    done, before, after = done + 1, before + size, after + smaller
            except OSError as e:
                _log.info("%s cannot be compressed: %s", path, e)
    return Tidied(done, before, after, tuple(_make_room(run_dir, old, keep)))


def bound_newest(run_dir: RunDir, newest: int, keep: int) -> tuple[dict[Path, int], str]:
    """Leaves the middle of the longest logs of the newest two attempts out, where all logs together take more than `keep` bytes.
    Returns what was freed of each, and why a file system refused that, "" where none did."""
    numbers = run_dir.attempt_numbers()
    sizes = {p: used_bytes(p) for n in numbers for p in _list_logs(run_dir, n)}
    if sum(sizes.values()) <= keep:
        return {}, ""
    growing = [
        p
        for n in numbers
        if n > newest - _LEFT_AS_THEY_ARE
        for p in _list_logs(run_dir, n)
        if p.suffix == ".log"
    ]
    each = max(_LEAST_OF_ONE, keep // max(1, len(growing)))
    freed, refused = {}, ""
    for path in (p for p in growing if sizes.get(p, 0) > each):
        try:
            # How a rank began says what it is; the rest is of use for what happened last.
            if size := drop_middle(path, each // 4, each // 2):
                freed[path] = size
        except OSError as e:
            refused = f"{path}: {e.strerror or e}"
    return freed, refused


def settle_logs(run_dir: RunDir, keep: int) -> None:
    """Leaves the middle of the newest logs out and removes the oldest, as far as all together are above `keep` bytes."""
    numbers = run_dir.attempt_numbers()
    newest = max(numbers, default=0)
    bound_newest(run_dir, newest, keep)
    old = [n for n in numbers if n <= newest - _LEFT_AS_THEY_ARE]
    for number in _make_room(run_dir, old, keep):
        _log.info("the logs of attempt %d were removed (--keep-logs)", number)


def _compress(path: Path, over: threading.Event) -> int:
    """Puts `path`.gz in its place, whole or not at all; its size. Raises OSError, also where it is over before."""
    aside, done = path.with_name(f".{path.name}.gz.aside"), path.with_name(f"{path.name}.gz")
    try:
        with open_past_holes(path) as source, gzip.open(aside, "wb", compresslevel=_LEVEL) as sink:
            began = time.monotonic()
            while piece := source.read(_PIECE):
                sink.write(piece)
                # The supervisor may share its host with ranks.
                if over.wait(min(1.0, time.monotonic() - began)):
                    raise InterruptedError("the supervisor ends")
                began = time.monotonic()
        shutil.copystat(path, aside)
        aside.replace(done)
    finally:
        aside.unlink(missing_ok=True)
    path.unlink()
    return done.stat().st_size


def _make_room(run_dir: RunDir, old: list[int], keep: int) -> Iterator[int]:
    """Removes the logs of the oldest attempts, until what is left is at most `keep` bytes; their numbers."""
    sizes = {n: sum(map(used_bytes, _list_logs(run_dir, n))) for n in run_dir.attempt_numbers()}
    total = sum(sizes.values())
    for number in old:
        if total <= keep:
            return
        if not sizes[number]:
            continue
        for path in _list_logs(run_dir, number):
            path.unlink(missing_ok=True)
        total -= sizes[number]
        yield number


def _list_logs(run_dir: RunDir, attempt: int) -> list[Path]:
    return sorted(run_dir.attempt(attempt).glob("*/rank-*.log*"))
