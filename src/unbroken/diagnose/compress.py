"""Logs without their chatter: what repeats in the healthy part is dropped, what could be evidence is kept.

A line's template is what is left of it without digits, spaces and signs, one C call per line. A template that
comes back and that no rule takes for an event becomes a *filter rule*: named, with a regular expression that can be
read, stored per task and used from the first line on the next time. What is left and no evidence is folded (`fold`). Metric lines whose loss leaps, or that are no
number, always stay, and so do a few lines around each event and the log's last ones.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .fold import AGAIN, CONTEXT, EVENT, METRIC, OTHER, TAIL, LineFolder
from .match.rules import RuleSet, builtin_set
from .read import progress_lines
from .read.decoration import Decoration, learn_from
from .read.prefixes import clean, take_apart
from .read.sources import LONGEST_LINE, Source, Sources, blocks

if TYPE_CHECKING:
    from .engine import Diagnosis

_DELETE = b"0123456789 .,:+-eE%\t/|" + bytes([0xE2, 0x96, *range(0x80, 0x90)])
KEEP_SAME = 2
EVENTS_PER_TEMPLATE = 2000
TEMPLATES = 200_000
_BEFORE, _LAST = 3, 12
RECOVERIES_PER_TEMPLATE = 4
_HEX = b"abcdfABCDF"
_NUMBER = r"[-+]?[\d][\d.,:eE+\-/%]*"
_VALUE = re.compile(rb"(\s*['\"]?)([-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)(?![\w.])")
_NAN_COUNT = re.compile(rb"nan iterations:\s+[1-9]")
_IDLE = re.compile(rb"util\w*[=: ]+0 ?%")
_LEVEL = re.compile(r"\b(DEBUG|INFO|WARNING|WARN)\b")
_EVENT_ROLES = ("root", "either", "cascade", "ending", "recovery", "context")


@dataclass(frozen=True)
class FilterRule:
    """One thing to drop. `kind`: metric, start, debug, chatter; `origin`: learnt, model, user."""

    name: str
    kind: str
    regex: str
    example: str
    origin: str = "learnt"


@dataclass
class CompressReport:
    """What went in and came out, by which rules; `folded` lines are said in a count."""

    bytes_in: int = 0
    bytes_out: int = 0
    lines_in: int = 0
    lines_out: int = 0
    folded: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    learnt: list[FilterRule] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return {
            "bytes_in": self.bytes_in, "bytes_out": self.bytes_out, "lines_in": self.lines_in, "lines_out": self.lines_out,
            "folded": self.folded, "ratio": round(self.bytes_in / self.bytes_out, 1) if self.bytes_out else None,
            "rules": [{"name": n, "lines": c} for n, c in sorted(self.dropped.items(), key=lambda x: -x[1])],
            "learnt": [r.name for r in self.learnt],
        }  # fmt: skip


@dataclass
class _Template:
    """What is decided about one template: `rule` drops it; without one it is kept (an event) or still counted.

    `plain` lines are dropped unseen. A metric line is dropped unread where the first digits after `anchor` (and the
    exponent, where there is one) are those of the line before, and `zero` is still in it; others are read."""

    rule: FilterRule | None = None
    event: bool = False
    most: int = EVENTS_PER_TEMPLATE
    seen: int = 0
    dropped: int = 0
    plain: bool = False
    anchor: bytes | None = None
    width: int = 0
    head: bytes | None = None
    exponent: bytes | None = None
    zero: bytes | None = None
    idle: bool = False
    first: str = ""
    usual: float | None = None
    low: float | None = None


class Compressor:
    """Drops lines of one log. `rules` are known already; new ones are learnt unless `learn` is off."""

    def __init__(
        self,
        rules: Sequence[FilterRule] = (),
        ruleset: RuleSet | None = None,
        *,
        learn: bool = True,
        settings: dict[str, str] | None = None,
    ) -> None:
        self.report = CompressReport()
        self._known = list(rules)
        self._ruleset = ruleset or builtin_set()
        self._match = RuleSet.matcher_of([r.regex for r in rules])
        self._templates: dict[bytes, _Template] = {}
        self._every: list[_Template] = []
        self._learn = learn
        self._trained = False
        self._folder = LineFolder(self._texts, settings)
        self._decoration: Decoration | None = None
        self._names: dict[str, int] = {}
        for r in rules:
            self._names[r.name] = 1

    def lines(self, pieces: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
        """(number, line) of what is kept, in order; a fold stands for lines from its number on."""
        return ((n, raw) for n, raw, _ in self.folded(pieces))

    def folded(self, pieces: Iterator[bytes]) -> Iterator[tuple[int, bytes, bool]]:
        """As `lines`, with whether each is a fold."""
        yield from self._folder.lines(self._kept(pieces))
        self.report.folded = self._folder.folded

    def _kept(self, pieces: Iterator[bytes]) -> Iterator[tuple[int, bytes, str]]:
        """(number, line, why) of what no template drops, in order."""
        report, get = self.report, self._templates.get
        number, follow = 0, 0
        midline = False
        tail: list[tuple[int, bytes]] = []
        for block in pieces:
            if self._decoration is None:
                self._decoration = learn_from(block)
            rows = block.split(b"\n")
            if not rows[-1]:
                rows.pop()
            report.bytes_in += len(block)
            number -= midline  # a line of megabytes comes in pieces
            midline = not block.endswith(b"\n")
            kept = -1  # index of the last kept row of this block
            for i, key in enumerate(block.translate(None, _DELETE).split(b"\n")[: len(rows)]):
                t = get(key)
                if t is not None and not follow:
                    if t.plain:
                        t.seen += 1
                        t.dropped += 1
                        continue
                    if t.head is not None:
                        raw = rows[i]
                        at = raw.find(t.anchor) + t.width  # type: ignore[arg-type]
                        if (
                            raw[at : at + 3] == t.head
                            and (t.exponent is None or raw[at + 8 : at + 12] == t.exponent)
                            and (t.zero is None or t.zero in raw)
                        ):
                            t.seen += 1
                            t.dropped += 1
                            continue
                raw = rows[i]
                if t is None:
                    t = self._other(key, raw)
                t.seen += 1
                if t.rule is not None and (t.seen > 1 or t.rule.kind != "metric"):
                    if (t.anchor is None or not _leaps(t, raw)) and not (t.idle and _IDLE.search(raw)):
                        if follow and t.rule.kind != "metric":
                            follow -= 1
                        else:
                            follow = 0
                            t.dropped += 1
                            continue
                elif t.event:
                    if t.seen > t.most:
                        t.dropped += 1
                        tail = [*tail[1 - _LAST :], (number + i + 1, raw)]
                        continue
                    if kept < 0 and i < _BEFORE:
                        for n, row in tail[i - _BEFORE :]:
                            self._restore(row)
                            yield n, row, CONTEXT
                    for j in range(max(kept + 1, i - _BEFORE), i):
                        self._restore(rows[j])
                        yield number + j + 1, rows[j], CONTEXT
                    follow = 2
                elif t.rule is None and self._learn and t.seen > KEEP_SAME:
                    self._promote(t, raw)
                kept = i
                tail.clear()
                why = (
                    EVENT
                    if t.event
                    else METRIC
                    if t.rule is not None and (t.anchor or t.idle)
                    else OTHER
                    if t.seen == 1
                    else AGAIN
                )
                yield number + i + 1, raw, why
            tail += [(number + j + 1, rows[j]) for j in range(max(kept + 1, len(rows) - _LAST), len(rows))]
            tail = tail[-_LAST:]
            number += len(rows)
        report.lines_in += number
        seen: set[int] = set()
        for n, raw in sorted(tail):
            if n not in seen:
                seen.add(n)
                self._restore(raw)
                yield n, raw, TAIL
        for t in self._every:
            if t.dropped > 0:
                name = t.rule.name if t.rule else "repeated events"
                report.dropped[name] = report.dropped.get(name, 0) + t.dropped

    def _other(self, key: bytes, raw: bytes) -> _Template:
        """The template of a line that is not known by its plain key."""
        if b"0x" in raw:
            key = key.translate(None, _HEX)
        return self._templates.get(key) or self._new(key, raw)

    def _restore(self, raw: bytes) -> None:
        """Takes a line that is kept as context off the count of dropped ones."""
        key = raw.translate(None, _DELETE)
        t = self._templates.get(key) or self._templates.get(key.translate(None, _HEX))
        if t is not None and t.dropped > 0:
            t.dropped -= 1

    def _texts(self, raw: bytes) -> list[str]:
        """The texts of a raw line without what its file's decoration puts around them."""
        if not self._decoration:
            return [clean(raw[:4000])]
        return [b.text for b in self._decoration.lines(clean(raw, 1 << 20))]

    def _new(self, key: bytes, raw: bytes) -> _Template:
        """Decides once about a template that was not seen before."""
        text = clean(raw[:4000])
        t = _Template(first=text)
        if len(self._templates) < TEMPLATES:
            self._templates[key] = t
            self._every.append(t)
        roles = [r for x in self._texts(raw) if (r := self._event_role(x))]
        role = next((r for r in roles if r not in ("recovery", "context")), roles[0] if roles else None)
        if role:
            t.event = True
            t.most = RECOVERIES_PER_TEMPLATE if role in ("recovery", "context") else EVENTS_PER_TEMPLATE
            return t
        t.idle = "util" in text
        metric = progress_lines.read(text)
        self._trained = self._trained or metric is not None
        for index in self._match(text[:2000]):
            t.rule = self._known[index]
            break
        if metric is not None and metric[1] is not None:
            t.anchor = _anchor(raw)
        t.plain = t.rule is not None and t.anchor is None and not t.idle
        return t

    def _event_role(self, text: str) -> str | None:
        """The role of the event that a line reports, or None."""
        line = take_apart(text, 2000)
        rule = self._ruleset.best(line.body, exception=True)
        if rule is not None and rule.role in _EVENT_ROLES:
            return rule.role
        return "root" if "Traceback (most recent call last)" in text or "Xid (" in text else None

    def _promote(self, t: _Template, raw: bytes) -> None:
        """Makes a template that came back a filter rule."""
        text = clean(raw[:4000])
        metric = progress_lines.read(text)
        if metric is None and text[:1].isspace() and t.seen < 20:
            return  # a frame or a detail of something above
        level = _LEVEL.search(text[:200])
        kind = (
            "metric"
            if metric
            else "debug"
            if level and level.group(1) == "DEBUG"
            else "chatter"
            if self._trained
            else "start"
        )
        regex = template_regex(t.first, text)
        if regex is None:
            return
        name = self._name(kind, text)
        t.rule = FilterRule(name, kind, regex, text[:300])
        t.plain = t.anchor is None and not t.idle
        self.report.learnt.append(t.rule)

    def _name(self, kind: str, text: str) -> str:
        words = re.findall(r"[A-Za-z_]{3,}", take_apart(text, 2000).body)[:3]
        name = "-".join([kind, *(w.lower() for w in words)])[:60]
        self._names[name] = count = self._names.get(name, 0) + 1
        return name if count == 1 else f"{name}-{count}"


