"""Of which nodes the end of an attempt is not proven, and whether the next attempt may start all the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..cluster import Ended


def of_message(answer: Mapping[str, Any]) -> Ended:
    """What an agent's answer to `stop`, or its `hello`, says of the ranks before."""
    return Ended(
        tuple(answer.get("survivors", ())),
        bool(answer.get("proven", True)),
        str(answer.get("unproven_why", "")),
    )


@dataclass
class Unproven:
    """node -> (the last attempt that may still have processes there, why). Empty where all is proven."""

    nodes: dict[str, tuple[int, str]] = field(default_factory=dict)

    def take(self, node: str, ended: Ended, attempt: int) -> str:
        """Notes how ending the processes of a node went; returns why it is unproven where that is news, else nothing."""
        if ended.gone:
            self.nodes.pop(node, None)
            return ""
        why = ended.why
        if ended.survivors:
            why = f"processes {list(ended.survivors)} survived kill -9" + (f"; {why}" if why else "")
        news = self.nodes.get(node, (0, ""))[1] != why
        self.nodes[node] = (attempt, why)
        return why if news else ""

    def forget(self, node: str) -> None:
        self.nodes.pop(node, None)
