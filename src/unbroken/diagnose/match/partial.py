"""Logs read within a bound of time or bytes: the head and the tail of each first, then backwards from the tails.

What was not read is counted, per log, so that the verdict can say it. Line numbers behind a part that was not read
are estimates for ordering only (`FileScan.exact`), and are not shown.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...errors import InputError, MissingExtra
from ...progress.records.verdict import Root, Verdict
from ..read.sources import LONGEST_LINE, Source, blocks, opened, seekable
from .events import FileScan, LogEnd
from .scan import Scanner

_PIECE = 1 << 20
_CHUNK = 4 << 20
_SMALLEST_HEAD, _LARGEST_HEAD = 4 << 10, 4 << 20
_TAIL = 3  # times as long as the head
_GUESS_PER_S = 20 << 20  # for the size of heads and tails where only a time is given
_FOR_READING = 0.8  # of the time; the rest is for putting events in order
_MOST_SURE = 0.75


@dataclass(frozen=True)
class Limits:
    """How much of the logs may be read: `seconds` on the clock from the call, `bytes` of (unpacked) text over all
    logs. None bounds nothing."""

    seconds: float | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        if (self.seconds is not None and not self.seconds > 0) or (self.bytes is not None and self.bytes < 1):
            raise InputError("limits of a diagnosis have to be above 0", where=f"{self}")


@dataclass
class _Part:
    """What one scanner saw of a log: from byte `start` to byte `end`, of `lines` lines before it if known."""

    start: int
    end: int
    scan: FileScan


@dataclass
class _Log:
    source: Source
    index: int
    parts: list[_Part] = field(default_factory=list)
    gap: tuple[int, int] = (0, 0)  # bytes not read (yet)
    gap_lines: int | None = None  # lines of the gap, where it was passed over and counted


class _Budget:
    """What is left of the limits of a call that began at `since` (monotonic seconds)."""

    def __init__(self, limits: Limits, since: float) -> None:
        self.until = None if limits.seconds is None else since + _FOR_READING * limits.seconds
        self.left = limits.bytes
        self.ran_out = ""

    def out(self) -> bool:
        """Whether nothing more may be read."""
        if self.left is not None and self.left <= 0:
            self.ran_out = self.ran_out or "bytes"
        elif self.until is not None and time.monotonic() >= self.until:
            self.ran_out = self.ran_out or "seconds"
        return bool(self.ran_out)

    def spend(self, count: int) -> None:
        if self.left is not None:
            self.left -= count


def scan_within(
    logs: Sequence[Source], scanner: Callable[[Source, int], Scanner], limits: Limits, since: float
) -> tuple[list[FileScan], str]:
    """The scans of `logs` in order, as far as `limits` allow to a call that began at `since` (monotonic seconds), and
    which limit ran out ('', 'seconds', 'bytes')."""
    budget = _Budget(limits, since)
    head = _head_size(limits, len(logs))
    every = [_Log(source, i) for i, source in enumerate(logs)]
    streams = [log for log in every if not seekable(log.source)]
    for log in every:
        if log not in streams:
            _head_and_tail(log, scanner, budget, head)
    for i, log in enumerate(streams):
        _stream(log, scanner, budget, head, len(streams) - i)
    _middles([log for log in every if log not in streams], scanner, budget)
    return [_joined(log) for log in every], budget.ran_out


def tell(verdict: Verdict, scans: Sequence[FileScan], ran_out: str, limits: Limits) -> Verdict:
    """The verdict with what was not read, no line numbers that are guesses, and no more certainty than that allows."""
    unread = sum(s.unread for s in scans)
    if not unread:
        return verdict
    read = sum(s.log_end.bytes for s in scans)
    exact = {s.name: s.exact for s in scans if s.exact is not None}
    bound = f"{limits.seconds:g} s" if ran_out == "seconds" else f"{_size(limits.bytes or 0)}"
    logs = sum(1 for s in scans if s.unread)
    note = (
        f"not everything was read: {_size(unread)} of {_size(unread + read)}, in {logs} of {len(scans)} logs, "
        f"are left out by the limit of {bound}; an earlier cause may lie there"
    )
    sure = min(verdict.confidence, _MOST_SURE) if verdict.reason is not None else verdict.confidence
    return replace(
        verdict, unread=unread, confidence=sure, notes=(*verdict.notes, note), evidence=tuple(_shown(r, exact) for r in verdict.evidence),
        root=_shown(verdict.root, exact) if verdict.root else None,
    )  # fmt: skip


def _shown(root: Root, exact: dict[str, int]) -> Root:
    last = exact.get(root.file or "")
    return replace(root, line=None) if last is not None and (root.line or 0) > last else root


def _size(count: int) -> str:
    value = float(count)
    for unit in ("bytes", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


def _head_size(limits: Limits, logs: int) -> int:
    amounts = [
        limits.bytes,
        int(limits.seconds * _FOR_READING * _GUESS_PER_S) if limits.seconds is not None else None,
    ]
    least = min(a for a in (*amounts, 1 << 62) if a is not None)
    return max(_SMALLEST_HEAD, min(_LARGEST_HEAD, least // (2 * (1 + _TAIL) * max(1, logs))))


def _head_and_tail(log: _Log, scanner: Callable[[Source, int], Scanner], budget: _Budget, head: int) -> None:
    size = log.source.bytes
    if size <= (1 + _TAIL) * head:
        _scan(log, scanner, budget, 0, None)
        return
    first, last = _line_start(log.source, head), _line_start(log.source, size - _TAIL * head)
    # The tail goes first: it says how the job ended, should the time run out between the two.
    _scan(log, scanner, budget, last, None)
    _scan(log, scanner, budget, 0, first)


def _scan(
    log: _Log, scanner: Callable[[Source, int], Scanner], budget: _Budget, start: int, end: int | None
) -> None:
    """Scans the bytes from `start` to `end` (None: to the end of the file), as far as the budget reaches."""
    s = scanner(log.source, log.index)
    at = start
    if not budget.out():
        for piece in _range(log.source, start, end, s.out.notes):
            budget.spend(len(piece))
            s.feed(piece)
            at += len(piece)
            if budget.out():
                break
    scan = s.finish()
    goal = end if end is not None else max(log.source.bytes, at)
    if at < goal and not budget.ran_out:
        goal = at  # it could not be read; a note says so
    log.parts.append(_Part(start, at, scan))
    log.parts.sort(key=lambda p: p.start)
    if end is None:
        log.parts[-1].scan.unread = goal - at


def _middles(logs: Sequence[_Log], scanner: Callable[[Source, int], Scanner], budget: _Budget) -> None:
    """What lies between heads and tails, backwards from the tails, log by log in turn."""
    waiting = [log for log in logs if len(log.parts) == 2]
    for log in waiting:
        log.gap = (log.parts[0].end, log.parts[1].start)
    while waiting and not budget.out():
        for log in waiting:
            low, high = log.gap
            if budget.out():
                break
            chunk = _CHUNK if budget.left is None else max(64 << 10, min(_CHUNK, budget.left))
            start = low if high - low <= chunk else min(high, _line_start(log.source, high - chunk))
            if start >= high:
                start = low
            _scan(log, scanner, budget, start, high)
            part = next(p for p in log.parts if p.start == start and p.scan is not log.parts[0].scan)
            if part.end < high and budget.ran_out:
                log.parts.remove(part)  # cut short: a hole on both its sides helps nobody
                break
            log.gap = (low, start)
        waiting = [log for log in waiting if log.gap[0] < log.gap[1]]


def _stream(
    log: _Log, scanner: Callable[[Source, int], Scanner], budget: _Budget, least: int, left: int
) -> None:
    """A log that can only be read forwards: its head as far as its share goes, the rest passed over, then its end."""
    s = scanner(log.source, log.index)
    now = time.monotonic()
    until = None if budget.until is None else now + max(0.0, budget.until - now) * 0.6 / left
    room = None if budget.left is None else max(least, budget.left // left - _TAIL * least)
    rest: deque[bytes] = deque()
    head = passed = passed_lines = kept = 0
    whole = True
    for piece in blocks(log.source, s.out.notes, _PIECE):
        if (
            whole
            and not budget.out()
            and (room is None or head < room)
            and (until is None or time.monotonic() < until)
        ):
            budget.spend(len(piece))
            s.feed(piece)
            head += len(piece)
            continue
        whole = False
        if budget.until is not None and time.monotonic() >= budget.until:
            budget.out()
            passed += kept + len(piece)
            rest.clear()
            log.gap_lines = None
            log.parts.append(_Part(0, head, s.finish()))
            # How much more there is, nobody knows without reading it.
            log.parts[0].scan.unread = max(1, passed)
            return
        rest.append(piece)
        kept += len(piece)
        while kept - len(rest[0]) >= _TAIL * least:
            gone = rest.popleft()
            kept -= len(gone)
            passed += len(gone)
            passed_lines += gone.count(b"\n")
    log.parts.append(_Part(0, head, s.finish()))
    if rest:
        if passed and not budget.ran_out:
            budget.ran_out = "bytes" if until is None else "seconds"
        tail = scanner(log.source, log.index)
        for piece in rest:
            tail.feed(piece)
        log.parts.append(_Part(head + passed, head + passed + kept, tail.finish()))
        log.gap, log.gap_lines = (head, head + passed), passed_lines


def _range(source: Source, start: int, end: int | None, notes: list[str]) -> Iterator[bytes]:
    """Bytes `start` to `end` of a plain file in pieces that end with a whole line."""
    assert source.path is not None
    if start == 0 and end is None:
        yield from blocks(source, notes, _PIECE)
        return
    rest = b""
    try:
        with source.path.open("rb") as f:
            f.seek(start)
            left = end - start if end is not None else None
            while left is None or left > 0:
                data = f.read(_PIECE if left is None else min(_PIECE, left))
                if not data:
                    break
                left = None if left is None else left - len(data)
                cut = data.rfind(b"\n") + 1
                if cut == 0 and len(rest) + len(data) < LONGEST_LINE:
                    rest += data
                    continue
                cut = cut or len(data)
                yield rest + data[:cut]
                rest = data[cut:]
    except OSError as e:
        notes.append(f"{source.name} could not be read to its end: {e.strerror or e}")
    if rest:
        yield rest


def _line_start(source: Source, at: int) -> int:
    """Where the next line at or after byte `at` begins; `at` itself within a line of more than a megabyte."""
    try:
        with opened(source) as f:
            f.seek(at - 1)
            end = f.read(LONGEST_LINE).find(b"\n")
    except (OSError, MissingExtra):
        return at
    return at if end < 0 else at + end


def _joined(log: _Log) -> FileScan:
    """The parts of a log as one scan, lines counted through."""
    out = FileScan(log.index, log.source.name, log.source.rank)
    lines = count = 0
    for i, part in enumerate(log.parts):
        scan = part.scan
        hole = part.start - log.parts[i - 1].end if i else part.start
        if hole:
            if i and log.gap_lines is not None:
                lines += log.gap_lines
            else:
                out.exact = lines if out.exact is None else out.exact
                lines += max(1, int(hole * (lines + 1) / max(1, count)) if count else hole // 100)
            out.unread += hole
        out.unread += scan.unread
        last = i == len(log.parts) - 1
        out.events += [replace(e, line=e.line + lines) for e in scan.events if last or e.rule.where != "tail"]
        out.complaints += [(c[0] + lines, *c[1:]) for c in scan.complaints]
        out.last_lines = [(n + lines, text, when) for n, text, when in scan.last_lines]
        out.machine = scan.machine and (out.machine or not i)
        out.progress += [replace(p, line=p.line + lines) for p in scan.progress]
        out.idle_gpus += [(a, b, c, n + lines, text) for a, b, c, n, text in scan.idle_gpus]
        out.busy_gpus += scan.busy_gpus
        out.counted += scan.counted
        out.notes += [n for n in scan.notes if n not in out.notes]
        end = scan.log_end
        out.log_end = LogEnd(**(end.__dict__ | {"last_line": end.last_line + lines, "stamps": [(n + lines, t) for n, t in end.stamps]}))  # fmt: skip
        lines += end.lines
        count += end.bytes
    out.log_end.lines, out.log_end.bytes = lines, count
    return out
