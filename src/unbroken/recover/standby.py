"""A standby: waits beside a run that somebody else supervises, and supervises it once nobody does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..errors import RunInUse, RunStopped, StorageError, UsageError
from ..progress import RunDir, RunSpec, Term, check_same, read_spec
from ..progress.records.state import RunState
from .amend import read_run_secret
from .node.checks.command import check_words
from .record.base import Record
from .start import check_cluster, find_record, follow_journal, run_supervised, stop_ends_wait
from .supervise.launch.takeover import reach_supervisor
from .supervise.screen.view import Lines, View
from .supervise.supervisor import METRICS_S

_EVERY_S = 2.0
_SILENT_S = METRICS_S + 2.0
"""A supervisor that gives no sign for so long is gone: what it writes every few seconds may come late over a network."""
_ENDED = ("completed", "interrupted", "stopped")


def stand_by(run_dir: RunDir, wanted: RunSpec, *, view: View | None = None, cwd: Path | None = None) -> str:
    """Waits while a supervisor has the run, then takes it over; returns how it ended (completed or interrupted), whoever had it then.

    What is wrong with the command, the run's key files or its cluster is told at once, and not in the night. What the run is amended
    to later is followed. A supervisor that cannot be reached from here and still writes into the run directory has the run.
    Raises UsageError where there is no run, RunStopped where the run was stopped by a verdict meanwhile (a person has to look at that), RunInterrupted at one of
    STOP_SIGNALS while it waits, and the errors of `run_supervised`.
    """
    here, shown = cwd or Path.cwd(), view or Lines()
    check_words(wanted.command)
    record = find_record(run_dir, wanted)
    if not run_dir.spec.exists():
        raise UsageError(
            "there is no run to stand by for",
            where=str(run_dir.path),
            hint="Start it first, without --standby",
        )
    follow_journal(run_dir, record)
    check_same(read_spec(run_dir.spec), wanted, run_dir)
    check_cluster(run_dir, wanted, here, goes_on=True, say=shown.say)
    watch = _Watch(run_dir, record, shown.say)
    while True:
        with stop_ends_wait(run_dir, "beside it"):
            ended = watch.wait()
        if ended:
            return ended
        follow_journal(run_dir, record)
        now = read_spec(run_dir.spec)
        amended = replace(wanted, command=now.command, nodes=now.nodes, nproc=now.nproc)
        shown.say("nobody supervises the run any more: it is taken over")
        try:
            return run_supervised(run_dir, amended, view=shown, cwd=here)
        except RunInUse as e:  # somebody was faster, or is back
            shown.say(f"{e.message}: standing by")


class _Watch:
    """Looks who supervises a run."""

    def __init__(self, run_dir: RunDir, record: Record, say: Callable[[str], None]) -> None:
        self._run_dir, self._record, self._say = run_dir, record, say
        self._said = ""
        self._written = self._read_written()
        """When the supervisor wrote its metrics last, by the file system's clock: that it changes is a sign."""

    def wait(self) -> str:
        """Until nobody supervises the run: how it ended, "" where it has not. Raises RunStopped."""
        heard = time.monotonic()
        while True:
            try:
                terms = self._record.terms()
                if not terms:
                    self._tell("the run is about to begin: standing by (Ctrl-C ends that)")
                elif sign := self._find_sign(term := terms[-1]):
                    heard = time.monotonic()
                    self._tell(
                        f"process {term.pid} on {term.host} {sign}: standing by (Ctrl-C ends that alone)"
                    )
                elif (ended := self._read_end()) is not None:
                    return ended
                elif term.supervisor_is_gone() or time.monotonic() - heard >= _SILENT_S:
                    return ""
            except (OSError, StorageError) as e:
                heard = time.monotonic()  # nobody knows what it wrote meanwhile
                self._tell(f"the record of the run cannot be read ({e}): standing by")
            time.sleep(_EVERY_S)

    def _tell(self, what: str) -> None:
        if what != self._said:
            self._said = what
            self._say(what)

    def _find_sign(self, term: Term) -> str:
        """What this term's supervisor does, in words; "" where there is no sign of it now."""
        before, self._written = self._written, self._read_written()
        if term.supervisor_is_gone():
            return ""
        if asyncio.run(_answers(self._run_dir, term)):
            return "supervises the run"
        if self._written != before:
            return "cannot be reached from here, and still writes into the run directory"
        return ""

    def _read_written(self) -> int:
        try:
            return self._run_dir.metrics.stat().st_mtime_ns
        except OSError:
            return 0

    def _read_end(self) -> str | None:
        """How the run ended; None where it has not."""
        state = RunState.of(self._record.read().records)
        if state.status not in _ENDED:
            return None
        if state.status == "stopped":
            raise RunStopped(
                f"the run was stopped meanwhile: {state.why}", where=str(self._run_dir.path),
                hint="Fix the cause and give the command again: it goes on from the last checkpoint, if one was saved",
            )  # fmt: skip
        self._say(f"the run is {state.status} after step {state.step:,}")
        return state.status


async def _answers(run_dir: RunDir, term: Term) -> bool:
    async with reach_supervisor(term, read_run_secret(run_dir)) as link:
        return link is not None