def template_regex(first: str, again: str) -> str | None:
    """A linear-time expression that fits both lines: equal words as they are, numbers and other words as classes.

    None where nothing but variables would be left."""
    a, b = first.split(), again.split()
    if len(a) != len(b):
        a = b
    parts, fixed = [], 0
    for x, y in zip(a, b, strict=True):
        if re.search(r"\d", x) or re.search(r"\d", y):
            masked = re.sub(r"\d[\d.,:eE+\-/%]*", "\0", x)
            other = re.sub(r"\d[\d.,:eE+\-/%]*", "\0", y)
            if masked == other:
                parts.append(_escape(masked).replace("\0", r"\d[\d.,:eE+\-/%]*"))
                fixed += len(masked.strip("\0")) > 2
            else:
                parts.append(r"\S+")
        elif x == y:
            parts.append(_escape(x))
            fixed += len(x) > 2
        else:
            parts.append(r"\S+")
    if fixed < 1 or not parts:
        return None
    return r"^\s*" + r"\s+".join(parts) + r"\s*$"


def _escape(text: str) -> str:
    return "".join(c if c == "\0" else re.escape(c) for c in text)


def _anchor(raw: bytes) -> bytes | None:
    """The bytes just before a metric line's loss."""
    m = re.search(rb"(?:[A-Za-z_]{1,12} ?)?loss['\"]?\s*[:=](?=\s*['\"]?[-+\d])", raw)
    return m.group(0) if m else None


