"""What came of leaving a run's nodes: what was saved, and what keepers still hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ....link.bounds import Message


@dataclass(frozen=True)
class Last:
    """The newest snapshot that is whole in memory, and the ranks whose share each node is to write."""

    attempt: int
    step: int
    shares: Mapping[str, tuple[int, ...]]


@dataclass
class Farewell:
    """Each node's answer; `holding` are nodes whose keepers go on trying on their own."""

    answers: dict[str, Message] = field(default_factory=dict)
    holding: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    """Those that were asked and did not answer."""
    unreached: list[str] = field(default_factory=list)
    """Nodes of the last attempt that were not heard of, and of which it is not proven that nothing runs there: what is left
    there may still save."""

    @property
    def unsaved(self) -> dict[str, str]:
        """{node: why} of the keepers that ended, or did not answer, with a snapshot that is not durable."""
        closed = {n: a.get("closed", {}) for n, a in self.answers.items()}
        return {n: str(why) for n, c in closed.items() if (why := c.get("why") or c.get("what"))}

    @property
    def elsewhere(self) -> str:
        """Where the snapshot was written because its own place refused it; "" where it did not."""
        closed = [a.get("closed", {}) for a in self.answers.values()]
        return next((str(c["elsewhere"]) for c in closed if c.get("elsewhere")), "")
