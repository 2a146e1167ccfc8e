"""The policies that our planner is measured against, in simulated time: one job per dataset, the published one, OpenCompass'.

Published: "Characterization of Large Language Model Development in the Datacenter" (NSDI'24), section 6.2. OpenCompass:
its SizePartitioner (a task is a bundle of about `max_size` rows, a generated row counting `gen_coef` times) and
NumWorkerPartitioner (every dataset is cut into as many parts as there are GPUs, of at least `min_size` rows); both
start a new process, with a new load, for every task, and score after all inference.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .simulated import (
    CpuPool,
    Dataset,
    Machines,
    Process,
    SharedLink,
    SimulatedClock,
    SimulatedOutcome,
    SimulatedWait,
    Weights,
)


@dataclass(frozen=True)
class Published:
    """Which of the three published techniques are on."""

    shared_weights: bool = True
    """A precursor job per node loads the model into shared memory; jobs read it over PCIe."""
    metrics_apart: bool = True
    """The GPU is released after inference; metrics are CPU jobs."""
    priors: bool = True
    """Small datasets merged, large ones split, the sorted queue dealt round-robin, long metrics first."""


@dataclass(frozen=True)
class GpuJob:
    """One GPU job: a process that loads the model and goes through pieces of datasets."""

    pieces: tuple[tuple[Dataset, float], ...]
    """(dataset, share of its rows)."""

    @property
    def believed_s(self) -> float:
        """Inference, by the priors."""
        return sum((d.believed_s or d.infer_s) * share for d, share in self.pieces)


def baseline(datasets: Sequence[Dataset], weights: Weights, cluster: Machines) -> SimulatedOutcome:
    """One job per dataset in the suite's order, the model from remote storage each time, metrics in the GPU job."""
    return published(datasets, weights, cluster, Published(False, False, False))


