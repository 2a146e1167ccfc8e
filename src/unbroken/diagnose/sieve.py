"""Which lines are worth reading in a log where a trigger word stands on every line.

Reading one line takes tens of microseconds. As long as triggers are rare, each line with one is read. Where they are
not, lines are first tried against all rules at once, in chunks of 8 KB: a chunk that fits none holds nothing. Of those
that fit, each kind (the same rules, the same rank) is read a number of times and counted from then on; the last
one of each block is read too, because it shows what was going on at the end.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from .decoration import SAMPLE_LINES
from .rules import Rule, RuleSet, loose_set
from .triggers import TRIGGER
from .verdict import Verdict

_CHUNK = 8 << 10
_DELETE = b"0123456789.,:+-"
_FREE_HITS, _BYTES_PER_HIT = 300, 16 << 10
_READ_EACH = 64
_COMMON = 2000
_FREE_READS, _BYTES_PER_READ = 1500, 16 << 10
_FREE_WRITERS, _BYTES_PER_WRITER = 5000, 8 << 10
_MANY_TEXTS = 300
_MOST_WRITERS = 50_000
_TEMPLATES = 50_000
_MANY_LOGS, _FEW_LINES = 64, 20
_TAIL, _LEAST_TAIL, _TAILS = 256 << 10, 8 << 10, 8 << 20

# What a line may mean beside the rules: see `Scanner._matter` and `TopologyReader.see`.
_STRUCTURE = (
    r"Traceback \(most recent call last\)", r"Xid \(", r"\brank \d+ nranks \d+ cudaDev", r"Bootstrap ?: Using",
    r"(?:nodelist|NODELIST|nodes|hosts|NodeList)[=:] ?[A-Za-z]", r"(?:gpus[_-]per[_-]node|nproc[_-]per[_-]node|GPUS_PER_NODE|ntasks-per-node)[= :]+\d",
    r"\b(?:world[ _]size|WORLD_SIZE)['\"]?\s*[:=]\s*\d", r"\s(?:time|host|rank|exitcode|pid)\s+:\s", r"failed \(exitcode: -?\d+\)",
    r"Root Cause \(first", r"Failures:", r"util(?:ization)?[=: ]+\d+\s?%", r"Exception Group", r"exc_info|\"exception\"|stack_trace",
)  # fmt: skip
_WRITER = (
    re.compile(rb"ank[ =:_\[]{0,2}\d+"),
    re.compile(rb"node[-_ ]?\d+"),
    re.compile(rb"Xid \(PCI:[^)]{0,20}\): \d+"),
)
_TASK = re.compile(rb"\s{0,5}\d{1,6}: ")


class Hit(Protocol):
    """Where something was found, as a match of a regular expression says it."""

    def start(self) -> int: ...


@dataclass(frozen=True)
class _Hit:
    at: int

    def start(self) -> int:
        return self.at


Ids = tuple[int, ...]


class Patterns:
    """All rules and structures in one matcher that does not care where on a line they stand."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)
        self._match = loose_set([r.regex for r in rules] + list(_STRUCTURE))

    @property
    def usable(self) -> bool:
        """Whether whole chunks can be tried at once (google-re2 is there)."""
        return self._match is not None

    def __call__(self, text: bytes) -> Ids:
        """The numbers of what fits somewhere in `text`, in order; () where nothing does."""
        if b"\\" in text:  # text within JSON
            text = text.replace(b"\\n", b"\n").replace(b"\\t", b"\t").replace(b'\\"', b'"')
        assert self._match is not None
        found = self._match(text)
        return tuple(sorted(found)) if found else ()

    def name(self, ids: Ids) -> str | None:
        """The id of the rule that would decide, or None for structure."""
        return self.rules[ids[0]].id if ids[0] < len(self.rules) else None


def patterns_of(ruleset: RuleSet) -> Patterns:
    """The patterns of a rule set, kept with it."""
    known = getattr(ruleset, "_patterns", None)
    if known is None:
        known = Patterns(ruleset.rules)
        ruleset._patterns = known  # type: ignore[attr-defined]
    return known


