"""What comes before the first answer: tasks looked up and checked, beside the fetch of the model; workers that import."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from dataclasses import dataclass

from ...contracts import PreparedTask, Task
from ...model.locate import model_files
from ..job import Job, Launchers
from ..settings import Settings
from .preparation import Preparation

STAND_BY_S = 0.3
"""If data and model are not there by then, workers are started to import what they will need."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checked:
    """The tasks of an evaluation whose data are here."""

    tasks: tuple[Task, ...]
    """The leaf tasks, in the suite's order."""
    prepared: dict[str, PreparedTask]
    """Those that an earlier command has prepared, by name."""
    weaknesses: tuple[str, ...]
    """What the sandbox of generated code lacks on this machine, where a task needs it."""


async def check_tasks(job: Job, preparation: Preparation, data_there: asyncio.Event) -> Checked:
    """The tasks; what is missing is reported while the model is on its way. Sets `data_there`. Raises Abort, UsageError."""
    job.folder.compare(job.question())
    tasks = await preparation.expand()
    loop = asyncio.get_running_loop()
    files = await loop.run_in_executor(None, functools.partial(model_files, job.spec, job.folder.model_files))
    prepared = await preparation.check(tasks, files)
    data_there.set()
    weaknesses: list[str] = []
    if any(t.metric == "code" for t in tasks):
        from ...scoring import sandbox

        weaknesses = await loop.run_in_executor(None, sandbox.weaknesses)
        for why in weaknesses:
            _log.warning("%s; docs/security.md says what follows", why)
    return Checked(tuple(tasks), prepared, tuple(weaknesses))


async def stand_by(job: Job, launchers: Launchers, settings: Settings, data_there: asyncio.Event) -> None:
    """Workers import beside the checks and the fetch of the model; not where the same command was finished before."""
    if job.folder.report.exists():
        return
    await asyncio.sleep(STAND_BY_S)
    with contextlib.suppress(OSError):  # no more processes: reported when they are started for real
        launchers.engine.stand_by(settings.slots, job.folder.cluster, job.spec.backend)
    await data_there.wait()
    launchers.engine.take_devices()
