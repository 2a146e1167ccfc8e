"""Tracebacks put together line by line, per writer: whichever exception ended each, and how they hang together.

Read by structure: chained exceptions, the 'Original Traceback' that a DataLoader carries in its message, the remote
tracebacks of process pools (between triple quotes), exception groups in their margins, and tracebacks whose
indentation a launcher lost. What a traceback quotes of somebody's program (`quoted`) is swallowed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

HEADER = "Traceback (most recent call last)"
EXCEPTION = re.compile(
    r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Timeout|Failure|Fault|Disconnected|Expired|Warning|NotFound|OutOfMemory|Unavailable|Traceback|Group|Exceeded|Denied|Forbidden|Unauthorized)\b(?:\(.{0,80}\))?(?:: |:$|$)"
)
_LAST = re.compile(r"^[A-Za-z_][\w.]*(?::|$|\()")  # an exception's own class may be called anything
_FLAT_LAST = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:: |:?$)")
_FRAME = re.compile(r'^\s+File "([^"]+)", line \d+, in (\S+)')
_FLAT_FRAME = re.compile(r'^File "([^"]+)", line \d+(?:, in (\S+))?')
_CARETS = re.compile(r"^[~^\s]+$")
_MARGIN = re.compile(r"^\s{1,60}[|+](?: |$|-)")
_BRANCH = re.compile(r"^\s*\+-[+-]")
_CHAIN = ("The above exception was the direct cause", "During handling of the above exception")
_MOST_LINES = 400


@dataclass(frozen=True)
class Reported:
    """The last line of a traceback: `chain` counts the exceptions before it in one chain, `chained` says how they
    hang together ('cause', 'context'), `frames` are `file:function`, `group` says it is one of an exception group."""

    body: str
    chain: int = 0
    chained: str | None = None
    frames: tuple[str, ...] = ()
    group: bool = False
    quoted: bool = False


@dataclass
class _Open:
    """A traceback that is being put together. `flat`: its indentation was lost; `group`: it has a margin."""

    chain: int = 0
    chained: str | None = None
    frames: list[str] = field(default_factory=list)
    lines: int = 0
    indent: int = 0
    flat: bool = False
    code: bool = False  # flat only: the next line is the frame's source
    group: bool = False
    quoted: bool = False


class Tracebacks:
    """The tracebacks of one log, by the stream that writes them."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._chains: dict[str, tuple[int, str | None]] = {}

    @property
    def following(self) -> bool:
        """Whether the next lines may belong to one."""
        return bool(self._open or self._chains)

    def feed(self, body: str, key: str, quoted: bool = False) -> Reported | bool:
        """Takes in one line of the stream `key`: the exception that ends a traceback, or whether it belongs to one.

        `quoted` says of a header that it stands in somebody's text."""
        if HEADER in body:
            self._start(body, key, quoted)
            return True
        tb = self._open.get(key)
        if tb is None:
            return self._between(body, key)
        if tb.group:
            inner = _MARGIN.match(body)
            if inner is None and not body.strip():
                return True
            if inner is None:
                del self._open[key]
                return False
            if _BRANCH.match(body):
                tb.frames, tb.lines = [], 0
                return True
            body = (
                body[body.index("|") + 1 :].removeprefix(" ")
                if "|" in body[: inner.end()]
                else body[inner.end() :]
            )
        return self._within(tb, body, key)

    def _start(self, body: str, key: str, quoted: bool) -> None:
        group = "Exception Group Traceback" in body or (key in self._open and self._open[key].group)
        chain, how = (0, None) if group else self._chains.pop(key, (0, None))
        before = self._open.get(key)
        indent = len(body) - len(body.lstrip(" ")) if body[:1] == " " and not group else 0
        quoted = quoted or (before is not None and before.quoted and before.lines < 3)
        self._open[key] = _Open(chain if how else 0, how, indent=indent, group=group, quoted=quoted)

    def _between(self, body: str, key: str) -> bool:
        """A line after the end of a traceback: what chains the next one to it, or something else."""
        if key not in self._chains:
            return False
        text = body.strip()
        if text.startswith(_CHAIN):
            self._chains[key] = (self._chains[key][0], "cause" if text[:3] == "The" else "context")
            return True
        if text.strip("\"'") and self._chains[key][1] is None and not body[:1].isspace():
            del self._chains[key]
        return False

    def _within(self, tb: _Open, body: str, key: str) -> Reported | bool:
        tb.lines += 1
        if not body.strip():
            return True
        flat = _FLAT_FRAME.match(body)
        if flat and (tb.flat or tb.lines <= 2):
            tb.flat = tb.code = True
            tb.frames.append(f"{flat.group(1)}:{flat.group(2) or ''}")
            return True
        if tb.flat:
            if _CARETS.match(body):
                return True
            if not EXCEPTION.match(body) and (tb.code or not _FLAT_LAST.match(body)):
                tb.code = False
                return tb.lines < _MOST_LINES or not self._open.pop(key, None)
            return self._ended(tb, body, key)
        if tb.indent and body[: tb.indent].isspace() and EXCEPTION.match(body[tb.indent :]):
            body = body[tb.indent :]
        if body[0] in " \t|+│╭╰┌└":
            m = _FRAME.match(body)
            if m:
                tb.frames.append(f"{m.group(1)}:{m.group(2)}")
            return tb.lines < _MOST_LINES or not self._open.pop(key, None)
        if tb.lines < 3 and not EXCEPTION.match(body):
            return False  # another writer's line in between
        if not tb.frames and not EXCEPTION.match(body):
            del self._open[key]
            return False
        if not EXCEPTION.match(body) and not _LAST.match(body):
            return False
        return self._ended(tb, body, key)

    def _ended(self, tb: _Open, body: str, key: str) -> Reported:
        if tb.group:
            tb.frames, frames, tb.lines = [], tuple(tb.frames[-40:]), 0  # more of the group may follow
            return Reported(body, 0, None, frames, True, tb.quoted)
        del self._open[key]
        self._chains[key] = (tb.chain + 1, None)
        return Reported(body, tb.chain, tb.chained, tuple(tb.frames[-40:]), False, tb.quoted)
