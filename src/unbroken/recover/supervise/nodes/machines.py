"""What the ranks of a run are given of their machines, as the agents describe those: never of the supervisor's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ....cluster.survey import find_gpus, find_visible
from ....units import Bytes
from .node import Node

_LOOPBACK = "127.0.0.1"


def _machine(node: Node) -> tuple[str, str]:
    """Equal for virtual nodes of one machine: two containers of one host have names of their own, and networks too."""
    facts = node.facts
    return (facts.boot_id, facts.host) if facts is not None and facts.boot_id else ("", node.name)


def share_machine(nodes: Mapping[str, Node], names: Sequence[str]) -> bool:
    """Whether these nodes are virtual ones of one machine: no network lies between them."""
    return len({_machine(nodes[n]) for n in names}) == 1


def find_meeting(nodes: Mapping[str, Node], slots: Sequence[str]) -> str:
    """The address at which rank 0 of these nodes is reached by all others: loopback where they are one machine, else the
    first address of its node that others can reach."""
    facts = nodes[slots[0]].facts
    if facts is None or not facts.addresses or share_machine(nodes, slots):
        return _LOOPBACK
    return facts.addresses[0].address


def name_interface(node: Node, meeting: str) -> str:
    """The interface by which this node's ranks reach those of others; "" where they meet on one machine."""
    if meeting == _LOOPBACK or node.facts is None or not node.facts.addresses:
        return ""
    return node.facts.addresses[0].interface


def list_gpus(nodes: Mapping[str, Node]) -> dict[str, tuple[str, ...]]:
    """The UUIDs of each node's GPUs, by their place, as far as its agent has said."""
    return {n: tuple(g.uuid for g in node.facts.gpus) for n, node in nodes.items() if node.facts is not None}


def share_devices(nodes: Mapping[str, Node], slots: Sequence[str], nproc: int) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of the ranks in each slot: its machine's GPUs, shared in turn by the slots that run there; None
    without GPUs. They belong to the slot: a spare that takes one on the same machine inherits its GPUs."""
    before: dict[tuple[str, str], int] = {}
    found: list[str | None] = []
    for name in slots:
        node = nodes[name]
        # An agent of an earlier version tells none: it runs where this supervisor's forebear started it.
        gpus = node.facts.visible if node.facts is not None else tuple(find_visible(find_gpus()))
        first = before.get(_machine(node), 0)
        before[_machine(node)] = first + nproc
        wanted = [gpus[(first + i) % len(gpus)] for i in range(nproc)] if gpus else []
        found.append(",".join(dict.fromkeys(wanted)) if wanted else None)
    return found


def describe_memory(nodes: Iterable[Node]) -> str:
    """What the keepers of these nodes may hold, as each node says, in words; "" where none says so."""
    by_bytes = sorted((n.keeper_bytes, n.name) for n in nodes if n.keeper_bytes)
    if not by_bytes:
        return ""
    (least, where), (most, _) = by_bytes[0], by_bytes[-1]
    if str(Bytes(least)) == str(Bytes(most)):
        return f"snapshots may take up to {Bytes(least)} of memory on each node"
    return f"snapshots may take up to {Bytes(least)} ({where}) to {Bytes(most)} of memory on a node"
