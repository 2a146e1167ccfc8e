"""Turns expected run times into an ordered list of bundles, and says how long they will take at the very least.

Pure functions over data: the same input gives the same plan on every machine. A *bundle* is what a worker is handed
at once: one shard of a large task, or several whole small tasks. Bundles wait in one queue, the most urgent first;
a worker that falls idle takes the next one (dispatch.py). How finely to cut, and in which order, is decided by
simulating the candidates and keeping the best:

* order: tasks with a long CPU metric first (Jackson's rule for delivery times), or longest first (LPT, at most
  4/3 - 1/(3m) of the optimum: Graham 1969), or longest including the metric;
* size: a fraction of the bound, never so small that switching costs more than `MAX_OVERHEAD` of it.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..contracts import Shard

MAX_OVERHEAD = 0.05
"""Share of a bundle's time that may go into switching to it."""
_FRACTIONS = (16, 32, 64)
"""Of a worker's share of the work, the longest bundle. Coarser ones would do if run times were known: what was handed out by
times that prove wrong keeps a worker from what has become urgent."""
SIMULATED_BUNDLES = 24_000
"""At most so many bundles are simulated for all candidates together: 10,000 shards stay far below a second."""


@dataclass(frozen=True)
class Work:
    """One task, as the planner sees it."""

    task: str
    block_s: tuple[float, ...]
    """Expected seconds of each block still to do, on one worker."""
    blocks: tuple[int, ...] = ()
    """Their numbers; empty: 0, 1, 2, ..."""
    score_s: float = 0.0
    """CPU seconds of the metric, once the last block has landed."""
    gpus: int = 1
    score_parts: int = 1
    """On so many CPU workers at once. A running evaluation plans as for one: whether a metric will be shared out is known
    only when it is scored, and a long one begins early either way. A forecast, and what was measured, count with them."""

    @property
    def tail_s(self) -> float:
        """From the last block until the score, with a CPU worker for each part."""
        return self.score_s / self.score_parts

    @functools.cached_property
    def seconds(self) -> float:
        """All blocks."""
        return math.fsum(self.block_s)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Block numbers, given or counted."""
        return self.blocks or tuple(range(len(self.block_s)))


@dataclass(frozen=True)
class Costs:
    """What is paid beside inference."""

    load_s: float = 0.0
    """From the start of a worker until its first block: fetch into the node and load onto the GPU."""
    switch_s: float = 0.005
    """Per shard: hand-over, first read of its prompts."""
    cpu_workers: int = 1


class Bundle(NamedTuple):
    """What a worker is handed at once."""

    shards: tuple[Shard, ...]
    expected_s: float
    """Switches included."""
    urgency: tuple[float, ...] = ()
    """Sort key, smaller first."""

    @property
    def gpus(self) -> int:
        """GPUs that its worker must have."""
        return self.shards[0].gpus if len(self.shards) == 1 else max(s.gpus for s in self.shards)


class Placement(NamedTuple):
    """Where and when the plan expects a bundle."""

    worker: int
    start: float
    end: float
    bundle: Bundle


@dataclass(frozen=True)
class Plan:
    """Bundles, most urgent first, and what is expected of them."""

    bundles: tuple[Bundle, ...]
    makespan_s: float
    """Until the last score."""
    gpu_end_s: float
    """Until the last GPU is released."""
    lower_bound_s: float
    rule: str
    placements: tuple[Placement, ...] = ()

    @property
    def shards(self) -> int:
        """Number of shards in all bundles."""
        return sum(len(p.shards) for p in self.bundles)


def plan(
    work: Iterable[Work], workers: Sequence[int], costs: Costs = Costs(), *, budget: int = SIMULATED_BUNDLES
) -> Plan:
    """The best plan found for workers with so many GPUs each; `budget` bundles are simulated for it at most.

    Raises ValueError if a task needs more GPUs than any worker has, or there is no worker.
    """
    tasks = sorted((w for w in work if w.block_s), key=lambda w: w.task)
    if not tasks:
        return Plan((), costs.load_s, costs.load_s, costs.load_s, "nothing to do")
    if not workers:
        raise ValueError("a plan needs at least one worker")
    widest = max(workers)
    for w in tasks:
        if w.gpus > widest:
            raise ValueError(f"task '{w.task}' needs {w.gpus} GPUs, the largest worker has {widest}")
    bound = lower_bound(tasks, workers, costs)
    by_name = {w.task: w for w in tasks}
    best: Plan | None = None
    simulated = 0
    for size in _sizes(tasks, workers, costs, bound):
        if best is not None and simulated + len(tasks) > budget:
            break
        cut = cut_and_merge(tasks, size, costs)
        for rule in RULES:
            if best is not None and simulated + len(cut) > budget:
                break
            simulated += len(cut)
            ordered = order(cut, by_name, rule)
            found = rehearse(ordered, tasks, workers, costs, bound, f"{rule}, bundles up to {size:.3g} s")
            if best is None or found.makespan_s < best.makespan_s - 1e-9:
                best = found
        if best is not None and best.makespan_s <= bound * 1.002:
            break
    assert best is not None  # there is at least one size, and the first candidate is always simulated
    return best


def _sizes(tasks: Sequence[Work], workers: Sequence[int], costs: Costs, bound: float) -> list[float]:
    """Longest bundles to try, in seconds, coarse to fine."""
    floor = costs.switch_s / MAX_OVERHEAD
    span = max(bound - costs.load_s, 1e-9)
    share = math.fsum(w.seconds for w in tasks) / len(workers)
    found = {max(min(span, share or span) / f, floor) for f in _FRACTIONS}
    return sorted(found, reverse=True)


def cut_and_merge(tasks: Sequence[Work], size: float, costs: Costs) -> list[Bundle]:
    """Cuts what is longer than `size` into even shards of whole blocks; joins what is much shorter into bundles.

    Only whole tasks without a long metric are joined, and only up to a quarter of `size`, so that a bundle never
    holds back a score or makes the tail coarser.
    """
    bundles: list[Bundle] = []
    small: dict[int, list[Shard]] = {}
    held: dict[int, float] = {}
    for w in tasks:
        pieces = max(1, math.ceil(w.seconds / size)) if size > 0 else len(w.block_s)
        if pieces == 1 and w.seconds < size / 8 and w.tail_s <= size / 4:
            shard = Shard(w.task, w.numbers, w.seconds, w.gpus)
            cost = w.seconds + costs.switch_s
            if held.get(w.gpus, 0.0) + cost > size / 4 and small.get(w.gpus):
                bundles.append(_bundle(small.pop(w.gpus), costs))
                held[w.gpus] = 0.0
            small.setdefault(w.gpus, []).append(shard)
            held[w.gpus] = held.get(w.gpus, 0.0) + cost
            continue
        bundles += [_bundle([s], costs) for s in cut(w, pieces)]
    bundles += [_bundle(shards, costs) for shards in small.values()]
    return bundles


def cut(work: Work, pieces: int) -> list[Shard]:
    """Consecutive runs of whole blocks, about equally long; fewer than `pieces` where there are fewer blocks."""
    n = len(work.block_s)
    pieces = min(pieces, n)
    numbers = work.numbers
    if pieces == n:
        return [Shard(work.task, (b,), s, work.gpus) for b, s in zip(numbers, work.block_s, strict=True)]
    total = work.seconds
    shards: list[Shard] = []
    start = 0
    done = 0.0
    for i in range(pieces):
        goal = total * (i + 1) / pieces
        end, here = start, 0.0
        last = n - (pieces - i - 1)  # leave a block for each later piece
        while end < last and (end == start or i == pieces - 1 or done + here + work.block_s[end] / 2 <= goal):
            here += work.block_s[end]
            end += 1
        shards.append(Shard(work.task, numbers[start:end], here, work.gpus))
        start, done = end, done + here
    return shards


def _bundle(shards: Sequence[Shard], costs: Costs) -> Bundle:
    return Bundle(tuple(shards), math.fsum(s.expected_s for s in shards) + costs.switch_s * len(shards))


RULES = ("long metrics first", "longest first", "longest with metric first")


def order(bundles: Sequence[Bundle], work: Mapping[str, Work], rule: str) -> list[Bundle]:
    """Bundles with their urgency set, most urgent first; wide ones first, since fewer workers can take them."""
    made = []
    for p in bundles:
        first = work[p.shards[0].task]
        tail, whole = first.tail_s, first.seconds
        for s in p.shards[1:]:
            tail, whole = max(tail, work[s.task].tail_s), max(whole, work[s.task].seconds)
        if rule == RULES[0]:
            key = (-float(p.gpus), -tail, -whole, -p.expected_s)
        elif rule == RULES[1]:
            key = (-float(p.gpus), -p.expected_s, -tail, 0.0)
        else:
            key = (-float(p.gpus), -(whole + tail), -tail, -p.expected_s)
        made.append(Bundle(p.shards, p.expected_s, key))
    made.sort(key=lambda p: (p.urgency, p.shards[0].task, p.shards[0].blocks[:1]))
    return made


def rehearse(
    bundles: Sequence[Bundle],
    work: Sequence[Work],
    workers: Sequence[int],
    costs: Costs,
    bound: float,
    rule: str,
) -> Plan:
    """What happens if every bundle takes as long as expected: list scheduling, then the metrics on the CPU workers."""
    free = {
        g: [(costs.load_s, i) for i, have in enumerate(workers) if have == g] for g in sorted(set(workers))
    }
    landed: dict[str, float] = {}
    placements = []
    widths = list(free)
    for p in bundles:
        g = widths[0]
        if len(widths) > 1:
            need = p.gpus
            g = min((g for g in widths if g >= need), key=lambda g: (free[g][0][0], g))
        start, worker = free[g][0]
        end = start + p.expected_s
        heapq.heapreplace(free[g], (end, worker))
        placements.append(Placement(worker, start, end, p))
        at = start
        for s in p.shards:
            at += s.expected_s + costs.switch_s
            landed[s.task] = max(landed.get(s.task, 0.0), at)
    scores = sorted((landed[w.task], -w.tail_s, w.tail_s, w.score_parts) for w in work if w.task in landed)
    cpus = [0.0] * max(1, costs.cpu_workers)
    last = gpu_end = max((p.end for p in placements), default=costs.load_s)
    for at, _, seconds, parts in scores:
        for _ in range(parts):
            end = max(heapq.heappop(cpus), at) + seconds
            heapq.heappush(cpus, end)
            last = max(last, end)
    return Plan(tuple(bundles), last, gpu_end, bound, rule, tuple(placements))


def lower_bound(work: Sequence[Work], workers: Sequence[int], costs: Costs = Costs()) -> float:
    """Seconds that no schedule of these blocks on these workers can beat, metrics included.

    The largest of: all work spread evenly; the work of wide tasks on wide workers; the longest block; the k+1
    shortest of the km+1 longest blocks (that many share a worker); for each prefix of the tasks by falling metric
    time, their work spread evenly plus the shortest metric among them (Carlier's bound); all metrics on the CPU
    workers, which cannot start before some task can have landed. Each task is switched to at least once.
    """
    live = [w for w in work if w.block_s]
    if not live:
        return costs.load_s
    m = len(workers)
    found = [costs.load_s]
    for need in sorted({w.gpus for w in live}):
        able = sum(1 for g in workers if g >= need)
        part = [w for w in live if w.gpus >= need]
        spent = 0.0
        for w in sorted(part, key=lambda w: (-w.tail_s, w.task)):
            spent += w.seconds + costs.switch_s
            found.append(costs.load_s + spent / able + w.tail_s)
    for w in live:
        found.append(costs.load_s + costs.switch_s + max(w.block_s) + w.tail_s)
    blocks = sorted((s for w in live for s in w.block_s), reverse=True)
    for k in range(1, min(16, (len(blocks) - 1) // m) + 1):
        found.append(costs.load_s + math.fsum(blocks[k * m - k : k * m + 1]))
    count = {need: sum(1 for g in workers if g >= need) for need in {w.gpus for w in live}}
    first = min(max(max(w.block_s), w.seconds / count[w.gpus]) for w in live)
    total = math.fsum(w.score_s for w in live)
    found.append(costs.load_s + first + total / max(1, costs.cpu_workers))
    return max(found)


def arrange(gpus: int, work: Sequence[Work], costs: Costs = Costs()) -> tuple[int, ...]:
    """How to split `gpus` into workers for these tasks: the best planned makespan over the number of wide workers.

    A node with 8 GPUs and some tasks that need 4 becomes (4, 1, 1, 1, 1), (4, 4) or 8 narrow ones. Raises ValueError
    if a task needs more GPUs than there are.
    """
    widest = max((w.gpus for w in work if w.block_s), default=1)
    if widest > gpus:
        raise ValueError(f"a task needs {widest} GPUs, there are {gpus}")
    if widest == 1:
        return (1,) * gpus
    best: tuple[float, tuple[int, ...]] | None = None
    for wide in range(1, gpus // widest + 1):
        workers = (widest,) * wide + (1,) * (gpus - wide * widest)
        found = (plan(work, workers, costs).makespan_s, workers)
        if best is None or found < best:
            best = found
    assert best is not None  # gpus >= widest: at least one arrangement was tried
    return best[1]
