"""From a command line to the workers, the settings and the processes of an evaluation."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UsageError

if TYPE_CHECKING:
    from ...cluster.contract import Cluster
    from ...evaluate.contracts import ModelSpec, Suite
    from ...evaluate.engines import Engine, Slot
    from ...evaluate.processes.imports import Imports
    from ...evaluate.result.folder import EvalDir
    from ...evaluate.run.settings import Settings
    from .options import Evaluating


def slots_of(asked: Evaluating, spec: ModelSpec) -> tuple[Slot, ...]:
    """The workers that the engine is to start; none for `--engine none`. Raises UsageError."""
    from ...evaluate.engines import Slot
    from ...evaluate.engines.local import count_gpus
    from ...evaluate.suite.registry import get_backend

    engine, gpus, workers, width = asked.engine, asked.gpus, asked.workers, asked.gpus_per_worker
    if engine not in ("local", "ray", "none"):
        raise UsageError(f"there is no engine '{engine}'", hint="Choose local, ray or none")
    if asked.cluster and engine != "local":
        raise UsageError(
            f"--cluster beside --engine {engine}", hint="Leave --engine out: the cluster starts the workers"
        )
    if engine == "none":
        return ()
    if gpus is not None and gpus < 0:
        raise UsageError(f"--gpus {gpus}", hint="Give how many to use; 0 for none")
    if workers is not None and workers < 1:
        raise UsageError("--workers must be at least 1", hint="`--engine none` starts no worker")
    if asked.cluster:
        each = gpus or 0
        if each % width:
            raise UsageError(f"{each} GPUs of a node cannot be shared out to workers of {width}")
        return tuple(Slot(f"n{i}", width=width if each else 0) for i in range(asked.nodes))
    if not get_backend(spec.backend).needs_weights:
        return tuple(Slot(f"w{i}") for i in range(workers or 4))
    have = count_gpus() if engine == "local" else 0
    count = have if gpus is None and workers is None else (gpus or 0)
    if engine == "local" and count > have:
        raise UsageError(
            f"--gpus {count}: this machine has {have}", hint="Give fewer, or --workers for CPU workers"
        )
    if count % width:
        raise UsageError(f"{count} GPUs cannot be shared out to workers of {width}")
    if count:
        return tuple(
            Slot(f"w{i}", tuple(range(i * width, (i + 1) * width)) if engine == "local" else (), width)
            for i in range(count // width)
        )
    return tuple(Slot(f"w{i}") for i in range(max(1, workers or 1)))


def settings_of(slots: tuple[Slot, ...], asked: Evaluating) -> Settings:
    """How the evaluation is run: its workers, its places, its runtime estimates. Raises UsageError."""
    from ...evaluate.model.cache import Places, default_places
    from ...evaluate.run.settings import Settings

    if asked.cache not in ("auto", "always", "never"):
        raise UsageError(f"--cache {asked.cache}", hint="Choose auto, always or never")
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free = max(1, here - len(slots)) if asked.cpu_workers is None else max(1, asked.cpu_workers)
    places = default_places()
    if asked.cache_disk:
        places = Places(places.memory, tuple(asked.cache_disk))
    address = cluster_of(asked).door_address if asked.cluster else ""
    return Settings(slots=slots, advertise=address, cpu_workers=free, prepare_workers=min(free, 8), cache=asked.cache, places=places,
                    priors=estimates_file(asked.priors), device=device_name(), keep_going=asked.keep_going)  # fmt: skip


def cluster_of(asked: Evaluating, folder: EvalDir | None = None) -> Cluster:
    """The cluster that was asked for: the same evaluation finds the nodes that it had. Raises UsageError, UnknownKey."""
    from ...cluster.options import parse_choice
    from ...cluster.registry import make_cluster

    choice = parse_choice(asked.cluster)
    place = str(folder.root.resolve()) if folder is not None else ""
    run_id = f"eval{sha256(place.encode()).hexdigest()[:10]}"
    log_of = None if folder is None else (lambda node: folder.root / "logs" / f"{node}.log")
    return make_cluster(choice.name, run_id, choice.options, log_of=log_of)


def engine_of(
    asked: Evaluating, folder: EvalDir, slots: tuple[Slot, ...], imports: Imports | None = None
) -> Engine:
    """What starts the workers."""
    if asked.cluster:
        from ...evaluate.engines.cluster.engine import ClusterEngine

        each = (asked.gpus or 0) // asked.gpus_per_worker or (asked.workers or 1)
        return ClusterEngine(cluster_of(asked, folder), nodes=asked.nodes, workers=each, width=slots[0].width)
    if asked.engine == "ray":
        from ...evaluate.engines.ray import RayEngine

        return RayEngine(asked.ray_address)
    from ...evaluate.engines.local import LocalEngine

    return LocalEngine(folder.root / "logs", threads=_threads(slots), imports=imports)


@contextlib.contextmanager
def worker_imports(
    engine: str, slots: tuple[Slot, ...], spec: ModelSpec, folder: EvalDir
) -> Iterator[Imports | None]:
    """A process that imports once for all workers of this node; none where a lone worker imports for itself."""
    from ...evaluate.engines.local import imports_for

    if engine != "local" or not slots or not hasattr(os, "fork"):
        yield None
        return
    made = imports_for(spec.backend, slots, folder.root / "logs", _threads(slots))
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def harness_imports(suite: Suite, folder: EvalDir) -> Iterator[Imports | None]:
    """A process that imports the suite's harnesses once for all that prepare and score; a user's own are left to those,
    since their code may change."""
    from ...evaluate.engines.local import imports_for_harnesses
    from ...evaluate.suite.registry import HARNESSES

    if not hasattr(os, "fork"):
        yield None
        return
    known = sorted({t.harness for t in suite.tasks} & set(HARNESSES))
    made = imports_for_harnesses(known, folder.root / "logs")
    try:
        yield made
    finally:
        made.close()


def _threads(slots: tuple[Slot, ...]) -> int | None:
    cpu_only = not any(s.gpus for s in slots)
    return max(1, (os.cpu_count() or 1) // max(1, len(slots))) if cpu_only else None


def estimates_file(given: str | None) -> Path | None:
    """The file of learnt run times; None for none."""
    from ...evaluate.plan.priors import default_store

    if given == "none":
        return None
    return Path(given) if given else default_store()


def device_name() -> str:
    """The GPU's name, or 'cpu'."""
    try:
        import pynvml

        pynvml.nvmlInit()
        name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
        return name.decode() if isinstance(name, bytes) else str(name)
    except Exception:  # noqa: BLE001  no library, no driver, no device: all the same here
        return "cpu"
