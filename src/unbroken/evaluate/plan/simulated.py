"""Evaluation in simulated time: the real dispatcher and planner, and the published policies, on a cluster that is arithmetic.

A cluster has nodes with GPUs, one storage link per node that concurrent loads share evenly, a PCIe link per GPU and
CPU workers. What a policy pays is counted the same way for every contender:

    start-up of a process (imports, device context), fetch over the node's link, load over PCIe,
    preprocessing, inference, metric

The other contenders are in contenders.py; this file is the clock, the link and our own.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .dispatch import Block, Dispatcher
from .planner import SIMULATED_BUNDLES, Costs, Work, lower_bound

_LEFTOVER = 1024.0
"""Bytes below which a transfer is over: what floating point leaves of 10^11 bytes must not be waited for."""

Process = Generator["SimulatedWait", None, None]


@dataclass(frozen=True)
class Machines:
    """The machines."""

    nodes: int = 1
    gpus: int = 8
    link: float = 25e9 / 8
    """Bytes per second from remote storage into a node (25 Gb/s)."""
    pcie: float = 20e9
    """Bytes per second from host memory onto one GPU, deserialisation included."""
    cpus: int = 16
    """CPU workers for metrics, per node."""

    @property
    def workers(self) -> int:
        """GPUs in all."""
        return self.nodes * self.gpus


@dataclass(frozen=True)
class Weights:
    """The model."""

    bytes: float
    start_s: float = 20.0
    """Imports, device context and model construction of a new process, before its weights are loaded."""

    def gpus(self) -> int:
        """80 GB GPUs that hold it with room for activations: a power of two."""
        return 1 << max(0, math.ceil(math.log2(max(self.bytes / 60e9, 1.0))))


@dataclass(frozen=True)
class Dataset:
    """One dataset's true times with this model on one worker."""

    name: str
    infer_s: float
    preprocess_s: float
    metric_s: float
    rows: int
    generates: bool
    choices: int = 1
    """Requests per row where it does not generate."""
    believed_s: float = 0.0
    """What the priors say; 0: exactly `infer_s`."""
    block: int = 32

    @property
    def blocks(self) -> int:
        """Indivisible pieces."""
        return max(1, -(-self.rows // self.block))


@dataclass
class SimulatedOutcome:
    """What one contender took."""

    makespan_s: float
    gpu_end_s: float
    infer_s: float = 0.0
    """Worker seconds of inference."""
    loads: int = 0
    fetched: float = 0.0
    """Bytes over the storage links."""
    workers: int = 1
    steals: int = 0

    @property
    def busy(self) -> float:
        """Share of worker time until the last GPU is released that is inference."""
        return self.infer_s / (self.workers * self.gpu_end_s) if self.gpu_end_s else 0.0


@dataclass
class SimulatedWait:
    """What a process yields: sleep, or a transfer, or until woken."""

    seconds: float | None = None
    link: SharedLink | None = None
    size: float = 0.0


class SimulatedClock:
    """Runs processes in order of simulated time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def at(self, when: float, do: Callable[[], None]) -> None:
        """Calls `do` at a time."""
        heapq.heappush(self._heap, (when, next(self._count), do))

    def start(self, process: Process) -> None:
        """Runs a process until it waits, then again when its wait is over."""

        def step() -> None:
            try:
                wait = next(process)
            except StopIteration:
                return
            if wait.link is not None:
                wait.link.send(wait.size, step)
            elif wait.seconds is not None:
                self.at(self.now + wait.seconds, step)

        step()

    def run(self) -> float:
        """Until nothing is left; returns the time."""
        while self._heap:
            self.now, _, do = heapq.heappop(self._heap)
            do()
        return self.now


class SharedLink:
    """A link that its transfers share evenly (processor sharing)."""

    def __init__(self, clock: SimulatedClock, rate: float) -> None:
        self.clock = clock
        self.rate = rate
        self.moved = 0.0
        self._left: dict[int, tuple[float, Callable[[], None]]] = {}
        self._since = 0.0
        self._epoch = 0
        self._ids = itertools.count()

    def send(self, size: float, then: Callable[[], None]) -> None:
        """Calls `then` when so many bytes have come through."""
        self._settle()
        self.moved += size
        self._left[next(self._ids)] = (size, then)
        self._schedule()

    def _settle(self) -> None:
        if self._left:
            each = (self.clock.now - self._since) * self.rate / len(self._left)
            self._left = {i: (left - each, then) for i, (left, then) in self._left.items()}
        self._since = self.clock.now

    def _schedule(self) -> None:
        self._epoch += 1
        epoch = self._epoch
        if self._left:
            soonest = min(left for left, _ in self._left.values())
            when = self.clock.now + max(soonest, 0.0) * len(self._left) / self.rate
            self.clock.at(when, lambda: self._finish(epoch))

    def _finish(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        self._settle()
        done = [(i, then) for i, (left, then) in self._left.items() if left <= _LEFTOVER]
        for i, _ in done:
            del self._left[i]
        self._schedule()
        for _, then in done:
            then()


class CpuPool:
    """CPU workers that take metrics in the order in which they come."""

    def __init__(self, clock: SimulatedClock, workers: int) -> None:
        self.clock = clock
        self._free = [0.0] * max(1, workers)
        self.end = 0.0

    def submit(self, seconds: float) -> None:
        """Scores for so long, now or when a worker is free."""
        end = max(heapq.heappop(self._free), self.clock.now) + seconds
        heapq.heappush(self._free, end)
        self.end = max(self.end, end)


@dataclass(frozen=True)
class Techniques:
    """Ours, one by one: what is left out is done as the baseline does it."""

    shared_weights: bool = True
    """One fetch per node into shared memory, one load per worker that then drains the queue; else a new process and a
    fetch from remote storage for every bundle."""
    scoring_apart: bool = True
    """Prompts are built, and metrics computed, on CPUs; else inside the GPU job."""
    planning: bool = True
    """Priors, splitting, merging, order, stealing; else whole datasets in any order."""


@dataclass
class _Run:
    """State shared by our processes."""

    clock: SimulatedClock
    cluster: Machines
    dispatcher: Dispatcher
    datasets: Mapping[str, Dataset]
    weights: Weights
    cpus: CpuPool
    switch_s: float
    techniques: Techniques
    links: list[SharedLink]
    load_s: float
    """Over PCIe."""
    idle: list[str] = field(default_factory=list)
    unprepared: int = 0
    given: dict[str, list[Block]] = field(default_factory=dict)
    gpu_end: float = 0.0
    infer: float = 0.0
    steals: int = 0
    loads: int = 0


def ours(
    datasets: Sequence[Dataset],
    weights: Weights,
    cluster: Machines,
    *,
    switch_s: float = 0.05,
    stealing: bool = True,
    staged: bool = False,
    techniques: Techniques = Techniques(),
) -> SimulatedOutcome:
    """Our policy: fetch once per node, load once per worker, drain the planned queue, steal at the tail, score apart.

    `staged`: the prompts were built by an earlier evaluation; else they are built on the CPUs of one node, the longest
    datasets first, while the GPUs load the model and run what is ready.

    The dispatcher and planner are the ones that real evaluations use; they see `believed_s`, the clock uses `infer_s`.
    """
    if not techniques.planning:
        datasets = [replace(d, block=max(d.rows, 1), believed_s=1.0) for d in datasets]
        stealing = False
    width = min(weights.gpus(), cluster.gpus)
    per_node = cluster.gpus // width
    workers = cluster.nodes * per_node
    pcie_s = weights.bytes / width / cluster.pcie
    costs = Costs(
        max(weights.start_s, weights.bytes / cluster.link) + pcie_s, switch_s, cluster.cpus * cluster.nodes
    )
    if techniques.planning and not techniques.shared_weights:
        costs = replace(costs, switch_s=weights.start_s + weights.bytes * per_node / cluster.link + pcie_s)
    if techniques.planning and not techniques.scoring_apart and datasets:
        # Each shard builds the prompts of its dataset: the planner is told what that costs.
        prompts_s = sum(d.preprocess_s for d in datasets) / len(datasets)
        costs = replace(costs, switch_s=costs.switch_s + prompts_s)
    dispatcher = Dispatcher((), [1] * workers, costs, stealing=stealing)
    clock = SimulatedClock()
    cpus = CpuPool(clock, cluster.cpus * cluster.nodes)
    links = [SharedLink(clock, cluster.link) for _ in range(cluster.nodes)]
    named = {d.name: d for d in datasets}
    run = _Run(clock, cluster, dispatcher, named, weights, cpus, switch_s, techniques, links, pcie_s)
    if staged or not techniques.scoring_apart:
        dispatcher.add([_work(d, true=False) for d in datasets], budget=SIMULATED_BUNDLES)
    else:
        _prepare(run, datasets)

    def node(index: int) -> Process:
        if techniques.shared_weights:
            yield SimulatedWait(link=links[index], size=weights.bytes)
        for gpu in range(per_node):
            clock.start(_worker(run, f"n{index}g{gpu}"))

    for index in range(cluster.nodes):
        clock.start(node(index))
    clock.run()
    return SimulatedOutcome(max(cpus.end, run.gpu_end), run.gpu_end, run.infer, run.loads or workers,
                   sum(link.moved for link in links), workers, run.steals)  # fmt: skip


def bound(
    datasets: Sequence[Dataset], weights: Weights, cluster: Machines, *, switch_s: float = 0.05
) -> float:
    """The lower bound of `ours`' problem with the true times: no policy that must fetch, load and infer can beat it."""
    width = min(weights.gpus(), cluster.gpus)
    workers = cluster.nodes * (cluster.gpus // width)
    load = max(weights.start_s, weights.bytes / cluster.link) + weights.bytes / width / cluster.pcie
    costs = Costs(load, switch_s, cluster.cpus * cluster.nodes)
    return lower_bound([_work(d, true=True) for d in datasets], [1] * workers, costs)


def _work(d: Dataset, *, true: bool) -> Work:
    seconds = d.infer_s if true or not d.believed_s else d.believed_s
    full, last = divmod(d.rows, d.block)
    sizes = [d.block] * full + ([last] if last else [])
    each = seconds / max(d.rows, 1)
    return Work(d.name, tuple(each * s for s in sizes) or (seconds,), score_s=d.metric_s)


def _prepare(run: _Run, datasets: Sequence[Dataset]) -> None:
    """Builds prompts on the CPUs of one node, longest inference and metric first; wakes idle workers."""
    free = [0.0] * run.cluster.cpus
    run.unprepared = len(datasets)
    ready: dict[float, list[Dataset]] = {}
    for d in sorted(datasets, key=lambda d: (-(d.believed_s or d.infer_s) - d.metric_s, d.name)):
        end = heapq.heappop(free) + d.preprocess_s
        heapq.heappush(free, end)
        ready.setdefault(end, []).append(d)
    for end, found in ready.items():
        run.clock.at(end, functools.partial(_ready, run, found))


def _ready(run: _Run, found: Sequence[Dataset]) -> None:
    run.unprepared -= len(found)
    run.dispatcher.add([_work(d, true=False) for d in found])
    idle, run.idle = run.idle, []
    for name in idle:
        run.clock.start(_drain(run, name))


def _worker(run: _Run, name: str) -> Process:
    if run.techniques.shared_weights:
        # The process starts while the node's fetch runs; what is left of its start-up is paid here.
        yield SimulatedWait(seconds=max(0.0, run.weights.start_s - run.clock.now) + run.load_s)
    run.dispatcher.join(name)
    yield from _drain(run, name)


def _drain(run: _Run, name: str) -> Process:
    while True:
        bundle = run.dispatcher.next_bundle(name)
        if bundle is None:
            steal = run.dispatcher.steal_for(name)
            if steal is not None:
                run.steals += 1
                run.dispatcher.yielded(steal.victim, steal.blocks)
                taken = set(steal.blocks)
                run.given[steal.victim] = [b for b in run.given[steal.victim] if b not in taken]
                continue
            if run.unprepared:
                run.idle.append(name)
                return
            run.gpu_end = max(run.gpu_end, run.clock.now)
            run.dispatcher.leave(name, blame=False)
            return
        run.given[name] = [(s.task, b) for s in bundle.shards for b in s.blocks]
        if not run.techniques.shared_weights:
            run.loads += 1
            yield SimulatedWait(seconds=run.weights.start_s)
            yield SimulatedWait(link=run.links[int(name[1:].partition("g")[0])], size=run.weights.bytes)
            yield SimulatedWait(seconds=run.load_s)
        yield from _answer_bundle(run, name)


def _answer_bundle(run: _Run, name: str) -> Process:
    """A bundle, block by block; others may take from its end meanwhile."""
    apart = run.techniques.scoring_apart
    previous = None
    while run.given[name]:
        task, number = run.given[name].pop(0)
        d = run.datasets[task]
        true = d.infer_s * _share(d, number)
        switch = 0.0 if task == previous else run.switch_s + (0.0 if apart else d.preprocess_s)
        yield SimulatedWait(seconds=true + switch)
        previous = task
        run.infer += true
        if run.dispatcher.answered(name, (task, number), true):
            if apart:
                run.cpus.submit(d.metric_s)
            else:
                yield SimulatedWait(seconds=d.metric_s)


def _share(d: Dataset, number: int) -> float:
    """Part of a dataset's inference that is in one block."""
    return min(d.block, d.rows - number * d.block) / max(d.rows, 1) if d.rows else 1.0
