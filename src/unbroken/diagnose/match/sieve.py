"""Which lines are worth reading in a log where a trigger word stands on every line.

Reading one line takes a hundred microseconds. As long as triggers are rare, each line with one is read. Where they are
not, all rules are tried at once on chunks of 64 KB: a chunk that fits none holds nothing. One whose texts, or rules,
and whose writers (ranks, nodes, error codes) were all read often enough is counted as a whole: by its texts where
they are few, else by their share in a sample of such chunks. Only what is new in a chunk is looked for line by line.
The last line of each kind in a block is read too, because it shows what was going on at the end.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ...progress.records.verdict import Verdict
from ..read.decoration import SAMPLE_LINES, Learner
from .events import Counted
from .rules import Rule, RuleSet, Search, loose_search, loose_set
from .triggers import TRIGGER

_CHUNK, _PIECE = 64 << 10, 8 << 10
_DELETE = b"0123456789.,:+-"
_FREE_HITS, _BYTES_PER_HIT = 300, 16 << 10
_READ_EACH = 48
_COMMON = 1000
_FREE_READS, _BYTES_PER_READ = 800, 32 << 10
_FREE_WRITERS, _BYTES_PER_WRITER = 5000, 16 << 10
_MANY_TEXTS = 150
_HITS_JUDGED = 8
_SAMPLED = 16  # of so many chunks, one is sampled
_MOST_WRITERS = 50_000
_TEMPLATES = 50_000
_FIRST_TRIES = 4
_MANY_LOGS, _FEW_LINES, _FREE_METRICS = 64, 12, 2000
_TAIL, _LEAST_TAIL, _TAILS = 256 << 10, 8 << 10, 8 << 20

# What a line may mean beside the rules: see `Scanner._matter` and `TopologyReader.see`.
_STRUCTURE = (
    r"Traceback \(most recent call last\)", r"Xid \(", r"\brank \d+ nranks \d+ cudaDev", r"Bootstrap ?: Using",
    r"(?:nodelist|NODELIST|nodes|hosts|NodeList)[=:] ?[A-Za-z]", r"(?:gpus[_-]per[_-]node|nproc[_-]per[_-]node|GPUS_PER_NODE|ntasks-per-node)[= :]+\d",
    r"\b(?:world[ _]size|WORLD_SIZE)['\"]?\s*[:=]\s*\d", r"\s(?:time|host|rank|exitcode|pid)\s+:\s", r"failed \(exitcode: -?\d+\)",
    r"Root Cause \(first", r"Failures:", r"util(?:ization)?[=: ]+\d+\s?%", r"Exception Group", r"exc_info|\"exception\"|stack_trace",
)  # fmt: skip
_WRITER = (
    (b"ank", re.compile(rb"ank[ =:_\[]{0,2}\d+")),
    (b"node", re.compile(rb"node[-_ ]?\d+")),
    (b"Xid (", re.compile(rb"Xid \(PCI:[^)]{0,20}\): \d+")),
)
_TASK = re.compile(rb"\s{0,5}\d{1,6}: ")
_TASKS = re.compile(rb"\n {0,5}\d{1,6}: ")
_PLAIN = b"!"
_LOW = (b"INFO", b"WARN", b"DEBUG")


class Hit(Protocol):
    """Where something was found, as a match of a regular expression says it."""

    def start(self) -> int: ...


@dataclass(frozen=True)
class _Hit:
    at: int

    def start(self) -> int:
        return self.at


Ids = tuple[int, ...]


@dataclass(frozen=True)
class _Place:
    """A chunk (or a line) at byte `at` of its block in which something fits; with `keys`, the last line with `key`."""

    at: int
    chunk: bytes
    keys: list[bytes] | None = None
    key: bytes = b""


@dataclass
class _Sample:
    """What fits the lines of some chunks, to estimate others from."""

    chunks: int = 0
    lines: int = 0
    fits: Counter[Ids] = field(default_factory=Counter)


class Patterns:
    """All rules and structures in one matcher that does not care where on a line they stand."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)
        self._regexes = [r.regex for r in rules] + list(_STRUCTURE)
        self._match = loose_set(self._regexes)
        self._each: dict[int, Search] = {}

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

    def find(self, one: int, text: bytes, pos: int) -> int:
        """Where in `text`, from byte `pos` on, number `one` fits first; -1 where nowhere."""
        search = self._each.get(one)
        if search is None:
            search = self._each[one] = loose_search(self._regexes[one])
        m = search(text, pos)
        return -1 if m is None else m.start()

    def name(self, ids: Ids) -> str | None:
        """The id of the rule that would decide, or None for structure."""
        return self.rules[ids[0]].id if ids[0] < len(self.rules) else None


