"""Watches the run directory: deleted, moved, made again, read-only, full. Each is said within seconds, once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass

from ....progress import RunDir
from ....progress.disk import find_trouble
from .term import TermWatch

_EVERY_S = 1.0


@dataclass(frozen=True)
class FolderState:
    """`lost` says in words that the folder is not the run's any more; `trouble` that it cannot be written now."""

    lost: str = ""
    trouble: str = ""


class RunFolderWatch:
    """Remembers which folder it is, by its file system and number, and that this term's file lies in it (not with `term` 0)."""

    def __init__(self, run_dir: RunDir, term: int) -> None:
        self._run_dir, self._term = run_dir, term
        self._id = self._identity()

    def _identity(self) -> tuple[int, int]:
        found = os.stat(self._run_dir.path)
        return found.st_dev, found.st_ino

    def poll(self) -> FolderState:
        """What the folder is now; may block on a file system that hangs, so call it from a thread."""
        path = self._run_dir.path
        try:
            if self._identity() != self._id:
                return FolderState(lost=f"{path} is another folder now: the run's own was deleted or moved")
            if self._term and not self._run_dir.term(self._term).exists():
                return FolderState(lost=f"what lay in {path} was deleted")
            return FolderState(trouble=find_trouble(path))
        except FileNotFoundError:
            return FolderState(lost=f"{path} was deleted or moved")
        except OSError as e:
            return FolderState(trouble=f"{path} cannot be reached: {e.strerror}")


class FolderLoss:
    """Says what becomes of the run directory; where it is gone the ranks are asked to save and stop.

    Nothing can be recorded or saved there then, so nothing may be decided any more: what the keepers hold is the run. `why`
    is empty while the folder is the run's.
    """

    def __init__(self, cannot: str) -> None:
        """`cannot`: what is not done any more without the folder, in a word or two."""
        self._cannot, self.why = cannot, ""

    async def follow(
        self,
        watch: RunFolderWatch,
        term: TermWatch,
        say: Callable[[str], None],
        request_stop: Callable[[], None],
    ) -> None:
        """Looks every second, until the folder is lost."""
        shown = ""
        while True:
            await asyncio.sleep(_EVERY_S)
            now = await asyncio.to_thread(watch.poll)
            if now.lost and not term.is_over:
                self.why = now.lost
                say(
                    f"{now.lost}, while the run goes on: nothing can be {self._cannot} any more. The ranks are asked to save "
                    "and stop, and the keepers to write what they hold"
                )
                request_stop()
                return
            if now.trouble != shown:
                shown = now.trouble
                say(
                    f"{shown}: training goes on, and what is to be written waits"
                    if shown
                    else "it can be written again"
                )
