"""The supervisor of a run: starts attempts, watches them, and decides what happens after each incident.

It lives outside all training processes and alone writes the run's journal. It may be killed at any moment: its
agents go on until their lease expires, and the same command takes over (reattaching to ranks that still run) or starts
the next attempt. One supervisor per run, by the term it claims; one attempt at a time, by the seal of the one
before and the proof that its processes are gone.

Here is the order of things alone; how each is done lies in the folders beside this file.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from ...checkpoint.catalogue.placement import elsewhere_of
from ...cluster import Backend
from ...errors import RunDirLost, RunStopped
from ...link.listener import Listener
from ...progress import JournalWriter, RunDir, RunSpec, read_journal, read_spec, write_spec
from ...progress.records.state import RunState
from ...units import Bytes
from .attempt.outcome import AttemptOutcome, name_loss
from .incident.diagnosing import Diagnosis
from .launch.launching import StartFailed
from .launch.takeover import take_over
from .nodes.desk import Desk, Inbox, Listen, make_token
from .nodes.fleet import Fleet
from .parts import Parts, assemble
from .record.background import Background
from .record.clock import Clock
from .record.recorder import Recorder
from .record.run_folder import EVERY_S, RunFolderWatch
from .record.stop_request import StopRequest
from .record.term import Superseded, TermWatch
from .screen.view import View

_log = logging.getLogger("unbroken.supervisor")
_FAILED_STARTS_MAX = 10
_WAIT_MAX_S = 30.0
_ORPHAN_LEAST_S = 60.0
_ORPHAN_LEASES = 6
"""Agents without a supervisor wait for so many leases for another one."""


class Supervisor:
    """Runs one run to its end. `run` returns how it ended: completed, interrupted, or raises RunStopped."""

    def __init__(
        self,
        run_dir: RunDir,
        spec: RunSpec,
        backend: Backend,
        view: View,
        *,
        cwd: Path | None = None,
        clock: Clock | None = None,
        listen: Listen = lambda serve: Listener(serve, "127.0.0.1"),
    ) -> None:
        self._run_dir, self._spec, self._view = run_dir, spec, view
        self._cwd = cwd or Path.cwd()
        self._clock, self._listen = clock or Clock(), listen
        self._changed = asyncio.Event()
        self._stop = StopRequest(self._clock, self._changed)
        self._diagnosis = Diagnosis(hurry=self._stop.asked)
        self._background = Background()
        self._elsewhere = elsewhere_of(spec.room_elsewhere, spec.run_id)
        lease_s = float(spec.timeouts.lease)
        self._keeper_bytes = int(spec.host_memory) or backend.keeper_memory(spec.nodes + spec.spares)
        arguments = {
            "--orphan-grace": max(_ORPHAN_LEAST_S, _ORPHAN_LEASES * lease_s), "--keeper-memory": self._keeper_bytes,
            "--wait-for-room": float(spec.timeouts.room), "--room-elsewhere": self._elsewhere,
        }  # fmt: skip
        self._fleet = Fleet(
            run_dir, spec.run_id, backend, nodes=spec.nodes, spares=spec.spares, lease_s=lease_s,
            agent_arguments=[str(word) for pair in arguments.items() for word in pair], clock=self._clock,
            changed=self._changed,
        )  # fmt: skip

    def request_stop(self) -> None:
        """Asks for a stop at a step boundary; the second time, at once. Safe to call from a signal handler."""
        self._stop.ask()

    async def run(self) -> str:
        """Supervises until the run ends. Raises RunStopped, RunInUse, Superseded and other RunErrors."""
        inbox = Inbox()
        token = make_token(self._run_dir)
        desk = Desk(
            self._fleet, inbox, token, self._listen, nproc=self._spec.nproc, world_size=self._spec.world_size
        )
        try:
            claimed, before = await take_over(self._run_dir, self._spec.run_id, desk.address)
            desk.term = claimed.number
            state = RunState.of(read_journal(self._run_dir).records, now=self._clock.wall())
            if state.status == "completed":
                await self._fleet.sweep()
                self._view.say("this run is already completed")
                return "completed"
            if read_spec(self._run_dir.spec) != self._spec:
                # Only now: a call that finds the run in use must not change its settings.
                write_spec(self._run_dir, self._spec)
            recorder = Recorder(
                self._run_dir, JournalWriter(self._run_dir, claimed.number), state, self._stop, self._view.say, self._clock,
                float(self._spec.timeouts.stop),
            )  # fmt: skip
            try:
                if state.started is None:
                    await recorder.record(
                        "run", run_id=self._spec.run_id, command=list(self._spec.command), nodes=self._spec.nodes,
                        nproc=self._spec.nproc, spares=self._spec.spares, cwd=str(self._cwd),
                    )  # fmt: skip
                takes_over = before.number if before else None
                await recorder.record("epoch", host=claimed.host, pid=claimed.pid, takes_over=takes_over)
                term = TermWatch(self._run_dir, claimed.number, self._clock)
                return await self._lead(self._assemble(recorder, term, inbox))
            finally:
                recorder.close()
        finally:
            self._background.cancel()
            desk.close()
            await self._diagnosis.close()

    def _assemble(self, recorder: Recorder, term: TermWatch, inbox: Inbox) -> Parts:
        return assemble(
            self._run_dir, self._spec, self._cwd, self._fleet, inbox, recorder, term, self._stop, self._background,
            self._diagnosis, self._view, self._clock, self._changed, self._elsewhere,
        )  # fmt: skip

    # --- the flow of a run

    async def _lead(self, parts: Parts) -> str:
        """One term, from its first record on."""
        self._background.start(self._diagnosis.warm_up())
        await parts.place.start_from(self._spec.origin, self._spec.trust_pickle)
        lost = _FolderLoss()
        self._background.start(self._watch_folder(parts, lost))
        try:
            ended = await self._supervise(parts)
            if lost.why:
                raise await parts.finishing.describe_lost_folder(lost.why)
            return ended
        except (Superseded, RunDirLost):
            raise
        except (Exception, asyncio.CancelledError):
            if not parts.term.is_over:
                await parts.stopping.leave(flush=True)
            raise

    async def _supervise(self, parts: Parts) -> str:
        """Attempt after attempt, until one ends the run."""
        self._view.say(
            f"{self._spec.nodes} nodes x {self._spec.nproc} ranks, {self._spec.spares} spares; snapshots may take up to "
            f"{Bytes(self._keeper_bytes)} of memory on each node"
        )
        self._view.say(f"processes are held by {self._fleet.describe()}")
        await parts.launching.bring_up()
        attempt, whole = await parts.taking_over.take_over()
        if attempt is not None and not whole:
            await parts.recovering.recover(attempt, AttemptOutcome("supervisor_lost"))
            attempt = None
        failed_starts = 0
        while True:
            if attempt is None:
                if self._stop:
                    return await parts.finishing.finish("interrupted")
                try:
                    attempt = await parts.launching.start()
                    failed_starts = 0
                except StartFailed as e:
                    failed_starts += 1
                    await self._note_failed_start(parts, e, failed_starts)
                continue
            outcome = await parts.watching.watch(attempt)
            _log.info("attempt %d ended: %s", attempt.number, outcome.kind)
            if outcome.kind in ("completed", "interrupted"):
                await parts.recorder.record(
                    "ended", attempt=attempt.number, how=outcome.kind, step=attempt.step
                )
                return await parts.finishing.finish(outcome.kind)
            if outcome.kind in ("renumbered", "refused"):
                await parts.launching.end_misplaced(attempt, outcome)
            else:
                await parts.recovering.recover(attempt, outcome)
            attempt = None

    async def _note_failed_start(self, parts: Parts, failed: StartFailed, count: int) -> None:
        """Says that an attempt could not be launched, and waits before the next one; raises RunStopped after too many."""
        error, attempt = failed.error, failed.attempt
        self._view.say(f"attempt {parts.recorder.state.attempt} could not be started: {error}")
        if count > _FAILED_STARTS_MAX:
            raise RunStopped(
                f"{count} attempts in a row could not be started: {error.message}", where=error.where,
                hint=error.hint or "See the agents' logs in the run directory",
            )  # fmt: skip
        if attempt is not None:
            lost = await self._fleet.find_lost(attempt.nodes)
            kind = name_loss(lost) if lost else "start_failed"
            await parts.recovering.recover(attempt, AttemptOutcome(kind, nodes=lost, error=str(error)))
        await self._stop.pause(min(0.5 * 2**count, _WAIT_MAX_S) if count > 1 else 0.0)

    # --- the run directory

    async def _watch_folder(self, parts: Parts, loss: _FolderLoss) -> None:
        """Says what becomes of the run directory; where it is gone the ranks are asked to save and stop.

        Nothing can be recorded then, so nothing may be decided any more: what the keepers hold is the run.
        """
        watch, shown = RunFolderWatch(self._run_dir, parts.term.number), ""
        while True:
            await asyncio.sleep(EVERY_S)
            now = await asyncio.to_thread(watch.look)
            if now.lost and not parts.term.is_over:
                loss.why = now.lost
                self._view.say(
                    f"{now.lost}, while the run goes on: nothing can be recorded any more. The ranks are asked to save "
                    "and stop, and the keepers to write what they hold"
                )
                self.request_stop()
                return
            if now.trouble != shown:
                shown = now.trouble
                self._view.say(
                    f"{shown}: training goes on, and what is to be written waits"
                    if shown
                    else "it can be written again"
                )


class _FolderLoss:
    """Why the run directory is not the run's any more; nothing while it is."""

    why = ""