def _leaps(t: _Template, raw: bytes) -> bool:
    """Whether a metric line shows a loss far above the usual, or counts an iteration that was no number."""
    anchor = t.anchor
    assert anchor is not None
    at = raw.find(anchor)
    if at < 0:
        return True
    at += len(anchor)
    m = _VALUE.match(raw[at : at + 40])
    if not m:
        return True
    loss = float(m.group(2))
    if b"nan iterations:" in raw:
        if _NAN_COUNT.search(raw):
            return True
        t.zero = b"nan iterations:   0" if b"nan iterations:   0" in raw else None
    if t.usual is not None and loss > t.usual * 1.35 + 0.3:
        return True
    t.usual = loss if t.usual is None else t.usual + 0.05 * (loss - t.usual)
    t.low = t.usual if t.low is None else min(t.low, t.usual)
    if t.usual > t.low * 1.03 + 0.02:  # it creeps up: one line per step of the way
        t.low = t.usual
        return True
    token = m.group(2)
    if (
        t.usual is not None
        and abs(loss - t.usual) < 0.1 * abs(t.usual) + 0.1
        and (b"nan iterations:" not in raw or t.zero)
    ):
        t.width, t.head = len(anchor) + len(m.group(1)), token[:3]
        t.exponent = token[8:12] if len(token) == 12 and token[8:9] in b"eE" else None
        if t.exponent is None and (b"e" in token or b"E" in token or b"." not in token[:3]):
            t.head = None
    return False


