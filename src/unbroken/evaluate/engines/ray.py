"""Workers as Ray actors: on an existing cluster by its address, or on this machine.

An actor reserves its GPUs and runs the same worker as everywhere; prompts and answers do not travel through Ray but
over the worker's own connection, so that planner, stealing and recovery are the same. When a node dies the actor's
connection ends and its blocks go to others; Ray places the replacement wherever GPUs are free.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import EvaluationError, MissingExtra
from . import Slot, WorkerEnded


class RayEngine:
    """One actor per slot. `address`: as `ray.init` takes it; "" starts Ray on this machine, or joins $RAY_ADDRESS."""

    remote = True

    def __init__(
        self, address: str = "", *, cpus_per_worker: float = 1.0, runtime_env: dict[str, Any] | None = None
    ) -> None:
        try:
            import ray
        except ImportError as e:
            raise MissingExtra("Ray", "ray", what="The Ray engine") from e
        self._ray = ray
        self._cpus = cpus_per_worker
        self._owner = not ray.is_initialized()
        if self._owner:
            _probe(address or os.environ.get("RAY_ADDRESS", ""))
            try:
                ray.init(address=address or os.environ.get("RAY_ADDRESS") or None, log_to_driver=False, runtime_env=runtime_env,
                         include_dashboard=False if not address else None, logging_level="ERROR", namespace="unbroken")  # fmt: skip
            except (ConnectionError, ValueError, RuntimeError) as e:
                raise EvaluationError(f"the Ray cluster does not answer: {e}", where=address or "this machine",
                                      hint="Check the address with `ray status --address ...`") from e  # fmt: skip
        self._actor = ray.remote(_Worker)
        self._actors: dict[str, Any] = {}
        self._jobs: dict[Any, str] = {}

    def stand_by(self, slots: Sequence[Slot], cluster: Path, backend: str) -> None:
        """Nothing: an actor reserves its GPUs from its beginning."""

    def take_devices(self) -> None:
        """Nothing: nobody stands by."""

    def start(self, slot: Slot, cluster: Path) -> None:
        """Asks for an actor; it joins when Ray has placed it."""
        options = {
            "num_cpus": self._cpus,
            "num_gpus": slot.width,
            "max_restarts": 0,
        }
        actor = self._actor.options(**options).remote()
        self._actors[slot.name] = actor
        self._jobs[actor.serve.remote(json.loads(cluster.read_text()), slot.name)] = slot.name

    def ended(self) -> Sequence[WorkerEnded]:
        """Actors that returned or died."""
        if not self._jobs:
            return []
        done, _ = self._ray.wait(list(self._jobs), num_returns=len(self._jobs), timeout=0)
        gone = []
        for job in done:
            name = self._jobs.pop(job)
            self._actors.pop(name, None)
            try:
                gone.append(WorkerEnded(name, f"exit code {self._ray.get(job)}"))
            except self._ray.exceptions.RayError as e:
                gone.append(
                    WorkerEnded(name, f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}")
                )
        return gone

    def running(self) -> int:
        """Actors that were asked for and have not ended."""
        return len(self._jobs)

    def end(self, name: str) -> None:
        """Kills the actor."""
        actor = self._actors.get(name)
        if actor is not None:
            self._ray.kill(actor)

    def close(self, within_s: float = 10.0) -> None:
        """Waits for actors that were told to stop, then kills them; leaves a cluster that it only joined."""
        if self._jobs:
            self._ray.wait(list(self._jobs), num_returns=len(self._jobs), timeout=within_s)
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors.clear()
        self._jobs.clear()

    def shutdown(self) -> None:
        """Disconnects from Ray, if this engine connected."""
        if self._owner:
            self._ray.shutdown()


def _probe(address: str) -> None:
    """Raises EvaluationError at once if nobody listens at HOST:PORT; Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as e:
        raise EvaluationError(f"the Ray cluster does not answer: {e}", where=address,
                              hint="Check the address with `ray status --address ...`") from e  # fmt: skip


class _Worker:
    """The actor: a worker of worker.py in this process."""

    def serve(self, where: dict[str, Any], name: str) -> int:
        import ray

        from .worker.process import join

        gpus = [int(g) for g in ray.get_gpu_ids()]
        # Ray has set CUDA_VISIBLE_DEVICES to these: inside, they count from 0.
        return join(where, name, list(range(len(gpus))))
