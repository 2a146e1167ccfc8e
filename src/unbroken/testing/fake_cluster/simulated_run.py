"""The real supervisor over a fake cluster, in simulated time: whole runs of thousands of nodes in one process.

The run directory is a real one, as small as it is: journal, terms and incidents are read back by a successor.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...diagnose import diagnose
from ...diagnose.judge.facts import Facts
from ...private import write_secret
from ...progress import ClusterChoice, Policy, RunDir, RunSpec, Timeouts, read_journal, write_spec
from ...progress.records.incident import read_incidents
from ...progress.records.verdict import Verdict
from ...recover.record.base import Record
from ...recover.supervise.record.clock import Clock
from ...recover.supervise.screen.view import Lines
from ...recover.supervise.supervisor import Supervisor
from ...recover.supervise.surroundings import Surroundings
from ...recover.wire import Link
from .clock import SimulatedLoop
from .cluster import FakeCluster, FakeHardware
from .faults import Faults
from .training import Script


class _Diagnosis:
    """The real diagnosis, in this process: ranks write no logs here, so it has facts alone."""

    def __init__(self, empty: Path) -> None:
        empty.touch()
        self._empty = empty
        self.hurry = asyncio.Event()

    async def warm_up(self) -> None:
        """Nothing is to be started."""

    async def __call__(self, logs: Sequence[Path], facts: Facts) -> Verdict:
        # On a thread's account: in a real run another process does it.
        return await asyncio.to_thread(diagnose, logs or [self._empty], facts=facts)

    async def close(self) -> None:
        """Nothing was started."""


class _Screen(Lines):
    """Keeps the lines, with simulated time kept out of them."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines += text.splitlines()


class SimulatedRun:
    """One run. `spares` are nodes of it that wait; `idle` are nodes that the cluster has beside them."""

    def __init__(
        self,
        loop: SimulatedLoop,
        folder: Path,
        nodes: int,
        *,
        spares: int = 0,
        idle: int = 0,
        nproc: int = 8,
        script: Script | None = None,
        timeouts: Timeouts | None = None,
        record_of: Callable[[RunDir], Record] | None = None,
        policy: Policy | None = None,
        one_machine: bool = False,
        min_nodes: int = 0,
        nodes_per_replica: int = 1,
    ) -> None:
        """`record_of` gives the run's record as the host has it that this is the run directory of; by default that itself.
        `one_machine`: its nodes are virtual ones."""
        self.loop, self._record_of = loop, record_of
        self.hardware = FakeHardware(loop, nodes + spares + idle, gpus=nproc)
        for node in self.hardware.nodes.values() if one_machine else ():
            node.host = "host"
        self.run_dir = RunDir(folder)
        self.run_dir.create()
        self.spec = RunSpec(
            command=("train.py",), run_id="simulated", nodes=nodes, nproc=nproc, spares=spares, cluster=ClusterChoice("fake"),
            timeouts=timeouts or Timeouts(), policy=policy or Policy(), min_nodes=min_nodes, nodes_per_replica=nodes_per_replica,
        )  # fmt: skip
        write_spec(self.run_dir, self.spec, first=True)
        self._script = script or Script()
        self.screen = _Screen()
        self._begin_term()

    def _begin_term(self) -> None:
        self.cluster = FakeCluster("simulated", self.hardware, script=self._script)
        self.faults = Faults(self.cluster)
        offset = self.cluster.wall_offset_s
        clock = Clock(self.loop.time, lambda: self.loop.time() + offset)
        surroundings = Surroundings(
            self.cluster,
            _Diagnosis(self.run_dir.path.with_name("empty.log")),
            clock,
            self.hardware.network.listen,
            _reach_nobody,
            record=self._record_of(self.run_dir) if self._record_of else None,
        )
        self.supervisor = Supervisor(
            self.run_dir, self.spec, surroundings, self.screen, cwd=self.run_dir.path
        )
        self.task = self.loop.create_task(self.supervisor.run())

    def kill_supervisor(self) -> None:
        """Ends the supervisor as kill -9 does: nothing of it runs any more, and every link breaks."""
        self.faults.kill_supervisor()
        self.task.add_done_callback(lambda t: t.cancelled() or t.exception())
        coroutine: Any = self.task.get_coro()
        coroutine.close()  # not cancelled, which it could answer by leaving its nodes in order
        self.task.cancel()
        self.supervisor._changed.set()  # a wait for news is a task of its own, and would be left pending

    def restart_supervisor(self, elsewhere: Path | None = None) -> None:
        """Gives the same command again; on another host, whose run directory is `elsewhere` and holds this run's key."""
        if elsewhere is not None:
            token = self.run_dir.token.read_bytes()
            self.run_dir = RunDir(elsewhere)
            self.run_dir.create()
            write_secret(self.run_dir.token, token)
            write_spec(self.run_dir, self.spec, first=True)
        self._begin_term()

    # --- what there is to see

    def journal(self, kind: str) -> list[dict[str, Any]]:
        """The records of one kind, of all terms."""
        return [r for r in read_journal(self.run_dir).records if r["kind"] == kind]

    def journal_text(self) -> list[dict[str, Any]]:
        """All records, of all terms."""
        return read_journal(self.run_dir).records

    def incidents(self) -> list[dict[str, Any]]:
        """The files of incidents, oldest first."""
        return read_incidents(self.run_dir)

    def step(self) -> int:
        """The newest step of the newest attempt, -1 before its first."""
        gangs = self.hardware.gangs
        return gangs[max(gangs)].step() if gangs else -1

    async def until(self, condition: Callable[[], object], within_s: float = 3600.0) -> None:
        """Waits in simulated time. Raises TimeoutError, or what the supervisor ended with."""
        deadline = self.loop.time() + within_s
        while not condition():
            if self.task.done():
                self.task.result()
            if self.loop.time() > deadline:
                raise TimeoutError("\n".join(["it did not come true", *self.screen.lines]))
            await asyncio.sleep(0.5)


async def _reach_nobody(*_: Any, **__: Any) -> Link:
    raise ConnectionRefusedError("the supervisor before is gone")
