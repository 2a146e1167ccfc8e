"""A checkpoint whose parts are written, and who of the keepers is to commit it."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from ..buffers.holdings import SnapshotId
from .commit import CommitState

COMMITTER_S = 1.0
"""How long, in seconds, the keeper with ranks from 1 on waits for that of rank 0; others the longer the higher their ranks."""
COMMIT_TIMEOUT_S = 600.0
LISTING_S = 2.0
"""So often one of the keepers that are not to commit lists a checkpoint's folder; the others look for two small files alone."""


def find_turn(ranks: Collection[int], world_size: int, since: float, now: float) -> float:
    """When, after `now`, the node of these ranks lists a folder: one node every `LISTING_S`, in their order from `since` on.

    However many nodes wait, together they list as often as one alone would, and see who is gone as soon.
    """
    here = max(1, len(ranks))
    nodes, index = -(-world_size // here), min(ranks, default=0) // here
    first, all_turns = since + LISTING_S * index, LISTING_S * max(1, nodes)
    return first + all_turns * max(0, math.floor((now - first) / all_turns) + 1)


@dataclass(eq=False)
class PendingCheckpoint:
    """A checkpoint whose local parts are written, waiting for those of other nodes."""

    snapshot_id: SnapshotId
    world_size: int
    since: float
    written: float = field(default_factory=time.monotonic)
    next_poll: float = 0.0
    polled: float = 0.0
    """When the last poll began that listed the folder, and found `missing`."""
    pause: float = 0.01
    missing: tuple[int, ...] = ()
    last: CommitState = field(default_factory=lambda: CommitState((0,)))
    """What the last poll that listed the folder found."""
    shares: set[int] = field(default_factory=set)
    """The ranks whose share was written here."""
    whole_since: float | None = None
    """When every share was first seen, where another keeper is to commit."""
    urgent: bool = False
    """The attempt is being sealed: nobody is waited for."""

    def may_list(self, now: float) -> bool:
        """Whether it is this keeper's turn to list the folder, or the time for it is over."""
        turn = find_turn(self.shares, self.world_size, self.written, max(self.written, self.polled))
        return now >= turn or now - self.written > COMMIT_TIMEOUT_S

    def may_merge(self, now: float) -> bool:
        """Whether this keeper reads all parts and commits: rank 0's does, so that each part is read once. Should it not, the
        others do it, one after the other; whoever has no share here was asked for it."""
        if self.urgent or not self.shares or 0 in self.shares:
            return True
        patience = COMMITTER_S * (1 + math.log2(1 + min(self.shares)))
        return self.whole_since is not None and now - self.whole_since > patience