def compress(
    sources: Sequence[Source], write: Callable[[Source, int, bytes], None], rules: Sequence[FilterRule] = (), *,
    learn: bool = True, ruleset: RuleSet | None = None,
) -> CompressReport:  # fmt: skip
    """Passes every kept line to `write(source, number, line)` and returns the report over all sources."""
    total = CompressReport()
    known = list(rules)
    settings: dict[str, str] = {}
    for source in sources:
        c = Compressor(known, ruleset, learn=learn, settings=settings)
        for number, raw in c.lines(blocks(source, [])):
            total.lines_out += 1
            total.bytes_out += len(raw) + 1
            write(source, number, raw)
        r = c.report
        total.bytes_in += r.bytes_in
        total.lines_in += r.lines_in
        total.folded += r.folded
        total.learnt += r.learnt
        known += r.learnt
        for name, count in r.dropped.items():
            total.dropped[name] = total.dropped.get(name, 0) + count
    return total


def following(path: Path, ended: Callable[[], bool] = lambda: False, pause: float = 0.5) -> Iterator[bytes]:
    """The whole lines of a log that is still written, as they come, until `ended` or Ctrl-C; the rest comes then.

    A log that was replaced or cut short is read from its start again. Raises InputError where it cannot be read."""
    rest, at = b"", 0
    try:
        while True:
            last = ended()
            try:
                with path.open("rb") as f:
                    if path.stat().st_size < at:
                        rest, at = b"", 0
                    f.seek(at)
                    while data := f.read(1 << 20):
                        at += len(data)
                        cut = data.rfind(b"\n") + 1
                        if cut or len(rest) > LONGEST_LINE:
                            cut = cut or len(data)
                            yield rest + data[:cut]
                            rest = b""
                        rest += data[cut:]
            except OSError as e:
                raise InputError(f"cannot follow the log: {e.strerror or e}", where=str(path)) from None
            if last:
                break
            time.sleep(pause)
    except KeyboardInterrupt:
        pass
    if rest:
        yield rest


def compress_live(
    path: Path, write: Callable[[int, bytes], None], rules: Sequence[FilterRule] = (), **kw: Any
) -> CompressReport:
    """Passes what is kept of a log that is still written to `write(number, line)` as soon as it is decided."""
    c = Compressor(rules)
    for number, raw in c.lines(following(path, **kw)):
        c.report.lines_out += 1
        c.report.bytes_out += len(raw) + 1
        write(number, raw)
    return c.report


def expand_or_fail(paths: Sequence[str]) -> Sources:
    """The sources of `paths`; raises InputError where there is no text log among them."""
    from .read.sources import expand

    sources = expand(paths)
    if not sources.logs:
        raise InputError("there is no text log to compress", where=", ".join(paths))
    return sources


def evidence_lines(d: Diagnosis, source: Source, most: int = 3000) -> list[tuple[int, str]]:
    """(number, text) of what is worth showing of one log: the compressed log, its last `most` lines and the root's."""
    if source.path is None or source.kind == "pipe":
        return []
    kept: deque[tuple[int, str]] = deque(maxlen=most)
    root = d.verdict.root
    own = []
    for number, raw, fold in Compressor().folded(blocks(source, [])):
        if fold:
            continue  # nothing that may be quoted
        text = clean(raw[:4000])
        kept.append((number, text))
        if root and root.file == source.name and root.line is not None and abs(number - root.line) <= 40:
            own.append((number, text))
    return sorted({*kept, *own})
