"""What a run costs its supervisor, by the number of nodes: the real loop over a fake cluster, in simulated time.

    python benchmarks/cluster.py [--nodes 8 64 1200 8000] [--nproc 8] [--json FILE]
    python benchmarks/cluster.py --show FILE      # the table of docs/cluster.md

For each size: from `acquire` until all agents have greeted and train, a node lost and replaced by a spare, a rank that
hangs, a node that is preempted, a supervisor that is killed and succeeded. For each of these: messages and bytes in both
directions, simulated seconds, CPU seconds, the longest that the event loop was busy at one go, and the memory reached.
The supervisor shares its process with the virtual nodes: what agents do with a message, and when their timers come, is
counted apart and is not the supervisor's; so is what it does in threads (writing facts, the diagnosis, which a real run has in
another process), of which the lag of the loop is free. In simulated time all agents speak in the same instant, and one turn
of the loop takes in all of them: the longest turn is the worst case of a lag. Memory is that of both, an upper bound.
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
from typing import Any, TypeVar

from machine import describe_machine

from unbroken.progress import Timeouts
from unbroken.testing.fake_cluster import Script, SimulatedLoop
from unbroken.testing.fake_cluster.agent import VirtualAgent
from unbroken.testing.fake_cluster.simulated_run import SimulatedRun

T = TypeVar("T")


class MeasuredLoop(SimulatedLoop):
    """Remembers the longest turn, in seconds of a processor (others share the machine): so long nobody was answered.

    `nodes` and `threads` are what virtual nodes and threads took in all; no turn counts them.
    """

    longest = nodes = threads = 0.0
    _apart = False

    def _run_once(self) -> None:
        began, apart = time.process_time(), self.nodes + self.threads
        super()._run_once()  # type: ignore[misc]
        took = time.process_time() - began - (self.nodes + self.threads - apart)
        self.longest = max(self.longest, took)

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        return self._on_account("threads", super().run_in_executor, executor, func, *args)

    def count_nodes(self) -> None:
        """From now on what virtual agents do is counted as theirs."""
        for name in (
            "_receive",
            "_step",
            "_beat",
            "_save",
            "_send",
            "_hello",
            "_check_lease",
            "_lost",
            "_end_ranks",
        ):
            own = getattr(VirtualAgent, name)
            own = getattr(own, "own", own)

            def theirs(agent: VirtualAgent, *args: Any, _own: Any = own, **given: Any) -> Any:
                return self._on_account("nodes", _own, agent, *args, **given)

            theirs.own = own  # type: ignore[attr-defined]
            setattr(VirtualAgent, name, theirs)

    def _on_account(self, account: str, work: Callable[..., Any], *args: Any, **given: Any) -> Any:
        if self._apart:
            return work(*args, **given)
        self._apart, began = True, time.process_time()
        try:
            return work(*args, **given)
        finally:
            self._apart = False
            setattr(self, account, getattr(self, account) + time.process_time() - began)


@dataclass(frozen=True)
class Cost:
    """What one event cost. `longest_turn_s` is the lag of the event loop; `received` and `sent` are the supervisor's, in bytes;
    `simulated_s` is the time of the event itself; `cpu_s` the supervisor's loop, the others what was counted apart."""

    nodes: int
    event: str
    messages_received: int
    received: int
    messages_sent: int
    sent: int
    simulated_s: float
    cpu_s: float
    nodes_cpu_s: float
    threads_cpu_s: float
    longest_turn_s: float
    peak_rss: int


