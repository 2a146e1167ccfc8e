"""Likelihoods that wait, cut into batches wave by wave, and run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..tokens import Pair
from ..transformers_model import TransformersModel, is_out_of_memory
from . import prefixes
from .fitting import Fit
from .likelihoods import Likelihoods, Member
from .prefixes import PrefixBatch, PrefixRow, Stem


@dataclass(frozen=True)
class AskedProbability:
    """One log-probability to find: of a request, or of a window of one."""

    place: Any
    pair: Pair


@dataclass(frozen=True)
class _Work:
    batch: PrefixBatch
    rows: Sequence[PrefixRow]
    members: Mapping[int, Sequence[Member]]
    asked: Sequence[AskedProbability]


class Waves:
    """All that waits is cut at once (a wave), so that what is alike in length or beginning stands together; what comes meanwhile
    is in the next one, and nobody waits for longer than two."""

    def __init__(
        self,
        exact: TransformersModel,
        likelihoods: Likelihoods,
        fit: Fit,
        answer: Callable[[Any, list[Any]], None],
        fail: Callable[[Any, Exception], None],
    ) -> None:
        self._exact, self._likelihoods, self._fit = exact, likelihoods, fit
        self._answer, self._fail = answer, fail
        self._waiting: dict[str, list[AskedProbability]] = {}
        """By group: what belongs together begins alike."""
        self._work: list[_Work] = []
        """Of the present wave, the next one last."""
        self._started: tuple[Any, _Work] | None = None

    def __bool__(self) -> bool:
        return bool(self._started is not None or self._work or self._waiting)

    def put(self, group: str, asked: Sequence[AskedProbability]) -> None:
        """Into the next wave."""
        if asked:
            self._waiting.setdefault(group, []).extend(asked)

    def drop(self, of: Callable[[Any], Hashable], key: Hashable) -> None:
        """Takes out what has not begun of a key."""
        kept = {g: [a for a in some if of(a.place) != key] for g, some in self._waiting.items()}
        self._waiting = {g: some for g, some in kept.items() if some}

    def step(self) -> None:
        """Starts a batch, then waits for the one before it: on a GPU the next one is ready by then."""
        if not self._work:
            self._cut_all()
        before, self._started = self._started, None
        if self._work:
            work = self._work.pop()
            try:
                self._started = self._likelihoods.score(work.batch, work.rows, work.members), work
            except Exception as e:  # noqa: BLE001  the batch before this one is answered all the same
                self._retry(e, work)
        if before is not None:
            self._collect(*before)

    def _collect(self, started: Any, work: _Work) -> None:
        try:
            found = self._likelihoods.collect(started)
        except Exception as e:  # noqa: BLE001  on a GPU what goes wrong is often noticed here
            self._retry(e, work)
            return
        for number, value in found.items():
            self._answer(work.asked[number].place, value)

    def _cut_all(self) -> None:
        """Groups whose rows begin alike apart, the others together by length."""
        waiting, self._waiting = self._waiting, {}
        loose: list[AskedProbability] = []
        for some in waiting.values():
            root = prefixes.root_of([self._row(a.pair) for a in some]) if self._fit.shares else ()
            if root:
                self._cut(some, root)
            else:
                loose += some
        self._cut(loose, ())

    def _cut(self, asked: Sequence[AskedProbability], root: tuple[int, ...]) -> None:
        numbers: dict[tuple[tuple[int, ...], int], int] = {}
        rows: list[PrefixRow] = []
        members: dict[int, list[Member]] = {}
        for i, a in enumerate(asked):
            if not a.pair.continuation:
                self._answer(a.place, [0.0, True])
                continue
            row = self._row(a.pair)
            # Requests that differ in their last token alone share a row, as in the harness.
            n = numbers.setdefault((row.tokens, row.context), len(rows))
            if n == len(rows):
                rows.append(row)
            members.setdefault(n, []).append((i, a.pair.continuation[-row.wanted :]))
        if self._fit.shares:
            stems = prefixes.stems_of(rows, root)
        else:
            stems = [_alone(rows, i) for i in range(len(rows))]
        made = list(prefixes.batches(stems, root, self._fit.tokens, self._fit.held))
        self._work += [_Work(b, rows, members, asked) for b in reversed(made)]

    def _row(self, pair: Pair) -> PrefixRow:
        tokens = (pair.context + pair.continuation)[-(self._exact.max_length + 1) :][:-1]
        n = min(len(pair.continuation), len(tokens))
        return PrefixRow(tokens, len(tokens) - n + 1, n)

    def _retry(self, e: Exception, work: _Work) -> None:
        """A batch that raised is cut, until what raises is alone and has no answer; the others have theirs."""
        memory = isinstance(e, RuntimeError | MemoryError) and is_out_of_memory(self._exact.torch, e)
        if memory:
            self._likelihoods.forget()
            self._fit.free()
            self._fit.halve()
        batch = work.batch
        if len(batch.stems) > 1:
            half = len(batch.stems) // 2
            parts = [PrefixBatch(batch.root, batch.stems[half:]), PrefixBatch(batch.root, batch.stems[:half])]
        elif batch.root or len(batch.stems[0].rows) > 1:
            parts = [PrefixBatch((), (_alone(work.rows, i),)) for i in batch.stems[0].rows]
        else:
            parts = []
            for number, _ in work.members[batch.stems[0].rows[0]]:
                self._fail(work.asked[number].place, self._exact.out_of_memory() if memory else e)
        self._work += [_Work(b, work.rows, work.members, work.asked) for b in parts]


def _alone(rows: Sequence[PrefixRow], i: int) -> Stem:
    """A row with nothing shared."""
    return Stem(rows[i].tokens, (i,), ((),))
