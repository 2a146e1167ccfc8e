"""Which tokens requests share, and how they are cut into batches: pure functions over token sequences.

A *row* is what the model has to read for one request: its context and its continuation without the last token. Three levels
are computed once each: the *root* that all rows of a batch begin with (few-shot examples), the *contexts* behind it (one
question), and the *tails* behind a context that has several (its choices).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

ROOT_AT_LEAST = 24
"""Tokens of a root: a shorter one is read again with each row, since another pass of the model costs more."""
SAVED_AT_LEAST = 0.15
"""Share of a batch's tokens that a root has to save."""

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class PrefixRow:
    """What the model reads for one request, and how much of it is context."""

    tokens: Tokens
    context: int
    """So many of the tokens are the context's; at least 1."""
    wanted: int
    """The predictions after the last so many tokens are asked for: one per token of the continuation."""


@dataclass(frozen=True)
class Stem:
    """A context behind the root, with the rows that continue it."""

    tokens: Tokens
    """Behind the root; never empty. Of a lone row: all of it."""
    rows: tuple[int, ...]
    """Numbers of the rows."""
    tails: tuple[Tokens, ...]
    """What each row reads behind `tokens`; all empty for a lone row."""

    @property
    def longest_tail(self) -> int:
        """Tokens."""
        return max(map(len, self.tails))


@dataclass(frozen=True)
class PrefixBatch:
    """What is computed together."""

    root: Tokens
    stems: tuple[Stem, ...]

    @property
    def computed(self) -> int:
        """Tokens that the model reads, padding included; the root apart, which may be kept from the batch before."""
        tails = [len(t) for s in self.stems for t in s.tails if t]
        stems = len(self.stems) * max(len(s.tokens) for s in self.stems)
        return stems + (len(tails) * max(tails) if tails else 0)


def common_prefix(rows: Sequence[Tokens]) -> Tokens:
    """The longest sequence that all of them begin with."""
    if not rows:
        return ()
    low, high = min(rows), max(rows)  # what the first and the last in order share, all share
    n = 0
    while n < min(len(low), len(high)) and low[n] == high[n]:
        n += 1
    return low[:n]


def root_of(rows: Sequence[PrefixRow]) -> Tokens:
    """The root of rows that belong together, such as those of one task; empty where it is not worth a pass of its own.

    It leaves each context at least one token, behind which the first token of a continuation is predicted.
    """
    if len(rows) < 2:
        return ()
    shared = common_prefix([r.tokens for r in rows])
    root = shared[: min(r.context for r in rows) - 1]
    whole = sum(len(r.tokens) for r in rows)
    saved = len(root) * (len(rows) - 1)
    return root if len(root) >= ROOT_AT_LEAST and saved >= SAVED_AT_LEAST * whole else ()


def stems_of(rows: Sequence[PrefixRow], root: Tokens) -> list[Stem]:
    """Rows joined where their context is the same, behind the root."""
    groups: dict[Tokens, list[int]] = {}
    for i, r in enumerate(rows):
        groups.setdefault(r.tokens[: r.context], []).append(i)
    stems = []
    for context, members in groups.items():
        behind = context[len(root) :]
        tails = tuple(rows[i].tokens[len(context) :] for i in members)
        # Twice the context costs less than a second pass where there is hardly any.
        if len(members) == 1 or len(behind) * (len(members) - 1) < ROOT_AT_LEAST:
            stems += [Stem(rows[i].tokens[len(root) :], (i,), ((),)) for i in members]
        else:
            stems.append(Stem(behind, tuple(members), tails))
    return stems


def batches(stems: Iterable[Stem], root: Tokens, budget: int, held: int) -> Iterator[PrefixBatch]:
    """Batches of at most `budget` computed tokens, and of `held` tokens whose keys and values are in memory; longest first.

    A stem that is larger than that makes a batch of its own.
    """
    chosen: list[Stem] = []
    size = _Size(len(root))
    order = [(s, s.longest_tail) for s in stems]
    order.sort(key=lambda x: (-len(x[0].tokens), -x[1], x[0].tokens))
    for stem, longest_tail in order:
        more = size.with_stem(stem, longest_tail)
        if chosen and (more.computed > budget or more.held > held):
            yield PrefixBatch(root, tuple(chosen))
            chosen, more = [], _Size(len(root)).with_stem(stem, longest_tail)
        chosen.append(stem)
        size = more
    if chosen:
        yield PrefixBatch(root, tuple(chosen))


@dataclass(frozen=True, slots=True)
class _Size:
    """Of a batch as it grows: what it computes is `PrefixBatch.computed`, without looking at all of its stems again."""

    root: int
    stems: int = 0
    width: int = 0
    tails: int = 0
    """Those that are not empty."""
    rows_behind: int = 0
    """All tails of stems that have one."""
    longest_tail: int = 0

    def with_stem(self, stem: Stem, longest_tail: int) -> _Size:
        return _Size(
            self.root, self.stems + 1, max(self.width, len(stem.tokens)), self.tails + (sum(map(bool, stem.tails)) if longest_tail else 0),
            self.rows_behind + (len(stem.tails) if longest_tail else 0), max(self.longest_tail, longest_tail),
        )  # fmt: skip

    @property
    def computed(self) -> int:
        return self.stems * self.width + self.tails * self.longest_tail

    @property
    def held(self) -> int:
        """Tokens in memory at the end: each row has its own copy of what it continues."""
        first = self.root + self.width
        return self.stems * first + self.rows_behind * (first + self.longest_tail)
