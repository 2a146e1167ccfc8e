"""A rank that left the loop without an error while the others waited for it: uneven batches, an early return."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...progress.records.verdict import Root
from ..match.events import FileScan, Topology

_LEFT = re.compile(
    r"(?i)\b(?:exhausted|ran out of (?:data|batches|samples)|no more (?:data|batches|samples)|end of (?:data|the epoch|epoch|training)|out of (?:data|batches)|left the (?:training )?loop|leaving the loop|loop (?:is )?(?:left|over|done)|early stop\w*|finished|all done|done|bye|exiting|shutting down|exit(?:ed)? with (?:code )?0|stopiteration)\b"
)


def leaver(scans: Sequence[FileScan], topology: Topology, waiting: set[int]) -> Root | None:
    """The line with which a rank that does not wait said goodbye, where exactly one has a log of its own that does."""
    found: list[Root] = []
    for s in scans:
        if (
            s.rank is None
            or s.rank in waiting
            or any(e.role in ("root", "either", "cascade") for e in s.events)
        ):
            continue
        said = next((x for x in s.last_lines if _LEFT.search(x[1])), None)
        if said is not None:
            found.append(Root(s.name, said[0], said[1], s.rank, topology.node_of(s.rank), said[2]))
    return found[0] if len(found) == 1 else None
