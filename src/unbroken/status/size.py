"""With how many nodes a run went on, and for how long with fewer than it was asked for, from its journal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .data import RunReport, seconds_text


@dataclass(frozen=True)
class RunSize:
    """`nodes` of the `asked` ones have the newest attempt; `reduced_s` is for how long attempts had fewer than were asked for,
    of `attempts_s` altogether. `changes` says each change in words, oldest first."""

    nodes: int
    asked: int
    reduced_s: float
    attempts_s: float
    changes: tuple[str, ...]

    def describe(self) -> str:
        """In a line; "" of a run that always had all of its nodes."""
        if not self.reduced_s:
            return ""
        share = f", {self.reduced_s / self.attempts_s:.0%} of its attempts" if self.attempts_s else ""
        return f"{self.nodes} of {self.asked} nodes; {seconds_text(self.reduced_s)} with fewer than asked for{share}"


def read_size(report: RunReport) -> RunSize:
    """The sizes of a run's attempts."""
    lasted = {a.number: (report.ended if a.ended is None else a.ended) - a.launched for a in report.attempts}
    asked = nodes = 0
    reduced = 0.0
    changes = []
    for e in report.events:
        if e["kind"] in ("run", "amended") and "nodes" in e:
            asked = int(e["nodes"])
        elif e["kind"] == "resized":
            changes.append(
                describe_change(
                    e["had"], e["nodes"], e["before"], int(e.get("step", -1)), e.get("without") or ()
                )
            )
        elif e["kind"] == "attempt":
            nodes = len(e["slots"])
            if nodes < asked:
                reduced += max(0.0, lasted.get(int(e["attempt"]), 0.0))
    return RunSize(nodes, asked, reduced, sum(max(0.0, s) for s in lasted.values()), tuple(changes))


def describe_change(had: int, nodes: int, attempt: int, step: int, without: Sequence[str]) -> str:
    """`from attempt 2 on, after step 120: 4 nodes -> 3, without node-001`."""
    after = f", after step {step:,}" if step >= 0 else ""
    left = f", without {', '.join(without)}" if without else ""
    return f"from attempt {attempt} on{after}: {had} nodes -> {nodes}{left}"
