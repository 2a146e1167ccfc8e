"""Logs without their chatter: what repeats in the healthy part is dropped, what could be evidence is kept.

A line's template is what is left of it without digits, spaces and signs, one C call per line. A template that
comes back and that no rule takes for an event becomes a *filter rule*: named, with a regular expression that can be
read, stored per task and used from the first line on the next time. Metric lines whose loss leaps, or that are no
number, always stay, and so do a few lines around each event and the log's last ones.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from . import progress_lines
from .prefixes import clean, take_apart
from .rules import RuleSet, builtin_set
from .sources import Source, Sources, blocks

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
    """What went in and came out, by which rules."""

    bytes_in: int = 0
    bytes_out: int = 0
    lines_in: int = 0
    lines_out: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    learnt: list[FilterRule] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return {
            "bytes_in": self.bytes_in, "bytes_out": self.bytes_out, "lines_in": self.lines_in, "lines_out": self.lines_out,
            "ratio": round(self.bytes_in / self.bytes_out, 1) if self.bytes_out else None,
            "rules": [{"name": n, "lines": c} for n, c in sorted(self.dropped.items(), key=lambda x: -x[1])],
            "learnt": [r.name for r in self.learnt],
        }  # fmt: skip


@dataclass
class _Template:
    """What is decided about one template: `rule` drops it; without one it is kept (an event) or still counted."""

    rule: FilterRule | None = None
    event: bool = False
    most: int = EVENTS_PER_TEMPLATE
    seen: int = 0
    anchor: bytes | None = None
    idle: bool = False
    first: str = ""
    usual: float | None = None


class Compressor:
    """Drops lines of one log. `rules` are known already; new ones are learnt unless `learn` is off."""

    def __init__(
        self, rules: Sequence[FilterRule] = (), ruleset: RuleSet | None = None, *, learn: bool = True
    ) -> None:
        self.report = CompressReport()
        self._known = list(rules)
        self._ruleset = ruleset or builtin_set()
        self._match = RuleSet.matcher_of([r.regex for r in rules])
        self._templates: dict[bytes, _Template] = {}
        self._learn = learn
        self._trained = False
        self._names: dict[str, int] = {}
        for r in rules:
            self._names[r.name] = 1

    def lines(self, pieces: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
        """(number, line) of what is kept, in order."""
        report, templates = self.report, self._templates
        number = 0
        before: deque[tuple[int, bytes, str]] = deque(maxlen=_LAST)
        last: deque[tuple[int, bytes, str]] = deque(maxlen=_LAST)
        follow = 0
        dropped: dict[str, int] = {}
        for block in pieces:
            rows = block.split(b"\n")
            if not rows[-1]:
                rows.pop()
            report.bytes_in += len(block)
            for raw in rows:
                number += 1
                key = raw.translate(None, _DELETE)
                if b"0x" in raw:
                    key = key.translate(None, _HEX)
                t = templates.get(key)
                if t is None:
                    t = self._new(key, raw)
                t.seen += 1
                rule = t.rule
                if rule is not None and (t.seen > 1 or rule.kind != "metric"):
                    if (t.anchor is None or not _leaps(t, raw)) and not (t.idle and _IDLE.search(raw)):
                        if follow > 0 and rule.kind != "metric":
                            follow -= 1
                        else:
                            dropped[rule.name] = dropped.get(rule.name, 0) + 1
                            before.append((number, raw, rule.name))
                            continue
                elif t.event:
                    if t.seen > t.most:
                        dropped["repeated events"] = dropped.get("repeated events", 0) + 1
                        last.append((number, raw, "repeated events"))
                        continue
                    for n, row, name in list(before)[-_BEFORE:]:
                        dropped[name] -= 1
                        yield n, row
                    before.clear()
                    follow = 2
                elif rule is None and self._learn and t.seen > KEEP_SAME:
                    self._promote(t, raw)
                before.clear()
                yield number, raw
        report.lines_in += number
        tail = sorted({(n, r, m) for n, r, m in (*before, *last)})
        for n, row, name in tail:
            dropped[name] -= 1
            yield n, row
        for name, count in dropped.items():
            if count > 0:
                report.dropped[name] = report.dropped.get(name, 0) + count

    def _new(self, key: bytes, raw: bytes) -> _Template:
        """Decides once about a template that was not seen before."""
        text = clean(raw[:4000])
        t = _Template(first=text)
        if len(self._templates) < TEMPLATES:
            self._templates[key] = t
        role = self._event_role(text)
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
    try:
        loss = float(raw[at : at + 20].split(None, 1)[0].strip(b",;|}'\")]"))
    except (ValueError, IndexError):
        m = re.match(rb"\s*['\"]?([-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)", raw[at : at + 40])
        if not m:
            return True
        loss = float(m.group(1))
    usual = t.usual
    if usual is None:
        t.usual = loss
        return False
    if loss != loss or loss > usual * 1.35 + 0.3:
        return True
    t.usual = usual + 0.05 * (loss - usual)
    if b"nan iterations:" in raw:
        return b"nan iterations:   0" not in raw and re.search(rb"nan iterations:\s+[1-9]", raw) is not None
    return False


def compress(
    sources: Sequence[Source], write: Callable[[Source, int, bytes], None], rules: Sequence[FilterRule] = (), *,
    learn: bool = True, ruleset: RuleSet | None = None,
) -> CompressReport:  # fmt: skip
    """Passes every kept line to `write(source, number, line)` and returns the report over all sources."""
    total = CompressReport()
    known = list(rules)
    for source in sources:
        c = Compressor(known, ruleset, learn=learn)
        for number, raw in c.lines(blocks(source, [])):
            total.lines_out += 1
            total.bytes_out += len(raw) + 1
            write(source, number, raw)
        r = c.report
        total.bytes_in += r.bytes_in
        total.lines_in += r.lines_in
        total.learnt += r.learnt
        known += r.learnt
        for name, count in r.dropped.items():
            total.dropped[name] = total.dropped.get(name, 0) + count
    return total


def expand_or_fail(paths: Sequence[str]) -> Sources:
    """The sources of `paths`; raises InputError where there is no text log among them."""
    from .sources import expand

    sources = expand(paths)
    if not sources.logs:
        raise InputError("there is no text log to compress", where=", ".join(paths))
    return sources


def evidence_lines(d: Diagnosis, source: Source, most: int = 3000) -> list[tuple[int, str]]:
    """(number, text) of what is worth showing of one log: the compressed log, its last `most` lines and the root's."""
    if source.path is None:
        return []
    kept: deque[tuple[int, str]] = deque(maxlen=most)
    root = d.verdict.root
    own = []
    for number, raw in Compressor().lines(blocks(source, [])):
        text = clean(raw[:4000])
        kept.append((number, text))
        if root and root.file == source.name and root.line is not None and abs(number - root.line) <= 40:
            own.append((number, text))
    return sorted({*kept, *own})
