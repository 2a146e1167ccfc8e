"""One log in, its events out, in one streaming pass that looks closely only where something may be wrong.

A trigger expression runs over blocks of 4 MB and finds the lines that may matter; metric lines between them are
never touched one by one, except near an event and at the log's end, where steps and losses are read. Around an
event the lines are followed one by one: tracebacks are put together per writer, and what comes after shows
whether training went on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..read import clock, progress_lines
from ..read.decoration import PLAIN, Bare, Decoration
from ..read.prefixes import Line, clean, take_apart
from ..read.quoted import FENCE, is_fenced, is_open_before, is_talk
from ..read.sources import LONGEST_LINE, Source, blocks
from ..read.tracebacks import EXCEPTION, HEADER, Tracebacks
from .completion import planned
from .events import FileScan, LogEvent, MetricLine
from .kinds import Shared, patterns_of
from .log_end import TailReader
from .quick import has_clock, may_introduce
from .rules import Rule, RuleSet, xids
from .sieve import Sieve
from .topology import TopologyReader

WINDOW = 8192
STEPS_AFTER = 6
MOST_EVENTS = 20_000
MOST_COMPLAINTS = 64
SAME_KEPT = 40
_SOME_TRIES = 8

_EXCEPTION = EXCEPTION
_COMPLAINT = re.compile(r"\b(?:ERROR|FATAL|CRITICAL|PANIC)\b|^(?:[Ee]rror|[Ff]atal)\b")
_MACHINE = re.compile(
    r"(?i)fabric ?manager|\bNVLink\b.{0,40}\bfabric\b|\[tid \d+\] |\bnvswitch|\bSXid\b|\bdcgm|\bnv-hostengine|\bkernel: |\bsystemd\[\d+\]: "
)
_WHAT = re.compile(r"^\s*what\(\):\s+")
_XID = re.compile(
    r"\bXid \(PCI:([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})[^)]*\): (\d+)(?:,\s*pid=(\d+))?"
)
_GPU_IN_TEXT = re.compile(
    r"\bGPU (\d{1,2}) has a total capacity|\bGPU[ :#]?(\d{1,2})\b|cuda:(\d{1,2})\b|\bDevice: (\d{1,2})\b"
)
_HOST_IN_TEXT = re.compile(r"\bhost[=:]\s?([A-Za-z][\w.\-]*\d[\w.\-]*)")
_UTIL = re.compile(
    r"(?:\bnode[=: ]|\bhost[=: ])?([A-Za-z][\w.\-]*\d[\w.\-]*)?\s*\bgpu[ =:#]?(\d{1,2})\b.{0,40}?util(?:ization)?[=: ]+(\d+)\s?%",
    re.I,
)
_SUMMARY = re.compile(r"  (?:time|host|rank|exitcode|pid)\s+: ")
_BEHIND_BAR = re.compile(r"(?:\[(?:rank|default)\d+\]:\s?)*Traceback \(most recent call last\)")
_SEQ = re.compile(r"SeqNum=(\d+)")
_LOADING = ("serialization.py", "load_checkpoint", "load_state", "from_pretrained")


class Scanner:
    """Reads one source. `ruleset` says what lines mean, `topology` collects what they say of the machine."""

    def __init__(
        self, source: Source, index: int, ruleset: RuleSet, topology: TopologyReader, year: int, shared: Shared | None = None
    ) -> None:  # fmt: skip
        self.source, self.ruleset, self.topology, self.year = source, ruleset, topology, year
        self.out = FileScan(index, source.name, source.rank)
        self._tracebacks = Tracebacks()
        self._fenced = False
        self._same: dict[tuple[str, int | None, str | None, bool], int] = {}
        self._last_time: float | None = None
        self._line = 0
        self._midline = False
        self._wanted = 0
        shared = shared or Shared(patterns_of(ruleset))
        self._shared, self._sieve = shared, Sieve(shared)
        self._window = 0
        self._last_blocks = (b"", b"")
        self._decoration: Decoration | None = None
        self._planned: frozenset[int] = frozenset()

    def run(self) -> FileScan:
        """Reads the source to its end and returns what was found."""
        for block in blocks(self.source, self.out.notes):
            self.feed(block)
        return self.finish()

    def feed(self, block: bytes) -> None:
        """Scans the next bytes, which end with a whole line unless they are the last or a line is very long."""
        if self._decoration is None:
            self._decoration = self._shared.decoration(block)
            self._meet(block)
            self._planned = planned(block[: self._shared.plan])
        self._window = self._block(block, self._window)
        self._last_blocks = (self._last_blocks[1], block)

    def _meet(self, block: bytes) -> None:
        """Learns from a log's first lines whose it is: a job's (and on which host), or the machine's."""
        first = block[:16384].split(b"\n")[:60]
        if not may_introduce(b"\n".join(first)):
            return
        rows = [b for raw in first for b in self._bare(raw) if b.text.strip()]
        machine = 0
        for bare in rows:
            line = self._line_of(bare)
            machine += line.kernel or bool(_MACHINE.search(bare.text))
            self.topology.meet(bare.text)
        self.out.machine = machine >= 0.6 * len(rows) > 0

    def finish(self) -> FileScan:
        """What was found in all that was fed."""
        log_end = TailReader(
            self.out, self.source, self.ruleset, self._shared, self.year, self._planned, self._bare
        )
        log_end.read(*self._last_blocks, self._line)
        self.out.counted = self._sieve.counted()
        self._last_blocks = (b"", b"")
        return self.out

    def _block(self, block: bytes, window: int) -> int:
        """Scans one block; `window` bytes at its start still belong to the last event's surroundings."""
        # `base` lines lie before byte `counted`; a block that goes on within a line is still on that line.
        base, counted = self._line - self._midline, 0
        self.out.log_end.bytes += len(block)
        self._fenced = FENCE in block
        self._sample(block, base)
        pos, end = 0, window
        while True:
            hit = self._sieve.search(block, pos) if pos < len(block) else None
            start = block.rfind(b"\n", 0, hit.start()) + 1 if hit else len(block)
            number = base + block.count(b"\n", counted, pos)
            counted, base = pos, number
            for raw, offset in _lines(block, pos, min(start, end)):
                if not self._tracebacks.following and not self._may_be_plain(block[offset : min(start, end)]):
                    break
                number += 1
                self._plain(raw, number, block, offset)
            if hit is None:
                break
            number = base + block.count(b"\n", counted, start) + 1
            stop = block.find(b"\n", hit.start())
            stop = len(block) if stop < 0 else stop
            close = self._matter(block[start:stop], number, block, start, start > end)
            pos = stop + 1
            if close:
                end, self._wanted = pos + WINDOW, STEPS_AFTER
        self._line = base + block.count(b"\n", counted)
        self._midline = not block.endswith(b"\n")
        self._line += self._midline
        return max(0, end - len(block))

    def _sample(self, block: bytes, base: int) -> None:
        """Reads the first metric line of a block: the long-run curve of step and loss costs nothing more."""
        number, tries = base, _SOME_TRIES if self._shared.few_metrics else 4096
        if not progress_lines.may(block[:8192]):
            return
        for raw, _ in _lines(block, 0, min(len(block), 4096)):
            number += 1
            if progress_lines.may(raw):
                tries -= 1
                if any(self._step(b, number) for b in self._bare(raw)) or not tries:
                    break

    def _look_back(self, block: bytes, start: int, number: int) -> None:
        """Reads the metric lines just before an event that stands alone."""
        first = max(0, start - 2048)
        before = block[first:start].split(b"\n")[:-1]
        if first:
            before = before[1:]
        for i, raw in enumerate(before[-3:]):
            for bare in self._bare(raw):
                self._step(bare, number - len(before[-3:]) + i)

    def _bare(self, raw: bytes) -> list[Bare]:
        """The texts of a raw line without what its file's decoration puts around them."""
        if not self._decoration:
            return [Bare(clean(raw))]
        return self._decoration.lines(clean(raw, LONGEST_LINE if self._decoration.fields else 8192))

    def _line_of(self, bare: Bare) -> Line:
        """A text taken apart, with what its decoration says of the writer."""
        line = take_apart(bare.text, self.year)
        if not bare.tag and bare.field is None and bare.time is None:
            return line
        return replace(
            line,
            rank=line.rank if line.rank is not None else bare.rank,
            node=line.node or bare.node,
            level=line.level or bare.level,
            time=line.time
            if line.time is not None or bare.time is None
            else clock.find(bare.time, self.year),
            stream=bare.tag + line.stream,
        )

    def _step(self, bare: Bare, number: int) -> bool:
        text = bare.text
        found = progress_lines.read(text)
        if not found:
            return False
        when = clock.find(text, self.year)
        if when is None and bare.time is not None:
            when = clock.find(bare.time, self.year)
        if self.out.progress and self.out.progress[-1].line >= number:
            return True
        self.out.progress.append(MetricLine(self.out.index, number, found[0], found[1], when, text[:1000]))
        return True

    def _may_be_plain(self, text: bytes) -> bool:
        """Whether any of some lines without a trigger can be a part of a summary, or a step that is wanted."""
        return b" : " in text or (self._wanted > 0 and progress_lines.may(text))

    def _plain(self, raw: bytes, number: int, block: bytes, offset: int) -> None:
        """A line without a trigger, near an event: part of a traceback, a summary, or a step."""
        if self._tracebacks.following or self._may_be_plain(raw):
            for bare in self._bare(raw):
                self._plain_text(bare, number, block, offset)

    def _plain_text(self, bare: Bare, number: int, block: bytes, offset: int) -> None:
        text = bare.text
        if self._tracebacks.following:
            line = self._line_of(bare)
            if self._traceback(line, text, number, block, offset):
                return
        if " : " in text:
            summary = _SUMMARY.search(text)  # torchrun's, behind whatever prefix
            if summary and self.topology.see(Line(text), text[summary.start() :]):
                return
        if self._wanted > 0 and self._step(bare, number):
            self._wanted -= 1

    def _matter(self, raw: bytes, number: int, block: bytes, offset: int, alone: bool) -> bool:
        """A line with a trigger in it; true where the lines after it have to be read one by one."""
        if b"Traceback (most" in raw:
            self._learn_tag(raw, block, offset)
        close = False
        for bare in self._bare(raw):
            close |= self._matter_text(bare, number, block, offset, alone and not close)
        return close

    def _learn_tag(self, raw: bytes, block: bytes, offset: int) -> None:
        """Learns the tag of a stream that shows itself only with a traceback."""
        after = offset + len(raw) + 1
        following = clean(block[after : after + 400].split(b"\n", 1)[0])
        decoration = self._decoration or PLAIN
        bares, then = decoration.lines(clean(raw)), decoration.lines(following)
        if len(bares) == 1 and len(then) == 1:
            self._decoration = decoration.with_tag_before(bares[0].text, then[0].text)

    def _matter_text(self, bare: Bare, number: int, block: bytes, offset: int, alone: bool) -> bool:
        text = bare.text
        if not text.strip():
            return False
        behind = _BEHIND_BAR.search(text) if "Traceback" in text else None
        if behind and behind.start() > 0 and "|" in text[: behind.start()]:
            text = text[behind.start() :]  # a progress bar that had not ended its line
            bare = replace(bare, text=text)
        line = self._line_of(bare)
        if line.time is not None:
            self._last_time = line.time
        summary = _SUMMARY.search(text) if " : " in text else None
        if self.topology.see(line, text[summary.start() :] if summary else text, self.source.rank):
            return "exitcode" in text or "host" in text or "rank" in text[:12]
        if self._traceback(line, text, number, block, offset):
            if alone:
                self._look_back(block, offset, number)
            return True
        body = line.body.lstrip() if line.level else line.body
        if "util" in text:
            self._utilisation(text, line, number)
        if "Xid (" in body and _XID.search(body) and not self._quoted(line, 0, block, offset):
            if alone:
                self._look_back(block, offset, number)
            return self._kernel(line, text, number, block, offset)
        stripped = _WHAT.sub("", body)
        exception = bool(_EXCEPTION.match(stripped))
        rule = self.ruleset.best(stripped if exception else body, exception=exception)
        if rule is None:
            if not self._step(bare, number) and (line.level == "ERROR" or _COMPLAINT.search(body[:200])):
                self._complain(line, text, number)
            return "Root Cause" in text or "Failures:" in text or "FAILED" in text
        if rule.role != "noise" and self._quoted(line, 0, block, offset):
            self._step(bare, number)
            return False
        weight = 0.8 if exception else 0.9
        if line.level in ("INFO", "DEBUG", "WARNING"):
            weight = 0.4
        matters = rule.role in ("root", "either", "cascade") and weight >= 0.5
        if matters and alone:
            self._look_back(block, offset, number)
        if self._step(bare, number) and rule.role != "root":
            return False
        if rule.role != "noise":
            self._emit(
                rule,
                line,
                text,
                number,
                block,
                offset,
                weight=weight,
                exception=_class(stripped) if exception else None,
            )
        return matters

    def _complain(self, line: Line, text: str, number: int) -> None:
        """Keeps an error that no rule knows: the first ones and the last ones."""
        kept = self.out.complaints
        if len(kept) >= MOST_COMPLAINTS:
            del kept[MOST_COMPLAINTS // 2]
        rank = line.rank if line.rank is not None else self.source.rank
        kept.append((number, text[:2000], line.time, rank, line.node or self.source.node))

    def _utilisation(self, text: str, line: Line, number: int) -> None:
        m = _UTIL.search(text)
        if not m:
            return
        if int(m.group(3)) == 0:
            when = line.time or clock.find(text, self.year)
            self.out.idle_gpus.append(
                (m.group(1) or line.node, int(m.group(2)), when or 0.0, number, text[:1000])
            )
        else:
            self.out.busy_gpus += 1

    def _kernel(self, line: Line, text: str, number: int, block: bytes, offset: int) -> bool:
        noise = self.ruleset.best(line.body, exception=False)
        if noise is not None and noise.role == "noise" and noise.priority >= 90:
            return False
        m = _XID.search(line.body)
        if not m or is_open_before(line.body, m.start()):
            return False
        xid = xids().get(int(m.group(4)))
        if xid is None:
            return False
        pid = int(m.group(5)) if m.group(5) else None
        self._emit(
            _xid_rule(xid.role, xid.reason),
            line,
            text,
            number,
            block,
            offset,
            xid=xid,
            bus=m.group(2).lower(),
            pid=pid,
        )
        return xid.role == "root"

    def _traceback(self, line: Line, text: str, number: int, block: bytes, offset: int) -> bool:
        """Feeds one line to the tracebacks that are open; true where the line belongs to one."""
        at = line.body.find(HEADER)
        quoted = at >= 0 and self._quoted(line, at, block, offset)
        got = self._tracebacks.feed(line.body, line.stream, quoted)
        if isinstance(got, bool) or got.quoted:
            return bool(got)
        rule = self._exception_rule(got.body, got.frames)
        if rule is not None:
            self._emit(
                rule, line, text, number, block, offset, weight=1.0, chain=got.chain, chained=got.chained,
                frames=got.frames, exception=_class(got.body),
            )  # fmt: skip
        return True

    def _quoted(self, line: Line, at: int, block: bytes, offset: int) -> bool:
        """Whether what begins at character `at` of a message is somebody's text: a sample, a prompt, a listing."""
        return (
            (line.level != "ERROR" and is_talk(line.body))
            or is_open_before(line.body, at)
            or (self._fenced and is_fenced(block, offset))
        )

    def _exception_rule(self, body: str, frames: tuple[str, ...]) -> Rule | None:
        rule = self.ruleset.best(body, exception=True, noise=False)
        if rule is None:
            return self.ruleset.get("py-other")
        if body.startswith("EOFError") and any(word in f for f in frames for word in _LOADING):
            return self.ruleset.get("model-file-damaged")
        return rule

    def _emit(
        self, rule: Rule, line: Line, text: str, number: int, block: bytes, offset: int, *, weight: float = 0.9, xid: Any = None,
        bus: str | None = None, pid: int | None = None, chain: int = 0, chained: str | None = None,
        frames: tuple[str, ...] = (), exception: str | None = None,
    ) -> None:  # fmt: skip
        rank = line.rank if line.rank is not None else self.source.rank
        # What a logger calls a warning never takes the place of a failure of the same kind.
        key = (f"xid-{xid.code}-{bus}" if xid else rule.id, rank, line.node, weight < 0.5)
        self._same[key] = seen = self._same.get(key, 0) + 1
        if (seen > SAME_KEPT and rule.role not in ("ending", "recovery")) or len(
            self.out.events
        ) >= MOST_EVENTS:
            # The first ones can be roots, the last one shows what was going on at the end.
            self._replace_last(key, rule, xid)
        when = line.time
        if when is None and rule.role in ("ending", "cascade"):
            when = clock.find(text, self.year)  # schedulers write the time into the sentence
        if when is None:
            when = self._time_before(block, offset)
        gpu = line.gpu
        if gpu is None and rule.scope == "gpu":
            m = _GPU_IN_TEXT.search(line.body)
            gpu = int(next(g for g in m.groups() if g is not None)) if m else None
        host = _HOST_IN_TEXT.search(text)
        seq = _SEQ.search(text)
        node = line.node or (host.group(1) if host else None) or self.source.node
        self.out.events.append(LogEvent(
            file=self.out.index, line=number, text=text[:2000], rule=rule, time=when, rank=rank, node=node, gpu=gpu,
            pid=pid or line.pid or _killed(rule, line.body), xid=xid, bus=bus, weight=weight, chain=chain, chained=chained, frames=frames,
            exception=exception, level=line.level, seq=int(seq.group(1)) if seq else None,
        ))  # fmt: skip

    def _replace_last(self, key: tuple[str, int | None, str | None, bool], rule: Rule, xid: Any) -> None:
        for i in range(len(self.out.events) - 1, max(-1, len(self.out.events) - 200), -1):
            e = self.out.events[i]
            if e.rule is rule and e.xid is xid and e.rank == key[1] and (e.weight < 0.5) == key[3]:
                del self.out.events[i]
                return
        if len(self.out.events) >= MOST_EVENTS:
            self.out.events.pop()

    def _time_before(self, block: bytes, offset: int) -> float | None:
        """The time of the nearest earlier line that has one."""
        before = block[max(0, offset - 4096) : offset]
        for raw in reversed(before.split(b"\n")) if has_clock(before) else ():
            if raw:
                when = clock.find(raw[:200].decode("utf-8", "replace"), self.year)
                if when is not None:
                    return when
        return self._last_time


def _lines(block: bytes, start: int, end: int) -> Iterator[tuple[bytes, int]]:
    pos = start
    while pos < end:
        stop = block.find(b"\n", pos)
        if stop < 0:
            stop = len(block)
        yield block[pos:stop], pos
        pos = stop + 1


def _class(body: str) -> str:
    m = re.match(r"^[\w.]+", body)
    return m.group(0) if m else ""


def _killed(rule: Rule, body: str) -> int | None:
    """The process that the kernel's OOM killer names."""
    m = re.search(r"[Kk]ill(?:ed)? process (\d+)", body) if rule.id == "kernel-oom-kill" else None
    return int(m.group(1)) if m else None


_XID_RULES: dict[tuple[str, str], Rule] = {}


def _xid_rule(role: str, reason: str) -> Rule:
    key = (role, reason)
    if key not in _XID_RULES:
        _XID_RULES[key] = Rule(
            id="xid", regex=r"Xid \(PCI", role=role, reason=reason, scope="gpu", priority=90,
            source="https://docs.nvidia.com/deploy/xid-errors/", example="NVRM: Xid (PCI:0000:5d:00): 95, pid=4393",
        )  # fmt: skip
    return _XID_RULES[key]
