"""Virtual nodes whose agents are a test's own programs, held as `LocalCluster` holds them."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from unbroken.cluster import EndedProcesses, Kind, Ownership
from unbroken.cluster.holding.processes import marked
from unbroken.cluster.local import find_root
from unbroken.cluster.local_events import LocalCluster, LocalOptions
from unbroken.private import private_folder


class OwnedNodes:
    """The nodes of one run."""

    def __init__(self, run_id: str, kind: Kind | None = None) -> None:
        self.run_id = run_id
        self._cluster = LocalCluster(run_id, LocalOptions(kind))
        self._root = find_root(run_id)
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def owner(self) -> Ownership:
        return self._cluster.owner

    def ownership(self) -> str:
        return self.owner.as_text()

    def scratch(self, node: str) -> Path:
        return self._root / node

    def launch(self, node: str, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        for folder in (self._root, self.scratch(node)):
            private_folder(folder)
        start = self.owner.start_agent(node, argv)
        try:
            with open(log, "ab") as out:
                self._children[node] = subprocess.Popen(
                    start.argv, env={**os.environ, **env, **start.env}, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                    start_new_session=True, preexec_fn=start.enter,
                )  # fmt: skip
        finally:
            start.close()

    def roles(self, node: str) -> set[str]:
        """What of the run lives there."""
        if child := self._children.get(node):
            child.poll()  # a zombie would look alive
        return {p.role for p in marked(self.run_id, node=node)} & {"agent", "keeper", "rank"}

    def clear(self, node: str) -> EndedProcesses:
        """Ends all that is left on a node."""
        ended = self._cluster.end_node(node)
        if child := self._children.get(node):
            child.poll()
        with contextlib.suppress(OSError):
            self._root.rmdir()
        return ended

    def sweep(self) -> EndedProcesses:
        """Ends all that is left on any."""
        return self._cluster.end_all()

    def forget(self, node: str) -> None:
        """Drops what is remembered of a lost proof."""
        self._cluster.forget_node(node)
