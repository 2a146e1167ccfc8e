"""What the nodes of a run tell each other without a supervisor: who holds whose copies, and what is whole everywhere.

All of it through the agreement of the ranks, a few small values; the keepers move the bytes.
"""

from __future__ import annotations

import os
import secrets
import threading
from contextlib import suppress

from ..errors import UnbrokenError
from .agreement import Agreement
from .environment import Place
from .peers import own_address
from .rank_memory import RankMemory

TIMEOUT_S = 300.0
LOOK_S = 0.1


def gather_nodes(agreement: Agreement, p: Place, memory: RankMemory) -> list[str]:
    """The nodes of the run in the order of their first ranks."""
    agreement.publish(f"node/{p.rank}", memory.link.info["node"])
    told = [agreement.read(f"node/{r}", timeout_s=TIMEOUT_S) for r in range(p.world_size)]
    return list(dict.fromkeys(told))


def join_ring(agreement: Agreement, p: Place, memory: RankMemory, nodes: list[str]) -> None:
    """The first rank of each node makes its keeper listen, and tells it who comes next: never the node itself."""
    me = str(memory.link.info["node"])
    token = agreement.decide("ring/token", secrets.token_hex(32))
    if p.local_rank != 0:
        return
    host = own_address(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    mine = memory.alive().request({"op": "peer_listen", "host": host})[0]["address"]
    agreement.publish(f"ring/{me}", mine)
    following = nodes[(nodes.index(me) + 1) % len(nodes)]
    theirs = agreement.read(f"ring/{following}", timeout_s=TIMEOUT_S)
    memory.alive().request({"op": "peer_target", "token": token, "node": following, "address": theirs})


def peer_addresses(agreement: Agreement, nodes: list[str]) -> dict[str, str]:
    """{node: address} of the keepers of these nodes, which all listen for peers."""
    return {n: str(agreement.read(f"ring/{n}", timeout_s=TIMEOUT_S)) for n in nodes}


class Board:
    """Learns, without a supervisor, which snapshots are whole on all ranks of several nodes, and tells this node's keeper."""

    def __init__(self, agreement: Agreement, memory: RankMemory) -> None:
        self.agreement, self.memory = agreement, memory
        self._open: set[int] = set()
        self._guard = threading.Lock()
        self._stop = threading.Event()
        threading.Thread(target=self._loop, name="unbroken-board", daemon=True).start()

    def on_host(self, step: int) -> None:
        """This rank has its share in memory."""
        with self._guard:
            self._open.add(step)
        if self.agreement.count(f"host/{step}") == self.agreement.world_size:
            self.agreement.publish(f"whole/{step}", True)

    def close(self) -> None:
        """Ends looking."""
        self._stop.set()

    def _loop(self) -> None:
        while not self._stop.wait(LOOK_S):
            with self._guard:
                steps = sorted(self._open, reverse=True)
            for step in steps:
                if not self.agreement.peek(f"whole/{step}"):
                    continue
                with suppress(UnbrokenError):
                    link = self.memory.link
                    link.request({"op": "complete", "attempt": link.info["attempt"], "step": step})
                with self._guard:
                    self._open -= {s for s in self._open if s <= step}
                break
