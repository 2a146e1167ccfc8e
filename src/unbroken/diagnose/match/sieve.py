"""Which lines are worth reading in a log where a trigger word stands on every line.

Reading one line takes a hundred microseconds. As long as triggers are rare, each line with one is read. Where they are
not, all rules are tried at once on chunks of 64 KB: a chunk that fits none holds nothing. One whose texts, or rules,
and whose writers (ranks, nodes, error codes) were all read often enough is counted as a whole: by its texts where
they are few, else by their share in a sample of such chunks. Only what is new in a chunk is looked for line by line.
The last line of each kind in a block is read too, because it shows what was going on at the end.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from ...progress.records.verdict import Verdict
from .events import Counted
from .kinds import BYTES_PER_HIT, Ids, LineSample, Shared
from .rules import RuleSet
from .triggers import TRIGGER
from .writers import PLAIN, has_plain, is_low, named, writers_of

_CHUNK, _PIECE = 64 << 10, 8 << 10
_DELETE = b"0123456789.,:+-"
_READ_EACH = 48
_COMMON = 1000
_MANY_TEXTS = 150
_HITS_JUDGED = 8
_SAMPLED = 16  # of so many chunks, one is sampled
_MOST_WRITERS = 50_000
_TEMPLATES = 50_000
_FIRST_TRIES = 4


class Hit(Protocol):
    """Where something was found, as a match of a regular expression says it."""

    def start(self) -> int: ...


@dataclass(frozen=True)
class _Hit:
    at: int

    def start(self) -> int:
        return self.at


@dataclass(frozen=True)
class _Place:
    """A chunk (or a line) at byte `at` of its block in which something fits; with `keys`, the last line with `key`."""

    at: int
    chunk: bytes
    keys: list[bytes] | None = None
    key: bytes = b""


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
        kinds = {(got, b"" if is_low(key) else PLAIN) for key, got in found.items()}
        writers = named(chunk)
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
            sample = sample or LineSample()
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
                    self._note(got, writers_of(row[:400]))
                    self._count_read(got)
                    break
                pos = start + len(row) + 1

    def _known_writers(self, chunk: bytes, at: int, ids: Ids, starts: list[int]) -> bool:
        """Whether enough lines that fit each of `ids` were read from each writer in `chunk`; those few that lacked
        one are put into `starts`, and with many the answer is no."""
        if all(not self._limit((i,)) for i in ids):
            return True
        if not has_plain(chunk):
            parts = [(chunk, ids, False)]
        elif not is_low(chunk):
            parts = [(chunk, ids, True)]
        else:
            rows = chunk.split(b"\n")
            texts = [b"\n".join(r for r in rows if is_low(r) is low) for low in (True, False)]
            parts = [(text, self._match(text), text is texts[1]) for text in texts]
        for text, fitting, marked in parts:
            writers = {PLAIN + w for w in named(text)} if marked else named(text)
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
        if len(new) > 8 or (new and limit > 1) or not new.isdisjoint((b"", PLAIN)):
            return False
        for w in new:
            self._first_of(w, chunk, at, ids, starts)
        return True

    def _first_of(self, writer: bytes, chunk: bytes, at: int, ids: Ids, starts: list[int]) -> None:
        """Has the first line of a writer that fits `ids` read, if the chunk holds one."""
        word, pos = writer.removeprefix(PLAIN), 0
        while (pos := chunk.find(word, pos)) >= 0:
            start, end = chunk.rfind(b"\n", 0, pos) + 1, chunk.find(b"\n", pos)
            row = chunk[start : len(chunk) if end < 0 else end]
            pos = start + len(row)
            if writer not in writers_of(row):
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
        worth |= self._note(ids, writers_of(row[:400]))
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
    return min(count, 4 * len(block) // BYTES_PER_HIT)


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
