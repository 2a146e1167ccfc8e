"""The supervisor of a run: starts attempts, watches them, and decides what happens after each incident.

It lives outside all training processes and alone writes the run's journal. It may be killed at any moment: its
agents go on until their lease lapses, and the same command takes over (adopting ranks that still run) or starts
the next attempt. One supervisor per run, by the epoch it claims; one attempt at a time, by the seal of the one
before and the proof that its processes are gone.

This file is long because it holds the flow of a run, which is read in one place, and nothing else; what it decides
with is pure and lies beside it (policy, candidates, ledger, state), what it talks through is nodes.NodeTable.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...checkpoint.catalogue.candidates import candidates
from ...checkpoint.catalogue.contents import Found
from ...checkpoint.catalogue.placement import elsewhere_of
from ...checkpoint.format.manifest import folder_name
from ...cluster import Allocation, Backend, Ended, NodeState
from ...detect import Hang, HangDetector, Level, ProcessLook, late_ranks
from ...detect.stacks import place
from ...diagnose.judge.facts import Facts, HangFact, RankExit
from ...errors import (
    Exit,
    NotDurable,
    RunDirLost,
    RunError,
    RunInUse,
    RunStopped,
    StorageError,
    UnbrokenError,
)
from ...progress import JournalWriter, RunDir, RunSpec, newest_epoch, read_journal, read_spec, write_spec
from ...progress.records.decision import Decision
from ...progress.records.incident import Incident
from ...progress.records.state import RunState
from ...progress.records.steps import read_steps
from ...progress.records.verdict import Action, Root, Verdict
from ...units import Bytes, Duration
from ..decide.policy import (
    AGENT,
    FREE,
    LAPSED,
    as_carried_out,
    cause_of,
    decide,
    decide_agent_lost,
    decide_lapsed,
    fingerprint,
)
from ..node.ranks import LaunchOrder
from ..wire import Message
from .fence import proof
from .fence.leaving import (
    ANSWER_S,
    FLUSH_S,
    INVENTORY_S,
    Farewell,
    Last,
    accept_late,
    say_farewell,
    whole_in_memory,
)
from .incident.diagnosing import Diagnosis
from .incident.early_exit import RankPlace, blame_early_exit
from .incident.incidents import (
    agent_lost_verdict,
    facts_of,
    killed_from_outside,
    lapsed_verdict,
    logs_of,
    named_in_run,
    takeover_verdict,
    with_kill,
    with_root,
)
from .launch.placing import Placing, told
from .launch.takeover import take_over
from .screen.view import View
from .watch.attempt import Attempt
from .watch.following import Following, ends_normally
from .watch.ledger import Ledger
from .watch.nodes import Node, NodeTable
from .watch.run_folder import EVERY_S, RunFolderWatch

_log = logging.getLogger("unbroken.supervisor")
_TICK_S = 0.1
_SETTLE_S = 0.5
_SETTLE_QUIET_S = 0.15
_KEEPER_SETTLE_S = 10.0
_FAILED_STARTS_MAX = 10
WAIT_LEAST_S = 10.0
"""A disk that refuses at the end is waited for at least this long, however late the stop was asked for."""


class Superseded(RunInUse):
    """Another supervisor claimed a higher term, while this one did not run."""


class CannotRecord(RunError):
    """The journal cannot be written, and there is no time left to wait until it can."""


@dataclass
class Ending:
    """How the watch over an attempt ended. `kind`: completed, interrupted, failed, hung, lease, agent_lost, node_lost, or
    supervisor_lost and start_failed where there was no watch."""

    kind: str
    nodes: dict[str, NodeState] = field(default_factory=dict)
    hang: Hang | None = None
    looks: dict[int, ProcessLook] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)
    error: str = ""


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
    ) -> None:
        self.run_dir, self.spec, self.backend, self.view = run_dir, spec, backend, view
        self._cwd = str(cwd or Path.cwd())
        self._following = Following(spec.command, Path(self._cwd), spec.timeouts.idle)
        self._diagnosis = Diagnosis()
        self._changed = asyncio.Event()
        self._timeouts = spec.timeouts
        grace = max(60.0, 6 * float(self._timeouts.lease))
        keeper_bytes = int(spec.host_memory) or backend.keeper_memory(spec.nodes + spec.spares)
        self.nodes = NodeTable(
            run_dir, spec.run_id, backend, float(self._timeouts.lease), grace, keeper_bytes, self._on_message,
            self._changed, nproc=spec.nproc, world_size=spec.world_size,
        )  # fmt: skip
        self.nodes.room_s = float(self._timeouts.room)
        self.nodes.elsewhere = elsewhere_of(spec.room_elsewhere, spec.run_id)
        self._farewell = Farewell()
        self._allocation: Allocation = backend.allocate(spec.nodes, spec.spares)
        self._state = RunState()
        self._journal: JournalWriter | None = None
        self._unwritten: list[tuple[str, dict[str, Any]]] = []
        self._attempt: Attempt | None = None
        self._ledger = Ledger(0, spec.world_size)
        self._unproven = proof.Unproven()
        self._folder_lost = ""
        self._incident: Incident | None = None
        self._stop_requests = 0
        self._stop_first: float | None = None
        self._waits: dict[str, Message] = {}
        """Per node, the snapshot that waits for a storage that refuses."""
        self._background: set[asyncio.Task[Any]] = set()
        self._epoch_checked = 0.0
        self._first_told = 0
        self._failed_starts = 0
        self._unwritten_incidents: dict[int, Incident] = {}
        self._early: list[tuple[Node, Message]] = []
        self._placing = Placing(
            run_dir, spec.run_id, lambda: self._state, self._record, view.say, lambda: self._stop_requests > 0
        )

    # --- from outside

    def request_stop(self) -> None:
        """Asks for a stop at a step boundary; the second time, at once. Safe to call from a signal handler."""
        self._stop_requests += 1
        self._stop_first = self._stop_first or time.monotonic()
        self._diagnosis.hurry.set()
        self._changed.set()

    async def run(self) -> str:
        """Supervises until the run ends. Raises RunStopped, RunInUse, Superseded and other RunErrors."""
        address = await self.nodes.listen()
        try:
            epoch, before = await take_over(self.run_dir, self.spec.run_id, address)
            self.nodes.epoch = epoch.number
            self._state = RunState.of(read_journal(self.run_dir).records)
            self._unproven.nodes.update(self._state.unproven)
            if self._state.status == "completed":
                await asyncio.to_thread(self.backend.sweep)
                self.view.say("this run is already completed")
                return "completed"
            if read_spec(self.run_dir.spec) != self.spec:
                # Only now: a call that finds the run in use must not change its settings.
                write_spec(self.run_dir, self.spec)
            self._journal = JournalWriter(self.run_dir, epoch.number)
            if self._state.started is None:
                await self._record(
                    "run", run_id=self.spec.run_id, command=list(self.spec.command), nodes=self.spec.nodes,
                    nproc=self.spec.nproc, spares=self.spec.spares, cwd=self._cwd,
                )  # fmt: skip
            await self._record(
                "epoch", host=epoch.host, pid=epoch.pid, takes_over=before.number if before else None
            )
            self._spawn(self._diagnosis.warm_up())
            await self._placing.start_from(self.spec.origin, self.spec.trust_pickle)
            self._spawn(self._watch_folder(RunFolderWatch(self.run_dir, epoch.number)))
            try:
                ended = await self._supervise()
                if self._folder_lost:
                    raise await self._lost_folder()
                return ended
            except Superseded:
                raise
            except RunDirLost:
                raise
            except (Exception, asyncio.CancelledError):
                if not self._superseded():
                    await self._leave(flush=True)
                raise
        finally:
            for task in list(self._background):
                task.cancel()
            await self.nodes.close()
            await self._diagnosis.close()
            if self._journal is not None:
                self._journal.close()

    async def _watch_folder(self, watch: RunFolderWatch) -> None:
        """Says what becomes of the run directory; where it is gone the ranks are asked to save and stop.

        Nothing can be recorded then, so nothing may be decided any more: what the keepers hold is the run.
        """
        said = ""
        while True:
            await asyncio.sleep(EVERY_S)
            now = await asyncio.to_thread(watch.look)
            if now.lost and not self._superseded():
                self._folder_lost = now.lost
                self.view.say(
                    f"{now.lost}, while the run goes on: nothing can be recorded any more. The ranks are asked to save "
                    "and stop, and the keepers to write what they hold"
                )
                self.request_stop()
                return
            if now.trouble != said:
                said = now.trouble
                self.view.say(
                    f"{said}: training goes on, and what is to be written waits"
                    if said
                    else "it can be written again"
                )

    async def _lost_folder(self) -> RunDirLost:
        """The end of a run whose directory was lost, with what was saved where."""
        found = [f.name for f in await self._found() if f.committed]
        place = self.run_dir.checkpoints
        saved = f"saved: {', '.join(found[:3])} in {place}" if found else f"nothing could be saved in {place}"
        return RunDirLost(
            f"{self._folder_lost}, while the run went on; {saved}",
            where=f"step {self._state.step}" if self._state.step >= 0 else None,
            todo="Move the folder back where it was moved, or start another run (`unbroken run --from CHECKPOINT` takes up "
            "one that was saved)",
        )  # fmt: skip

    def _superseded(self) -> bool:
        return newest_epoch(self.run_dir) > self.nodes.epoch

    # --- the flow of a run

    async def _supervise(self) -> str:
        names = [*self._allocation.nodes, *self._allocation.spares]
        names = [n for n in names if n not in self._state.cordoned]
        self.view.say(
            f"{self.spec.nodes} nodes x {self.spec.nproc} ranks, {self.spec.spares} spares; snapshots may take up to "
            f"{Bytes(self.nodes.keeper_bytes)} of memory on each node"
        )
        self.view.say(f"processes are held by {self.backend.describe_ownership()}")
        missing = await self.nodes.bring_up([n for n in names if n not in self._state.lost])
        for name in missing:
            await self._lose(name, "its agent did not come up")
        attempt = await self._adopt()
        while True:
            if attempt is None:
                if self._stop_requests:
                    return await self._finish("interrupted")
                try:
                    attempt = await self._start_attempt()
                    self._failed_starts = 0
                    if attempt is None:
                        continue
                except (RunStopped, Superseded):
                    raise
                except RunError as e:
                    await self._start_failed(e)
                    continue
            ending = await self._watch(attempt)
            _log.info("attempt %d ended: %s", attempt.number, ending.kind)
            if ending.kind in ("renumbered", "refused"):
                await self._end_misplaced(attempt, ending)
                attempt = None
                continue
            if ending.kind in ("completed", "interrupted"):
                await self._record("ended", attempt=attempt.number, how=ending.kind, step=attempt.step)
                return await self._finish(ending.kind)
            await self._recover(attempt, ending)
            attempt = None

    async def _adopt(self) -> Attempt | None:
        """Takes over ranks that still run from before; None where a new attempt is needed."""
        s = self._state
        if not s.attempt_open:
            return None
        # Steps are not journalled one by one; what was received before is in steps.jsonl.
        s.step = max([s.step, *(x.step for x in read_steps(self.run_dir.steps(s.attempt))[-1:])])
        ranks: dict[int, tuple[str, Message]] = {}
        for name in s.slots:
            node = self.nodes.nodes.get(name)
            if node is None or not node.up or node.hello.get("attempt") != s.attempt:
                break
            ranks.update({int(r): (name, d) for r, d in node.hello.get("ranks", {}).items()})
        # Ranks that have ended meanwhile, well or badly, are judged like any others once they are adopted.
        whole = len(ranks) == self.spec.world_size and not any(d.get("ours") for _, d in ranks.values())
        if not whole:
            self.view.say(f"attempt {s.attempt} did not survive its supervisor")
            ended = self._attempt_of(s.attempt, s.slots)
            self._first_told = s.attempt  # its start was not seen, here as below
            for rank, (_, d) in ranks.items():
                if not d["running"]:
                    self._note_exit(ended, rank, d)
            self._attempt = ended
            await self._recover(ended, Ending("supervisor_lost"))
            return None
        attempt = self._attempt_of(s.attempt, s.slots)
        for rank, (_, d) in ranks.items():
            attempt.ranks[rank].pid = d["pid"]
            if not d["running"]:
                self._note_exit(attempt, rank, d)
        running = sum(d["running"] for _, d in ranks.values())
        self._attempt = attempt
        self._first_told = attempt.number  # its start was not seen: how long the first step took is not known
        self._ledger = Ledger(attempt.number, self.spec.world_size)
        await self._note_takeover(attempt)
        await self._record("adopted", attempt=attempt.number)
        how = f"{running} ranks never stopped" if running else "its ranks have ended meanwhile"
        self.view.say(f"took over attempt {attempt.number}: {how}")
        early, self._early = self._early, []
        for node, message in early:
            self._on_message(node, message)
        await self._reconcile(attempt)
        return attempt

    async def _reconcile(self, attempt: Attempt) -> None:
        """Asks the keepers what they hold: what they told while nobody listened must not stay unknown."""
        nodes = list(dict.fromkeys(attempt.slots))
        answers = await self.nodes.ask_all(nodes, "keeper", request={"op": "inventory"}, timeout=20)
        done = -1
        entries = [
            e for a in answers.values() for e in a.get("inventory", []) if e["attempt"] == attempt.number
        ]
        for e in sorted(entries, key=lambda e: e["step"]):
            if self._ledger.on_host(e["step"], e["rank"]):
                done = e["step"]
        if done >= 0:
            self._tell_complete(attempt.number, done)

    def _tell_complete(self, attempt: int, step: int) -> None:
        request = {"op": "complete", "attempt": attempt, "step": step}
        self._spawn(self.nodes.ask_all(self.nodes.up(), "keeper", request=request, timeout=20))

    async def _note_takeover(self, attempt: Attempt) -> None:
        """An incident that cost no step: the supervisor was gone and the ranks never stopped."""
        now = time.time()
        incident = Incident(
            number=self._state.incident + 1, attempt=attempt.number, kind="supervisor_lost", step=self._state.step,
            last_sign=now, detected=now, verdict=takeover_verdict(), action=Action.NONE.value,
            why="a successor took over; no rank was touched", resumed=now, steps_lost=0, next_attempt=attempt.number,
        )  # fmt: skip
        self._write_incident(incident)
        await self._record(
            "incident", incident=incident.number, attempt=attempt.number, what=incident.kind, step=incident.step,
            cause="free", fingerprint="takeover", reason=None, outcome="running", action="none", why=incident.why,
        )  # fmt: skip
        await self._record(
            "resumed",
            incident=incident.number,
            attempt=attempt.number,
            step=incident.step,
            steps_lost=0,
            seconds=0.0,
        )

    def _attempt_of(self, number: int, slots: tuple[str, ...]) -> Attempt:
        detector = HangDetector(self._timeouts)
        return Attempt.make(number, slots, self.spec.nproc, detector, self._state.step, self.run_dir)

    async def _start_attempt(self) -> Attempt | None:
        """Seals what was before, chooses nodes, and launches the next attempt; None where a stop came before that."""
        began = time.monotonic()
        self._check_epoch(at_once=True)
        slots = await self._fill_slots()
        for node in set(slots) & set(self._state.slots) if self._state.attempt else ():
            before = self.nodes.nodes[node]
            cleared = proof.of_message(before.hello.get("cleared", {})) | before.left
            if self._state.held == "marks" != self._held():
                cleared |= Ended(proven=False, why=proof.MARKS_LEFT)
            if not cleared.gone:
                await self._take_proof(node, cleared)
        if self._state.attempt and self._state.attempt not in self._state.seals:
            await self._placing.accept_elsewhere(self.spec.room_elsewhere)
            await self._seal(self._state.attempt)
        await self._accept_late()
        if self._stop_requests:
            return None
        number = await self._placing.take()
        place = self._placing.current()
        up = self.nodes.up()
        answers = await self.nodes.ask_all(up, "keeper", request={"op": "inventory"}, timeout=20)
        offered = self._offer(slots, {n: a.get("inventory", []) for n, a in answers.items()})
        if not await self._wait_for_proof(accepted=bool(offered)):
            return None
        port = (await self.nodes.ask(slots[0], "port", address=self.backend.address(slots[0])))["port"]
        await self._record(
            "attempt", attempt=number, slots=list(slots), candidates=offered[:20],
            place=self._placing.written(place), held=self._held(),
        )  # fmt: skip
        attempt = self._attempt_of(number, slots)
        self._attempt, self._ledger = attempt, Ledger(number, self.spec.world_size)
        for node in dict.fromkeys(slots):
            await self.nodes.ask(node, "keeper", request=self._announcement(attempt, node, offered))
        if self._incident is not None:
            self._incident.phases["schedule"] = time.monotonic() - began
            self._incident.next_attempt = number
        attempt.started = time.time()
        orders = [
            self.nodes.ask(
                node, "launch", timeout=60,
                **LaunchOrder(
                    attempt=number, run_id=self.spec.run_id, command=self.spec.command, cwd=self._cwd,
                    ranks={r: lr for r, lr in attempt.node_ranks(node).items() if r // self.spec.nproc == slot},
                    world_size=self.spec.world_size, slot=slot, slots=len(slots), nproc=self.spec.nproc,
                    master_addr=self.backend.address(slots[0]), master_port=port, restarts=self._state.restarts,
                    devices=self.backend.devices(slot, self.spec.nproc, len(slots)),
                ).as_message(),
            )
            for slot, node in enumerate(slots)
        ]  # fmt: skip
        await asyncio.gather(*orders)
        best = offered[0] if offered else None
        durable = max((c["step"] for c in offered if c["name"]), default=-1)
        self.view.attempt(number, self.spec.world_size, slots, best, durable)
        return attempt

    def _offer(
        self, slots: tuple[str, ...], inventories: dict[str, list[dict[str, Any]]]
    ) -> list[dict[str, Any]]:
        """What an attempt on these nodes may restore from."""
        rank_nodes = {
            slot * self.spec.nproc + i: n for slot, n in enumerate(slots) for i in range(self.spec.nproc)
        }
        places = {n: self._placing.of(n) for n in self._state.places}
        return candidates(
            self._state.seals, inventories, rank_nodes, brought=self._placing.brought(), places=places
        )

    def _announcement(self, attempt: Attempt, node: str, offered: list[dict[str, Any]]) -> Message:
        """What a keeper is told of an attempt."""
        return {
            "op": "attempt", "attempt": attempt.number, "world_size": self.spec.world_size,
            "ranks": {str(r): lr for r, lr in attempt.node_ranks(node).items()}, "candidates": offered,
            "place": self._placing.message(attempt.number),
        }  # fmt: skip

    async def _place_named(self, attempt: Attempt, url: str) -> None:
        """The script names where its checkpoints go; its ranks wait until every keeper knows whether they may."""
        before = self._placing.of(attempt.number)
        agreed = await self._placing.named(attempt.number, url)
        if self._attempt is not attempt:
            return
        if not agreed and self._placing.refusal is None:
            self._changed.set()  # started again under a number that is free there
            return
        nodes = list(dict.fromkeys(attempt.slots))
        answers = await self.nodes.ask_all(nodes, "keeper", request={"op": "inventory"}, timeout=20)
        offered = self._offer(attempt.slots, {n: a.get("inventory", []) for n, a in answers.items()})
        requests = {n: self._announcement(attempt, n, offered) for n in nodes}
        if self._placing.refusal is not None:
            for request in requests.values():
                request["place"] = {"refused": told(self._placing.refusal)}
        for node, request in requests.items():
            await self.nodes.ask_all([node], "keeper", request=request, timeout=20)
        if agreed and self._placing.of(attempt.number) != before:
            best = offered[0] if offered else None
            self.view.say(
                f"checkpoints go to {url}, as the script says; "
                + ("none is there yet" if best is None else f"it goes on from step {best['step']}")
            )
        self._changed.set()

    async def _end_misplaced(self, attempt: Attempt, ending: Ending) -> None:
        """Ends an attempt that could not have its place, before it did a step; raises RunStopped where none can."""
        refusal = self._placing.refusal
        if refusal is not None:
            await asyncio.sleep(_SETTLE_S)  # the ranks say it in their logs too
        await self._stop_all(attempt, ending)
        await self._record("ended", attempt=attempt.number, how=ending.kind, step=self._state.step)
        if refusal is None:
            self.view.say(
                f"the script keeps its checkpoints in {self._placing.current()}, where attempt {attempt.number} has "
                "been before: it is started again under a new number"
            )
            return
        await self._record("status", status="stopped", step=self._state.step, why=refusal.what)
        raise RunStopped(refusal.what, where=refusal.where, todo=refusal.todo)

    async def _wait_for_proof(self, *, accepted: bool) -> bool:
        """Waits for a person where an old process could overwrite what the next attempt saves; False where a stop came."""
        waiting = ""
        while True:
            for node in self._unproven.confirmed(self.run_dir):
                self._unproven.forget(node)
                await asyncio.to_thread(self.backend.forget, node)
                await self._record("made_sure", node=node)
                self.view.say(f"{node}: a person has made sure that nothing is left; going on")
            why = self._unproven.in_the_way(self.run_dir, accepted=accepted)
            if not why:
                return True
            if why != waiting:
                waiting, todo = why, self._unproven.what_to_do(self.run_dir)
                await self._record("waiting", why=why, todo=todo)
                self.view.say(
                    f"the next attempt waits for a person: an old process may still run and overwrite what the script saves "
                    f"by itself ({why}). {todo}"
                )
            if self._stop_requests:
                return False
            self._check_epoch()
            await self._pause(1.0)

    def _held(self) -> str:
        """How processes are held now: cgroup, parent or marks."""
        return self.backend.ownership().partition(":")[0]

    async def _start_failed(self, error: RunError) -> None:
        """An attempt that could not be launched: a node was lost meanwhile, or the disk is full. Tries again."""
        self._failed_starts += 1
        number = self._state.attempt
        self.view.say(f"attempt {number} could not be started: {error}")
        if self._failed_starts > _FAILED_STARTS_MAX:
            raise RunStopped(
                f"{self._failed_starts} attempts in a row could not be started: {error.what}", where=error.where,
                todo=error.todo or "See the agents' logs in the run directory",
            )  # fmt: skip
        attempt = self._attempt
        if attempt is not None and attempt.number == number and self._state.attempt_open:
            lost = await self._lost_nodes(attempt)
            gone = any(s is not NodeState.AGENT_LOST for s in lost.values())
            kind = ("node_lost" if gone else "agent_lost") if lost else "start_failed"
            await self._recover(attempt, Ending(kind, nodes=lost, error=str(error)))
        await self._pause(min(0.5 * 2**self._failed_starts, 30.0) if self._failed_starts > 1 else 0.0)

    async def _fill_slots(self) -> tuple[str, ...]:
        """Keeps each living node in its slot and fills empty slots with spares; brings nodes back if it must."""
        before = self._state.slots or self._allocation.nodes
        usable = [
            n for n in (*self._allocation.nodes, *self._allocation.spares)
            if n not in self._state.lost and n not in self._state.cordoned
        ]  # fmt: skip
        missing = await self.nodes.bring_up([n for n in usable if not self.nodes.nodes[n].up])
        for name in missing:
            await self._lose(name, "its agent did not come up")
        usable = [n for n in usable if self.nodes.nodes[n].up]
        free = [n for n in usable if n not in before]
        slots: list[str] = []
        for old in before:
            if old in usable:
                slots.append(old)
            elif free:
                slots.append(free.pop(0))
                await self._record("replaced", slot=len(slots) - 1, old=old, new=slots[-1])
                self.view.say(f"{slots[-1]} takes the place of {old}")
            elif old not in self._state.cordoned and self.backend.can_return(old):
                await self._return(old)
                slots.append(old)
            else:
                raise RunStopped(
                    f"no node is left to take the place of {old}",
                    where=str(self.run_dir.path),
                    todo="Give the run more --spares, or wait until the node is repaired, and use the same command",
                )
        return tuple(slots)

    async def _return(self, name: str) -> None:
        """Launches a lost node again, empty."""
        self._state.lost.discard(name)
        self.nodes.nodes[name].state = "down"
        if await self.nodes.bring_up([name]):
            raise RunStopped(f"{name} did not come back and there is no spare", where=str(self.run_dir.path))
        await self._record("returned", node=name)
        self.view.say(f"no spare is left; {name} was started again, without its memory")

    async def _seal(self, attempt: int) -> None:
        """Settles the keepers, then lists what is accepted from an attempt. After this nothing more counts."""
        nproc, lost = self.spec.nproc, self._state.lost
        gone = [s * nproc + i for s, n in enumerate(self._state.slots) if n in lost for i in range(nproc)]
        await self.nodes.ask_all(
            self.nodes.up(), "keeper", timeout=_KEEPER_SETTLE_S + 10,
            request={"op": "settle", "attempt": attempt, "deadline_s": _KEEPER_SETTLE_S, "gone": gone},
        )  # fmt: skip
        memory = [[m.attempt, m.step] for m in await self._in_memory() if m.attempt == attempt]
        accepted = await self._placing.committed(attempt)
        await self._record("seal", attempt=attempt, checkpoints=accepted, memory=memory)

    async def _found(self) -> list[Found]:
        """What lies where the run keeps its checkpoints; nothing where it cannot be read."""
        try:
            return await self._placing.found()
        except (OSError, UnbrokenError) as e:
            self.view.say(f"the checkpoints cannot be listed: {e}")
            return []

    async def _in_memory(self) -> list[Last]:
        """The snapshots that are whole in the keepers' memory, the newest first."""
        answers = await self.nodes.ask_all(
            self.nodes.up(), "keeper", request={"op": "inventory"}, timeout=INVENTORY_S
        )
        nproc = self.spec.nproc
        ranks = {s * nproc + i: n for s, n in enumerate(self._state.slots) for i in range(nproc)}
        return whole_in_memory({n: a.get("inventory", []) for n, a in answers.items()}, ranks)

    async def _accept_late(self) -> None:
        """Takes into the seals what was accepted in memory and has become durable since, also elsewhere."""
        for name in await self._placing.accept_elsewhere(self.spec.room_elsewhere):
            self.view.say(
                f"{name} was written to {self.nodes.elsewhere}, because its own place refused it: it counts"
            )
        for attempt, names in accept_late(await self._found(), self._state).items():
            await self._record("seal", attempt=attempt, checkpoints=list(names))

    # --- watching

    async def _watch(self, attempt: Attempt) -> Ending:
        looks: dict[int, ProcessLook] = {}
        looking: asyncio.Task[dict[int, ProcessLook]] | None = None
        stopping: asyncio.Task[None] | None = None
        while True:
            self._changed.clear()
            self._check_epoch()
            await self._write_later()
            self.view.progress(attempt, self._ledger)
            if attempt.all_finished:
                return Ending("completed")
            lost = await self._lost_nodes(attempt)
            if lost:
                kind = (
                    "node_lost" if any(s is not NodeState.AGENT_LOST for s in lost.values()) else "agent_lost"
                )
                return Ending(kind, nodes=lost, silent=self._silent(lost))
            if self._placing.refusal is not None:
                return Ending("refused")
            if self._placing.collided:
                return Ending("renumbered")
            if self._stop_requests:
                stopping = stopping or asyncio.create_task(self._stop_ranks(attempt))
                if attempt.all_ended or stopping.done():
                    await stopping
                    return Ending("interrupted")
            elif attempt.stopped_by_us() is not None:
                return Ending("lease")
            elif attempt.done_but_for_saving:
                if attempt.all_ended:  # the keepers hold what was not saved, and try on
                    return Ending("completed")
            elif attempt.failures():
                return Ending("failed")
            if news := self._following.news(attempt, time.time()):
                self.view.say(news)
            hang = self._judge(attempt)
            # What ends well may take its time: nothing is suspected of it before half of the deadline.
            ending = hang.idle_s < hang.declare_s / 2 and ends_normally(attempt)
            if hang.level is not Level.OK and not self._stop_requests and not ending:
                if looking is None:
                    self.view.suspect(hang)
                    await self._record_soft("suspected", attempt=attempt.number, idle_s=round(hang.idle_s, 2))
                    looking = asyncio.create_task(self._look(attempt))
                    self._spawn(self._reconcile(attempt))
                if hang.level is Level.DECLARED:
                    looks = await looking
                    return Ending("hung", hang=hang, looks=looks)
            elif hang.level is Level.OK and looking is not None and looking.done():
                looking = None
                self.view.say("it goes on: no hang")
            try:
                await asyncio.wait_for(self._changed.wait(), _TICK_S)
            except TimeoutError:
                continue

    def _judge(self, attempt: Attempt) -> Hang:
        attempt.detector.told = attempt.told or any(
            s.source == "page" and s.count for s in attempt.ranks.values()
        )
        if not attempt.detector.told and all(s.source == "page" for s in attempt.ranks.values()):
            attempt.detector.told = True  # nothing was heard yet: the deadlines of the first step hold
        return attempt.detector.look(time.monotonic(), attempt.views())

    async def _lost_nodes(self, attempt: Attempt) -> dict[str, NodeState]:
        """Nodes of the attempt whose agent is gone for good, with what is left of them."""
        lost: dict[str, NodeState] = {}
        silent_after = max(2.0, self.nodes.lease_s / 2)
        for name in dict.fromkeys(attempt.slots):
            node = self.nodes.nodes[name]
            if node.up and time.monotonic() - node.heard < silent_after:
                continue
            state = await asyncio.to_thread(self.nodes.check, name)
            if state is not NodeState.ALIVE:
                lost[name] = state
        return lost

    def _silent(self, lost: Mapping[str, NodeState]) -> dict[str, str]:
        """What the agents do that are there but do not answer; asked before they are ended."""
        return {n: self.backend.agent_state(n) for n, s in lost.items() if s is NodeState.UNREACHABLE}

    def _check_epoch(self, *, at_once: bool = False) -> None:
        """Raises Superseded where another supervisor has the run by now; looks once a second, or `at_once`."""
        now = time.monotonic()
        if at_once or now - self._epoch_checked > 1.0:
            self._epoch_checked = now
            if self._superseded():
                raise Superseded(
                    "another supervisor took over this run while this one did not run", where=str(self.run_dir.path),
                    todo=f"Watch it with `unbroken status {self.run_dir.path}`",
                )  # fmt: skip

    async def _look(self, attempt: Attempt) -> dict[int, ProcessLook]:
        """Stacks of all ranks, from all nodes at once; written to the incident's evidence folder."""
        nodes = [n for n in dict.fromkeys(attempt.slots) if self.nodes.nodes[n].up]
        found: dict[int, ProcessLook] = {}
        alive = {n: [r for r in attempt.node_ranks(n) if attempt.ranks[r].exit is None] for n in nodes}
        asks = [self.nodes.ask_all([n], "look", ranks=ranks, timeout=30) for n, ranks in alive.items()]
        folder = self.run_dir.evidence(self._state.incident + 1)
        for answers in await asyncio.gather(*asks):
            for answer in answers.values():
                for rank, k in answer["looks"].items():
                    look = ProcessLook(k["pid"], k["state"], k["wchan"], tuple(k["frames"]), k["text"])
                    found[int(rank)] = look
                    try:
                        folder.mkdir(parents=True, exist_ok=True)
                        (folder / f"stacks-rank-{rank}.txt").write_text(look.text)
                    except OSError as e:
                        _log.warning("stacks of rank %s could not be written: %s", rank, e)
        return found

    # --- stopping on request

    async def _stop_ranks(self, attempt: Attempt) -> None:
        """Asks for a stop at a step that no rank has passed; kills what has not stopped in time."""
        nodes = list(dict.fromkeys(attempt.slots))
        self.view.say(
            "stopping: the ranks are asked to save and exit at the next step (run.should_stop); Ctrl-C again kills them"
        )
        await self._wake_keepers(nodes)
        agreed = False
        margin = 2 + int(1.0 / max(attempt.step_time or 1.0, 1e-3))
        for _ in range(8):
            target = attempt.step + margin
            answers = await self.nodes.ask_all(nodes, "stop_at", step=target, timeout=INVENTORY_S)
            told = len(answers) == len(nodes) and all(a["told"] for a in answers.values())
            furthest = max((a["furthest"] for a in answers.values()), default=-1)
            if told and furthest < target:
                agreed = True
                break
            if not told:
                break
            margin *= 2
        grace = float(self._timeouts.stop)
        if not agreed:
            self.view.say(
                f"the script cannot be asked to stop at a step; it gets SIGTERM and {self._timeouts.stop} to exit"
            )
            ending = asyncio.create_task(
                self.nodes.ask_all(
                    nodes, "stop", attempt=attempt.number, signal=15, grace_s=grace, timeout=grace + 30
                )
            )
            while not ending.done() and self._stop_requests < 2:
                await asyncio.wait([ending], timeout=0.05)
            if not ending.done():
                self.view.say("asked again: killing the ranks")
                await self.nodes.ask_all(nodes, "stop", attempt=attempt.number, timeout=30)
            await ending
            return
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and not attempt.all_ended and self._stop_requests < 2:
            if attempt.failures() and all(e.code != Exit.RANK_STOPPED_ON_REQUEST for e in attempt.failures()):
                break
            if self._saved_but_for_room():
                break
            await asyncio.sleep(0.05)
        if self._saved_but_for_room():
            self.view.say(
                "the ranks have saved, and wait for the storage only: their keepers do that without them"
            )
        elif not attempt.all_ended:
            self.view.say("not all ranks stopped in time; killing them")
        await self.nodes.ask_all(nodes, "stop", attempt=attempt.number, timeout=30)

    def _saved_but_for_room(self) -> bool:
        """Whether what the ranks wait for, at their end, is whole in memory and lacks nothing but room on the storage."""
        waits = [w for w in self._waits.values() if w.get("attempt") == self._ledger.attempt]
        return bool(waits) and all(w["step"] == self._ledger.host_step for w in waits)

    # --- after an incident

    async def _recover(self, attempt: Attempt, ending: Ending) -> None:
        """Stops what is left, finds the verdict, decides; raises RunStopped where a restart cannot help."""
        began = time.monotonic()
        detected = time.time()
        if ending.kind == "failed":
            await self._let_settle(attempt)
            # A dying node's ranks may be heard of before the node is missed: then the node is the story.
            missed = await self._lost_nodes(attempt)
            if missed:
                gone = any(s is not NodeState.AGENT_LOST for s in missed.values())
                kind = "node_lost" if gone else "agent_lost"
                ending = replace(ending, kind=kind, nodes=missed, silent=self._silent(missed))
            elif attempt.stopped_by_us() is not None:
                ending = replace(ending, kind="lease")
        incident = Incident(
            number=self._state.incident + 1, attempt=attempt.number, kind=ending.kind, step=attempt.step,
            last_sign=self._last_sign(attempt, ending), detected=detected,
            nodes={n: s.value for n, s in ending.nodes.items()},
        )  # fmt: skip
        incident.phases["detect"] = max(0.0, detected - incident.last_sign)
        hang = self._hang_fact(attempt, ending, incident)
        stop_began = time.monotonic()
        await self._stop_all(attempt, ending)
        incident.phases["stop"] = time.monotonic() - stop_began
        diagnose_began = time.monotonic()
        lost = [n for n, state in ending.nodes.items() if state is not NodeState.AGENT_LOST]
        facts = facts_of(attempt, lost, hang)
        found = await self._verdict(attempt, ending, facts)
        oom = {r: s.oom for r, s in attempt.ranks.items()}
        verdict = with_root(with_kill(found, facts, oom), facts, ending.looks, ending.silent)
        verdict = blame_early_exit(verdict, facts, _places(attempt, ending), attempt.total)
        incident.verdict, killed = verdict, killed_from_outside(facts, verdict)
        incident.phases["diagnose"] = time.monotonic() - diagnose_began
        step = max(attempt.step, self._state.step)
        incident.step = step
        reached, stacks = attempt.step >= 0, place(ending.looks)
        decision = as_carried_out(
            self._decide(verdict, step, ending, killed, reached=reached, stacks=stacks),
            len(self._free_spares(list(ending.nodes))),
        )
        incident.action, incident.why = decision.action.value, decision.why
        self._write_incident(incident)
        await self._record("ended", attempt=attempt.number, how=ending.kind, step=step)
        await self._record(
            "incident", incident=incident.number, attempt=attempt.number, what=ending.kind, step=step,
            cause=_charged(verdict, ending, killed), fingerprint=fingerprint(verdict, stacks), reason=verdict.reason,
            outcome=verdict.outcome.value, action=incident.action, why=decision.why, reached=reached,
        )  # fmt: skip
        self.view.incident(incident, time.monotonic() - began)
        self._incident = incident
        for name, state in ending.nodes.items():
            if state is not NodeState.AGENT_LOST:
                await self._lose(name, verdict.reason or ending.kind)
        if decision.action is Action.STOP:
            await self._record("status", status="stopped", why=decision.why)
            await self._leave(flush=True)
            self.view.stopped(incident, self.run_dir)
            raise RunStopped(
                decision.why, where=f"incident {incident.number} in {self.run_dir.incident(incident.number)}",
                todo="Fix the cause and give the same command again (another one needs another --run-dir): "
                "it goes on from the last checkpoint, if one was saved",
            )  # fmt: skip
        for name in decision.exclude:
            if name in self.nodes.nodes and name not in ending.nodes:
                await self._cordon(name, verdict)
        if decision.delay_s:
            self.view.say(
                f"waiting {decision.delay_s:.0f} s before the restart (no progress since the last one)"
            )
            await self._pause(decision.delay_s)

    async def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._stop_requests:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), min(0.5, deadline - time.monotonic()))
            except TimeoutError:
                continue

    def _last_sign(self, attempt: Attempt, ending: Ending) -> float:
        """When the attempt was last known to be well, seconds since the epoch."""
        failures = attempt.failures()
        if ending.kind == "failed" and failures:
            return failures[0].time
        now, clock = time.time(), time.monotonic()
        heard = [now - (clock - self.nodes.nodes[n].heard) for n in ending.nodes]
        if heard:
            return min([now, *heard])
        if attempt.last is not None:
            return attempt.last.time
        kept = read_steps(self.run_dir.steps(attempt.number))
        return kept[-1].time if kept else attempt.started

    async def _let_settle(self, attempt: Attempt) -> None:
        """Waits a moment for the other ranks to end too: who was first is told by times, not by arrival."""
        deadline = time.monotonic() + _SETTLE_S
        seen, quiet = len(attempt.exits()), time.monotonic()
        while time.monotonic() < deadline and not attempt.all_ended:
            await asyncio.sleep(0.02)
            if len(attempt.exits()) != seen:
                seen, quiet = len(attempt.exits()), time.monotonic()
            elif time.monotonic() - quiet > _SETTLE_QUIET_S:
                return

    def _hang_fact(self, attempt: Attempt, ending: Ending, incident: Incident) -> HangFact | None:
        if ending.hang is None:
            return None
        late = late_ranks(ending.looks, ending.hang.behind)
        folder = self.run_dir.evidence(incident.number)
        return HangFact(
            step=attempt.step, phase=ending.hang.phase.name.lower(), idle_s=round(ending.hang.idle_s, 2), late=late,
            stacks=str(folder) if folder.is_dir() else None,
        )  # fmt: skip

    async def _stop_all(self, attempt: Attempt, ending: Ending) -> None:
        """Proves that no process of the attempt is left, or waits until what cannot be reached has stopped."""
        self._check_epoch(at_once=True)
        slots = list(dict.fromkeys(attempt.slots))
        reachable = [n for n in slots if self.nodes.nodes[n].up and n not in ending.nodes]
        answers = await self.nodes.ask_all(reachable, "stop", attempt=attempt.number, timeout=30)
        for name, answer in answers.items():
            await self._take_proof(name, proof.of_message(answer))
        for name in slots:
            if name in answers:
                continue
            state = ending.nodes.get(name) or await asyncio.to_thread(self.backend.state, name)
            if state is NodeState.AGENT_LOST:
                continue  # its next agent ends the ranks before it says hello
            if name in ending.nodes and state is not NodeState.UNREACHABLE:
                await self._take_proof(name, await asyncio.to_thread(self.backend.clear, name))
            elif not await self._clear_unreachable(name):
                wait = max(0.0, self.nodes.lease_ends(name) - time.monotonic())
                self.view.say(f"{name} cannot be reached: waiting {wait:.0f} s until its lease has expired")
                await self._pause(wait)

    async def _clear_unreachable(self, name: str) -> bool:
        """Ends a node whose agent hangs but whose processes we can reach; True where that is proven."""
        ended = await asyncio.to_thread(self.backend.clear, name)
        await self._take_proof(name, ended)
        return ended.gone

    async def _take_proof(self, name: str, ended: Ended) -> None:
        """Notes what ending a node's processes came to: parks it where some survived, and says what is not proven."""
        if ended.survivors:
            await self._park(name, ended.survivors)
        before = self._unproven.nodes.get(name)
        why = self._unproven.take(name, ended, self._state.attempt, self._held())
        if why:
            self.view.say(f"{name}: the end of attempt {self._state.attempt} is not proven: {why}")
        after = self._unproven.nodes.get(name)
        if after is None and before is not None:
            await self._record("proven", node=name)
        elif after is not None and after != before:
            await self._record("unproven", node=name, **asdict(after))

    async def _park(self, name: str, pids: Sequence[int]) -> None:
        reason = f"processes {list(pids)} survived kill -9"
        self.nodes.nodes[name].parked = reason
        await self._record("cordon", node=name, reason=reason, owner="unbroken", expires_s=86400)
        self._state.cordoned[name] = reason
        self.view.say(f"{name} is parked: {reason}")

    async def _cordon(self, name: str, verdict: Verdict) -> None:
        if not self._free_spares([]):
            self.view.say(
                f"{name} should be cordoned ({verdict.reason}), but no spare is left: it stays in use"
            )
            return
        await self._record("cordon", node=name, reason=verdict.reason, owner="unbroken", expires_s=86400)
        self.view.say(f"{name} is cordoned for a day: {verdict.reason} (confidence {verdict.confidence:.0%})")

    def _free_spares(self, gone: Sequence[str]) -> list[str]:
        """Nodes that could take another one's place now."""
        names = [*self._allocation.nodes, *self._allocation.spares]
        return [
            n
            for n in names
            if n not in self._state.slots
            and n not in gone
            and n in self.nodes.nodes
            and self.nodes.nodes[n].up
        ]

    async def _lose(self, name: str, reason: str) -> None:
        self._check_epoch(at_once=True)  # its processes may be another supervisor's by now
        await self._record("lost", node=name, reason=reason)
        self.nodes.give_up(name)
        ended = await asyncio.to_thread(self.backend.clear, name)
        if name in self._state.slots and not ended.gone:
            await self._take_proof(name, ended)

    async def _verdict(self, attempt: Attempt, ending: Ending, facts: Facts) -> Verdict:
        if ending.kind == "agent_lost":
            return agent_lost_verdict(next(iter(ending.nodes)), attempt.step)
        if ending.kind == "start_failed":
            verdict = agent_lost_verdict(attempt.slots[0], attempt.step)
            root = Root(text=f"the attempt could not be launched: {ending.error}", time=time.time())
            return replace(verdict, root=root, mitigation="Tried again.", decided_by="launch")
        lapsed = attempt.stopped_by_us()
        if ending.kind in ("supervisor_lost", "lease") and lapsed is not None:
            # What other ranks said and did after that, their own LeaseLapsed or a lost connection, followed from it.
            return lapsed_verdict(lapsed)
        if ending.kind == "supervisor_lost" and not attempt.failures():
            node = attempt.slots[0]
            verdict = agent_lost_verdict(node, attempt.step)
            text = "the supervisor was gone, and so are the ranks: nothing else is known of their end"
            return replace(verdict, root=Root(text=text, time=time.time()), decided_by="lost-supervisor")
        logs = logs_of(self.run_dir, attempt)
        return named_in_run(await self._diagnosis(logs, facts), logs, self.run_dir)

    def _decide(
        self, verdict: Verdict, step: int, ending: Ending, killed: bool, *, reached: bool, stacks: str
    ) -> Decision:
        history, budgets = self._state.history, self.spec.budgets
        if _is_ours(verdict, ending):
            if ending.kind == "lease":
                return decide_lapsed(step, history, budgets)
            if ending.kind == "agent_lost":
                return decide_agent_lost(step, history, budgets)
            return Decision(Action.RESTART, "free of charge: not the training's fault")
        return decide(verdict, step, history, budgets, killed=killed, reached=reached, stacks=stacks)

    # --- the end

    async def _finish(self, kind: str) -> str:
        """Lets the keepers make the last snapshot durable, ends agents and keepers, and says how it ended."""
        last = await self._leave(flush=True)
        attempt, step = self._state.attempt, self._state.step
        somewhere = last is not None and bool(self._farewell.holding or self._farewell.elsewhere)
        unsaved = ""
        try:
            if attempt and attempt not in self._state.seals:
                await self._seal_last(attempt, [[last.attempt, last.step]] if somewhere and last else [])
            await self._accept_late()
            if last is not None and kind == "completed" and not await self._is_saved(last):
                unsaved = self._why_unsaved(last)
                kind = "interrupted"  # so that the same command goes on, and makes that checkpoint
            await self._record("status", status=kind, step=step, **({"why": unsaved} if unsaved else {}))
        except CannotRecord as e:
            self.view.say(
                f"{e.what}: the next start will take this end for a lost supervisor, and lose nothing by it"
            )
        counted = {n for names in self._state.seals.values() for n in names}
        newest = [f.name for f in await self._found() if f.committed and f.name in counted]
        elsewhere = [n for b in self._placing.brought() if b.place == self.nodes.elsewhere for n in b.names]
        if last is not None and folder_name(last.step, last.attempt) in elsewhere:
            newest = [f"{folder_name(last.step, last.attempt)} in {self.nodes.elsewhere}"]
        self.view.finished(kind, step, newest)
        if unsaved:
            raise NotDurable(
                unsaved, where=str(self.run_dir.path),
                todo="Make room, and give the same command again: it goes on from the newest checkpoint",
            )  # fmt: skip
        return kind

    async def _is_saved(self, last: Last) -> bool:
        """Whether this snapshot is a checkpoint now, in its own place or elsewhere."""
        if not (self._farewell.unsaved or self._farewell.holding):
            return True
        name = folder_name(last.step, last.attempt)
        if any(name in b.names for b in self._placing.brought()):
            return True
        return any(f.committed and f.name == name for f in await self._found())

    def _why_unsaved(self, last: Last) -> str:
        """Of a run whose ranks are done, in words, why that is not all."""
        whys = list(self._farewell.unsaved.values())
        why = whys[0] if whys else "its keepers still try"
        return f"all ranks are done, but step {last.step}, the last checkpoint, is not saved: {why}"

    async def _seal_last(self, attempt: int, memory: list[list[int]]) -> None:
        """Seals the attempt that the run ends with; where its checkpoints cannot be listed the next start does."""
        try:
            accepted = await self._placing.committed(attempt, within_s=60)
        except (StorageError, RunStopped) as e:
            self.view.say(f"{e.what}; what attempt {attempt} saved is listed when the run goes on")
            return
        await self._record("seal", attempt=attempt, checkpoints=accepted, memory=memory)

    async def _leave(self, *, flush: bool) -> Last | None:
        """Ends all agents and keepers that are reachable, and proves that nothing is left on their nodes.

        Returns the newest snapshot that was whole in memory; what came of it is in `_farewell`.
        """
        names, last = self.nodes.up(), None
        began = time.monotonic()
        self._waits.clear()
        if flush and names:
            await self._wake_keepers(names)
            last = next(iter(await self._in_memory()), None)
            if last is not None and not self._is_durable(last):
                self.view.say(f"saving step {last.step} from memory")
        room_s = float(self._timeouts.room)
        extra_s = FLUSH_S if self.nodes.elsewhere else 0.0
        asked = self._stop_requests

        def patient_until() -> float:
            if not self._waits:  # it writes: beyond the grace of a stop the keepers do that without us
                within = began + FLUSH_S + ANSWER_S + extra_s
                return within if self._stop_first is not None else within + room_s
            if self._stop_requests > asked:
                return 0.0
            if self._stop_first is not None:
                return max(self._stop_first + float(self._timeouts.stop), began + WAIT_LEAST_S)
            return began + FLUSH_S + room_s + extra_s

        farewell = await say_farewell(
            self.nodes, names, last, flush=flush, room_s=room_s, patient_until=patient_until, extra_s=extra_s
        )
        self._farewell = farewell
        if flush:
            self.view.kept(farewell, last, room_s)
        for name in [n for n in names if n not in farewell.holding]:
            deadline = time.monotonic() + 3
            while (
                time.monotonic() < deadline
                and await asyncio.to_thread(self.backend.state, name) is not NodeState.GONE
            ):
                await asyncio.sleep(0.02)
        for name in [n for n in self.nodes.nodes if n not in farewell.holding]:
            ended = await asyncio.to_thread(self.backend.clear, name)
            if ended.survivors:
                self.view.say(f"processes {list(ended.survivors)} on {name} survive kill -9")
            elif not ended.proven:
                self.view.say(f"{name}: it is not proven that nothing of the run is left: {ended.why}")
            if not ended.gone and name in self._state.slots:
                # For the same command given again: what it starts must not run beside this.
                self._unproven.take(name, ended, self._state.attempt, self._held())
                await self._record_soft("unproven", node=name, **asdict(self._unproven.nodes[name]))
        return last

    async def _wake_keepers(self, names: list[str]) -> None:
        """A keeper that somebody stopped holds the newest snapshot: at an end it has to go on."""
        answers = await self.nodes.ask_all(names, "wake", timeout=INVENTORY_S)
        for name, answer in answers.items():
            if answer.get("woken"):
                self.view.say(
                    f"{name}: its keeper (process {answer['woken']}) was stopped by a signal; it is continued so that it can save"
                )

    def _is_durable(self, last: Last) -> bool:
        known = {(a, s) for s, a in self._state.durable}
        return (last.attempt, last.step) in known

    # --- what agents tell

    def _on_message(self, node: Node, message: Message) -> None:
        attempt = self._attempt
        op = message.get("op")
        if attempt is None:
            # From before it is known whether the running attempt is adopted: kept until then.
            self._early.append((node, message))
            return
        if op == "progress" and message["attempt"] == attempt.number:
            steps = attempt.take(message["sent"], message["ranks"])
            if steps:
                self.view.steps(attempt, steps)
                self._on_steps(attempt)
                self._changed.set()
        elif op == "exited" and message["attempt"] == attempt.number:
            self._note_exit(attempt, message["rank"], message)
            self._changed.set()
        elif op == "keeper":
            self._on_keeper(node, message)

    def _note_exit(self, attempt: Attempt, rank: int, message: Message) -> None:
        state = attempt.ranks[rank]
        if state.exit is None:
            state.exit = RankExit(
                rank=rank, node=state.node, code=message["code"], signal=message["signal"], time=message["time"],
                ours=message["ours"],
            )  # fmt: skip
            state.oom = message.get("oom")

    def _on_steps(self, attempt: Attempt) -> None:
        first = attempt.first_step
        if first is not None and self._first_told != attempt.number:
            self._first_told = attempt.number
            self._spawn(
                self._record_soft(
                    "first_step", attempt=attempt.number, step=first.step,
                    seconds=round(first.time - attempt.started, 3),
                )
            )  # fmt: skip
        if self._incident is not None and attempt.caught_up is not None and first is not None:
            incident, self._incident = self._incident, None
            up = attempt.caught_up
            incident.resumed = up.time
            incident.resumed_step = first.step
            incident.steps_lost = max(0, incident.step - first.step + 1)
            start = attempt.attached_at or attempt.started
            incident.phases["start"] = max(0.0, start - attempt.started)
            incident.phases["restore_and_first_step"] = max(0.0, first.time - start)
            incident.phases["replay"] = max(0.0, up.time - first.time)
            self._spawn(self._tell_resumed(incident, attempt))

    async def _tell_resumed(self, incident: Incident, attempt: Attempt) -> None:
        self._write_incident(incident)
        await self._record_soft(
            "resumed", incident=incident.number, attempt=attempt.number, step=incident.step,
            first_step=incident.resumed_step, steps_lost=incident.steps_lost,
            seconds=round((incident.resumed or 0) - incident.detected, 3),
        )  # fmt: skip
        self.view.resumed(incident)

    def _on_keeper(self, node: Node, event: Message) -> None:
        kind = event.get("event")
        if kind in ("keeper_lost", "keeper_back"):
            self.view.say(
                f"{node.name}: its keeper {'died; another is starting' if kind == 'keeper_lost' else 'is back'}"
            )
            self._spawn(self._record_soft(kind, node=node.name))
            if kind == "keeper_back" and self._attempt is not None:
                self._spawn(self._reconcile(self._attempt))
            return
        if kind == "waiting":
            self._on_waiting(node, event)
            return
        if event.get("attempt") != self._ledger.attempt:
            return
        if kind == "place" and self._attempt is not None:
            self._spawn(self._place_named(self._attempt, str(event["place"])))
            return
        if kind == "host" and self._ledger.on_host(event["step"], event["rank"]):
            self._tell_complete(event["attempt"], event["step"])
        elif kind == "durable" and self._ledger.on_durable(event["step"]):
            self._spawn(
                self._record_soft(
                    "durable", attempt=event["attempt"], step=event["step"], seconds=event.get("seconds")
                )
            )
        elif kind == "restored":
            self.view.restored(event)
            key = (event.get("of"), event.get("step"))
            if self._attempt is not None and key in self._state.brought_offers:
                # What was trained after it does not count any more, so it is nothing that has to be caught up with.
                self._attempt.floor = min(self._attempt.floor, int(event["step"]))
            self._spawn(
                self._record_soft(
                    "restored", attempt=event["attempt"], step=event.get("step"), of=event.get("of"),
                    skipped=event.get("skipped", []),
                )
            )  # fmt: skip
        elif kind == "superseded":
            total = self._ledger.on_superseded(event["step"])
            if total.bit_count() != 1:  # the 1st, 2nd, 4th, 8th ... are told
                return
            self.view.say(
                f"checkpoints are asked for faster than the storage takes them: step {event['step']} is left out for step "
                f"{event['by']} ({total} so far)"
            )
            self._spawn(
                self._record_soft(
                    "superseded", attempt=event["attempt"], step=event["step"], by=event["by"], total=total
                )
            )
        elif kind == "failed":
            self._ledger.failed[event["step"]] = event.get("why", "")
            self.view.say(
                f"checkpoint of step {event['step']} failed on rank {event.get('rank')}: {event.get('why')}"
            )
            self._spawn(
                self._record_soft(
                    "checkpoint_failed", attempt=event["attempt"], step=event["step"], rank=event.get("rank"),
                    why=event.get("why"),
                )
            )  # fmt: skip

    def _on_waiting(self, node: Node, event: Message) -> None:
        self._waits[node.name] = event
        self.view.say(
            f"{node.name}: step {event['step']} cannot be saved yet: {event.get('why')}; tried again for up to "
            f"{Duration(event.get('seconds', 0.0))} (--wait-for-room)"
        )
        self._changed.set()

    # --- the journal

    async def _record(self, kind: str, **fields: Any) -> None:
        """Journals what is about to be acted on; waits while the disk refuses, because nothing may go before.

        Raises CannotRecord once a stop was asked for and its grace is over.
        """
        journal = self._journal
        if journal is None:
            return
        complained, began = False, 0.0
        while True:
            try:
                await self._write_later()
                if not self._unwritten:
                    self._state.apply(journal.append(kind, **fields))
                    return
            except OSError as e:
                if not complained:
                    complained = True
                    began = time.monotonic()
                    self.view.say(f"the run directory cannot be written ({e.strerror}); waiting until it can")
                if self._stop_first is not None:
                    grace = self._stop_first + float(self._timeouts.stop)
                    if time.monotonic() > max(grace, began + WAIT_LEAST_S):
                        raise CannotRecord(
                            f"the journal cannot be written ({e.strerror})", where=str(self.run_dir.path)
                        ) from e
            await asyncio.sleep(0.5)

    async def _record_soft(self, kind: str, **fields: Any) -> None:
        """Journals news that nothing depends on; kept in memory while the disk refuses."""
        self._unwritten.append((kind, fields))
        await self._write_later()

    def _write_incident(self, incident: Incident) -> None:
        """Writes the incident's file now, or later where the disk refuses."""
        try:
            incident.write(self.run_dir)
            self._unwritten_incidents.pop(incident.number, None)
        except OSError as e:
            if incident.number not in self._unwritten_incidents:
                _log.warning(
                    "incident %d cannot be written yet (%s); tried again until it can", incident.number, e
                )
            self._unwritten_incidents[incident.number] = incident

    async def _write_later(self) -> None:
        for incident in list(self._unwritten_incidents.values()):
            self._write_incident(incident)
        while self._unwritten and self._journal is not None:
            kind, fields = self._unwritten[0]
            try:
                self._state.apply(self._journal.append(kind, **fields))
            except OSError:
                del self._unwritten[:-10000]
                return
            self._unwritten.pop(0)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._note_done)

    def _note_done(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("work beside the run failed: %s", error)


def _is_ours(verdict: Verdict, ending: Ending) -> bool:
    """Whether the training had no part in it."""
    return ending.kind in ("agent_lost", "supervisor_lost", "lease", "start_failed") and not verdict.category


def _charged(verdict: Verdict, ending: Ending, killed: bool) -> str:
    """The budget of an incident: what is free must not use up that of failures nobody can explain."""
    if not _is_ours(verdict, ending):
        return cause_of(verdict, killed=killed)
    return {"lease": LAPSED, "agent_lost": AGENT}.get(ending.kind, FREE)


def _places(attempt: Attempt, ending: Ending) -> dict[int, RankPlace]:
    frames = {r: look.frames for r, look in ending.looks.items()}
    return {r: RankPlace(s.step, frames.get(r, ())) for r, s in attempt.ranks.items()}
