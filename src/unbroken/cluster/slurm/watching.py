"""Turns what happens to a job, its nodes and its steps into the contract's events.

Slurm reports nothing to a user by itself but this: the srun of a step ends when its node is lost. So each srun's end is
followed at once, and is answered by a question to the controller; else that is asked every few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import RunError
from ...waiting import keep_following, wait_within
from ..clocks import Moment
from ..contract import EndingAt, Event, Exited, Lost, PreemptingAt, Returned, Started, Unreachable
from ..stream import EventStream
from .controller.commands import Slurm
from .controller.cordons import is_ours
from .controller.records import JobRecord, NodeRecord
from .launches import Launch, Launches

_log = logging.getLogger("unbroken.slurm")
_LAUNCHES_EVERY_S = 0.1
_AGAIN_S = 1.0
_NEAR_S = 600.0
_CHANGED_S = 1.0
_OVER = "the job is over"


@dataclass
class NodeView:
    """What was reported of a node. `lost` says why; a job never gets a lost node back."""

    lost: str = ""
    unreachable: bool = False
    leaving: bool = False


class SlurmWatching:
    """Follows one job. `watched` are the run's nodes, by name."""

    def __init__(
        self,
        job: str,
        slurm: Slurm,
        launches: Launches,
        stream: EventStream,
        *,
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._job, self._slurm, self._launches, self._stream = job, slurm, launches, stream
        self._every_s = every_s
        self._clock, self._wall = clock, wall
        self.watched: dict[str, NodeView] = {}
        self._look = asyncio.Event()
        self._looked_at = clock()
        self._ends: tuple[float, float] | None = None
        """When the job ends: by the time of day, and on our clock."""
        self._near_told = False
        self._grace_ends: float | None = None
        """When a job that is preempted will be ended, by the time of day, where Slurm shows no end of it."""
        self._elsewhere: dict[str, str] = {}
        """Launches of a supervisor on another host, which have no srun here -> their node."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to follow; call it in the event loop. Does nothing the second time."""
        if not self._tasks:
            self._launches.find_running()
            self._tasks = [
                asyncio.get_running_loop().create_task(
                    keep_following(f, _AGAIN_S, _log, "what Slurm reports")
                )
                for f in (self._follow_launches, self._follow_job)
            ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def look(self) -> None:
        """Asks the controller now."""
        self._look.set()

    def list_running(self) -> list[Event]:
        """What a new reader is told: agents that run."""
        now = Moment.at(self._clock())
        here = [Started(now, x.node, x.name) for x in self._launches.live.values() if x.began and not x.told]
        return [*here, *(Started(now, node, name) for name, node in self._elsewhere.items())]

    def convert_end(self, ends: float | None) -> float | None:
        """When the job ends, on our clock: the same answer for the same end."""
        ends = self._grace_ends if ends is None else ends
        if ends is None:
            return None
        if self._ends is None or abs(self._ends[0] - ends) > _CHANGED_S:
            self._ends, self._near_told = (ends, self._clock() + ends - self._wall()), False
        return self._ends[1]

    # --- sruns

    async def _follow_launches(self) -> None:
        while True:
            for launch in list(self._launches.live.values()):
                self._take(launch)
            await asyncio.sleep(_LAUNCHES_EVERY_S)

    def _take(self, launch: Launch) -> None:
        ended = launch.poll()  # before its lines are read: all of them are there then
        for said in launch.read():
            self._apply(launch, said)
        if ended is None or launch.closing:
            return
        if launch.told:
            self._launches.forget(launch)
            return
        # Either its node is lost, or its program was ended: the controller knows.
        launch.closing = True
        task = asyncio.get_running_loop().create_task(self._explain(launch, ended, Moment.at(self._clock())))
        self._tasks.append(task)
        task.add_done_callback(lambda t: self._tasks.remove(t) if t in self._tasks else None)

    def _apply(self, launch: Launch, said: Mapping[str, Any]) -> None:
        now = Moment.at(self._clock())
        match said.get("kind"):
            case "started":
                launch.began = True
                self._stream.publish(Started(now, launch.node, launch.name))
            case "refused":
                _log.warning("no agent starts on %s: %s", launch.node, said.get("why"))
                self._publish_exit(launch, now, 1, None)
            case "exited":
                self._publish_exit(launch, now, said.get("code"), said.get("signal"))
            case "lost" if not self.watched.get(launch.node, NodeView()).lost:
                # Agent, keeper and ranks are gone, the machine is there.
                self._stream.publish(Lost(now, launch.node, str(said.get("why")), bool(said.get("proven"))))
                self._stream.publish(Returned(now, launch.node))

    def _publish_exit(self, launch: Launch, at: Moment, code: int | None, signal: int | None) -> None:
        launch.told = True
        self._stream.publish(Exited(at, launch.node, launch.name, code, signal))

    async def _explain(self, launch: Launch, code: int, at: Moment) -> None:
        with contextlib.suppress(RunError):
            await self.ask()
        view = self.watched.get(launch.node)
        if view is None or not view.lost:
            known = code if 0 <= code < 128 else None
            number = code - 128 if 128 < code < 192 else -code if code < -1 else None
            self._publish_exit(launch, at, known, number)
        self._launches.forget(launch)

    # --- the job and its nodes

    async def _follow_job(self) -> None:
        while True:
            self._look.clear()
            try:
                await self.ask()
            except RunError as e:
                _log.warning("the controller does not answer: %s", e)
            with contextlib.suppress(TimeoutError):
                await wait_within(self._look.wait(), self._every_s)

    async def ask(self) -> JobRecord | None:
        """Asks the controller, and reports what has changed. Raises RunError where it does not answer."""
        job = await self._slurm.find_job(self._job)
        names = list(self.watched)
        nodes = await self._slurm.list_nodes(names) if names else {}
        steps = await self._slurm.list_steps(self._job) if job is not None and names else []
        ends = await self._find_end(job)
        now = self._clock()
        self._compare_end(ends, now)
        for name in names:
            self._compare(name, job, nodes.get(name), Moment(self._looked_at, now))
        self._compare_steps({(s.name, n) for s in steps for n in s.nodes})
        self._looked_at = now
        return job

    async def _find_end(self, job: JobRecord | None) -> float | None:
        """When the job will be ended, by the time of day. Of one without a time limit that is preempted Slurm shows no end
        (22.05) until its grace is over: it is told by when that began, and by the grace of its partition or QOS."""
        if job is None or job.ends is not None or not job.runs or self._grace_ends is not None:
            return job.ends if job is not None and job.ends is not None else self._grace_ends
        try:
            queue = await self._slurm.read_queue(self._job)
            if queue.preempted is not None:
                # Where nobody can say how long it has, it has no time to lose.
                self._grace_ends = queue.preempted + (await self._slurm.read_grace(queue) or 0.0)
        except RunError as e:
            _log.warning("whether the job is preempted cannot be asked: %s", e)
        return self._grace_ends

    def _compare_end(self, ends: float | None, now: float) -> None:
        if ends is None:
            return
        before = self._ends
        at = self.convert_end(ends)
        assert at is not None
        near = at - now < _NEAR_S
        if (before is not None and before != self._ends) or (near and not self._near_told):
            self._near_told = near
            self._stream.publish(EndingAt(Moment.at(now), self._job, at))

    def _compare(self, name: str, job: JobRecord | None, node: NodeRecord | None, at: Moment) -> None:
        view = self.watched[name]
        if view.lost:
            return
        why = _why_lost(name, job, node)
        if why:
            view.lost = why
            self._stream.publish(Lost(at, name, why))
            return
        assert node is not None
        if not node.responds and not view.unreachable:
            view.unreachable = True
            self._stream.publish(Unreachable(at, name, node.describe()))
        leaving = node.drained and not is_ours(node)
        if leaving and not view.leaving and node.responds:
            view.leaving = True
            # Whoever drains a node waits for its jobs: it is left when another is free, and nobody ends it by the clock.
            self._stream.publish(PreemptingAt(at, name, math.inf, node.describe()))
        if (view.unreachable and node.responds) or (view.leaving and not leaving):
            view.unreachable = view.unreachable and not node.responds
            view.leaving = leaving
            self._stream.publish(Returned(at, name))

    def _compare_steps(self, there: set[tuple[str, str]]) -> None:
        """Launches whose srun ran on another host: their step is all that is known of them."""
        here = {(x.step, x.node) for x in self._launches.live.values()}
        ours = {(s, n) for s, n in there if s.startswith(self._launches.prefix)}
        found = {self._launches.name_of_step(s, n): n for s, n in ours - here}
        now = Moment.at(self._clock())
        for name, node in found.items():
            if name not in self._elsewhere and not self._launches.was_here(name):
                self._elsewhere[name] = node
                self._stream.publish(Started(now, node, name))
        for name in [n for n in self._elsewhere if n not in found]:
            node = self._elsewhere.pop(name)
            if not self._launches.was_here(name) and not self.watched.get(node, NodeView()).lost:
                self._stream.publish(Exited(now, node, name))


def _why_lost(name: str, job: JobRecord | None, node: NodeRecord | None) -> str:
    if job is None or not job.runs:
        return _OVER if job is None else f"{_OVER}: {job.state.lower()}"
    if node is None:
        return "Slurm knows the node no more"
    if node.down:
        return node.describe()
    if name not in job.nodes:
        return f"the job has it no more; {node.describe()}"
    return ""
