"""The faults of `localisation.py`: each breaks one node, or one way, of a run over a fake cluster, and says which.

The three scenarios are those of the published systems in a form without GPUs: the part of ByteRobust's mix that needs none, the injections
of Mycroft, and hangs of a process beside the training. What ranks write before they end is written as real ones do; ranks of other nodes
fail after the first one, for its sake, each with an error of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random

from unbroken.detect import ProcessInfo
from unbroken.detect.stacks.process import ChildInfo
from unbroken.testing.fake_cluster.simulated_run import SimulatedRun

NPROC = 4


@dataclass
class Broken:
    """What was done: the run, chance, the node that it is done to, and one of its ranks."""

    run: SimulatedRun
    draw: Random
    node: str
    rank: int
    background: asyncio.Future[None] | None = None
    """What goes on breaking it."""

    @property
    def ranks(self) -> list[int]:
        """All ranks of the node."""
        first = self.rank // NPROC * NPROC
        return list(range(first, first + NPROC))

    def write(self, node: str, rank: int, text: str) -> None:
        """Adds to a rank's log."""
        attempt = self.run.journal("attempt")[-1]["attempt"]
        path = self.run.run_dir.rank_log(attempt, node, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as out:
            out.write(text)

    def others(self, count: int) -> list[tuple[str, int]]:
        """So many (node, rank) by chance, of other nodes."""
        slots = self.run.journal("attempt")[-1]["slots"]
        all_ranks = [(n, i * NPROC + k) for i, n in enumerate(slots) for k in range(NPROC) if n != self.node]
        return self.draw.sample(all_ranks, count)

    async def fail_others(self) -> None:
        """Ranks of other nodes lose their connection a moment later and end."""
        for node, rank in self.others(self.draw.randint(1, 6)):
            await asyncio.sleep(self.draw.uniform(0.02, 0.6))
            if self.run.hardware.nodes[node].agent is None or self.run.incidents():
                return  # what was running is ended, and the next attempt may be under way
            host, port = self.draw.randint(2, 250), self.draw.randint(20000, 60000)
            self.write(node, rank, RESET.format(host=host, port=port))
            self.run.faults.fail_rank(node, rank, code=1)


Kind = Callable[[Broken], Awaitable[set[str]]]
"""Breaks it; the nodes that are at fault: none where it is no node's fault."""
KINDS: dict[str, tuple[int, Kind]] = {}


def kind(scenario: int) -> Callable[[Kind], Kind]:
    def add(function: Kind) -> Kind:
        KINDS[function.__name__.strip("_").replace("_", " ")] = (scenario, function)  # type: ignore[attr-defined]
        return function

    return add


TRACE = """Traceback (most recent call last):
  File "/job/train.py", line 214, in <module>
    main()
  File "/job/train.py", line 188, in main
    {call}
"""
RESET = """Traceback (most recent call last):
  File "/job/train.py", line 214, in <module>
    main()
  File "/job/train.py", line 171, in main
    dist.all_reduce(loss)
  File "/usr/lib/python3/site-packages/torch/distributed/c10d_logger.py", line 81, in wrapper
    return func(*args, **kwargs)
  File "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py", line 2810, in all_reduce
    work.wait()
RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.{host}]:{port}
"""
FULL = (
    TRACE.format(call="torch.save(state, path)")
    + """  File "/usr/lib/python3/site-packages/torch/serialization.py", line 966, in save
    with _open_zipfile_writer(f) as opened_zipfile:
OSError: [Errno 28] No space left on device: '/scratch/ckpt/step-{step}.pt'
"""
)
AWAY = (
    TRACE.format(call="tokens = read(shard)")
    + """  File "/job/data.py", line 41, in read
    return np.fromfile(path, dtype=np.uint16)
OSError: [Errno {number}] {text}: '/mnt/data/shard-{shard:05d}.bin'
"""
)


# --- 1: the part of ByteRobust's mix that needs no GPU


@kind(1)
async def _cpu_overload(b: Broken) -> set[str]:
    for r in b.ranks:
        b.run.faults.slow_rank(b.node, r, b.draw.uniform(1.3, 2.0))
    return {b.node}


@kind(1)
async def _out_of_memory(b: Broken) -> set[str]:
    b.run.faults.fail_rank(b.node, b.rank, code=None, signal=9, oom=True)
    await b.fail_others()
    return {b.node}


@kind(1)
async def _disk_full(b: Broken) -> set[str]:
    b.write(b.node, b.rank, FULL.replace("{step}", str(b.run.step())))
    b.run.faults.fail_rank(b.node, b.rank)
    await b.fail_others()
    return {b.node}


@kind(1)
async def _mount_gone(b: Broken) -> set[str]:
    number, text = b.draw.choice(
        [(107, "Transport endpoint is not connected"), (116, "Stale file handle"), (5, "Input/output error")]
    )
    for r in b.ranks[: b.draw.randint(1, NPROC)]:
        error = AWAY.replace("{number}", str(number)).replace("{text}", text)
        b.write(b.node, r, error.replace("{shard:05d}", f"{r:05d}"))
        b.run.faults.fail_rank(b.node, r)
        await asyncio.sleep(b.draw.uniform(0.0, 0.05))
    await b.fail_others()
    return {b.node}


@kind(1)
async def _storage_slow_for_all(b: Broken) -> set[str]:
    b.run.faults.slow_steps(b.draw.uniform(1.3, 2.0))
    return set()


@kind(1)
async def _container_dead(b: Broken) -> set[str]:
    b.run.faults.crash_agent(b.node)
    return {b.node}


@kind(1)
async def _machine_frozen(b: Broken) -> set[str]:
    b.run.faults.isolate(b.node, noticed_after_s=b.draw.uniform(5, 120))
    return {b.node}


# --- 2: Mycroft's injections


@kind(2)
async def _link_down(b: Broken) -> set[str]:
    """The node's way to the others, not that of the supervisor's messages: every attempt stands until the node has left."""
    b.run.faults.fail_pairs(b.node, 1.0)
    await _stall_each_attempt(b, lambda slots: b.node in slots)
    return {b.node}


@kind(2)
async def _way_between_two_nodes_down(b: Broken) -> set[str]:
    slots = b.run.journal("attempt")[-1]["slots"]
    other = slots[(slots.index(b.node) + 1) % len(slots)]
    b.run.faults.fail_link(b.node, other)
    await _stall_each_attempt(b, lambda slots: {b.node, other} <= {*slots})
    return {b.node, other}


async def _stall_each_attempt(b: Broken, still: Callable[[list[str]], bool]) -> None:
    b.run.faults.stall(b.node)

    async def again() -> None:
        for begun in range(len(b.run.journal("attempt")), 10):
            await b.run.until(lambda begun=begun: len(b.run.journal("attempt")) > begun, 7200)
            if not still(b.run.journal("attempt")[-1]["slots"]):
                return
            await asyncio.sleep(25.0)
            b.run.faults.stall(b.node)

    b.background = asyncio.ensure_future(again())


@kind(2)
async def _bandwidth_capped(b: Broken) -> set[str]:
    b.run.faults.slow_steps(b.draw.uniform(1.3, 3.0))
    b.run.faults.slow_pairs(b.node, b.draw.uniform(0.1, 0.5))
    return {b.node}


@kind(2)
async def _foreign_traffic(b: Broken) -> set[str]:
    b.run.faults.slow_steps(b.draw.uniform(1.15, 1.5))
    b.run.faults.slow_pairs(b.node, b.draw.uniform(0.4, 0.7))
    return {b.node}


@kind(2)
async def _cpu_quota(b: Broken) -> set[str]:
    factor = b.draw.uniform(1.15, 2.0)
    for r in b.ranks:
        b.run.faults.slow_rank(b.node, r, factor)
    return {b.node}


@kind(2)
async def _foreign_load(b: Broken) -> set[str]:
    for r in b.draw.sample(b.ranks, b.draw.randint(1, NPROC)):
        b.run.faults.slow_rank(b.node, r, b.draw.uniform(1.1, 1.5))
    return {b.node}


@kind(2)
async def _delays_by_chance(b: Broken) -> set[str]:
    """A second, in a fifth to a half of the steps of one rank."""
    b.run.faults.delay_rank(b.node, b.rank, b.draw.uniform(0.2, 0.5), 1.0)
    return {b.node}


@kind(2)
async def _power_cap(b: Broken) -> set[str]:
    b.run.faults.slow_rank(b.node, b.rank, b.draw.uniform(1.1, 1.4))
    return {b.node}


# --- 3: a process beside the training stands


def _look(b: Broken, *frames: str, children: tuple[ChildInfo, ...] = (), state: str = "S") -> ProcessInfo:
    site = next((f for f in frames if "train.py" in f), frames[0])
    return ProcessInfo(b.rank + 2, state, "", frames, frames[0], site=site, busy=False, children=children)


@kind(3)
async def _evaluation_hangs(b: Broken) -> set[str]:
    frames = (
        "wait (threading.py:320)", "result (concurrent/futures/_base.py:451)", "score (judge.py:77)", "evaluate (train.py:131)",
        "main (train.py:192)",
    )  # fmt: skip
    b.run.faults.hang_rank(b.node, b.rank, _look(b, *frames))
    return {b.node}


@kind(3)
async def _loader_worker_stuck(b: Broken) -> set[str]:
    frames = (
        "select (selectors.py:415)", "wait (multiprocessing/connection.py:948)", "poll (multiprocessing/connection.py:257)",
        "get (multiprocessing/queues.py:113)", "_try_get_data (torch/utils/data/dataloader.py:1275)",
        "_next_data (torch/utils/data/dataloader.py:1482)", "main (train.py:168)",
    )  # fmt: skip
    state = b.draw.choice("DTS")
    worker = ChildInfo(9000 + b.rank, "python3", state, ("read (data.py:41)", "__getitem__ (data.py:60)"))
    b.run.faults.hang_rank(b.node, b.rank, _look(b, *frames, children=(worker,)))
    return {b.node}


@kind(3)
async def _checkpoint_process_stuck(b: Broken) -> set[str]:
    frames = (
        "_try_wait (subprocess.py:1961)", "wait (subprocess.py:1264)", "upload (train.py:90)", "save_checkpoint (train.py:101)",
        "main (train.py:199)",
    )  # fmt: skip
    child = ChildInfo(9000 + b.rank, "rclone", b.draw.choice("DS"))
    b.run.faults.hang_rank(b.node, b.rank, _look(b, *frames, children=(child,)))
    return {b.node}


@kind(3)
async def _stuck_in_the_kernel(b: Broken) -> set[str]:
    frames = ("fsync (train.py:88)", "save_checkpoint (train.py:101)", "main (train.py:199)")
    b.run.faults.hang_rank(b.node, b.rank, _look(b, *frames, state="D"))
    return {b.node}
