"""Whether what several ranks hold of the same tensors is the same, from the digests in their parts. No torch here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .shards import Box
    from .tensors import TensorPart

ALGORITHM = "columns64"
NOT_COVERED = "-" * 16
MOST_NAMED = 16
"""Tensors that are named where many differ."""
MOST_RANKS = 64
"""Ranks that are named of those with one digest."""
_JOINED = re.compile("(?:[0-9a-f]{16}|-{16})*")


def joined_json(joined: str) -> dict[str, str]:
    """The digests' place in a part."""
    return {"algorithm": ALGORITHM, "digests": joined}


def read_joined(value: object, tensors: int) -> str:
    """The digests of a part of so many tensors; "" where there are none, or none that this version can compare."""
    if not isinstance(value, Mapping) or value.get("algorithm") != ALGORITHM:
        return ""
    joined = value.get("digests")
    if not isinstance(joined, str) or len(joined) != 16 * tensors or not _JOINED.fullmatch(joined):
        return ""
    return joined


@dataclass(frozen=True)
class UnequalReplicas:
    """One tensor, or piece of one, of which the ranks have different bits: by digest, which ranks and how many."""

    name: str
    ranks: Mapping[str, tuple[int, ...]]
    counts: Mapping[str, int]


@dataclass(frozen=True)
class ReplicaComparison:
    """What was compared: `compared` pieces of tensors that at least two ranks hold, `alone` that only one does (nothing can be
    said of them). `differing` counts those whose replicas differ, `differences` names some."""

    compared: int = 0
    alone: int = 0
    differing: int = 0
    differences: tuple[UnequalReplicas, ...] = ()

    def as_message(self) -> dict[str, Any]:
        """For the way to the supervisor."""
        return {
            "compared": self.compared, "alone": self.alone, "differing": self.differing,
            "differences": [
                {"name": d.name, "groups": [[list(r), d.counts[k]] for k, r in d.ranks.items()]} for d in self.differences
            ],
        }  # fmt: skip


@dataclass
class _Class:
    """Ranks that say the same of the same pieces."""

    names: list[str]
    boxes: list[tuple[Box, ...]]
    digests: list[str]
    ranks: list[int] = field(default_factory=list)


class Replicas:
    """Takes the parts of a checkpoint one after another; keeps one of those that are alike, so that thousands fit."""

    def __init__(self) -> None:
        self._classes: dict[tuple[str, int], _Class] = {}
        self._alone = 0

    def add(self, rank: int, joined: str, tensors: Mapping[str, TensorPart]) -> None:
        """Takes the digests of one rank's part, and the tensors that they are of."""
        if not joined:
            self._alone = max(self._alone, len(tensors))
            return
        boxes = [tuple((s.offsets, s.sizes) for s in t.shards) for t in tensors.values()]
        key = (joined, hash(tuple(boxes)))
        known = self._classes.get(key)
        if known is None:
            digests = [joined[i : i + 16] for i in range(0, len(joined), 16)]
            known = self._classes[key] = _Class(list(tensors), boxes, digests)
        known.ranks.append(rank)

    def compare(self) -> ReplicaComparison:
        """What all parts together say."""
        held: dict[tuple[str, tuple[Box, ...]], dict[str, list[int]]] = {}
        uncovered: set[str] = set()
        for c in self._classes.values():
            for name, box, digest in zip(c.names, c.boxes, c.digests, strict=True):
                if digest == NOT_COVERED:
                    uncovered.add(name)
                    continue
                held.setdefault((name, box), {}).setdefault(digest, []).extend(c.ranks)
        shared = {k: v for k, v in held.items() if sum(map(len, v.values())) > 1}
        apart = {k: v for k, v in shared.items() if len(v) > 1}
        named = tuple(
            UnequalReplicas(
                name,
                {d: tuple(sorted(r)[:MOST_RANKS]) for d, r in by_digest.items()},
                {d: len(r) for d, r in by_digest.items()},
            )
            for (name, _), by_digest in sorted(apart.items())[:MOST_NAMED]
        )
        alone = max(self._alone, len(uncovered)) + len(held) - len(shared)
        return ReplicaComparison(len(shared), alone, len(apart), named)
