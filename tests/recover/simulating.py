"""Runs of the real supervisor over a fake cluster, for the tests of this folder."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from unbroken.progress import Timeouts
from unbroken.recover.wire import read_token
from unbroken.testing.fake_cluster import Script, SimulatedLoop, run_simulated
from unbroken.testing.fake_cluster.simulated_run import SimulatedRun

Act = Callable[[SimulatedRun], Coroutine[Any, Any, None]]
Simulate = Callable[..., None]


def simulate_in(folder: Path) -> Simulate:
    """Runs a test's `act` with a run of so many nodes below `folder`; the run is stopped after it, and must leave no agent."""

    def go(act: Act, nodes: int, **options: Any) -> None:
        async def main(loop: SimulatedLoop) -> None:
            options.setdefault("script", Script(start_s=20, step_s=5, save_every=4))
            options.setdefault("timeouts", Timeouts(suspect=30, hang=60, lease=15))  # type: ignore[arg-type]
            run = SimulatedRun(loop, folder / "run", nodes, nproc=2, **options)
            await act(run)
            if not run.task.done():
                run.supervisor.request_stop()
                await run.until(run.task.done, 600)
            left = [n.name for n in run.hardware.nodes.values() if n.agent and n.state == "up"]
            assert not left, "an agent was left"

        run_simulated(main)

    return go


async def reach(run: SimulatedRun, attempt: int, step: int) -> None:
    """Waits until the supervisor has heard of this step of this attempt."""
    await run.until(lambda: run.journal("attempt") and run.journal("attempt")[-1]["attempt"] >= attempt)
    await run.until(lambda: run.step() >= step)


class Visitor:
    """Somebody who asks the supervisor over its link, as a second call of `unbroken run` does."""

    def __init__(self, run: SimulatedRun) -> None:
        self._run, self._answers, self._id = run, dict[int, asyncio.Future[Any]](), 0

    async def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """The answer; shows the run's token before the first question."""
        if not self._id:
            network = self._run.hardware.network
            self._connection = await network.connect("visitor", self._receive, lambda: None)
            self._id = 1
            assert (await self.ask("token", token=read_token(self._run.run_dir)))["ok"]
        self._id += 1
        answer = self._answers[self._id] = self._run.loop.create_future()
        self._connection.send(json.dumps({"op": op, "id": self._id, **fields}).encode() + b"\n")
        return dict(await answer)

    def _receive(self, line: bytes) -> None:
        message = json.loads(line)
        self._answers.pop(message["answer"]).set_result(message)
