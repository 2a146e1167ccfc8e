"""From what keepers found of replicas to ranks that are suspect, and how sure that is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ONE, _SEVERAL, _UNKNOWN = 0.95, 0.7, 0.3
"""How sure it is that the suspects are at fault: one rank against a majority, several, or no majority at all."""


@dataclass(frozen=True)
class ReplicaFinding:
    """Replicas that were equal before and differ at `step`. `ranks` are the minority, all that may be it where there is no
    majority; `of` is how many ranks hold the tensor; `equal` is (attempt, step) of the last checkpoint where all were equal;
    `scattered` says that nearly every rank has bits of its own: no card does that, a program does."""

    step: int
    ranks: tuple[int, ...]
    of: int
    tensors: tuple[str, ...]
    differing: int
    equal: tuple[int, int]
    confidence: float
    scattered: bool = False

    @property
    def why(self) -> str:
        """In words."""
        shown = ", ".join(self.tensors[:3]) + (
            f" and {self.differing - 3} more" if self.differing > 3 else ""
        )
        if self.scattered:
            return f"the replicas of {shown} differ on nearly all of {self.of} ranks: the program lets them drift apart"
        who = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks[:8]))}"
        side = (
            f"{who} against {self.of - len(self.ranks)}"
            if len(self.ranks) < self.of
            else f"{who}, no majority"
        )
        return (
            f"the replicas of {shown} differ at step {self.step} ({side}), and were equal at step {self.equal[1]}: "
            "silent corruption"
        )


class ReplicaWatch:
    """Takes the comparisons of a run, one a checkpoint."""

    def __init__(self, equal: tuple[int, int] | None = None) -> None:
        """`equal` is (attempt, step) of the last checkpoint where all was equal, as far as the journal has it."""
        self.equal = equal
        self._never_equal: set[str] = set()

    def take(self, attempt: int, message: Mapping[str, Any]) -> ReplicaFinding | None:
        """What one comparison says (`ReplicaComparison.as_message`): a finding where replicas differ that were equal before.

        What differs from the start is no replica (a value of each rank's own), and nothing is said of it.
        """
        step, differences = int(message["step"]), list(message.get("differences") or ())
        before, baseline = self._never_equal, self.equal
        new = [d for d in differences if d["name"] not in before]
        if not new:
            if message.get("compared") and message.get("differing", 0) <= len(before):
                self.equal = (attempt, step)
            return None
        if baseline is None:
            self._never_equal = before | {d["name"] for d in new}
            return None
        return self._judge(step, new, int(message.get("differing", len(new))), baseline)

    @staticmethod
    def _judge(
        step: int, differences: list[Mapping[str, Any]], differing: int, equal: tuple[int, int]
    ) -> ReplicaFinding:
        votes: Counter[int] = Counter()
        of, most_groups, has_majority = 0, 0, True
        for d in differences:
            groups = [(tuple(ranks), int(count)) for ranks, count in d["groups"]]
            total = sum(count for _, count in groups)
            first = max(groups, key=lambda g: g[1])
            majority = first[1] * 2 > total
            of, most_groups = max(of, total), max(most_groups, len(groups))
            has_majority &= majority
            votes.update(r for g in groups if not (majority and g is first) for r in g[0])
        named = tuple(str(d["name"]) for d in differences)
        # A card that went wrong is in the minority for each tensor; who is only in some of them follows another.
        most = max(votes.values(), default=0)
        ranks = tuple(sorted(r for r, n in votes.items() if n == most))
        scattered = not has_majority and most_groups > max(2, of // 2)
        sure = _UNKNOWN if scattered or not has_majority else _ONE if len(ranks) == 1 else _SEVERAL
        return ReplicaFinding(step, ranks, of, named, differing, equal, sure, scattered)
