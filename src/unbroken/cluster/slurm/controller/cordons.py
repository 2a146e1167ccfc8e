"""Cordons of a Slurm cluster: by draining the node, which everybody sees, or in the run's own list.

A drain has a reason and no owner of ours nor an expiry: both stand in the reason's text. A drain of anybody else is a cordon
too, whose owner is whoever ordered it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...contract import Cordon
from .records import NodeRecord

_TEXT = re.compile(
    r"^(?P<reason>.*) \[unbroken: owner (?P<owner>[^\],]+), (?:expires (?P<expires>[0-9.]+)|for good)\]$",
    re.S,
)
_MOST = 200


def as_reason(cordon: Cordon) -> str:
    """The reason of a drain, from which `read_cordon` makes the cordon again."""
    until = "for good" if cordon.expires is None else f"expires {cordon.expires!r}"
    # A quote, a line end or a square bracket would end the text for whoever reads it.
    reason = re.sub(r"[\[\]\"'\\\s]+", " ", cordon.reason).strip()[:_MOST] or "no reason"
    owner = re.sub(r"[\],\[\"'\\\s]+", " ", cordon.owner).strip()
    return f"{reason} [unbroken: owner {owner}, {until}]"


def read_cordon(node: NodeRecord) -> Cordon | None:
    """The cordon that a drained node has; None for one that is in use."""
    if not node.drained:
        return None
    found = _TEXT.match(node.reason)
    if found is None:
        return Cordon(node.name, node.by or "somebody", node.reason or "drained without a reason")
    expires = float(found["expires"]) if found["expires"] else None
    return Cordon(node.name, found["owner"], found["reason"], expires)


def is_ours(node: NodeRecord) -> bool:
    """Whether the drain has been ordered by unbroken, for whichever owner."""
    return node.drained and _TEXT.match(node.reason) is not None


def find_expired(nodes: Mapping[str, NodeRecord], now: float) -> list[str]:
    """Nodes that are drained by us for longer than they were to be."""
    return [
        n for n, node in nodes.items() if is_ours(node) and (c := read_cordon(node)) and c.has_expired(now)
    ]
