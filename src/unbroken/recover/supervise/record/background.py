"""Work that goes on beside the run, and that nothing waits for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

_log = logging.getLogger("unbroken.supervisor")


class Background:
    """Tasks that are kept until they are done; one that fails is logged, and harms nothing else."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Begins it now."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("work beside the run failed: %s", error)

    def cancel(self) -> None:
        """Ends all that is left."""
        for task in list(self._tasks):
            task.cancel()
