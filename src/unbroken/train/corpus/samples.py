"""Samples as a trainer takes them: rows of tokens, and which of the tokens are to be learnt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .tokens import Tokens

IGNORED = -100
"""The target of a token that is not to be learnt, as torch's cross-entropy has it."""


class TrainingCorpus(Protocol):
    """A data set as a run speaks of it. One of your own has its `samples` (`CorpusSamples`) beside."""

    @property
    def count(self) -> int:
        """Its size, in tokens."""

    @property
    def fingerprint(self) -> str:
        """Changes with its tokens: a run that finds another one than its checkpoint has is refused."""

    @property
    def source(self) -> str:
        """What people call it."""


class CorpusSamples(Protocol):
    """A data set as samples of one length; which ones a step takes is for `train/corpus/order.py` to say."""

    @property
    def count(self) -> int:
        """Samples; each may be several rows: a preference is two."""

    def rows(self, samples: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens and targets, each (rows, seq), with `IGNORED` where nothing is to be learnt."""

    def weight(self, samples: Sequence[int]) -> int:
        """What the sum of their losses is divided by, the same on every rank: tokens to learn, or preferences."""


@dataclass(frozen=True)
class TextSamples:
    """Windows of a stream of tokens, each token learnt once."""

    text: NDArray[np.generic]
    seq: int
    learnt: NDArray[np.bool_] | None = None
    """Whether each token is to be learnt; None: all are."""

    @property
    def count(self) -> int:
        """Samples."""
        return (len(self.text) - 1) // self.seq

    def rows(self, samples: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As `CorpusSamples.rows`."""
        found = np.stack([self.text[s * self.seq : (s + 1) * self.seq + 1] for s in samples]).astype(np.int64)
        if self.learnt is None:
            return found[:, :-1], found[:, 1:]
        return found[:, :-1], np.where(self._learnt(samples), found[:, 1:], IGNORED)

    def weight(self, samples: Sequence[int]) -> int:
        """As `CorpusSamples.weight`."""
        return len(samples) * self.seq if self.learnt is None else max(1, int(self._learnt(samples).sum()))

    def _learnt(self, samples: Sequence[int]) -> NDArray[np.bool_]:
        """(samples, seq): whether each target is to be learnt."""
        assert self.learnt is not None
        return np.stack([self.learnt[s * self.seq + 1 : (s + 1) * self.seq + 1] for s in samples])


def text_samples(tokens: Tokens, seq: int) -> TextSamples:
    """The windows of a token file."""
    return TextSamples(tokens.map(), seq, tokens.map_mask())


@dataclass(frozen=True)
class PackedSamples:
    """Rows that were packed before: tokens and targets of all samples."""

    tokens: NDArray[np.int64]
    """(count x rows_each, seq)."""
    targets: NDArray[np.int64]
    rows_each: int = 1

    @property
    def count(self) -> int:
        """Samples."""
        return len(self.tokens) // self.rows_each

    def rows(self, samples: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As `CorpusSamples.rows`."""
        at = [s * self.rows_each + r for s in samples for r in range(self.rows_each)]
        return self.tokens[at], self.targets[at]

    def weight(self, samples: Sequence[int]) -> int:
        """As `CorpusSamples.weight`."""
        if self.rows_each > 1:
            return len(samples)
        return max(1, int((self.rows(samples)[1] != IGNORED).sum()))


@dataclass(frozen=True)
class ArrayCorpus:
    """A data set of your own, from arrays: `ArrayCorpus("sums", PackedSamples(tokens, targets))`."""

    source: str
    samples: PackedSamples

    @property
    def count(self) -> int:
        """As `TrainingCorpus.count`."""
        return self.samples.tokens.size

    @cached_property
    def fingerprint(self) -> str:
        """As `TrainingCorpus.fingerprint`: SHA-256 of tokens and targets."""
        h = hashlib.sha256()
        for array in (self.samples.tokens, self.samples.targets):
            h.update(f"{array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        return h.hexdigest()
