"""Where each event happened: rank, node and GPU completed from what the job's logs say about its machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ..match.events import FileScan, LogEvent, Topology
from ..match.topology import same_bus
from .facts import Facts

_NODE_NAMED = re.compile(r"(?:Node failure on|[Nn]ode|NODE|host|ON) ([A-Za-z][\w.\-]*\d[\w.\-]*)")
_GPU_SCOPES = ("gpu",)


def add_facts(topology: Topology, facts: Facts | None) -> None:
    """Adds what the supervisor knows to what the logs said."""
    if facts is None:
        return
    for rank, node in facts.nodes:
        topology.place(rank).node = node
        if node not in topology.nodes:
            topology.nodes.append(node)
    for exit_ in facts.exits:
        place = topology.place(exit_.rank)
        place.node = place.node or exit_.node
    if facts.nodes:
        topology.world = max(topology.world or 0, len(facts.nodes))


def from_paths(topology: Topology, ranks: Sequence[tuple[int | None, str | None]]) -> None:
    """Adds ranks and nodes that the logs' paths name."""
    for rank, node in ranks:
        if rank is not None:
            place = topology.place(rank)
            if node is not None and place.node is None:
                place.node = node
        if node is not None and node not in topology.nodes and rank is not None:
            topology.nodes.append(node)


def locate(event: LogEvent, topology: Topology) -> LogEvent:
    """The event with rank, node and GPU as far as they can be known."""
    rank, node, gpu = event.rank, event.node, event.gpu
    node = short(node, topology)
    if event.rule.scope == "node" and not event.xid:
        m = _NODE_NAMED.search(event.text)
        named = short(m.group(1), topology) if m else None
        if named and (named in topology.nodes or "ailure on" in event.text or node is None):
            node = named
    if node in topology.addresses:
        node = topology.addresses[node]
    if event.bus is not None and rank is None:
        bus = int(event.bus, 16)
        found = [r for r, p in topology.places.items() if p.node == node and same_bus(p.bus, bus)]
        if event.pid is not None:
            found = [r for r in found if topology.places[r].pid == event.pid] or found
        if len(found) == 1:
            rank = found[0]
    if rank is None and event.pid is not None:
        rank = topology.rank_at(node, pid=event.pid)
    if rank is None and node is not None and gpu is not None:
        rank = topology.rank_at(node, gpu=gpu)
    if rank is not None:
        node = node or topology.node_of(rank)
        if gpu is None and event.rule.scope in _GPU_SCOPES:
            gpu = topology.gpu_of(rank)
    if node is None and len(topology.nodes) == 1:
        node = topology.nodes[0]
    return replace(event, rank=rank, node=node, gpu=gpu)


def short(node: str | None, topology: Topology) -> str | None:
    """The node's name as the job's own list has it (without a domain that only some logs print)."""
    if node is None or node in topology.nodes:
        return node
    first = node.split(".", 1)[0]
    if first in topology.nodes:
        return first
    for known in topology.nodes:
        if known.split(".", 1)[0] == first:
            return known
    return node


def of_another_job(event: LogEvent, topology: Topology) -> bool:
    """Whether a kernel or node event belongs to a host that is not of this job."""
    machine = event.xid is not None or event.rule.scope == "node"
    return bool(
        machine and topology.nodes and event.node and short(event.node, topology) not in topology.nodes
    )


def order_key(event: LogEvent, scans: Sequence[FileScan]) -> tuple[float, int, int]:
    """Sorts events by when they happened: by line within one log, by time over several."""
    if len(scans) == 1:
        return (0.0, 0, event.line)
    when = event.time
    if when is None:
        when = scans[event.file].log_end.last_time or 0.0
    return (when, event.file, event.line)
