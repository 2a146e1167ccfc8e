"""A checkpoint whose parts are written, and who of the keepers is to commit it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from ..buffers.holdings import SnapshotId
from .commit import CommitState

COMMITTER_S = 1.0
"""How long, in seconds, the keeper with ranks from 1 on waits for that of rank 0; others the longer the higher their ranks."""
LISTING_S = 2.0
"""So often a keeper that is not to commit lists a checkpoint's folder; in between it looks for the marker alone."""


@dataclass(eq=False)
class PendingCheckpoint:
    """A checkpoint whose local parts are written, waiting for those of other nodes."""

    snapshot_id: SnapshotId
    world_size: int
    since: float
    written: float = field(default_factory=time.monotonic)
    next_poll: float = 0.0
    polled: float = 0.0
    """When the last poll began that found `missing`."""
    pause: float = 0.01
    missing: tuple[int, ...] = ()
    last: CommitState = field(default_factory=lambda: CommitState((0,)))
    """What the last poll found."""
    shares: set[int] = field(default_factory=set)
    """The ranks whose share was written here."""
    whole_since: float | None = None
    """When every share was first seen, where another keeper is to commit."""
    next_listing: float = 0.0
    urgent: bool = False
    """The attempt is being sealed: nobody is waited for."""

    def may_merge(self, now: float) -> bool:
        """Whether this keeper reads all parts and commits: rank 0's does, so that each part is read once. Should it not, the
        others do it, one after the other; whoever has no share here was asked for it."""
        if self.urgent or not self.shares or 0 in self.shares:
            return True
        patience = COMMITTER_S * (1 + math.log2(1 + min(self.shares)))
        return self.whole_since is not None and now - self.whole_since > patience