def patterns_of(ruleset: RuleSet) -> Patterns:
    """The patterns of a rule set, kept with it."""
    known = getattr(ruleset, "_patterns", None)
    if known is None:
        # Rules on a log's last lines are tried there, on each line.
        known = Patterns([r for r in ruleset.rules if r.where != "tail"])
        ruleset._patterns = known  # type: ignore[attr-defined]
    return known


class Shared:
    """What all logs of one diagnosis know together: how much was read, which kinds are seen everywhere, and how many
    bytes at its end of each are read line by line (`tail`), what decorations they have, and how many times on its last
    lines are read (`stamps`, within about `stamp_rows`), and in how many of its first bytes steps are planned (`plan`)."""

    def __init__(self, patterns: Patterns, logs: int = 1) -> None:
        self.patterns = patterns
        self.tail = max(_LEAST_TAIL, min(_TAIL, _TAILS // max(1, logs)))
        self.many = logs > _MANY_LOGS
        self.stamps, self.stamp_rows = (8, 40) if self.many else (40, 400)
        self.plan = (32 if self.many else 256) << 10
        self.decoration = Learner(_FEW_LINES if self.many else SAMPLE_LINES)
        self.metrics = 0
        self.bytes = self.hits = self.reads = self.firsts = 0
        self.known: dict[bytes, Ids] = {}
        self.seen: Counter[Ids] = Counter()
        self.told: Counter[Ids] = Counter()
        self.texts: Counter[Ids] = Counter()
        self.wide: set[int] = set()
        self.writers: dict[Ids, dict[bytes, int]] = {}
        self.samples: dict[Ids, _Sample] = {}

    @property
    def crowded(self) -> bool:
        """Whether triggers are so frequent that not every line with one can be read."""
        return self.patterns.usable and self.hits > _FREE_HITS + self.bytes // _BYTES_PER_HIT

    @property
    def very_crowded(self) -> bool:
        """Whether this will be so for long."""
        return self.hits > 2 * (_FREE_HITS + self.bytes // _BYTES_PER_HIT)

    @property
    def exhausted(self) -> bool:
        """Whether as many lines were read as their bytes allow: kinds that are known are only counted then."""
        return self.reads > _FREE_READS + self.bytes // _BYTES_PER_READ

    @property
    def few_metrics(self) -> bool:
        """Whether so many metric lines were read at the ends of many logs that of each further log a few are enough."""
        return self.many and self.metrics > _FREE_METRICS

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
        self._estimated: dict[Ids, float] = {}
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
            if not shared.very_crowded:
                shared.hits += _hits_after(block, hit.start())
            self._sifted = self._sift(block, block.rfind(b"\n", 0, pos) + 1 if pos else 0)
        at = bisect.bisect_left(self._sifted, pos)
        return _Hit(self._sifted[at]) if at < len(self._sifted) else None

    def counted(self) -> Counted:
        """How many lines were counted and not read, by the rule that would decide."""
        out: Counter[str] = Counter()
        about: set[str] = set()
        for ids, count in (*self._counted.items(), *((k, round(n)) for k, n in self._estimated.items())):
            name = self._match.name(ids)
            if name is not None and count:
                out[name] += count
                if ids in self._estimated:
                    about.add(name)
        return Counted(dict(out), frozenset(about))

    def _sift(self, block: bytes, at: int) -> list[int]:
        """Where the lines worth reading begin, from byte `at`."""
        starts: list[int] = []
        last: dict[Ids, _Place] = {}
        for chunk, offset in _pieces(block, at, _CHUNK):
            self._chunk(chunk, offset, starts, last)
        known = set(starts)
        starts += [x for x in {self._last_of(ids, p) for ids, p in last.items()} if x >= 0 and x not in known]
        starts.sort()
        return starts

    def _chunk(self, chunk: bytes, at: int, starts: list[int], last: dict[Ids, _Place]) -> None:
        """Takes the lines of a chunk in which something fits: counted as a whole, or else in smaller pieces, or else
        one by one."""
        ids = self._match(chunk)
        if not ids:
            return
        keys = None
        if self._shared.wide.issuperset(ids):
            self._first_of_each(chunk, at, ids, starts)
            if self._enough(ids) and self._known_writers(chunk, at, ids, starts):
                self._estimate(chunk, at, ids, last)
                return
        elif all(self._least((i,)) == 1 for i in ids) or self._enough(ids):
            keys = chunk.translate(None, _DELETE).split(b"\n")
            if self._count_repeats(chunk, at, keys, ids, starts, last):
                return
        if len(chunk) <= _PIECE + 1024:
            self._rows(chunk, at, keys or chunk.translate(None, _DELETE).split(b"\n"), ids, starts, last)
            return
        for piece, offset in _pieces(chunk, 0, _PIECE):
            self._chunk(piece, at + offset, starts, last)

    def _rows(
        self, chunk: bytes, at: int, keys: list[bytes], ids: Ids, starts: list[int], last: dict[Ids, _Place]
    ) -> None:
        """Takes the lines of a chunk one by one."""
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
        self, chunk: bytes, at: int, keys: list[bytes], ids: Ids, starts: list[int], last: dict[Ids, _Place]
    ) -> bool:
        """Counts a chunk of few texts that were all read often enough; false where one was not."""
        shared = self._shared
        counts = Counter(keys)
        if len(counts) > 64:
            return False
        found: dict[bytes, Ids] = {}
        for key in counts:
            got = shared.known.get(key)
            if got is None or (got and self._least(got) > max(1, self._read[got])):
                return False
            if got:
                found[key] = got
        if not set(ids).issubset(i for got in found.values() for i in got):
            return False
        kinds = {(got, b"" if _is_low(key) else _PLAIN) for key, got in found.items()}
        writers = _named(chunk)
        if not all(self._has_enough(k, {p + w for w in writers}, chunk, at, starts) for k, p in kinds):
            return False
        for key, got in found.items():
            if not self._read[got]:
                starts.append(at + _row_start(chunk, keys.index(key)))
                self._count_read(got)
            self._counted[got] += counts[key]
            shared.seen[got] += counts[key]
            last[got] = _Place(at, chunk, keys, key)
        return True

    def _estimate(self, chunk: bytes, at: int, ids: Ids, last: dict[Ids, _Place]) -> None:
        """Counts the lines of a chunk of many texts where each rule that fits is known from very many texts already:
        by their share in a sample of such chunks."""
        shared = self._shared
        sample = shared.samples.get(ids)
        if sample is None or sample.chunks % _SAMPLED == 0:
            sample = sample or _Sample()
            shared.samples[ids] = sample
            for piece, _ in _pieces(chunk, 0, _PIECE):
                rows = piece.rstrip(b"\n").split(b"\n")
                sample.lines += len(rows)
                sample.fits.update(got for row in rows if (got := self._match(row)))
                break
        sample.chunks += 1
        lines = chunk.count(b"\n") + (not chunk.endswith(b"\n"))
        for got, count in sample.fits.items():
            self._estimated[got] = self._estimated.get(got, 0.0) + count * lines / sample.lines
        last[ids] = _Place(at, chunk)

    def _last_of(self, ids: Ids, place: _Place) -> int:
        """Where the last line that fits some of `ids` begins; -1 where none is found near the chunk's end."""
        chunk, end = place.chunk, len(place.chunk)
        if place.keys is not None:
            before = chunk.rsplit(b"\n", place.keys[::-1].index(place.key))[0]
            return place.at + before.rfind(b"\n") + 1
        for _ in range(40):
            if end <= 0:
                break
            start = chunk.rfind(b"\n", 0, end - 1) + 1
            if not set(ids).isdisjoint(self._match(chunk[start:end])):
                return place.at + start
            end = start
        return -1

    def _least(self, ids: Ids) -> int:
        """How many lines that fit `ids` are read in this log: one is enough where other logs have shown the kind."""
        shared = self._shared
        return 1 if shared.exhausted or shared.told[ids] - self._read[ids] >= _READ_EACH else _READ_EACH

    def _enough(self, ids: Ids) -> bool:
        """Whether lines that fit each of `ids` were read often enough in this log."""
        return all(self._read[(i,)] >= self._least((i,)) for i in ids)

    def _first_of_each(self, chunk: bytes, at: int, ids: Ids, starts: list[int]) -> None:
        """Has the first lines of a log read in which kinds stand that other logs have shown often enough."""
        for i in ids:
            if self._read[(i,)] or self._least((i,)) != 1:
                continue
            pos = 0
            for _ in range(_FIRST_TRIES):  # what fits over the end of a line fits none of them
                pos = self._match.find(i, chunk, pos)
                if pos < 0:
                    break
                start, end = chunk.rfind(b"\n", 0, pos) + 1, chunk.find(b"\n", pos)
                row = chunk[start : len(chunk) if end < 0 else end]
                got = self._match(row)
                if i in got:
                    starts.append(at + start)
                    self._note(got, _writers(row[:400]))
                    self._count_read(got)
                    break
                pos = start + len(row) + 1

    def _known_writers(self, chunk: bytes, at: int, ids: Ids, starts: list[int]) -> bool:
        """Whether enough lines that fit each of `ids` were read from each writer in `chunk`; those few that lacked
        one are put into `starts`, and with many the answer is no."""
        if all(not self._limit((i,)) for i in ids):
            return True
        if not _has_plain(chunk):
            parts = [(chunk, ids, False)]
        elif not _is_low(chunk):
            parts = [(chunk, ids, True)]
        else:
            rows = chunk.split(b"\n")
            texts = [b"\n".join(r for r in rows if _is_low(r) is low) for low in (True, False)]
            parts = [(text, self._match(text), text is texts[1]) for text in texts]
        for text, fitting, marked in parts:
            writers = {_PLAIN + w for w in _named(text)} if marked else _named(text)
            if not all(self._has_enough((i,), writers, chunk, at, starts) for i in fitting):
                return False
        return True

    def _has_enough(self, ids: Ids, writers: set[bytes], chunk: bytes, at: int, starts: list[int]) -> bool:
        """As `_known_writers`, for these writers and lines that fit all of `ids`."""
        limit = self._limit(ids)
        if not limit:
            return True
        known = self._shared.writers.get(ids, {})
        new = writers - known.keys() if limit == 1 else {w for w in writers if known.get(w, 0) < limit}
        if len(new) > 8 or (new and limit > 1) or not new.isdisjoint((b"", _PLAIN)):
            return False
        for w in new:
            self._first_of(w, chunk, at, ids, starts)
        return True

    def _first_of(self, writer: bytes, chunk: bytes, at: int, ids: Ids, starts: list[int]) -> None:
        """Has the first line of a writer that fits `ids` read, if the chunk holds one."""
        word, pos = writer.removeprefix(_PLAIN), 0
        while (pos := chunk.find(word, pos)) >= 0:
            start, end = chunk.rfind(b"\n", 0, pos) + 1, chunk.find(b"\n", pos)
            row = chunk[start : len(chunk) if end < 0 else end]
            pos = start + len(row)
            if writer not in _writers(row):
                continue
            got = self._match(row)
            if not set(ids).isdisjoint(got):
                starts.append(at + start)
                self._note(got, {writer})
                self._count_read(got)
                return

    def _limit(self, ids: Ids) -> int:
        """How many lines of one writer that fit `ids` are read: fewer, the more of them there are."""
        shared = self._shared
        if shared.exhausted:
            return 1 if shared.more_writers else 0
        writers = len(shared.writers.get(ids, ()))
        if shared.seen[ids] > _COMMON or writers > 64:
            return 1
        return _READ_EACH if writers < 16 else 3

    def _take(
        self, ids: Ids, row: bytes, offset: int, starts: list[int], last: dict[Ids, _Place], new: bool
    ) -> None:
        """One line that fits `ids`: to be read, or counted where there were enough of its kind. `new` is a text that
        was not known before."""
        shared = self._shared
        shared.seen[ids] += 1
        worth = self._read[ids] < self._least(ids)
        if new and shared.texts[ids] <= _MANY_TEXTS:
            shared.texts[ids] += 1
            worth = True
            if shared.texts[ids] > _MANY_TEXTS:
                shared.wide.update(ids)
        worth |= self._note(ids, _writers(row[:400]))
        if worth:
            starts.append(offset)
            self._count_read(ids)
        else:
            self._counted[ids] += 1
            last[ids] = _Place(offset, row)

    def _note(self, ids: Ids, writers: set[bytes]) -> bool:
        """Counts one line that fits `ids` for each of its writers; true where one of them had not enough yet."""
        shared = self._shared
        known = shared.writers.setdefault(ids, {})
        limit = self._limit(ids)
        worth = False
        for w in writers:
            count = known.get(w, 0)
            if count < limit:
                worth = True
                shared.firsts += not count
            if len(known) < _MOST_WRITERS:
                known[w] = count + 1
                for i in ids if len(ids) > 1 else ():
                    single = shared.writers.setdefault((i,), {})
                    single[w] = single.get(w, 0) + 1
        return worth

    def _count_read(self, ids: Ids) -> None:
        shared = self._shared
        shared.reads += 1
        for one in (ids, *((i,) for i in ids)) if len(ids) > 1 else (ids,):
            self._read[one] += 1
            shared.told[one] += 1


def _pieces(data: bytes, at: int, size: int) -> Iterator[tuple[bytes, int]]:
    """`data` from byte `at` in pieces of about `size` bytes that end with a whole line, and where each begins."""
    total = len(data)
    while at < total:
        end = total
        if at + size < total:
            end = data.rfind(b"\n", at, at + size) + 1 or data.find(b"\n", at + size) + 1 or total
        yield data[at:end], at
        at = end


def _row_start(chunk: bytes, index: int) -> int:
    """Where line `index` of a chunk begins."""
    return len(chunk) - len(chunk.split(b"\n", index)[-1])


def _hits_after(block: bytes, at: int) -> int:
    """About how many lines with a trigger follow byte `at`, judged by the next few; so that a log stays crowded over
    the next blocks, and not for ever."""
    pos, count = at, 0
    while count < _HITS_JUDGED and (hit := TRIGGER.search(block, pos)) is not None:
        count += 1
        pos = block.find(b"\n", hit.start()) + 1 or len(block)
    if count == _HITS_JUDGED:
        count = count * (len(block) - at) // max(1, pos - at)
    return min(count, 4 * len(block) // _BYTES_PER_HIT)


def _writers(row: bytes) -> set[bytes]:
    """The ranks, nodes and error codes that a line names; those of a line that its logger does not rate below an
    error are marked, because what a rank warned of before says nothing of what it fails with."""
    return _named(row) if _is_low(row) else {_PLAIN + w for w in _named(row)}


def _named(text: bytes) -> set[bytes]:
    """The ranks, nodes and error codes that some lines name; one nameless writer where they name none."""
    found = set[bytes]().union(*(pattern.findall(text) for word, pattern in _WRITER if word in text))
    if _TASK.match(text):
        found.update(w.strip() for w in _TASKS.findall(b"\n" + text))
    return found or {b""}


def _is_low(row: bytes) -> bool:
    return any(w in row for w in _LOW)


def _line_without(words: Sequence[bytes]) -> Callable[[bytes], object]:
    """A search for a line, not blank, with none of `words` in it. The first letter of a word may stand nowhere else in
    any of them: then such a line is text without first letters, with beginnings of words that do not go on."""
    try:
        import re2
    except ImportError:
        return lambda text: True
    first = "".join(w[:1].decode() for w in words)
    starts = []
    for word in (w.decode() for w in words):
        starts += [f"{word[:n]}(?:[^{first}{word[n]}\\n][^{first}\\n]*)?" for n in range(1, len(word))]
    begun = f"(?:{'|'.join(starts)})"
    text = f"(?:[^{first}\\n]+{begun}*|{begun}+)"
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1
    return re2.compile(f"(?m)^{text}$".encode(), options).search  # type: ignore[no-any-return]


_LINE_WITHOUT_LOW = _line_without(_LOW)


def _has_plain(chunk: bytes) -> bool:
    """Whether a line, not blank, has none of the words with which loggers rate it below an error."""
    return _LINE_WITHOUT_LOW(chunk) is not None


def with_counts(verdict: Verdict, counted: Iterable[Counted], ruleset: RuleSet) -> Verdict:
    """The verdict with the lines that were counted and not read: in its cascade, and in a note."""
    by_rule: Counter[str] = Counter()
    about: set[str] = set()
    for one in counted:
        by_rule.update(one.lines)
        about |= one.about
    if not by_rule:
        return verdict
    by_reason: Counter[str] = Counter()
    for name, count in by_rule.items():
        rule = ruleset.get(name)
        if rule is not None and rule.reason and rule.role in ("root", "either", "cascade"):
            by_reason[rule.reason] += count
    names = ", ".join(
        f"{name} {'about ' if name in about else ''}{count:,}" for name, count in by_rule.most_common(3)
    )
    note = f"{'about ' if about else ''}{by_rule.total():,} more lines of kinds that had been read often enough were counted, not read one by one ({names})"
    cascade = tuple(replace(c, count=c.count + by_reason[c.reason]) for c in verdict.cascade)
    return replace(verdict, cascade=cascade, notes=(*verdict.notes, note))
