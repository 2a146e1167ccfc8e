"""Ways to start workers. All of them run worker/process.py, which connects to the coordinator: same planner, same results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Slot:
    """Where one worker runs."""

    name: str
    gpus: tuple[int, ...] = ()
    """Indices on its node; empty: CPU."""
    width: int = 0
    """How many GPUs; the engine chooses which, unless `gpus` names them. 0: CPU."""


@dataclass(frozen=True)
class WorkerEnded:
    """A worker that is no more."""

    name: str
    why: str


class Engine(Protocol):
    """Starts, watches and ends workers."""

    remote: bool
    """Whether workers run on other machines: then the coordinator listens on all addresses."""

    def stand_by(self, slots: Sequence[Slot], cluster: Path, backend: str) -> None:
        """Makes workers import what they will need, before there is a coordinator to join; `start` lets them go on.

        They touch no device before `take_devices`. An engine whose workers take a GPU by being there does nothing.
        """
        ...

    def take_devices(self) -> None:
        """Lets those that stand by make their devices ready: the data are there, the model is on its way."""
        ...

    def start(self, slot: Slot, cluster: Path) -> None:
        """Starts a worker that joins the coordinator of this file."""
        ...

    def ended(self) -> Sequence[WorkerEnded]:
        """Those that ended since the last call."""
        ...

    def running(self) -> int:
        """How many it has started that have not ended."""
        ...

    def end(self, name: str) -> None:
        """Ends one worker for certain (it hangs)."""
        ...

    def close(self, within_s: float = 10.0) -> None:
        """Waits for the workers to end as they were asked to, then ends them."""
        ...
