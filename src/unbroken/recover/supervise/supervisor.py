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
import math
from collections.abc import Callable
from pathlib import Path

from ...checkpoint.catalogue.placement import elsewhere_of
from ...cluster.contract import AgentCommand, Request
from ...errors import RunDirLost, RunStopped
from ...link.address import Address, own_address
from ...link.secret import Secret
from ...link.tls import make_identity
from ...progress import RunDir, RunSpec, read_spec, write_spec
from ...progress.records.state import RunState
from ...units import plural
from ...waiting import wait_within
from ..decide.policy import decide_failed_start
from ..record.folder import FolderRecord
from ..site.store import SiteHistory
from ..telling.teller import Teller
from .attempt.attempt import Attempt
from .attempt.outcome import AttemptOutcome, name_loss
from .launch.amending import Amending
from .launch.launching import StartFailed
from .launch.room import NoRoom
from .launch.takeover import take_over
from .nodes.acquiring import acquire
from .nodes.desk import Desk, Inbox, make_token
from .nodes.door import Listen, find_first_door, local_door, wide_door
from .nodes.fleet import Fleet
from .nodes.logs import ShippedLogs
from .nodes.machines import describe_memory, list_gpus
from .parts import Parts, assemble
from .record.background import Background
from .record.old_logs import OldLogs
from .record.recorder import CannotRecord, Recorder
from .record.run_folder import FolderLoss, RunFolderWatch
from .record.stop_request import StopRequest
from .record.term import Superseded, TermWatch
from .screen.view import View
from .surroundings import Surroundings

_log = logging.getLogger("unbroken.supervisor")
_SWEEP_S = 10.0
METRICS_S = 5.0
_ALLOCATION_EVERY_S = 1.0
_ORPHAN_LEAST_S = 60.0
_ORPHAN_LEASES = 6
"""Agents without a supervisor wait for so many leases for another one."""


