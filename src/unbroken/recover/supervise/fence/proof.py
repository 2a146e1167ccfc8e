"""Of which nodes the end of an attempt is not proven, and whether the next attempt may start all the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ....cluster import EndedProcesses
from ....progress import RunDir
from ....progress.records.doubt import Doubt

MARKS_LEFT = "it was held by marks in its environment only, before this supervisor"


def of_message(answer: Mapping[str, Any]) -> EndedProcesses:
    """What an agent's answer to `stop`, or its `hello`, says of the ranks before."""
    return EndedProcesses(
        tuple(answer.get("survivors", ())),
        bool(answer.get("proven", True)),
        str(answer.get("unproven_why", "")),
    )


@dataclass
class Unproven:
    """node -> why its end is not proven. Empty where all is proven; a successor reads it from the journal."""

    nodes: dict[str, Doubt] = field(default_factory=dict)

    def take(self, node: str, ended: EndedProcesses, attempt: int, held: str = "") -> str:
        """Notes how ending the processes of a node went; returns why it is unproven where that is news, else nothing."""
        before = self.nodes.get(node)
        if ended.gone:
            if before is not None and before.held == held:
                del self.nodes[node]
            return ""
        why = ended.why
        if ended.survivors:
            why = f"processes {list(ended.survivors)} survived kill -9" + (f"; {why}" if why else "")
        if before is not None and before.held != held:
            why, held = before.why if why in before.why else f"{before.why}; {why}", before.held
        self.nodes[node] = Doubt(attempt, why, held)
        return why if before is None or before.why != why else ""

    def forget(self, node: str) -> None:
        self.nodes.pop(node, None)

    def confirmed(self, run_dir: RunDir) -> list[str]:
        """Nodes of which a person has said that nothing is left: by a file, which lies in the attempt's folder."""
        return [n for n, doubt in self.nodes.items() if run_dir.made_sure(doubt.attempt, n).exists()]

    def in_the_way(self, run_dir: RunDir, *, accepted: bool, asked: Collection[int] = ()) -> str:
        """Why the next attempt has to wait for a person, in words; nothing where it may start.

        What an old process still writes must not count: checkpoints of ours carry their attempt's number and are
        `accepted` by name, and what a script saves below UNBROKEN_OUTPUT lies in its attempt's own folder. Anything
        else, an unmodified script's own torch.save, it could overwrite. `asked` are the attempts whose script asked our
        Checkpointer what to go on from: what they save is ours too, also where they had saved nothing yet.
        """
        if accepted:
            return ""
        return "; ".join(
            f"{node}: {doubt.why}"
            for node, doubt in sorted(self.nodes.items())
            if doubt.attempt not in asked and not _holds_something(run_dir, doubt.attempt)
        )

    def what_to_do(self, run_dir: RunDir) -> str:
        """What a person can do, in words."""
        files = " ".join(str(run_dir.made_sure(d.attempt, n)) for n, d in sorted(self.nodes.items()))
        return f"Make sure that nothing of this run is left there (end it, or restart the machine), then: touch {files}"


def _holds_something(run_dir: RunDir, attempt: int) -> bool:
    """Whether the script saved below UNBROKEN_OUTPUT in that attempt."""
    try:
        return any(run_dir.output(attempt).iterdir())
    except OSError:
        return False
