"""Where a fault sits: the node, rank and GPU of a root, as far as the job's logs let one say."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from ...progress.records.verdict import Faulty
from ..match.events import FileScan, LogEvent, Topology
from .chronology import Timeline, same_kind

_PEER_ADDRESS = re.compile(r"\bpeer ([\d.]+|<ip-\d+>|[A-Za-z][\w.\-]*)<\d+>")
_NOT_THERE = re.compile(
    r"[Rr]anks? \[?(\d+)\]? (?:failed to (?:pass|reach|join|enter)|did not|has not|have not|hasn't|is missing|are missing)|[Rr]emote rank \[?(\d+)\]?|[Mm]issing ranks?:? [\[{(]?(\d+)[\])}]?(?:$|[^,\d])"
)
_PEER = re.compile(r"(?:remote peer|peer) ([A-Za-z][\w.\-]*\d[\w\-]*)<")


def place_of(root: LogEvent, chron: Timeline, topology: Topology, scans: Sequence[FileScan]) -> Faulty | None:
    """The place of a root; where its own lines name no node, that of the kernel's only report of the same reason."""
    found = _own_place(root, chron, topology, scans)
    if found is not None and found.node is not None:
        return found
    kernel = [
        e for e in chron.candidates if e.xid is not None and e.role == "root" and e.reason == root.reason
    ]
    rank = found.rank if found is not None else root.rank
    nodes = {e.node for e in kernel if rank is None or e.rank is None or e.rank == rank}
    if len(nodes) != 1 or len(nodes) != len({e.node for e in kernel}):
        return found
    (node,) = nodes
    if node is None:
        return found
    place = found or Faulty()
    ranks, gpus = {e.rank for e in kernel}, {e.gpu for e in kernel}
    return Faulty(
        node,
        place.rank if place.rank is not None or len(ranks) > 1 else ranks.pop(),
        place.gpu if place.gpu is not None or len(gpus) > 1 else gpus.pop(),
    )