class Shared:
    """What all logs of one diagnosis know together: how much was read, which kinds are seen everywhere, and how many
    bytes at its end of each are read line by line (`tail`), how many lines show its decoration (`sample`)."""

    def __init__(self, patterns: Patterns, logs: int = 1) -> None:
        self.patterns = patterns
        self.tail = max(_LEAST_TAIL, min(_TAIL, _TAILS // max(1, logs)))
        self.sample = SAMPLE_LINES if logs <= _MANY_LOGS else _FEW_LINES
        self.bytes = self.hits = self.reads = self.firsts = 0
        self.known: dict[bytes, Ids] = {}
        self.seen: Counter[Ids] = Counter()
        self.texts: Counter[Ids] = Counter()
        self.wide: set[int] = set()
        self.writers: dict[Ids, dict[bytes, int]] = {}

    @property
    def crowded(self) -> bool:
        """Whether triggers are so frequent that not every line with one can be read."""
        return self.patterns.usable and self.hits > _FREE_HITS + self.bytes // _BYTES_PER_HIT

    @property
    def exhausted(self) -> bool:
        """Whether as many lines were read as their bytes allow: kinds that are known are only counted then."""
        return self.reads > _FREE_READS + self.bytes // _BYTES_PER_READ

    @property
    def more_writers(self) -> bool:
        """Whether the first line of a kind from yet another rank or node may still be read."""
        return self.firsts < _FREE_WRITERS + self.bytes // _BYTES_PER_WRITER


class Sieve:
    """Finds the next line of one log that is worth reading, as `search(block, pos)`, like a compiled expression."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._match = shared.patterns
        self._read: Counter[Ids] = Counter()
        self._counted: Counter[Ids] = Counter()
        self._block: bytes | None = None
        self._sifted: list[int] | None = None

    def search(self, block: bytes, pos: int = 0) -> Hit | None:
        """A hit whose `start()` lies in the first line worth reading that begins at `pos` or later."""
        shared = self._shared
        if block is not self._block:
            self._block, self._sifted = block, None
            shared.bytes += len(block)
        if self._sifted is None:
            hit: Hit | None = TRIGGER.search(block, pos)
            if hit is None:
                return None
            shared.hits += 1
            if not shared.crowded:
                return hit
            self._sifted = self._sift(block, block.rfind(b"\n", 0, pos) + 1 if pos else 0)
        at = bisect.bisect_left(self._sifted, pos)
        return _Hit(self._sifted[at]) if at < len(self._sifted) else None

    def counted(self) -> dict[str, int]:
        """Rule id -> how many of its lines were counted and not read."""
        out: Counter[str] = Counter()
        for ids, count in self._counted.items():
            name = self._match.name(ids)
            if name is not None:
                out[name] += count
        return dict(out)

    def _sift(self, block: bytes, at: int) -> list[int]:
        """Where the lines worth reading begin, from byte `at`."""
        starts: list[int] = []
        last: dict[Ids, int] = {}
        size = len(block)
        while at < size:
            end = size
            if at + _CHUNK < size:
                end = block.rfind(b"\n", at, at + _CHUNK) + 1 or block.find(b"\n", at + _CHUNK) + 1 or size
            chunk = block[at:end]
            ids = self._match(chunk)
            if ids:
                self._look(chunk, at, ids, starts, last)
            at = end
        known = set(starts)
        starts += [x for x in last.values() if x not in known]
        starts.sort()
        return starts

    def _look(self, chunk: bytes, at: int, ids: Ids, starts: list[int], last: dict[Ids, int]) -> None:
        """Takes the lines of a chunk in which something fits: to be read, or counted."""
        keys = chunk.translate(None, _DELETE).split(b"\n")
        writers = {w for pattern in _WRITER for w in pattern.findall(chunk)} or {b""}
        if not _TASK.match(chunk) and (
            self._count_repeats(chunk, at, keys, ids, writers, last) or self._count_wide(chunk, ids, writers)
        ):
            return
        known, offset, union = self._shared.known, at, set[int]()
        rows = chunk.split(b"\n")
        for row, key in zip(rows, keys, strict=True):
            got = known.get(key)
            new = got is None
            if got is None:
                got = self._match(row)
                if len(known) < _TEMPLATES:
                    known[key] = got
            if got:
                union.update(got)
                self._take(got, row, offset, starts, last, new)
            offset += len(row) + 1
        if not union.issuperset(ids):
            # Digits made the difference: no two lines are taken for the same one here.
            offset = at
            for row, key in zip(rows, keys, strict=True):
                got = self._match(row)
                if got and got != known.get(key):
                    self._take(got, row, offset, starts, last, True)
                offset += len(row) + 1

    def _count_repeats(
        self, chunk: bytes, at: int, keys: list[bytes], ids: Ids, writers: set[bytes], last: dict[Ids, int]
    ) -> bool:
        """Counts a chunk of few texts that were all read often enough; false where one was not."""
        shared = self._shared
        distinct = set(keys)
        if len(distinct) > 16:
            return False
        found: dict[bytes, Ids] = {}
        for key in distinct:
            got = shared.known.get(key)
            if got is None or (got and not self._enough(got, writers)):
                return False
            found[key] = got
        if not set(ids) <= {i for got in found.values() for i in got}:
            return False
        counts = Counter(keys)
        for key, got in found.items():
            if got:
                self._counted[got] += counts[key]
                shared.seen[got] += counts[key]
                last[got] = at + _row_start(chunk, len(keys) - 1 - keys[::-1].index(key))
        return True

    def _count_wide(self, chunk: bytes, ids: Ids, writers: set[bytes]) -> bool:
        """Counts a chunk of many texts where each rule that fits is known from very many texts already."""
        shared = self._shared
        if not shared.wide.issuperset(ids) or not all(self._enough((i,), writers) for i in ids):
            return False
        for row in chunk.split(b"\n"):
            got = self._match(row)
            if got:
                self._counted[got] += 1
                shared.seen[got] += 1
        return True

    def _enough(self, ids: Ids, writers: set[bytes]) -> bool:
        """Whether lines that fit `ids` were read often enough in this log, and from each of `writers` in any."""
        known = self._shared.writers.get(ids)
        if known is None or self._read[ids] < (1 if self._shared.exhausted else _READ_EACH):
            return False
        least = self._limit(ids, known)
        return all(known.get(w, 0) >= least for w in writers)

    def _limit(self, ids: Ids, known: dict[bytes, int]) -> int:
        """How many lines of one writer that fit `ids` are read: fewer, the more of them there are."""
        shared = self._shared
        if shared.exhausted:
            return 1 if shared.more_writers else 0
        if shared.seen[ids] > _COMMON or len(known) > 128:
            return 1
        return _READ_EACH if len(known) < 16 else 4

    def _take(
        self, ids: Ids, row: bytes, offset: int, starts: list[int], last: dict[Ids, int], new: bool
    ) -> None:
        """One line that fits `ids`: to be read, or counted where there were enough of its kind. `new` is a text that
        was not known before."""
        shared = self._shared
        shared.seen[ids] += 1
        worth = self._read[ids] < (1 if shared.exhausted else _READ_EACH)
        if new and shared.texts[ids] <= _MANY_TEXTS:
            shared.texts[ids] += 1
            worth = True
            if shared.texts[ids] > _MANY_TEXTS:
                shared.wide.update(ids)
        found = [w for pattern in _WRITER for w in pattern.findall(row, 0, 400)[:2]]
        task = _TASK.match(row)
        if task:
            found.append(task.group(0))
        known = shared.writers.setdefault(ids, {})
        limit = self._limit(ids, known)
        for w in found or [b""]:
            count = known.get(w, 0)
            if count < limit:
                worth = True
                shared.firsts += not count
            if len(known) < _MOST_WRITERS:
                known[w] = count + 1
                for i in ids if len(ids) > 1 else ():
                    single = shared.writers.setdefault((i,), {})
                    single[w] = single.get(w, 0) + 1
        if worth:
            starts.append(offset)
            shared.reads += 1
            self._read[ids] += 1
            for i in ids if len(ids) > 1 else ():
                self._read[(i,)] += 1
        else:
            self._counted[ids] += 1
            last[ids] = offset


def with_counts(verdict: Verdict, counted: Iterable[dict[str, int]], ruleset: RuleSet) -> Verdict:
    """The verdict with the lines that were counted and not read: in its cascade, and in a note."""
    by_rule: Counter[str] = Counter()
    for one in counted:
        by_rule.update(one)
    if not by_rule:
        return verdict
    by_reason: Counter[str] = Counter()
    for name, count in by_rule.items():
        rule = ruleset.get(name)
        if rule is not None and rule.reason and rule.role in ("root", "either", "cascade"):
            by_reason[rule.reason] += count
    names = ", ".join(f"{name} {count:,}" for name, count in by_rule.most_common(3))
    note = f"{by_rule.total():,} more lines of kinds that had been read often enough were counted, not read one by one ({names})"
    cascade = tuple(replace(c, count=c.count + by_reason[c.reason]) for c in verdict.cascade)
    return replace(verdict, cascade=cascade, notes=(*verdict.notes, note))


def _row_start(chunk: bytes, index: int) -> int:
    """Where line `index` of a chunk begins."""
    at = 0
    for _ in range(index):
        at = chunk.index(b"\n", at) + 1
    return at
