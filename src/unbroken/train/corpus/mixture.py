"""Several token files in one training, by weights: `--data "0.7*web.ds,0.3*code.ds"`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...data.ordering.mixture import BLOCK, Mixture, MixtureOrder
from ...errors import InputError, UsageError
from .samples import IGNORED, TextSamples, text_samples
from .tokens import Tokens

_PART = re.compile(r"\s*([0-9.eE+-]+)\s*\*\s*(\S.*?)\s*")


def is_mixture(source: str) -> bool:
    """Whether a source is named as several with weights."""
    return bool(re.match(r"\s*[0-9.]+\s*\*", source))


def open_mixture(source: str, seq: int, open_part: Callable[[str], Tokens]) -> TokenMixture:
    """Opens each part. Raises UsageError for what is no `WEIGHT*FILE,...`; InputError for a part without one whole sample."""
    parts, weights = [], []
    for text in source.split(","):
        found = _PART.fullmatch(text)
        try:
            weights.append(float(found[1]) if found else 0.0)
        except ValueError:
            found = None
        if found is None or not weights[-1] > 0:
            raise UsageError(
                f"--data: '{text}' is no weight above 0 and a file", hint='As "0.7*web.ds,0.3*code.ds"'
            )
        part = open_part(found[2])
        if part.count <= seq:
            raise InputError(f"it has {part.count} tokens: not one sample of {seq}", where=found[2])
        parts.append(part)
    return TokenMixture(tuple(parts), tuple(weights), seq, source)


@dataclass(frozen=True)
class TokenMixture:
    """Token files and the share of samples that comes from each."""

    parts: tuple[Tokens, ...]
    weights: tuple[float, ...]
    seq: int
    source: str

    @property
    def count(self) -> int:
        """Tokens of all parts."""
        return sum(p.count for p in self.parts)

    @property
    def fingerprint(self) -> str:
        """Changes with the tokens of a part, their sequence and the weights."""
        said = [f"{p.fingerprint} {w}" for p, w in zip(self.parts, self.weights, strict=True)]
        return hashlib.sha256("\n".join(said).encode()).hexdigest()

    @cached_property
    def samples(self) -> MixedSamples:
        """The samples of all parts, one part behind the other."""
        return MixedSamples(tuple(text_samples(p, self.seq) for p in self.parts))

    def order(self, held_out: int, seed: int) -> MixedOrder:
        """Which sample comes when; the last part keeps `held_out` back. Raises InputError where it has no more than those."""
        counts = [s.count for s in self.samples.parts]
        if counts[-1] <= held_out:
            raise InputError(
                f"the last part has {counts[-1]} samples, --eval-samples are {held_out}", where=self.source
            )
        counts[-1] -= held_out
        mixture = Mixture([range(n) for n in counts], self.weights)
        return MixedOrder(mixture.order(), seed)


@dataclass(frozen=True)
class MixedSamples:
    """As `CorpusSamples`."""

    parts: tuple[TextSamples, ...]

    @cached_property
    def starts(self) -> list[int]:
        """The number of each part's first sample, and of all."""
        return [0, *np.cumsum([p.count for p in self.parts]).tolist()]

    @property
    def count(self) -> int:
        """As `CorpusSamples.count`."""
        return self.starts[-1]

    def rows(self, samples: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As `CorpusSamples.rows`."""
        found = [part.rows([s]) for part, s in self._places(samples)]
        return np.concatenate([x for x, _ in found]), np.concatenate([y for _, y in found])

    def weight(self, samples: Sequence[int]) -> int:
        """As `CorpusSamples.weight`."""
        if all(p.learnt is None for p in self.parts):
            return len(samples) * self.parts[0].seq
        return max(1, sum(int((part.rows([s])[1] != IGNORED).sum()) for part, s in self._places(samples)))

    def _places(self, samples: Sequence[int]) -> list[tuple[TextSamples, int]]:
        """Of each sample its part, and its number there."""
        which = (np.searchsorted(self.starts, samples, "right") - 1).tolist()
        return [(self.parts[w], s - self.starts[w]) for s, w in zip(samples, which, strict=True)]


class MixedOrder:
    """As `SampleOrder`: a pure function of (seed, absolute index). A part that is used up begins again, shuffled otherwise."""

    def __init__(self, order: MixtureOrder, seed: int) -> None:
        self.samples, self.seed = order.size, seed
        self._order, self._at, self._block = order, -1, np.empty(0, np.int64)

    def __getitem__(self, index: int) -> int:
        at, inside = divmod(index, BLOCK)
        if at != self._at:
            self._block = self._order.indices(self.seed, 0, np.arange(at * BLOCK, (at + 1) * BLOCK))
            self._at = at
        return int(self._block[inside])
