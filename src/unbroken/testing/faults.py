"""Real faults for a run on the local backend: kill -9, SIGSTOP, a whole node with its memory, the supervisor.

    faults = Faults(RunDir("runs/train"))
    faults.kill_rank(3)

Processes are found by the run's mark in their environment; nothing else on the machine can be hit.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from ..cluster.holding.cgroups import Cgroups
from ..cluster.holding.processes import Marked, end, marked, still_there
from ..cluster.local import find_root
from ..cluster.local_events import LocalCluster
from ..errors import ContractError, RunError
from ..progress import PageReader, RunDir, read_spec, read_terms


class RunFaults:
    """Injects faults into one run that is going on."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self.run_id = read_spec(run_dir.spec).run_id
        self._root = find_root(self.run_id)

    # --- where the run is

    def processes(self, role: str, *, node: str | None = None) -> list[Marked]:
        """The run's processes of a role: agent, keeper or rank (with the children of a rank)."""
        return [p for p in marked(self.run_id, node=node) if p.role == role]

    def ranks(self) -> dict[int, Marked]:
        """Each running rank's own process (not its children): the oldest with its number."""
        found: dict[int, Marked] = {}
        for p in self.processes("rank"):
            if p.rank not in found or p.started < found[p.rank].started:
                found[p.rank] = p
        return found

    def nodes(self) -> list[str]:
        """Nodes on which ranks run now."""
        return sorted({p.node for p in self.ranks().values()})

    def step(self) -> tuple[int, int]:
        """(attempt, highest completed step of any rank), (0, -1) before the first page; reads the pages."""
        attempt, step = 0, -1
        for page in self._pages():
            try:
                reader = PageReader(page)
            except (OSError, ContractError):
                continue
            progress = reader.read()
            reader.close()
            if progress.attempt > attempt:
                attempt, step = progress.attempt, -1
            if progress.attempt == attempt and progress.last is not None:
                step = max(step, progress.last.step)
        return attempt, step

    def _pages(self) -> list[Path]:
        return list(self._root.glob("*/pages/rank-*.page"))

    def wait_for_step(self, step: int, *, within: float, alive: Callable[[], bool] = lambda: True) -> int:
        """Waits until a rank has completed `step`; returns the step then. Raises RunError when that does not come."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline and alive():
            now = self.step()[1]
            if now >= step:
                return now
            time.sleep(0.005)
        raise RunError(f"step {step} did not come within {within:.0f} s (reached {self.step()[1]})")

    # --- faults

    def kill_rank(self, rank: int, sig: int = signal.SIGKILL) -> Marked:
        """Signals one rank (kill -9 by default) and returns it. Raises RunError if it does not run."""
        process = self.ranks().get(rank)
        if process is None:
            raise RunError(f"rank {rank} does not run")
        os.kill(process.pid, sig)
        return process

    def stop_rank(self, rank: int) -> Marked:
        """SIGSTOP: the process is there and does nothing."""
        return self.kill_rank(rank, signal.SIGSTOP)

    def kill_agent(self, node: str) -> Marked:
        """kill -9 of a node's agent."""
        return self._kill_one("agent", node)

    def kill_parents(self) -> list[int]:
        """kill -9 of the small parents that hold the nodes, where they are held so; returns their process ids."""
        found = [p.pid for p in self.processes("parent")]
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        return found

    def kill_keeper(self, node: str) -> Marked:
        """kill -9 of a node's keeper."""
        return self._kill_one("keeper", node)

    def _kill_one(self, role: str, node: str) -> Marked:
        found = self.processes(role, node=node)
        if not found:
            raise RunError(f"{node} has no {role}")
        os.kill(found[0].pid, signal.SIGKILL)
        return found[0]

    def kill_node(self, node: str) -> int:
        """kill -9 of everything on a node, its memory and scratch with it; returns how many processes that were."""

        # Their small parents go last: what is killed before them still has to be listed.
        def there() -> list[Marked]:
            return [p for p in marked(self.run_id, node=node) if p.role != "parent"]

        before = len(there())
        # All at once, as far as anybody can tell: they stop first, and the agent, who would tell, goes last.
        for p in there():
            with contextlib.suppress(ProcessLookupError):
                os.kill(p.pid, signal.SIGSTOP)
        end(lambda: [p for p in there() if p.role != "agent"])
        end(there)
        ended = LocalCluster(self.run_id).end_node(node)
        if ended.survivors:
            raise RunError(f"{node} has processes that survive kill -9: {list(ended.survivors)}")
        shutil.rmtree(self._root / node, ignore_errors=True)
        return before

    def supervisor(self) -> int:
        """The process id of the supervisor of the newest epoch. Raises RunError if it is gone."""
        terms = read_terms(self.run_dir)
        if not terms or terms[-1].supervisor_is_gone():
            raise RunError("no supervisor runs")
        return terms[-1].pid

    def kill_supervisor(self) -> int:
        """kill -9 of the supervisor; returns its process id."""
        pid = self.supervisor()
        os.kill(pid, signal.SIGKILL)
        return pid

    # --- afterwards

    def end_everything(self) -> None:
        """kill -9 of everything that the run still has on this machine, its memory and scratch with it."""
        end(lambda: marked(self.run_id))
        LocalCluster(self.run_id).end_all()
        shutil.rmtree(self._root, ignore_errors=True)

    def left_over(self) -> list[str]:
        """What a finished run must not leave: processes and scratch folders, each described."""
        things = [f"{p.role} {p.pid} on {p.node}" for p in marked(self.run_id) if still_there(p)]
        root = self._root
        if root.exists():
            things += [str(p) for p in root.rglob("*")]
        for folder in Cgroups.left_by(self.run_id):
            things.append(f"the cgroup {folder} with processes {[p for n in self._held(folder) for p in n]}")
        return things

    def _held(self, folder: Path) -> list[list[int]]:
        held = Cgroups(self.run_id, folder)
        return [held.left(node) for node in held.nodes()]