async def measure(
    run: SimulatedRun, loop: MeasuredLoop, event: str, act: Callable[[], Awaitable[None]], costs: list[Cost]
) -> None:
    network = run.hardware.network
    before = network.to_supervisor.copy(), network.to_nodes.copy()
    loop.longest, simulated, cpu = 0.0, loop.time(), time.process_time()
    nodes, threads = loop.nodes, loop.threads
    await act()
    received, sent = network.to_supervisor.since(before[0]), network.to_nodes.since(before[1])
    cost = Cost(
        run.spec.nodes, event, received.messages, received.size, sent.messages, sent.size, round(loop.time() - simulated, 1),
        round(time.process_time() - cpu - (loop.nodes - nodes) - (loop.threads - threads), 2),
        round(loop.nodes - nodes, 2), round(loop.threads - threads, 2), round(loop.longest, 3),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )  # fmt: skip
    costs.append(cost)
    print(
        f"{cost.nodes:>6} {event:<10} {cost.messages_received:>9,} in {cost.received / 1e6:>8.2f} MB "
        f"{cost.messages_sent:>9,} out {cost.sent / 1e6:>8.2f} MB {cost.simulated_s:>7} s simulated {cost.cpu_s:>7} s CPU (nodes {cost.nodes_cpu_s}, threads {cost.threads_cpu_s}) "
        f"{cost.longest_turn_s * 1e3:>7.0f} ms at one go {cost.peak_rss / 1e6:>7.0f} MB", flush=True,
    )  # fmt: skip


async def go(
    loop: MeasuredLoop, folder: Path, nodes: int, nproc: int, costs: list[Cost], keep: Callable[[], None]
) -> None:
    script = Script(start_s=20, step_s=5, save_every=4)
    timeouts = Timeouts(suspect=30, hang=60, lease=60)  # type: ignore[arg-type]
    # One for each of the three: where none is free, a node that is taken away is left at its last moment.
    run = SimulatedRun(loop, folder, nodes, spares=3, nproc=nproc, script=script, timeouts=timeouts)
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

    events: dict[str, Callable[[], Awaitable[None]]] = {
        "start": lambda: reach(5, 1), "100 s": lambda: asyncio.sleep(100), "node lost": lose, "hang": hang,
        "preemption": preempt, "takeover": take_over,
    }  # fmt: skip
    for event, act in events.items():
        await measure(run, loop, event, act, costs)
        keep()


def simulate(nodes: int, nproc: int, costs: list[Cost], keep: Callable[[], None]) -> None:
    """Appends to `costs`, and calls `keep` after each event: what is done is kept where it is cut off."""
    loop = MeasuredLoop()
    loop.count_nodes()
    asyncio.set_event_loop(loop)
    with tempfile.TemporaryDirectory() as folder:
        try:
            loop.run_until_complete(go(loop, Path(folder) / "run", nodes, nproc, costs, keep))
        finally:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            asyncio.set_event_loop(None)
            loop.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 64, 1200, 8000])
    parser.add_argument("--nproc", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path, metavar="FILE", help="print what --json wrote, as a table")
    args = parser.parse_args()
    if args.show:
        print(describe(json.loads(args.show.read_text())["costs"]))
        return
    logging.disable(logging.WARNING)  # lost nodes do not answer: that is what is measured
    costs: list[Cost] = []
    for nodes in args.nodes:
        simulate(
            nodes, args.nproc, costs,
            lambda: write(args.json, args.nproc, costs) if args.json else None,
        )  # fmt: skip


WORDS = {
    "start": "acquired, greeted, first steps", "100 s": "100 s of training", "node lost": "a node lost, until training is past it",
    "hang": "a hang", "preemption": "a node taken away", "takeover": "a supervisor killed and succeeded",
}  # fmt: skip


def describe(costs: list[dict[str, Any]]) -> str:
    """The costs as a table, event by event."""
    lines = [
        "| nodes | event | received | sent | supervisor's loop | in threads | longest turn | memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for event, words in WORDS.items():
        for c in (c for c in costs if c["event"] == event):
            lines.append(
                f"| {c['nodes']:,} | {words} | {c['messages_received']:,}, {c['received'] / 1e6:.2f} MB "
                f"| {c['messages_sent']:,}, {c['sent'] / 1e6:.2f} MB | {c['cpu_s']:.1f} s | {c['threads_cpu_s']:.1f} s "
                f"| {c['longest_turn_s'] * 1e3:,.0f} ms | {c['peak_rss'] / 1e6:.0f} MB |"
            )
    return "\n".join(lines)


def write(path: Path, nproc: int, costs: list[Cost]) -> None:
    found = {"machine": describe_machine(), "nproc": nproc, "costs": [asdict(c) for c in costs]}
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
