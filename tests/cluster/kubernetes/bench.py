"""The contract's bench over a Kubernetes of this machine."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from unbroken.cluster.contract import Cluster
from unbroken.cluster.local import find_root
from unbroken.cluster.registry import make_cluster

from ...support.kubernetes.site import IMAGE, KubernetesSite
from ..contract import Scenario
from ..test_contract_local import LocalBench


class KubernetesBench(LocalBench):
    impossible: ClassVar[Mapping[str, str]] = {}
    size = 5

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, None)
        self._opened: list[Cluster] = []
        self.tells_how_it_ended = False  # a small parent reaps the agent
        self.site = KubernetesSite(folder / "site", [f"k{i}" for i in range(self.size)])

    def options(self) -> dict[str, str]:
        return {
            "image": IMAGE, "kubeconfig": str(self.site.kubeconfig), "python": sys.executable, "grace": "10s",
        }  # fmt: skip

    def open(self) -> Cluster:
        self._opened.append(make_cluster("kubernetes", self.run_id, self.options()))
        return self._opened[-1]

    def run(self, scenario: Scenario) -> None:
        async def whole() -> None:
            try:
                await scenario()
            finally:
                for cluster in self._opened:
                    await cluster.close()

        asyncio.run(whole())

    def hold(self) -> None:
        self.site.all.held = True

    def grant(self) -> None:
        self.site.all.held = False

    def lose(self, node: str) -> None:
        self.site.power_off(node, remove=True)

    def isolate(self, node: str) -> None:
        self.site.cut(node)

    def return_node(self, node: str) -> None:
        self.site.restore(node)

    def preempt(self, node: str, in_s: float) -> None:
        self.site.evict(node, in_s)

    def end_allocation(self, in_s: float) -> None:
        self.site.limit(in_s)


def clear_memory(run_id: str) -> None:
    """Removes what containers leave in memory when they are killed: in a pod it goes with the pod."""
    root = find_root(run_id)
    for path in root.parent.glob(f"{root.name}*"):
        shutil.rmtree(path, ignore_errors=True)
