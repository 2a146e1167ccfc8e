"""Virtual nodes on this machine: separate agents, keepers, scratch folders and addresses."""

from __future__ import annotations

import errno
import glob
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import DoesNotFit
from ..machine import available_memory, usable_memory
from ..private import private_folder
from ..units import Bytes
from .base import Allocation, NodeHandle, NodeState
from .holding.choice import choose, every
from .holding.ownership import Ended, Kind, Ownership
from .holding.processes import marked

_RANK_NEEDS = Bytes("300MiB")
"""What a rank takes before it has allocated anything: an interpreter with torch."""


class LocalBackend:
    """Nodes `node-000`, `node-001`, ... on this machine, for one run."""

    def __init__(self, run_id: str, ownership: Kind | None = None) -> None:
        self.run_id = run_id
        self._wanted = ownership
        self._owner: Ownership | None = None
        self._why_not_surer = ""
        self._before: list[Ownership] = []
        shm = Path("/dev/shm")
        self._root = (shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())) / f"unbroken-{run_id}"
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def check_fits(self, nodes: int, nproc: int, spares: int) -> None:
        """Raises DoesNotFit when the ranks alone would fill the memory that is free now."""
        ranks = nodes * nproc
        free = Bytes(_free())
        need = Bytes(ranks * _RANK_NEEDS)
        if need > free:
            raise DoesNotFit(
                f"{ranks} ranks on {nodes} nodes need at least {need} of memory before training starts, "
                f"{free} is free",
                hint="Use fewer --nodes or --nproc",
            )
        cores = os.cpu_count() or 1
        if ranks > 64 * cores:
            raise DoesNotFit(
                f"{ranks} ranks on a machine with {cores} cores would not train but wait",
                hint="Use fewer --nodes or --nproc",
            )

    def allocate(self, nodes: int, spares: int) -> Allocation:
        names = [f"node-{i:03d}" for i in range(nodes + spares)]
        return Allocation(tuple(names[:nodes]), tuple(names[nodes:]))

    def keeper_memory(self, nodes: int) -> int:
        """Half of the memory that is free now, shared by the virtual nodes."""
        return int(_free() * 0.5 / max(1, nodes))

    def scratch(self, node: str) -> Path:
        return self._root / node

    def address(self, node: str) -> str:
        return "127.0.0.1"

    def devices(self, slot: int, nproc: int, slots: int) -> str | None:
        """The slot's own GPUs where there are enough for all ranks, else GPUs shared in turn; None without GPUs.

        They belong to the slot, not to the node: a spare that takes a slot inherits its GPUs.
        """
        gpus = _gpus()
        if not gpus:
            return None
        wanted = [gpus[(slot * nproc + i) % len(gpus)] for i in range(nproc)]
        return ",".join(dict.fromkeys(wanted))

    @property
    def owner(self) -> Ownership:
        """How the processes of this run are held; chosen when first asked for. Raises RunError."""
        if self._owner is None:
            self._before = every(self.run_id, self._root)
            self._owner, self._why_not_surer = choose(self.run_id, self._root, self._wanted)
        return self._owner

    def describe_ownership(self) -> str:
        held = self.owner.describe()
        return f"{held} ({self._why_not_surer})" if self._why_not_surer else held

    def ownership(self) -> str:
        return self.owner.as_text()

    def launch(self, node: str, argv: Sequence[str], env: Mapping[str, str], log: Path) -> NodeHandle:
        owner = self.owner
        left = Ended()
        for other in self._others():
            left |= other.end_ranks(node)
        scratch = self.scratch(node)
        for folder in (self._root, scratch):  # in a place where others may make folders too
            private_folder(folder)
        log.parent.mkdir(parents=True, exist_ok=True)
        start = owner.start_agent(node, argv)
        try:
            with open(log, "ab") as out:
                child = subprocess.Popen(
                    start.argv,
                    env={**os.environ, **env, **start.env},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                    preexec_fn=start.enter,
                )
        except subprocess.SubprocessError as e:
            raise OSError(errno.EIO, f"the agent could not be put where it is held: {e}") from e
        finally:
            start.close()
        self._children[node] = child
        return NodeHandle(node, child.pid, scratch, left)

    def _others(self) -> list[Ownership]:
        """How an earlier supervisor held processes of this run, where that was another way."""
        mine = self.owner.as_text()
        return [o for o in self._before if o.as_text() != mine]

    def state(self, node: str) -> NodeState:
        child = self._children.get(node)
        if child is not None:
            child.poll()  # reaps it: a zombie would look alive
        roles = {p.role for p in marked(self.run_id, node=node)}
        if "agent" in roles:
            return NodeState.ALIVE
        return NodeState.AGENT_LOST if "keeper" in roles else NodeState.GONE

    def agent_state(self, node: str) -> str:
        agent = next((p for p in marked(self.run_id, node=node) if p.role == "agent"), None)
        if agent is None:
            return "its agent is gone"
        words = {
            "T": "is stopped by a signal",
            "t": "is held by a debugger",
            "D": "waits for a device or a disk",
        }
        return f"its agent (process {agent.pid}) {words.get(agent.state, 'is there, but hardly runs')}"

    def clear(self, node: str) -> Ended:
        ended = Ended()
        # What another way holds goes first: the marks that this one looks for would hit what holds it.
        for owner in (*self._others(), self.owner):
            ended |= owner.end_node(node)
        if child := self._children.get(node):
            child.poll()
        if not ended.survivors:
            shutil.rmtree(self.scratch(node), ignore_errors=True)
            try:
                self._root.rmdir()
            except OSError:
                pass  # other nodes still use it
        return ended

    def forget(self, node: str) -> None:
        for owner in (*self._others(), self.owner):
            owner.forget(node)

    def sweep(self, keep: Sequence[str] = ()) -> Ended:
        ended = Ended()
        for owner in (*self._others(), self.owner):
            for node in owner.nodes():
                if node not in keep:
                    ended |= owner.end_node(node)
        return ended

    def can_return(self, node: str) -> bool:
        return True


def _gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES would name them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [v for v in visible.split(",") if v and v != "-1"]
    return [p.removeprefix("/dev/nvidia") for p in sorted(glob.glob("/dev/nvidia[0-9]*"))]


def _free() -> int:
    """Bytes of memory that are free now, for this container."""
    free = available_memory()
    return usable_memory() if free is None else free
