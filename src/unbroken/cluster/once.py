"""Runs one program to its end on nodes of a cluster, through the contract alone, and gathers what it printed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..waiting import wait_within
from .contract import AgentCommand, Cluster, Exited, Lost, Request, Unreachable


@dataclass(frozen=True)
class NodeOutput:
    """What came of one node: its exit code (None where it did not end by itself), what it printed, and why there is no more."""

    code: int | None
    text: str
    why: str = ""


async def run_once(
    cluster: Cluster, request: Request, command: AgentCommand, log_of: Callable[[str], Path], within_s: float
) -> dict[str, NodeOutput]:
    """Asks for nodes, starts the command on each, waits until all have ended or `within_s` is over, and gives the nodes back.

    `log_of` is what the cluster was made with. Raises what `acquire` raises; a node that takes no order is said as one.
    """
    allocation = await cluster.acquire(request)
    nodes = allocation.everything
    found: dict[str, NodeOutput] = {}
    launches: dict[str, str] = {}
    done = asyncio.Event()

    async def follow() -> None:
        async for event in cluster.events():
            if isinstance(event, Exited) and launches.get(event.node) == event.launch:
                why = "" if event.signal is None else f"ended by signal {event.signal}"
                found[event.node] = NodeOutput(event.code, _read(log_of(event.node)), why)
            elif isinstance(event, Lost | Unreachable) and event.node in nodes:
                found.setdefault(event.node, NodeOutput(None, _read(log_of(event.node)), event.why))
            if len(found) == len(nodes):
                done.set()
                return

    following = asyncio.create_task(follow())
    try:
        await asyncio.sleep(0)  # the reader is there before anything happens
        for node in nodes:
            try:
                launches[node] = await cluster.start(node, command)
            except Exception as e:  # noqa: BLE001  whatever a cluster says of one node is no reason to leave the others
                found[node] = NodeOutput(None, "", str(e))
        if len(found) < len(nodes):
            with contextlib.suppress(TimeoutError):
                await wait_within(done.wait(), within_s)
    finally:
        following.cancel()
        for node in nodes:
            found.setdefault(
                node, NodeOutput(None, _read(log_of(node)), f"no answer within {within_s:.0f} s")
            )
        await cluster.give_back(nodes)
        await cluster.close()
    return {n: found[n] for n in nodes}


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