def published(
    datasets: Sequence[Dataset], weights: Weights, cluster: Machines, techniques: Published = Published()
) -> SimulatedOutcome:
    """The published policy, with any of its techniques left out."""
    width = min(weights.gpus(), cluster.gpus)
    workers = cluster.nodes * (cluster.gpus // width)
    if techniques.priors:
        queue = deque(_sorted(_merge_and_split(datasets, workers)))
    else:
        queue = deque(GpuJob(((d, 1.0),)) for d in datasets)
    return _simulate(queue, weights, cluster, techniques)


def opencompass(
    datasets: Sequence[Dataset], weights: Weights, cluster: Machines, *, rule: str, max_size: int = 40_000,
    gen_coef: int = 20, min_size: int = 16
) -> SimulatedOutcome:  # fmt: skip
    """OpenCompass with `rule` 'size' or 'workers' at its default settings."""
    width = min(weights.gpus(), cluster.gpus)
    workers = cluster.nodes * (cluster.gpus // width)
    jobs = (
        _by_size(datasets, max_size, gen_coef) if rule == "size" else _by_workers(datasets, workers, min_size)
    )
    found = _simulate(deque(jobs), weights, cluster, Published(False, True, False), metrics=False)
    clock = SimulatedClock()
    pool = CpuPool(clock, cluster.cpus * cluster.nodes)
    for d in datasets:
        pool.submit(d.metric_s)
    return replace(found, makespan_s=found.gpu_end_s + pool.end)


def _merge_and_split(datasets: Sequence[Dataset], workers: int) -> list[GpuJob]:
    """Pieces of at most an even share of the work; what is below a quarter of that is merged up to a half."""
    total = sum(d.believed_s or d.infer_s for d in datasets)
    share = total / workers
    jobs: list[GpuJob] = []
    small: list[tuple[Dataset, float]] = []
    held = 0.0
    for d in sorted(datasets, key=lambda d: (d.believed_s or d.infer_s, d.name)):
        seconds = d.believed_s or d.infer_s
        if seconds < share / 4 and d.metric_s < 30:
            if held + seconds > share / 2 and small:
                jobs.append(GpuJob(tuple(small)))
                small, held = [], 0.0
            small.append((d, 1.0))
            held += seconds
            continue
        parts = max(1, min(round(seconds / (share / 2)), d.blocks))
        jobs += [GpuJob(((d, 1.0 / parts),)) for _ in range(parts)]
    if small:
        jobs.append(GpuJob(tuple(small)))
    return jobs


def _sorted(jobs: Sequence[GpuJob]) -> list[GpuJob]:
    """Long metrics first, then the longest. A GPU that is free takes the next one in turn."""
    return sorted(
        jobs,
        key=lambda v: (-max(d.metric_s for d, _ in v.pieces) // 30, -v.believed_s, v.pieces[0][0].name),
    )


def _by_size(datasets: Sequence[Dataset], max_size: int, gen_coef: int) -> list[GpuJob]:
    def cost(d: Dataset) -> int:
        return d.rows * (gen_coef if d.generates else d.choices)

    jobs: list[GpuJob] = []
    bundle: list[tuple[Dataset, float]] = []
    held = 0
    for d in sorted(datasets, key=lambda d: (-cost(d), d.name)):
        if cost(d) > max_size:
            step = max(max_size // (gen_coef if d.generates else d.choices), 1)
            for start in range(0, d.rows, step):
                jobs.append(GpuJob(((d, min(step, d.rows - start) / d.rows),)))
            continue
        if held + cost(d) > max_size and bundle:
            jobs.append(GpuJob(tuple(bundle)))
            bundle, held = [], 0
        bundle.append((d, 1.0))
        held += cost(d)
    return jobs + ([GpuJob(tuple(bundle))] if bundle else [])


def _by_workers(datasets: Sequence[Dataset], workers: int, min_size: int) -> list[GpuJob]:
    """Every dataset in `workers` parts; part i of all datasets makes task i."""
    tasks: list[list[tuple[Dataset, float]]] = [[] for _ in range(workers)]
    for d in datasets:
        step = max(-(-d.rows // workers), min_size)
        for i, start in enumerate(range(0, d.rows, step)):
            tasks[i].append((d, min(step, d.rows - start) / d.rows))
    return [GpuJob(tuple(t)) for t in tasks if t]


def _simulate(
    queue: deque[GpuJob], weights: Weights, cluster: Machines, how: Published, *, metrics: bool = True
) -> SimulatedOutcome:  # fmt: skip
    """Runs the jobs; every GPU takes the next one from the common queue."""
    width = min(weights.gpus(), cluster.gpus)
    per_node = cluster.gpus // width
    clock = SimulatedClock()
    links = [SharedLink(clock, cluster.link) for _ in range(cluster.nodes)]
    cpus = CpuPool(clock, cluster.cpus * cluster.nodes)
    found = SimulatedOutcome(0.0, 0.0, workers=cluster.nodes * per_node)
    left: dict[str, int] = {}
    for v in queue:
        for d, _ in v.pieces:
            left[d.name] = left.get(d.name, 0) + 1

    def gpu(index: int) -> Process:
        while queue:
            job = queue.popleft()
            found.loads += 1
            yield SimulatedWait(seconds=weights.start_s)
            if not how.shared_weights:
                yield SimulatedWait(link=links[index // per_node], size=weights.bytes)
            yield SimulatedWait(seconds=weights.bytes / width / cluster.pcie)
            for d, share in job.pieces:
                # Every process tokenises and builds the prompts of its own part, but reads the whole dataset.
                yield SimulatedWait(seconds=d.preprocess_s * (0.5 + 0.5 * share))
                yield SimulatedWait(seconds=d.infer_s * share)
                found.infer_s += d.infer_s * share
                left[d.name] -= 1
                if metrics and not left[d.name]:
                    if how.metrics_apart:
                        cpus.submit(d.metric_s)
                    else:
                        yield SimulatedWait(seconds=d.metric_s)
        found.gpu_end_s = max(found.gpu_end_s, clock.now)

    def precursor(node: int) -> Process:
        if how.shared_weights:
            yield SimulatedWait(link=links[node], size=weights.bytes)
        for g in range(per_node):
            clock.start(gpu(node * per_node + g))

    for node in range(cluster.nodes):
        clock.start(precursor(node))
    clock.run()
    found.fetched = sum(link.moved for link in links)
    found.makespan_s = max(found.gpu_end_s, cpus.end)
    return found
