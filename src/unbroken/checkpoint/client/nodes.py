"""What the nodes of a run tell each other by themselves: who holds whose copies, and what is whole everywhere.

All of it through the agreement of the ranks, a few small values; the keepers move the bytes.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from contextlib import suppress

from ...errors import UnbrokenError
from ...link.address import own_address
from ..ranks.agreement import Agreement
from ..ranks.environment import Place
from .rank_memory import RankMemory

logger = logging.getLogger("unbroken.checkpoint")

TIMEOUT_S = 300.0
LOOK_S = 0.1
PATIENCE_S = 1.0
"""A supervisor answers in milliseconds; one that is slower is not waited for."""


def gather_nodes(agreement: Agreement, p: Place, memory: RankMemory) -> list[str]:
    """The nodes of the run in the order of their first ranks."""
    agreement.publish(f"node/{p.rank}", memory.link.info["node"])
    names = [agreement.read(f"node/{r}", timeout_s=TIMEOUT_S) for r in range(p.world_size)]
    return list(dict.fromkeys(names))


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
