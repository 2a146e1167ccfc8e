"""What a run costs its supervisor, by the number of nodes: the real loop over a fake cluster, in simulated time.

    python benchmarks/cluster.py [--nodes 8 64 1200] [--nproc 8] [--json FILE]

For each size: from `acquire` until all agents have greeted and train, a node lost and replaced by a spare, a rank that
hangs, a node that is preempted, a supervisor that is killed and succeeded. For each of these: messages and bytes in both
directions, simulated seconds, CPU seconds, the longest that the event loop was busy at one go, and the memory reached.
CPU and memory are those of supervisor *and* virtual nodes, which share the process: an upper bound for the supervisor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import resource
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from machine import describe_machine

from unbroken.progress import Timeouts
from unbroken.testing.fake_cluster import Script, SimulatedLoop
from unbroken.testing.fake_cluster.simulated_run import SimulatedRun


class MeasuredLoop(SimulatedLoop):
    """Remembers the longest turn, in seconds of a processor (others share the machine): so long nobody was answered."""

    longest = 0.0

    def _run_once(self) -> None:
        began = time.process_time()
        super()._run_once()  # type: ignore[misc]
        self.longest = max(self.longest, time.process_time() - began)


@dataclass(frozen=True)
class Cost:
    """What one event cost. `longest_turn_s` is the lag of the event loop; `received` and `sent` are the supervisor's, in bytes;
    `simulated_s` is the time of the event itself."""

    nodes: int
    event: str
    messages_received: int
    received: int
    messages_sent: int
    sent: int
    simulated_s: float
    cpu_s: float
    longest_turn_s: float
    peak_rss: int


async def measure(
    run: SimulatedRun, loop: MeasuredLoop, event: str, act: Callable[[], Awaitable[None]], costs: list[Cost]
) -> None:
    network = run.hardware.network
    before = network.to_supervisor.copy(), network.to_nodes.copy()
    loop.longest, simulated, cpu = 0.0, loop.time(), time.process_time()
    await act()
    received, sent = network.to_supervisor.since(before[0]), network.to_nodes.since(before[1])
    cost = Cost(
        run.spec.nodes, event, received.messages, received.size, sent.messages, sent.size, round(loop.time() - simulated, 1),
        round(time.process_time() - cpu, 2), round(loop.longest, 3),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )  # fmt: skip
    costs.append(cost)
    print(
        f"{cost.nodes:>6} {event:<10} {cost.messages_received:>9,} in {cost.received / 1e6:>8.2f} MB "
        f"{cost.messages_sent:>9,} out {cost.sent / 1e6:>8.2f} MB {cost.simulated_s:>7} s simulated {cost.cpu_s:>7} s CPU "
        f"{cost.longest_turn_s * 1e3:>7.0f} ms at one go {cost.peak_rss / 1e6:>7.0f} MB", flush=True,
    )  # fmt: skip


async def go(loop: MeasuredLoop, folder: Path, nodes: int, nproc: int, costs: list[Cost]) -> None:
    script = Script(start_s=20, step_s=5, save_every=4)
    timeouts = Timeouts(suspect=30, hang=60, lease=60)  # type: ignore[arg-type]
    run = SimulatedRun(loop, folder, nodes, spares=2, nproc=nproc, script=script, timeouts=timeouts)
    attempts = 0

    async def reach(step: int, attempt: int) -> None:
        await run.until(lambda: len(run.journal("attempt")) >= attempt and run.step() >= step)

    async def resume() -> None:
        nonlocal attempts
        attempts += 1
        await run.until(lambda: len(run.journal("resumed")) >= attempts)

    async def lose() -> None:
        run.faults.lose("node-00003", noticed_after_s=10.0, proven=True)
        await resume()

    async def hang() -> None:
        run.faults.hang_rank("node-00005", 5 * nproc)
        await resume()

    async def preempt() -> None:
        run.faults.preempt("node-00002", in_s=600.0)
        await resume()

    async def take_over() -> None:
        run.kill_supervisor()
        run.restart_supervisor()
        await run.until(lambda: run.journal("adopted"))

    await measure(run, loop, "start", lambda: reach(5, 1), costs)
    await measure(run, loop, "100 s", lambda: asyncio.sleep(100), costs)
    await measure(run, loop, "node lost", lose, costs)
    await measure(run, loop, "hang", hang, costs)
    await measure(run, loop, "preemption", preempt, costs)
    await measure(run, loop, "takeover", take_over, costs)


def simulate(nodes: int, nproc: int, costs: list[Cost]) -> None:
    loop = MeasuredLoop()
    asyncio.set_event_loop(loop)
    with tempfile.TemporaryDirectory() as folder:
        try:
            loop.run_until_complete(go(loop, Path(folder) / "run", nodes, nproc, costs))
        finally:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            asyncio.set_event_loop(None)
            loop.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 64, 1200])
    parser.add_argument("--nproc", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # lost nodes do not answer: that is what is measured
    costs: list[Cost] = []
    for nodes in args.nodes:
        simulate(nodes, args.nproc, costs)
    if args.json:
        found = {"machine": describe_machine(), "nproc": args.nproc, "costs": [asdict(c) for c in costs]}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
