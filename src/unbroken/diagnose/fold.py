"""What is left of a log after its repeats, folded: dumps become one line that says how many, evidence stays.

Start-up fills logs with lines that come once each: shell traces, modules, arguments, packages, model printouts. None
repeats, so no template drops them. Here everything that is neither an event, nor near one, nor a warning, nor the
log's end is folded: a window keeps its first line and a count. Where a later launch prints the same settings again,
the fold says which differ. Memory is bounded whatever the log's length.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from .read.prefixes import take_apart
from .read.tracebacks import EXCEPTION, HEADER

EVENT, CONTEXT, METRIC, OTHER, AGAIN, TAIL = "event", "context", "metric", "other", "again", "tail"
BEFORE, AFTER, LAST = 3, 2, 12
_METRICS = 60  # lines of one kind that leap
_EACH_EVENT = 3
_EACH_WARNING, _WARNINGS = 1, 40
_TRACEBACK_LINES = 80
_FEWEST = 2
_KEYS = 5000
_TEMPLATES = 20_000
_DELETE = b"0123456789 .,:+-\t"
_SUSPECT = re.compile(
    r"(?i)\b(?:error|errors|fail(?:ed|ure)?|fatal|exception|abort(?:ed)?|killed|denied|refused|timed? ?out|unreachable|corrupt\w*|mismatch|not found|no such|cannot|could not|unable|lost|hang|hung|stuck|nan|overflow|oom)\b"
)
_SHELL = re.compile(
    r"^\s*(?:\++ |set [+-]|export |unset |alias |source |(?:if|fi|for|done|case|esac|else|then|local|return)\b)"
)
_SETTING = re.compile(
    r"""^\s*["']?(?:--)?([A-Za-z_][\w./\-]{1,60})["']?(?:\s*[.]{3,}\s*|\s*={1,2}\s*|:\s+)(\S.{0,160})$"""
)
_REPORT = re.compile(
    rb"^.{0,80}?\s{2}(?:host|rank|exitcode|traceback)\s+: "
)  # torchrun's summary of who failed
_REPORTS = 16
_LEVEL = re.compile(r"\b(?:WARN(?:ING)?|ERROR|CRITICAL|FATAL)\b|[A-Z]\w+Warning:")


class LineFolder:
    """Folds the lines that a `Compressor` kept. `texts` are a raw line's without decoration. `settings` (name -> value) are those of an earlier launch, if known;
    they are brought up to date."""

    def __init__(self, texts: Callable[[bytes], list[str]], settings: dict[str, str] | None = None) -> None:
        self._texts = texts
        self.settings = {} if settings is None else settings
        self.folded = 0
        self._window: list[tuple[int, bytes]] = []  # its first line only
        self._last: deque[tuple[int, bytes]] = deque(maxlen=LAST)
        self._size = 0
        self._same = 0
        self._differ: dict[str, tuple[str, str]] = {}
        self._events: dict[bytes, int] = {}
        self._warnings: dict[bytes, int] = {}
        self._follow = 0
        self._traceback = 0
        self._repeats = 0
        self._repeated = b""
        self._reports = 0

    def lines(self, kept: Iterable[tuple[int, bytes, str]]) -> Iterator[tuple[int, bytes, bool]]:
        """(number, line, whether it is a fold) of what remains."""
        number = 0
        for number, raw, kind in kept:
            if kind == TAIL or self._worth(raw, kind):
                yield from self._unfold(
                    number - BEFORE if kind == EVENT else number if kind != TAIL else number - LAST
                )
                yield number, raw, False
            else:
                self._put(number, raw)
        yield from self._unfold(number - LAST + 1)

    def _worth(self, raw: bytes, kind: str) -> bool:
        """Whether a line stays as it is."""
        if kind == METRIC:
            key = raw[:200].translate(None, _DELETE + b"eE")[:24]
            seen = self._events[key] = self._events.get(key, 0) + 1
            return seen <= _METRICS
        if kind == EVENT:
            key = raw[:4000].translate(None, _DELETE)
            seen = self._events.get(key, 0) + 1
            if len(self._events) < _TEMPLATES:
                self._events[key] = seen
            if seen > _EACH_EVENT:
                self._traceback = 0
                self._repeats += 1
                self._repeated = self._repeated or raw
                return False
            if HEADER.encode() in raw:
                self._traceback = _TRACEBACK_LINES if seen == 1 else 0
            else:
                self._traceback = 0
            self._follow = AFTER if seen == 1 else 0
            return True
        if self._traceback:
            self._traceback -= 1
            if any(EXCEPTION.match(take_apart(t, 2000).body) for t in self._texts(raw)):
                self._traceback, self._follow = 0, AFTER
            return True
        if self._follow > 0:
            self._follow -= 1
            return True
        if self._reports < _REPORTS and b" : " in raw and _REPORT.match(raw[:400]):
            self._reports += 1
            return True
        if kind == AGAIN:
            return False
        return self._warns(raw)

    def _warns(self, raw: bytes) -> bool:
        """Whether a line complains in words of its own that were not seen before."""
        text = raw[:600].decode("utf-8", "replace")
        if _SHELL.match(text) or not (_LEVEL.search(text) or _SUSPECT.search(text)):
            return False
        if len(self._warnings) >= _WARNINGS and not _SUSPECT.search(text):
            return False
        key = raw[:400].translate(None, _DELETE)[:80]
        seen = self._warnings.get(key, 0)
        if seen < _EACH_WARNING and len(self._warnings) < 4 * _WARNINGS:
            self._warnings[key] = seen + 1
            return True
        return False

    def _put(self, number: int, raw: bytes) -> None:
        self._size += 1
        if not self._window:
            self._window.append((number, raw))
        self._last.append((number, raw))
        m = _SETTING.match(raw[:300].decode("utf-8", "replace"))
        if m and not raw.lstrip().startswith(b"+"):
            name, value = m.group(1), m.group(2).strip()
            old = self.settings.get(name)
            if old == value:
                self._same += 1
            elif old is not None and len(self._differ) < 200:
                self._differ.setdefault(name, (old, value))
            if old is not None or len(self.settings) < _KEYS:
                self.settings[name] = value

    def _unfold(self, keep_from: int) -> Iterator[tuple[int, bytes, bool]]:
        """The fold of the window that ends here; its lines from number `keep_from` on stay."""
        if not self._size:
            return
        first, head = self._window[0]
        keep = [x for x in self._last if x[0] >= keep_from]
        count = self._size - len(keep)
        if 0 < count < _FEWEST:
            yield first, head, False
        elif count:
            self.folded += count
            yield first, self._say(first, head, count), True
        yield from ((n, raw, False) for n, raw in keep if n != first or count <= 0)
        self._window.clear()
        self._last.clear()
        self._size = self._same = self._repeats = 0
        self._repeated = b""
        self._differ.clear()

    def _say(self, first: int, head: bytes, count: int) -> bytes:
        what = (self._repeated or head)[:90].decode("utf-8", "replace").strip()
        parts = [f"{count} lines folded from line {first}"]
        if self._repeats:
            parts.append(f"{self._repeats} more like '{what}'")
        else:
            parts.append(f"'{what}' and so on")
        if self._same >= 5 and 2 * len(self._differ) <= self._same:
            rows = [f"{k} {a[:40]} -> {b[:40]}" for k, (a, b) in list(self._differ.items())[:8]]
            parts.append("as in the last launch" + (", but " + ", ".join(rows) if rows else ""))
        return ("[... " + "; ".join(parts) + "]").encode()