def _own_place(
    root: LogEvent, chron: Timeline, topology: Topology, scans: Sequence[FileScan]
) -> Faulty | None:
    reason = root.reason
    if reason == "NodeFailure" and root.xid is None and root.rule.scope != "gpu":
        return Faulty(node=root.node) if root.node else None
    if root.xid is not None:
        return Faulty(root.node, root.rank, root.gpu if root.gpu is not None else topology.gpu_of(root.rank))
    if reason == "NCCLTimeoutError":
        missing = _missing_rank(chron, topology, scans)
        return (
            None if missing is None else Faulty(topology.node_of(missing), missing, topology.gpu_of(missing))
        )
    if reason == "NCCLRemoteError":
        peers = Counter(m.group(1) for e in chron.cascades if (m := _PEER.search(e.text)))
        return Faulty(node=next(iter(peers))) if len(peers) == 1 else None
    if root.rule.id == "ib-completion-error":
        peer = _common_peer(chron, topology)
        if peer is not None:
            return Faulty(node=peer)
    alike = [e for e in same_kind(root, chron.candidates) if e.rule.id == root.rule.id]
    ranks = {e.rank for e in alike if e.rank is not None}
    nodes = {e.node for e in alike if e.node is not None}
    if root.rule.scope in ("gpu", "rank"):
        rank, node, gpu = root.rank, root.node, root.gpu
        if rank is None:
            rank, node, gpu = find_reported(topology, node, gpu)
        if reason != "CUDAError" and topology.size and len(ranks) > max(1, topology.size // 3):
            return None
        if rank is None and node is None:
            return None
        return Faulty(node, rank, gpu if root.rule.scope == "gpu" else None)
    if root.rule.scope == "node" and (root.node or len(ranks) != 1):
        return Faulty(node=root.node, rank=root.rank if len(ranks) == 1 else None) if root.node else None
    if not ranks:
        return _soft_report(topology)
    if len(ranks) == 1:
        (rank,) = ranks
        return Faulty(root.node or topology.node_of(rank), rank) if rank != 0 else None
    if len(nodes) == 1 and len(topology.nodes) > 1:
        (node,) = nodes
        if node != topology.nodes[0] and ranks and ranks <= set(topology.ranks_on(node)):
            return Faulty(node=node)
    return None


def _soft_report(topology: Topology) -> Faulty | None:
    """The place of a program's error whose lines name no rank, by torchrun's summary: one rank, or one node of many."""
    entries = [x for x in topology.reported if x[1] is not None]
    alike = [x for x in entries if x[3] == entries[0][3]] if entries else []
    ranks, hosts = {x[1] for x in alike}, {x[0] for x in alike}
    if len(ranks) == 1 and 0 not in ranks:
        return Faulty(alike[0][0], alike[0][1])
    if len(hosts) == 1 and len(topology.nodes) > 1:
        (host,) = hosts
        if host is not None and host in topology.nodes[1:]:
            return Faulty(node=host)
    return None


def find_reported(
    topology: Topology, node: str | None, gpu: int | None
) -> tuple[int | None, str | None, int | None]:
    """Rank, node, GPU of the failure that torchrun observed first, where an event names no rank itself."""
    for host, rank, local, _, _ in topology.reported:
        if rank is not None and (gpu is None or local is None or local == gpu):
            return rank, host or node, gpu if gpu is not None else local
    return (topology.rank_at(node, gpu) if gpu is not None else None), node, gpu


def _missing_rank(chron: Timeline, topology: Topology, scans: Sequence[FileScan]) -> int | None:
    """The one rank that did not report the time-out, or whose collective lags behind the others'."""
    reports = [
        e
        for e in (*chron.candidates, *chron.cascades)
        if e.reason == "NCCLTimeoutError" and e.rank is not None
    ]
    ranks = {e.rank for e in reports}
    size = topology.size
    named = {
        m.group(1) or m.group(2) or m.group(3)
        for e in (*chron.candidates, *chron.cascades)
        if (m := _NOT_THERE.search(e.text))
    }
    if len(named) == 1:
        return int(named.pop())
    if size and len(ranks) >= 2 and len(ranks) < size:
        silent = set(range(size)) - ranks
        if len(silent) == 1:
            return silent.pop()
    lag = lagging_rank(scans)
    if lag is not None:
        return lag
    numbers = {e.rank: e.seq for e in reports if e.seq is not None}
    if len(numbers) >= 3:
        low = min(s for s in numbers.values() if s is not None)
        behind = [r for r, s in numbers.items() if s == low]
        if len(behind) == 1 and max(s for s in numbers.values() if s is not None) > low:
            return behind[0]
    return None


def lagging_rank(scans: Sequence[FileScan]) -> int | None:
    """The one rank whose own log stops at an earlier step than all others', where ranks have logs of their own."""
    last: dict[int, float] = {}
    for s in scans:
        steps = [p.step for p in s.progress[-50:] if p.step is not None]
        if s.rank is not None and steps:
            last[s.rank] = max(last.get(s.rank, 0.0), *steps)
    if len(last) < 3:
        return None
    low, *others = sorted(last.values())
    behind = [r for r, x in last.items() if x == low]
    return behind[0] if len(behind) == 1 and others[0] > low else None


def _common_peer(chron: Timeline, topology: Topology) -> str | None:
    """The one node that is an end of every link that failed, where several links did."""
    links: set[frozenset[str]] = set()
    for e in chron.candidates:
        m = _PEER_ADDRESS.search(e.text) if e.rule.id == "ib-completion-error" else None
        if m and e.node:
            links.add(frozenset((e.node, topology.addresses.get(m.group(1), m.group(1)))))
    common = frozenset.intersection(*links) if len(links) >= 2 else frozenset()
    return next(iter(common)) if len(common) == 1 and common <= set(topology.nodes) else None