class Supervisor:
    """Runs one run to its end. `run` returns how it ended: completed, interrupted, or raises RunStopped."""

    def __init__(
        self,
        run_dir: RunDir,
        spec: RunSpec,
        surroundings: Surroundings,
        view: View,
        *,
        cwd: Path | None = None,
    ) -> None:
        self._run_dir, self._spec, self._view = run_dir, spec, view
        self._record = surroundings.record or FolderRecord(run_dir, shared=True)
        self._around, self._clock = surroundings, surroundings.clock
        self._cwd = cwd or Path.cwd()
        self._changed = asyncio.Event()
        self._stop = StopRequest(self._clock, self._changed)
        self._background = Background()
        self._old_logs = OldLogs(run_dir, int(spec.keep_logs), view.say)
        self._elsewhere = elsewhere_of(spec.room_elsewhere, spec.run_id)
        site = (
            SiteHistory(Path(spec.policy.history).expanduser(), spec.run_id) if spec.policy.history else None
        )
        self._teller = Teller(
            spec.run_id, webhook=surroundings.webhook, history=site, metrics=run_dir.metrics
        )
        self._attempt: Attempt | None = None

    def request_stop(self) -> None:
        """Asks for a stop at a step boundary; the second time, at once. Safe to call from a signal handler."""
        self._around.diagnosis.hurry.set()
        self._stop.ask()

    async def run(self) -> str:
        """Supervises until the run ends. Raises RunStopped, RunInUse, Superseded and other RunErrors."""
        inbox, secret = Inbox(), self._make_secret()
        host = self._around.advertised or self._around.cluster.door_address or own_address()
        door = find_first_door(await asyncio.to_thread(self._record.terms), host)
        fleet = self._make_fleet(secret, lambda: door or desk.address)
        desk = Desk(
            fleet, inbox, secret.token, self._choose_door(secret, host, door), ShippedLogs(self._run_dir), nproc=self._spec.nproc,
            world_size=self._spec.world_size,
        )  # fmt: skip
        try:
            claimed, before = await take_over(
                self._record,
                self._run_dir,
                self._spec.run_id,
                desk.address,
                secret,
                self._around.connect,
                self._stop.__bool__,
            )
            desk.term = claimed.number
            text = await asyncio.to_thread(self._record.read)
            state = RunState.of(text.records, now=self._clock.wall())
            desk.world_size = max(self._spec.world_size, state.most_ranks)
            if state.status == "completed" and state.command in ((), self._spec.command):
                await self._sweep(fleet)
                self._view.say("this run is already completed")
                return "completed"
            if read_spec(self._run_dir.spec) != self._spec:
                # Only now: a call that finds the run in use must not change its settings.
                write_spec(self._run_dir, self._spec)
                await asyncio.to_thread(self._record.keep_spec)
            journal = self._record.open(claimed, self._clock.wall)
            recorder = Recorder(
                self._run_dir, journal, state, self._stop, self._view.say, self._clock,
                float(self._spec.timeouts.stop),
            )  # fmt: skip
            try:
                recorder.write_missing_incidents(text.records)
                if state.started is None:
                    await recorder.record(
                        "run", run_id=self._spec.run_id, command=list(self._spec.command), nodes=self._spec.nodes,
                        nproc=self._spec.nproc, spares=self._spec.spares, cwd=str(self._cwd),
                    )  # fmt: skip
                takes_over = before.number if before else None
                await recorder.record("epoch", host=claimed.host, pid=claimed.pid, takes_over=takes_over)
                amending = Amending(
                    self._run_dir, self._spec, str(self._cwd), fleet, self._record, recorder, self._view.say, self._changed,
                )  # fmt: skip
                await amending.settle_size()
                desk.amend, desk.waits = amending.take, recorder.describe_waits
                term = TermWatch(self._run_dir, self._record, claimed.number, self._clock)
                self._background.start(term.follow())
                parts = assemble(
                    self._run_dir, self._spec, self._cwd, fleet, inbox, recorder, term, self._stop, self._background,
                    self._around.diagnosis, self._view, self._clock, self._changed, self._elsewhere, amending, self._teller,
                )  # fmt: skip
                return await self._lead(parts)
            finally:
                recorder.close()
        finally:
            self._background.cancel()
            self._old_logs.close()
            desk.close()
            await self._around.cluster.close()
            await self._around.diagnosis.close()

    def _make_secret(self) -> Secret:
        """What this run's processes know. Raises UnsafeFile, RunError, OSError."""
        token = make_token(self._run_dir)
        if self._around.listen is not None or self._around.cluster.socket_folder is not None:
            return Secret(token)
        return Secret(token, make_identity(self._run_dir.identity, self._spec.run_id))

    def _choose_door(self, secret: Secret, host: str, before: Address | None) -> Listen:
        """Where agents come in: what the tests give, a Unix socket on one machine, else TLS."""
        if self._around.listen is not None:
            return self._around.listen
        if (folder := self._around.cluster.socket_folder) is not None:
            return local_door(folder)
        assert secret.identity is not None
        return wide_door(secret.identity, host, before)

    def _make_fleet(self, secret: Secret, door: Callable[[], Address]) -> Fleet:
        spec, timeouts = self._spec, self._spec.timeouts
        elsewhere = self._elsewhere
        if elsewhere and "://" not in elsewhere:
            elsewhere = str(Path(elsewhere).absolute())
        arguments = {
            "--run-dir": self._run_dir.path.absolute(), "--run-id": spec.run_id,
            "--orphan-grace": max(_ORPHAN_LEAST_S, _ORPHAN_LEASES * float(timeouts.lease)),
            "--keeper-share": spec.nodes + spec.spares if self._around.cluster.socket_folder is not None else 1,
            "--wait-for-room": float(timeouts.room),
            "--room-elsewhere": elsewhere, "--record": self._spec.record,
        }  # fmt: skip
        words = tuple(str(word) for pair in arguments.items() for word in pair)

        def command(node: str) -> AgentCommand:
            apart = ("--supervisor", str(door())) if secret.identity is not None else ()
            # What its keeper had before: what is free now lacks what others on that machine hold meanwhile.
            memory = int(spec.host_memory) or fleet.nodes[node].keeper_bytes
            return AgentCommand(
                "unbroken.recover.node.agent", (*words, "--keeper-memory", str(memory), *apart, "--node", node),
                secret=secret.as_bytes(),
            )  # fmt: skip

        fleet = Fleet(
            spec.run_id, self._around.cluster, Request(spec.nodes, spec.spares, spec.nproc), command,
            lease_s=float(timeouts.lease), say=self._view.say, clock=self._clock, changed=self._changed,
        )  # fmt: skip
        return fleet

    async def _sweep(self, fleet: Fleet) -> None:
        """Ends whatever is left of a run that is completed."""
        try:
            await wait_within(fleet.acquire(), _SWEEP_S)
        except TimeoutError:
            return
        await fleet.give_back(fleet.nodes)

    # --- the flow of a run

    async def _lead(self, parts: Parts) -> str:
        """One term, from its first record on."""
        self._background.start(self._around.diagnosis.warm_up())
        await parts.place.start_from(self._spec.origin, self._spec.trust_pickle)
        # Of a record elsewhere the run directory has copies only.
        watch = RunFolderWatch(self._run_dir, 0 if self._record.slow else parts.term.number)
        lost = FolderLoss("saved there" if self._record.slow else "recorded")
        self._background.start(lost.follow(watch, parts.term, self._view.say, self.request_stop))
        self._background.start(self._watch_allocation(parts))
        self._background.start(self._keep_metrics(parts))
        self._background.start(parts.suspects.settle())
        try:
            try:
                ended = await self._supervise(parts)
            except CannotRecord as e:  # a stop was asked for, and what comes next cannot be written down
                self._view.say(e.message)
                ended = await parts.finishing.finish("interrupted")
            if lost.why:
                raise await parts.finishing.describe_lost_folder(lost.why)
            await self._old_logs.settle()
            return ended
        except (Superseded, RunDirLost):
            raise
        except (Exception, asyncio.CancelledError):
            if not parts.term.is_over:
                await parts.finishing.leave()
                await self._old_logs.settle()
            raise

    async def _supervise(self, parts: Parts) -> str:
        """Attempt after attempt, until one ends the run."""
        self._view.say(
            f"{plural(self._spec.nodes, 'node')} x {plural(self._spec.nproc, 'rank')}, {plural(self._spec.spares, 'spare')}"
        )
        if words := parts.resizing.describe():
            self._view.say(words)
        self._view.say(parts.fleet.describe())
        self._view.say(self._record.describe())
        self._background.start(parts.fleet.follow_events())
        if not await acquire(
            parts.fleet, parts.recorder.state, parts.term, self._stop, self._teller, self._background, self._clock, self._view.say,
        ):  # fmt: skip
            return await parts.finishing.finish("interrupted")
        await parts.launching.bring_up()
        self._teller.note_gpus(self._clock.wall(), list_gpus(parts.fleet.nodes))
        if memory := describe_memory(parts.fleet.nodes.values()):
            self._view.say(memory)
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
                    if isinstance(e.error, NoRoom) and e.attempt is not None:
                        await parts.room_wait.wait(e.attempt, e.error)
                        continue
                    failed_starts += 1
                    await self._note_failed_start(parts, e, failed_starts)
                continue
            self._attempt = attempt
            self._background.start(self._old_logs.tidy(attempt.number))
            outcome = await parts.watching.watch(attempt)
            if outcome.kind in ("amended", "resized"):
                await parts.launching.end_amended(attempt, outcome)
                attempt = None
                continue
            _log.info("attempt %d ended: %s", attempt.number, outcome.kind)
            if outcome.kind in ("completed", "interrupted"):
                ended = {"attempt": attempt.number, "how": outcome.kind, "step": attempt.step}
                try:
                    await parts.recorder.record("ended", **ended)
                except CannotRecord:  # the nodes have to be left all the same, and there may be room by then
                    await parts.recorder.record_soft("ended", **ended)
                return await parts.finishing.finish(outcome.kind)
            if outcome.kind in ("renumbered", "refused"):
                await parts.launching.end_misplaced(attempt, outcome)
            else:
                parts.warm_starts.note_end(attempt)
                await parts.recovering.recover(attempt, outcome)
            attempt = None

    async def _keep_metrics(self, parts: Parts) -> None:
        """Writes the file of metrics again every few seconds, and what a disk refused before."""
        while True:
            a = self._attempt
            loss = a.last.loss if a is not None and a.last is not None else None
            self._teller.write_metrics(
                parts.recorder.state, self._clock.wall(), step=a.step if a is not None else -1,
                loss=loss if loss is not None and math.isfinite(loss) else None, step_s=a.step_time if a is not None else None,
            )  # fmt: skip
            parts.recorder.write_later()  # also where nothing else is recorded for a while
            await asyncio.sleep(METRICS_S)

    async def _note_failed_start(self, parts: Parts, failed: StartFailed, count: int) -> None:
        """Says that an attempt could not be launched, and waits before the next one; raises RunStopped after too many."""
        error, attempt = failed.error, failed.attempt
        self._view.say(f"attempt {parts.recorder.state.attempt} could not be started: {error}")
        delay_s, why = decide_failed_start(count, error.message)
        if why and not self._stop:
            hint = error.hint or "See the agents' logs in the run directory"
            raise RunStopped(why, where=error.where, hint=hint)
        if attempt is not None:
            lost = parts.fleet.find_lost(attempt.nodes)
            kind = name_loss(lost) if lost else "start_failed"
            await parts.recovering.recover(attempt, AttemptOutcome(kind, nodes=lost, error=str(error)))
        await self._stop.pause(delay_s)

    async def _watch_allocation(self, parts: Parts) -> None:
        """Asks for a stop while there is just time enough to save before the cluster takes all nodes away."""
        while True:
            if (ends := parts.fleet.ends) is not None:
                left = ends - self._clock.monotonic()
                if self._stop:
                    return  # asked for already: a second request would end the ranks at once
                if left <= parts.stopping.needs_s:
                    self._view.say(f"the allocation ends in {left:.0f} s: the run saves and stops")
                    self.request_stop()
                    return
            await asyncio.sleep(_ALLOCATION_EVERY_S)
