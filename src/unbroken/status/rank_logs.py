"""What the ranks of a run printed: which files there are, their last lines, and their new lines while they grow."""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..cluster.holding.processes import marked
from ..errors import UnbrokenError
from ..progress import RunDir, read_journal, read_spec, read_terms
from ..progress.growing_logs import open_past_holes
from .gather import status_of

_NAME = re.compile(r"rank-(\d+)\.log(\.gz)?")
_BLOCK = 1 << 16
_LINE_MAX = 1 << 20
"""Characters of a line without an end that are kept back while one follows; then they are shown as they are."""
_POLL_S = 0.1
_LOOK_S = 0.5
"""How often a follower looks for new attempts, new ranks and the end of the run."""
_LEAVE_S = 5.0
"""What ranks whose lease has ended may still say, and how long that may be under way."""


@dataclass(frozen=True)
class Wanted:
    """The ranks that somebody asks for: these ranks (none: all), of this node (None: of all)."""

    ranks: frozenset[int] = frozenset()
    node: str | None = None

    def has(self, log: RankLog) -> bool:
        return (not self.ranks or log.rank in self.ranks) and self.node in (None, log.node)

    def text(self) -> str:
        ranks = f"rank {', '.join(map(str, sorted(self.ranks)))}" if self.ranks else "any rank"
        return ranks + (f" on {self.node}" if self.node else "")


@dataclass(frozen=True)
class RankLog:
    """What one rank printed in one attempt. A path that ends in .gz is of an attempt that was compressed."""

    attempt: int
    node: str
    rank: int
    path: Path


def rank_logs(run_dir: RunDir, attempt: int, wanted: Wanted = Wanted()) -> list[RankLog]:
    """The logs of an attempt that are there, by rank."""
    found = []
    for path in run_dir.attempt(attempt).glob("*/rank-*.log*"):
        if name := _NAME.fullmatch(path.name):
            found.append(RankLog(attempt, path.parent.name, int(name[1]), path))
    return sorted((x for x in found if wanted.has(x)), key=lambda x: (x.rank, x.node))


def read_tail(log: RankLog, lines: int | None) -> Iterator[str]:
    """The last lines of a log, without their ends; all for None. Reads a plain file from its end. Raises OSError."""
    if log.path.suffix == ".gz":
        with gzip.open(log.path, "rb") as f:
            yield from map(_text, f if lines is None else deque(f, maxlen=lines))
        return
    with open_past_holes(log.path) if lines is None else open(log.path, "rb") as f:
        if lines is not None:
            f.seek(_start_of_last(f, lines))
        yield from map(_text, f)


def _start_of_last(f: BinaryIO, lines: int) -> int:
    """Where the last so many lines of a file begin."""
    at = f.seek(0, os.SEEK_END)
    if lines == 0:
        return at
    left = lines + 1  # the end of the file is no line of its own: the last line's end is counted too
    f.seek(max(0, at - 1))
    left -= f.read(1) != b"\n"
    while at > 0:
        step = min(_BLOCK, at)
        at = f.seek(at - step)
        block = f.read(step)
        end = step
        while (end := block.rfind(b"\n", 0, end)) >= 0:
            left -= 1
            if left == 0:
                return at + end + 1
    return 0


def follow_logs(
    run_dir: RunDir,
    wanted: Wanted,
    lines: int | None,
    show: Callable[[str, int | None], None],
    say: Callable[[str], None],
) -> None:
    """Shows the last lines of the newest attempt and what follows, over restarts and other supervisors, until the run ends or,
    of one whose supervisor is gone, nothing can come any more.

    `lines`: of each log that is there at the start, None for all. `show` gets each line with its rank (None where there
    is one rank only), `say` a new attempt, the loss of the supervisor and the end of the run.
    """
    alone = _Unsupervised(run_dir)
    followed: dict[Path, _Growing] = {}
    attempt = max(run_dir.attempt_numbers(), default=0)
    first = True
    next_look = 0.0
    ended = None
    while ended is None:
        now = time.monotonic()
        if now >= next_look:
            next_look = now + _LOOK_S
            ended = alone.look(say)
            newest = max(run_dir.attempt_numbers(), default=0)
            for growing in followed.values() if newest > attempt else ():
                growing.last = True
            if newest > attempt:
                say(f"attempt {newest}")
                attempt = newest
            for log in rank_logs(run_dir, attempt, wanted):
                if log.path not in followed and log.path.suffix != ".gz":
                    followed[log.path] = _Growing(log, lines if first else None)
            first = False
        several = len({g.log.rank for g in followed.values()}) > 1
        for growing in list(followed.values()):
            for line in growing.read(whole=not (growing.last or ended)):
                show(line, growing.log.rank if several else None)
            if growing.last or ended:
                growing.close()
                del followed[growing.log.path]
        if ended is None:
            time.sleep(_POLL_S)
    say(ended)


class _Unsupervised:
    """Says how a run ended, and whether something can still come of one whose supervisor is gone: its ranks train on until
    their lease ends, and another supervisor may take them over."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._told = False
        self._supervised = float("-inf")
        """When it last had a supervisor, or was not known to have none."""

    def look(self, say: Callable[[str], None]) -> str | None:
        """How it ended, in words; None while it goes on or has not begun."""
        status, why = status_of(read_journal(self._run_dir).records, read_terms(self._run_dir))
        if status in ("new", "running"):
            self._supervised = time.time()
            if self._told:
                say("another supervisor has taken over")
                self._told = False
            return None
        ended = f"the run is {status}" + (f": {why}" if why else "")
        if status != "abandoned":
            return ended
        try:
            spec = read_spec(self._run_dir.spec)
        except (OSError, UnbrokenError):
            return ended
        silent = time.time() - max(self._supervised, self._last_line())
        if silent > float(spec.timeouts.lease) + _LEAVE_S and not _has_ranks(spec.run_id):
            return ended
        if not self._told:
            say(
                f"{why}: its ranks go on until their lease of {spec.timeouts.lease} ends, or another supervisor takes them over"
            )
            self._told = True
        return None

    def _last_line(self) -> float:
        """When a rank of the newest attempt last printed something, seconds since the epoch."""
        newest = max(self._run_dir.attempt_numbers(), default=0)
        times = [float("-inf")]
        for log in rank_logs(self._run_dir, newest):
            with contextlib.suppress(FileNotFoundError):  # it was compressed meanwhile
                times.append(log.path.stat().st_mtime)
        return max(times)


def _has_ranks(run_id: str) -> bool:
    """Whether ranks of the run are on this machine."""
    return Path("/proc").is_dir() and any(p.role == "rank" for p in marked(run_id))


class _Growing:
    """One log that grows, read line by line from the last so many lines on (None: from its beginning)."""

    def __init__(self, log: RankLog, lines: int | None) -> None:
        self.log = log
        self.last = False
        """Its attempt is over: it is read once more."""
        self._file = open_past_holes(log.path) if lines is None else open(log.path, "rb")  # noqa: SIM115  closed by its follower
        if lines is not None:
            self._file.seek(_start_of_last(self._file, lines))
        self._rest = b""

    def read(self, *, whole: bool) -> list[str]:
        """The lines that came; `whole`: a last one without an end is kept back until it has one."""
        lines = (self._rest + self._file.read()).split(b"\n")
        self._rest = lines.pop()
        if self._rest and (not whole or len(self._rest) > _LINE_MAX):
            lines.append(self._rest)
            self._rest = b""
        return [_text(x) for x in lines]

    def close(self) -> None:
        self._file.close()


def _text(line: bytes) -> str:
    return line.rstrip(b"\r\n").decode(errors="replace")
