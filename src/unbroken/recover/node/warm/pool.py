"""The warm processes of a node: made once its ranks train, kept through the end of their attempt, used for the next one."""

from __future__ import annotations

import asyncio
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from ....cluster import Ownership, Process
from .imports import can_record, read_imports, with_hook
from .process import RankStart, Readiness, WarmProcess

_log = logging.getLogger("unbroken.agent")
_TRIALS = 4
_PROBE_S = 30.0
_WHY_MAX = 1000
NOT_TOLD = "the node's agent has run no attempt, and was not told to make one yet"


class WarmPool:
    """One warm process for each local rank at most. `tell` reports what became of them to the supervisor."""

    def __init__(
        self, node: str, scratch: Path, owner: Ownership, enter: Callable[[], None], tell: Callable[..., None]
    ) -> None:
        """`enter` is what a rank does between fork and exec."""
        self._node, self._folder, self._owner, self._enter, self._tell = (
            node,
            scratch / "warm",
            owner,
            enter,
            tell,
        )
        self._ready: dict[int, WarmProcess] = {}
        self._preparing: asyncio.Task[None] | None = None
        self._being_made: WarmProcess | None = None
        self._records: dict[int, Path] = {}
        """Where the interpreter of each local rank records its imports."""
        self._without: set[str] = set()
        """Modules that spoil a process which imports them before its script runs."""
        self._why = NOT_TOLD
        self._count = 0

    @property
    def pids(self) -> frozenset[int]:
        """Processes that wait, and belong to no attempt."""
        waiting = [*self._ready.values(), *([self._being_made] if self._being_made else [])]
        return frozenset(w.pid for w in waiting if w.running)

    def record(self, local: int, start: RankStart) -> RankStart:
        """The same start, of a process that records its imports where it can."""
        if not can_record(start.argv):
            self._records.pop(local, None)
            return start
        folder = self._make_folder(local)
        try:
            # An agent before this one, which was killed, counted from 1 too.
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, mode=0o700)
        except OSError as e:
            _log.warning("what local rank %d imports is not recorded: %s", local, e)
            self._records.pop(local, None)
            return start
        self._set_record(local, folder)
        return RankStart(
            start.rank, start.attempt, start.argv, start.cwd, with_hook(start.env, folder), start.log
        )

    def _make_folder(self, local: int) -> Path:
        self._count += 1
        return self._folder / f"{local}.{self._count}"

    def _set_record(self, local: int, folder: Path) -> None:
        if (old := self._records.get(local)) not in (None, folder):
            shutil.rmtree(str(old), ignore_errors=True)
        self._records[local] = folder

    def read_records(self) -> dict[int, list[str]]:
        """What the ranks have imported so far, by local rank; only of those that can be recorded."""
        return {local: read_imports(folder) for local, folder in self._records.items()}

    # --- made

    def expect(self, after_s: float) -> None:
        """An attempt begins: what was in the way before says nothing of the next one."""
        self._why = f"the attempt before ended sooner than they are made, {after_s:g} s after its first step (--warm-after)"

    def prepare(
        self, starts: Mapping[int, RankStart], imports: Mapping[int, list[str]] | None = None
    ) -> None:
        """Begins to make one for each start, by local rank, one after another; `imports` are those of another node's ranks."""
        if self._preparing is None or self._preparing.done():
            self._preparing = asyncio.create_task(self._prepare(dict(starts), imports))

    async def _prepare(self, starts: dict[int, RankStart], imports: Mapping[int, list[str]] | None) -> None:
        try:
            for local, start in starts.items():
                if local not in self._ready or not self._ready[local].running:
                    lines = (
                        imports.get(local, [])
                        if imports is not None
                        else read_imports(self._records.get(local, Path()))
                    )
                    self._report(local, await self._make(local, start, lines))
        except OSError as e:
            self._why = f"no warm process could be made: {e.strerror or e}"
            _log.warning("%s", self._why)

    async def _make(self, local: int, start: RankStart, lines: list[str]) -> Readiness:
        if not can_record(start.argv):
            return Readiness(why="the command is no Python script that this interpreter runs")
        if not lines:
            return Readiness(why="its imports are not known")
        if not await asyncio.to_thread(self._probe, start):
            return Readiness(why="the interpreter does not load what has to run before the script")
        readiness = Readiness()
        await asyncio.to_thread(self._owner.prepare_warm, self._node)
        for _ in range(_TRIALS):
            made = WarmProcess.launch(
                start, lines, self._without, self._make_folder(local), self._node, self._owner, self._enter
            )
            if made is None:
                return Readiness(
                    why="ranks are held apart here, and there is no container for those of the next attempt"
                )
            self._being_made = made
            try:
                readiness = await made.wait_until_ready()
            finally:
                self._being_made = None
                if made.readiness is None:
                    made.end()
            if not readiness.why:
                self._ready[local] = made
                return readiness
            shutil.rmtree(made.folder, ignore_errors=True)
            await asyncio.to_thread(self._owner.end_warm, self._node, self.pids)  # what it has started
            if not readiness.culprit or readiness.culprit in self._without:
                break
            self._without.add(readiness.culprit)
        return readiness

    def _probe(self, start: RankStart) -> bool:
        """Whether what has to wait before the script runs is run at all in this environment. Raises OSError."""
        folder = self._folder / "probe"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)
        try:
            subprocess.run(
                [sys.executable, "-c", "pass"], env=with_hook(start.env, folder), cwd=start.cwd, check=False,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_PROBE_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
        return (folder / "imports").exists()

    def _report(self, local: int, readiness: Readiness) -> None:
        self._why = readiness.why or self._why
        if readiness.why:
            _log.warning("local rank %d will start cold: %s", local, readiness.why)
        else:
            _log.info("local rank %d has a warm process after %.1f s", local, readiness.seconds)
        self._tell(
            op="warm", local=local, ready=not readiness.why, why=(readiness.why or readiness.stopped)[:_WHY_MAX],
            seconds=readiness.seconds, modules=readiness.modules, bytes=self._measure(local),
        )  # fmt: skip

    def _measure(self, local: int) -> int:
        """Bytes of memory that its process has for itself."""
        try:
            text = Path(f"/proc/{self._ready[local].pid}/smaps_rollup").read_text()
        except (OSError, KeyError):
            return 0
        return sum(1024 * int(x.split()[1]) for x in text.splitlines() if x.startswith("Private_"))

    # --- used

    async def take(self, local: int, start: RankStart) -> Process | str:
        """The process that is this rank now; in words why there is none."""
        warm = self._ready.pop(local, None)
        if warm is None:
            busy = self._preparing is not None and not self._preparing.done()
            return "its warm process was not ready yet" if busy else self._why
        why = warm.find_refusal(start)
        if not why:
            taken = await warm.become(start, self._node, self._owner)
            if not isinstance(taken, str):
                self._set_record(local, warm.folder)
                return taken
            why = taken
        warm.end()
        shutil.rmtree(warm.folder, ignore_errors=True)
        return why

    def end(self, why: str = "") -> None:
        """Ends all that wait."""
        if self._preparing is not None:
            self._preparing.cancel()
            self._preparing = None
        for warm in self._ready.values():
            warm.end()
            shutil.rmtree(warm.folder, ignore_errors=True)
        self._ready.clear()
        if self._being_made is not None:
            self._being_made.end()
        self._why = why or self._why
