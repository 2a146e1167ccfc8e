"""Which snapshots are complete on every rank, and which checkpoints are durable, from the keepers' events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class SnapshotTracker:
    """Counts one attempt's reports. `host_step` and `durable_step` are the newest complete ones, -1 for none."""

    attempt: int
    world_size: int
    host_step: int = -1
    durable_step: int = -1
    failed: dict[int, str] = field(default_factory=dict)
    superseded: set[int] = field(default_factory=set)
    """Never written: a newer one was whole before the storage had taken those before it."""
    _host: dict[int, set[int]] = field(default_factory=dict)

    def on_host(self, step: int, whole: Iterable[int]) -> bool:
        """Notes that the snapshots of these ranks are whole in their keeper; True when that completes the step."""
        ranks = self._host.setdefault(step, set())
        ranks.update(whole)
        if len(ranks) < self.world_size or step <= self.host_step:
            return False
        self.host_step = step
        for old in [s for s in self._host if s <= step]:
            del self._host[old]
        return True

    def on_superseded(self, step: int) -> int:
        """Notes a checkpoint that was left out; how many of this attempt were."""
        self.superseded.add(step)
        return len(self.superseded)

    def on_durable(self, step: int) -> bool:
        """Notes a commit; True for the first report of it."""
        if step <= self.durable_step:
            return False
        self.durable_step = step
        return True
