"""Whether an evaluation goes on, and what wakes its loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path

from ...errors import EvaluationError, RunInterrupted, UnbrokenError
from ...waiting import wait_within
from ..result.folder import FULL, unwritable
from .settings import Abort


class Control:
    """The end of one evaluation: who meets an error notes it here, and the loop raises it."""

    def __init__(self, root: Path) -> None:
        """`root`: the evaluation's folder, which the errors name."""
        self.root = root
        self.problem: UnbrokenError | None = None
        """The first error that ends the run."""
        self.stopping = ""
        """Why the run was asked to stop."""
        self.fetches_end = threading.Event()
        """Set when nobody needs the model any more: ends its fetch."""
        self._wake = asyncio.Event()

    def abort(self, error: UnbrokenError) -> None:
        """The run cannot go on."""
        self.problem = self.problem or error
        self._wake.set()

    def stop(self, why: str) -> None:
        """Ends the run as soon as it can: workers are asked to stop after their block. For signal handlers."""
        self.stopping = self.stopping or why
        self._wake.set()

    def wake(self) -> None:
        """Something has changed: the loop looks now."""
        self._wake.set()

    async def wait(self, within_s: float) -> None:
        """Returns at the next `wake`, at the latest after this time."""
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            await wait_within(self._wake.wait(), within_s)

    def check(self) -> None:
        """Raises Abort if the run cannot go on, or was asked to stop."""
        if self.problem is not None:
            raise Abort(self.problem)
        if self.stopping:
            hint = "The same command goes on where it was"
            raise Abort(RunInterrupted(f"stopped: {self.stopping}", where=str(self.root), hint=hint))

    def unwritable(self, e: OSError) -> UnbrokenError:
        """The error of a file of the evaluation that could not be written."""
        return unwritable(e, self.root)


def as_user_error(error: BaseException, where: str) -> UnbrokenError:
    """The error as the user sees it."""
    if isinstance(error, UnbrokenError):
        return error
    if isinstance(error, OSError) and error.errno in FULL:
        return unwritable(error, Path(where))
    return EvaluationError(
        f"{type(error).__name__}: {error}", where=where, hint="Fix that, then run the same command"
    )
