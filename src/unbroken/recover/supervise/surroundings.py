"""All that a supervisor takes from outside its run directory: real ones for a run, simulated ones for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ...cluster.contract import Cluster
from ...diagnose.judge.facts import Facts
from ...progress.records.verdict import Verdict
from ..record.base import Record
from ..telling.webhook import Webhook
from ..wire import Link
from .nodes.door import Listen
from .record.clock import Clock


class Diagnosing(Protocol):
    """Finds verdicts; `incident.diagnosing.IncidentDiagnosis` does it in a process of its own."""

    hurry: asyncio.Event
    """Set when the run was asked to stop."""

    async def warm_up(self) -> None: ...
    async def __call__(self, logs: Sequence[Path], facts: Facts) -> Verdict: ...
    async def close(self) -> None: ...


@dataclass(frozen=True)
class Surroundings:
    """`connect` reaches an earlier supervisor, to ask whether it is there. `listen` is where agents come in, None for what the cluster asks for. `advertised` is this
    machine's address as agents on others reach it; "" for the one that its routes name. `record` is where the run's record
    lies, None for the run directory. `webhook` is told of each incident."""

    cluster: Cluster
    diagnosis: Diagnosing
    clock: Clock = field(default_factory=Clock)
    listen: Listen | None = None
    connect: Callable[..., Awaitable[Link]] = Link.connect
    advertised: str = ""
    record: Record | None = None
    webhook: Webhook | None = None
