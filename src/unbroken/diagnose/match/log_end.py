"""What the last lines of a log show: its last steps and losses, their times, and whether the run reached its end."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator

from ..read import clock, progress_lines
from ..read.decoration import Bare
from ..read.sources import Source
from .completion import LAST_OF_PLAN, TAIL_LINES, completion, may_be_complete
from .events import FileScan, LogEvent, MetricLine
from .kinds import Shared
from .quick import has_clock
from .rules import RuleSet

_LAST_LINES, _FEW_TRIES = 6, 3
_PACE = re.compile(r"([\d.]+)s/it\]")


class TailReader:
    """Reads the end of one log into its scan `out`; `bare` takes a raw line apart, `planned` are the steps that its
    first lines plan for."""

    def __init__(
        self, out: FileScan, source: Source, ruleset: RuleSet, shared: Shared, year: int, planned: frozenset[int],
        bare: Callable[[bytes], list[Bare]],
    ) -> None:  # fmt: skip
        self._out, self._source, self._ruleset, self._shared = out, source, ruleset, shared
        self._year, self._planned, self._bare = year, planned, bare

    def read(self, previous: bytes, last: bytes, lines: int) -> None:
        """Reads the tail of the last two blocks of a log of so many lines."""
        end = self._out.log_end
        end.lines = end.last_line = lines
        most = self._shared.tail
        tail = (previous[-(most - len(last)) :] + last) if len(last) < most else last[-most:]
        if not tail:
            return
        end.cut_off = not tail.endswith(b"\n")
        rows = tail.split(b"\n")
        if not end.cut_off:
            rows.pop()
        if len(tail) >= most:
            rows = rows[1:]
        first = lines - len(rows) + 1
        if progress_lines.may(tail):
            self._last_metrics(rows, first)
        self._completed(rows, first)
        self._last_times(rows, first, has_clock(tail), b"/it]" in tail)

    def _completed(self, rows: list[bytes], first: int) -> None:
        """Adds the ending that a log's last lines show."""
        found = None
        if may_be_complete(b"\n".join(rows[-2 * TAIL_LINES :]), self._ruleset):
            texts = self._last_texts(rows, first, TAIL_LINES)
            steps = [p.step for p in self._out.progress[-50:] if p.step is not None]
            found = completion(texts, self._ruleset, max(steps, default=None))
        else:
            texts = self._last_texts(rows, first, _LAST_LINES)
        self._out.last_lines = [(n, t[:2000], clock.find(t, self._year)) for n, t in texts[-_LAST_LINES:]]
        end = self._out.progress[-1] if self._out.progress else None
        if (
            found is None
            and end is not None
            and end.step is not None
            and {end.step, end.step + 1} & self._planned
        ):
            found = (end.line, end.text, LAST_OF_PLAN)
        if found is not None and not self._out.machine:
            number, text, rule = found
            when = clock.find(text, self._year)
            self._out.events.append(
                LogEvent(
                    self._out.index,
                    number,
                    text[:2000],
                    rule,
                    when,
                    self._source.rank,
                    self._source.node,
                    weight=0.6,
                )
            )

    def _last_texts(self, rows: list[bytes], first: int, most: int) -> list[tuple[int, str]]:
        """At least `most` of the last texts that are not blank, with their lines, as far as twice as many rows go."""
        texts: list[list[tuple[int, str]]] = []
        count = 0
        for i in range(len(rows) - 1, max(-1, len(rows) - 2 * TAIL_LINES - 1), -1):
            texts.append([(first + i, b.text) for b in self._bare(rows[i]) if b.text.strip()])
            count += len(texts[-1])
            if count >= most:
                break
        return [t for some in reversed(texts) for t in some]

    def _last_metrics(self, rows: list[bytes], first: int) -> None:
        """Reads the metric lines among the last rows: all of them, or the last few where many logs showed many."""
        known = {p.line for p in self._out.progress if p.line >= first}
        found: list[MetricLine] = []
        backwards = range(len(rows) - 1, -1, -1)
        if self._shared.few_metrics:
            # The last step, and one from before: as much of a stretch of bad losses as of what lies before it.
            for order in (backwards, range(len(rows))):
                some = list(itertools.islice((i for i in order if progress_lines.may(rows[i])), _FEW_TRIES))
                found += itertools.islice(self._metrics_of(rows, some, first, known), 1)
        else:
            wanted = [i for i in backwards if progress_lines.may(rows[i])]
            self._shared.metrics += len(wanted)
            found += self._metrics_of(rows, wanted, first, known)
        if found:
            self._out.progress = sorted((*self._out.progress, *found), key=lambda p: p.line)

    def _metrics_of(
        self, rows: list[bytes], wanted: list[int], first: int, known: set[int]
    ) -> Iterator[MetricLine]:
        """The steps and losses of the `wanted` rows, where they are not known yet."""
        for i in wanted:
            for bare in self._bare(rows[i]) if first + i not in known else ():
                got = progress_lines.read(bare.text)
                if got:
                    when = clock.find(bare.text, self._year) or clock.find(bare.time or "", self._year)
                    yield MetricLine(self._out.index, first + i, *got, when, bare.text[:1000])
                    known.add(first + i)
                    break

    def _last_times(self, rows: list[bytes], first: int, timed: bool, paced: bool) -> None:
        """Reads the last line's text, the times of the last lines that have one, and the pace that a bar shows."""
        end, farthest = self._out.log_end, self._shared.stamp_rows
        for i in range(len(rows) - 1, -1, -1):
            said = next((b for b in reversed(self._bare(rows[i])) if b.text.strip()), None)
            if said is None:
                continue
            text = said.text
            if not end.last_text:
                end.last_text, end.last_line = text[:2000], first + i
            if not timed and not paced:
                break
            when = (
                (clock.find(text, self._year) or clock.find(said.time or "", self._year)) if timed else None
            )
            if when is not None:
                end.last_time = when if end.last_time is None else end.last_time
                end.stamps.insert(0, (first + i, when))
            if end.pace is None and "/it]" in text:
                m = _PACE.search(text)
                end.pace = float(m.group(1)) if m else None
            if len(end.stamps) >= self._shared.stamps or (len(rows) - i > farthest and end.stamps):
                break
