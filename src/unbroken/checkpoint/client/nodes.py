"""What the nodes of a run tell each other by themselves: who holds whose copies, and what is whole everywhere.

All of it through the agreement of the ranks, a few small values; the keepers move the bytes.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

from ...errors import CheckpointError, RunError, UnbrokenError
from ...link.address import own_address
from ...link.bounds import Message
from ...link.tls import Identity
from ..ranks.agreement import Agreement
from ..ranks.environment import Place
from .rank_memory import RankMemory

logger = logging.getLogger("unbroken.checkpoint")

TIMEOUT_S = 300.0
LOOK_S = 0.1
PATIENCE_S = 1.0
"""A supervisor answers in milliseconds; one that is slower is not waited for."""


def gather_nodes(agreement: Agreement, p: Place, memory: RankMemory) -> dict[str, str]:
    """{node: machine} of the run, in the order of their first ranks. Nodes of one machine reach each other's sockets."""
    info = memory.link.info
    agreement.publish(f"node/{p.rank}", [info["node"], info.get("machine", "")])
    found = [agreement.read(f"node/{r}", timeout_s=TIMEOUT_S) for r in range(p.world_size)]
    return {str(node): str(machine) for node, machine in found}


def join_ring(agreement: Agreement, p: Place, memory: RankMemory, machines: Mapping[str, str]) -> None:
    """The first rank of each node makes its keeper listen, and tells it who comes next: never the node itself.

    Raises CheckpointError, on every rank, where the keepers cannot reach each other as they must.
    """
    me, nodes = str(memory.link.info["node"]), list(machines)
    token = agreement.decide("ring/token", secrets.token_hex(32))
    asked: Message = {"op": "peer_listen"}
    if "" in machines.values():
        raise CheckpointError(
            "a keeper of an earlier version takes no copies of this one's snapshots",
            hint="Let the run save and stop, and start it again",
        )
    if len(set(machines.values())) > 1:
        asked["host"] = own_address(os.environ.get("MASTER_ADDR", "127.0.0.1"))
        asked["identity"] = _agree_on_identity(agreement, memory)
    if p.local_rank != 0:
        return
    mine = memory.alive().request(asked)[0]["address"]
    agreement.publish(f"ring/{me}", mine)
    following = nodes[(nodes.index(me) + 1) % len(nodes)]
    theirs = agreement.read(f"ring/{following}", timeout_s=TIMEOUT_S)
    memory.alive().request({"op": "peer_target", "token": token, "node": following, "address": theirs})


def _agree_on_identity(agreement: Agreement, memory: RankMemory) -> str:
    """The certificate and key of the keepers' links, as rank 0 makes them; "" where their agents have given them the run's.

    They travel as all that ranks tell each other does: through the process group's store. Raises CheckpointError.
    """
    if agreement.rank == 0:
        made, why = "", ""
        try:
            if not memory.link.info.get("identified"):
                made = Identity.make("keepers").pem
        except RunError as e:
            why = str(e)
        agreement.publish("ring/identity", [made, why])
    made, why = agreement.read("ring/identity", timeout_s=TIMEOUT_S)
    if why:
        raise CheckpointError(f"no copies on other nodes (peer=True): {why}")
    return str(made)


def peer_addresses(agreement: Agreement, nodes: Iterable[str]) -> dict[str, str]:
    """{node: address} of the keepers of these nodes, which all listen for peers."""
    return {n: str(agreement.read(f"ring/{n}", timeout_s=TIMEOUT_S)) for n in nodes}


class CompletionTracker:
    """Learns from the ranks themselves which snapshots are whole on several nodes, and tells this node's keeper.

    Without a supervisor nobody else does. With one it is the second way: a supervisor that is gone, stopped or cut off
    must not hold training up, whose buffers come free only when a newer snapshot is known to be whole. `patience_s` is
    how long the first way has for it. One rank of a node `asks`; all of them count.
    """

    def __init__(
        self, agreement: Agreement, memory: RankMemory, *, asks: bool = True, patience_s: float = 0.0
    ) -> None:
        self.agreement, self.memory = agreement, memory
        self._patience_s = patience_s
        self._open: dict[int, float] = {}
        self._guard = threading.Lock()
        self._stop = threading.Event()
        self._asks = asks
        if asks:
            threading.Thread(target=self._loop, name="unbroken-board", daemon=True).start()

    def on_host(self, step: int) -> None:
        """This rank has its share in memory."""
        if self._asks:
            with self._guard:
                self._open[step] = time.monotonic()
        try:
            if self.agreement.count(f"host/{step}") == self.agreement.world_size:
                self.agreement.publish(f"whole/{step}", True)
        except Exception as e:  # noqa: BLE001 - of torch's store; without it the supervisor's word is left
            self._give_up(e)

    def known(self, step: int) -> None:
        """The keeper knows of this one, and so of all before it."""
        with self._guard:
            self._open = {s: t for s, t in self._open.items() if s > step}

    def close(self) -> None:
        """Ends looking."""
        self._stop.set()

    def _give_up(self, e: Exception) -> None:
        if not self._stop.is_set():
            logger.warning("the ranks' store does not answer, only the supervisor says what is whole: %s", e)
        self.close()

    def _loop(self) -> None:
        while not self._stop.wait(LOOK_S):
            now = time.monotonic()
            with self._guard:
                steps = sorted(
                    (s for s, t in self._open.items() if now - t >= self._patience_s), reverse=True
                )
            for step in steps:
                try:
                    if not self.agreement.peek(f"whole/{step}"):
                        continue
                except Exception as e:  # noqa: BLE001 - as above
                    self._give_up(e)
                    return
                with suppress(UnbrokenError):
                    self.memory.link.request({"op": "whole", "step": step})
                self.known(step)
                break
