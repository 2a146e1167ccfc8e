"""What ranks say of another rank that is gone, and who of them refused to train: it is why the others lost it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...progress.records.verdict import REFUSED
from ..match.events import LogEvent

OF_PEERS = ("NCCLRemoteError", "NCCLTimeoutError", "ConnectionError", "NetworkError")
"""What a rank reports when another one is gone."""
BROKEN_LINK = re.compile(
    r"connect|network|\brecv\b|peer|remote|socket|store|broken pipe|unreachable|nccl|gloo|collective|barrier|all_?reduce|broadcast"
    r"|timed? ?out|distbackend|heartbeat",
    re.IGNORECASE,
)
"""Words of an error that a rank reports when another one is gone, where no rule knows it better than by its class."""
_CLOSE_S = 60.0


def is_of_peers(event: LogEvent) -> bool:
    """Whether an event says that another rank is gone, or late."""
    if event.reason in ("NCCLRemoteError", "NCCLTimeoutError"):
        return True
    if event.reason == "RuntimeError":
        return BROKEN_LINK.search(event.text) is not None
    return event.reason in OF_PEERS and any("torch/distributed" in f for f in event.frames[-6:])


def find_refusal(first: LogEvent, events: Sequence[LogEvent]) -> LogEvent | None:
    """The refusal of another rank that explains why the first to fail had lost a peer, however their ends were ordered: a rank that
    waits for others may well end before the one that refused, which still says why and closes what it has open."""
    if first.rule.id in REFUSED or not is_of_peers(first):
        return None
    others = (e for e in events if e.rule.id in REFUSED and (e.rank is None or e.rank != first.rank))
    return next((e for e in others if _is_close(e, first)), None)


def _is_close(a: LogEvent, b: LogEvent) -> bool:
    return a.time is None or b.time is None or abs(a.time - b.time) <= _CLOSE_S
