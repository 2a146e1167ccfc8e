"""Runs one evaluation: checks, prepares, plans, feeds workers, keeps what they answer, hands it to scoring.

One process, one event loop, the only writer of the evaluation's files. It may be killed at any instant: answers that
reached it are on disk, the same command goes on with the rest. Workers may join and leave while it runs.

This file is long because it is one state machine; what is pure is elsewhere: planning in planner.py, decisions in
dispatch.py, bookkeeping of a connection in live.py, tasks on their way in and out in intake.py and landing.py, the
report in outcome.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ... import atomic
from ...errors import EvaluationError, ModelChanged, RunInterrupted, UnbrokenError
from ...link.bounds import HELLO_BYTES, HELLO_S, Malformed, Message
from ...link.listener import Listener
from ...private import write_secret
from ..contracts import (
    ModelSpec,
    PreparedTask,
    Report,
    Score,
    ScoreDone,
    ScoringPool,
    Suite,
    Task,
    Trial,
    WorkerSeen,
    digest,
)
from ..engines import Engine, Slot
from ..engines.live import Link, Progress, Visit, Watcher
from ..engines.wire import VERSION, pack, receive
from ..model.cache import Lease, lease
from ..model.locate import Located, beside, locate, model_files
from ..plan.dispatch import Dispatcher
from ..plan.outcome import BlockTime, Measured, report, with_times_of
from ..plan.planner import SIMULATED_PARCELS, Costs, Work
from ..plan.priors import (
    START,
    Expected,
    Features,
    Observation,
    PriorBook,
    features_of,
    load_book,
    save_merged,
)
from ..preparation.prepare import Preparers, revive
from ..processes.imports import Imports
from ..result.answers import AnswerStore
from ..result.folder import FULL, EvalDir, unwritable
from ..result.journal import Journal, events
from ..suite import received
from ..suite.codec import encode
from ..suite.registry import check_options, open_scoring
from ..suite.staged import encode_sample, read_block
from .intake import Intake
from .landing import Landing
from .settings import Abort, Settings

_log = logging.getLogger(__name__)
TICK_S = 0.05
STAND_BY_S = 0.3
"""If data and model are not there by then, workers are told to import what they will need."""
RESTARTS = 3
"""A worker's place is filled again so often without one answered block in between."""


class Coordinator:
    """One evaluation by one process."""

    def __init__(
        self, suite: Suite, spec: ModelSpec, folder: EvalDir, engine: Engine, settings: Settings = Settings(), *,
        scoring: Callable[[int], ScoringPool] = open_scoring, watcher: Watcher | None = None, checkpoint: str = "",
        imports: Imports | None = None,
    ) -> None:  # fmt: skip
        """`imports`: a fork server that has the harnesses, for preparing. `checkpoint`: the hash, where it is known already (a committed checkpoint's manifest); else it is computed."""
        self.suite = suite
        self.spec = spec
        self.folder = folder
        self.engine = engine
        self.settings = settings
        self.open_scoring = scoring
        self.watcher = watcher
        self.imports = imports
        self.asked_checkpoint = checkpoint
        self.links: dict[str, Link] = {}
        self.prepared: dict[str, PreparedTask] = {}
        self.states: dict[str, str] = {}
        self.groups: list[Score] = []
        self.errors: dict[str, str] = {}
        self.trials: list[Trial] = []
        self.blocks: list[BlockTime] = []
        self.scorings: list[ScoreDone] = []
        self.seen: list[WorkerSeen] = []
        self.expected: dict[str, Expected] = {}
        self.problem: UnbrokenError | None = None
        self.stopping = ""
        self._gaps: list[float] = []
        self._reused = 0
        self._visits = 0
        self._unprepared = 0
        self._slots: dict[str, tuple[Slot, int]] = {}
        self._started: dict[str, float] = {}
        self._engine_at = 0.0
        self._staffed = False
        self._gpu_end = 0.0
        self._alone_since: float | None = None
        self._wake = asyncio.Event()
        self._last_shown = 0.0
        self._last_why = "all ended"
        self.journal: Journal | None = None
        self._weaknesses: list[str] = []
        """What the sandbox of generated code lacks on this machine."""

    # ------------------------------------------------------------------------------------------ the whole

    def run(self) -> Report:
        """Evaluates, and returns the report that is also in the folder. Raises UnbrokenError."""
        check_options(self.spec)
        try:
            with self.folder.lock():
                return asyncio.run(self._run())
        except Abort as e:
            raise e.error from None
        except OSError as e:
            if e.errno not in FULL:
                raise
            raise self._unwritable(e) from e

    async def _run(self) -> Report:
        self._wake = asyncio.Event()
        s, loop = self.settings, asyncio.get_running_loop()
        incarnation = 1 + sum(1 for e in events(self.folder.journal) if e["event"] == "begin")
        preparers = Preparers(s.prepare_workers, self.folder.log("prepare"), self.imports)
        self.intake = Intake(
            self.suite, self.spec, self.folder, preparers, self.errors, keep_going=s.keep_going
        )
        self._halt = threading.Event()
        find = functools.partial(
            locate,
            self.spec,
            cache=s.cache,
            places=s.places,
            remote=self.engine.remote,
            checkpoint=self.asked_checkpoint,
            halt=self._halt,
        )
        self._there = asyncio.Event()
        self._ahead = asyncio.create_task(self._stand_by())
        checking, finding = asyncio.create_task(self._tasks()), loop.run_in_executor(None, find)
        try:
            await self._unless_ended({checking, finding})
            (tasks, known), self.located = checking.result(), finding.result()
            key = self.spec.key(self.located.checkpoint, await loop.run_in_executor(None, beside, self.spec))
            self.folder.claim({**self._asked(), "checkpoint": self.located.checkpoint})
            self.journal = Journal(self.folder.journal)
            self._note(
                "begin",
                incarnation=incarnation,
                key=key,
                checkpoint=self.located.checkpoint,
                tasks=len(tasks),
            )
            for why in self._weaknesses:
                self._note("sandbox", why=why)
            self.states = {t.name: "failed" if t.name in self.errors else "waiting" for t in tasks}
            with contextlib.closing(AnswerStore(self.folder.answers(key), incarnation)) as self.store:
                pool = functools.partial(self.open_scoring, s.cpu_workers)
                with contextlib.closing(
                    Landing(self.folder, key, self.located.checkpoint, self.store, pool, self._wake.set)
                ) as self.landing:
                    await self._evaluate(tasks, known)
            self.groups = await self.intake.combine(
                [self.prepared[t] for t in self.states if t in self.prepared], self.landing.scores
            )
            return self._finish()
        finally:
            self._halt.set()
            checking.cancel()
            self._ahead.cancel()
            preparers.close()
            if self.journal is not None:
                journal, self.journal = self.journal, None
                journal.close()
            await loop.run_in_executor(None, self.engine.close)  # who stood by for nothing
            _, found = await asyncio.gather(checking, finding, return_exceptions=True)
            if isinstance(found, Located) and found.held is not None:
                found.held.release()

    async def _stand_by(self) -> None:
        """Workers import beside the checks and the fetch of the model; not where the same command was finished before."""
        if self.folder.report.exists():
            return
        await asyncio.sleep(STAND_BY_S)
        with contextlib.suppress(OSError):  # no more processes: said when they are started in earnest
            self.engine.stand_by(self.settings.slots, self.folder.cluster, self.spec.backend)
        await self._there.wait()
        self.engine.take_devices()

    async def _tasks(self) -> tuple[list[Task], dict[str, PreparedTask]]:
        """The leaf tasks, and those that are prepared; what is missing is said while the model is on its way."""
        self.folder.compare(self._asked())
        tasks = await self.intake.expand()
        fetch = functools.partial(model_files, self.spec, self.folder.model_files)
        files = await asyncio.get_running_loop().run_in_executor(None, fetch)
        known = await self.intake.check(tasks, files)
        self._there.set()
        if any(t.metric == "code" for t in tasks):
            from ..scoring.sandbox import weaknesses

            self._weaknesses = await asyncio.get_running_loop().run_in_executor(None, weaknesses)
            for why in self._weaknesses:
                _log.warning("%s; docs/security.md says what follows", why)
        return tasks, known

    async def _unless_ended(self, doing: set[asyncio.Future[Any]]) -> None:
        """Waits for all of them; raises what the first of them raises, or the end of the run if that comes before."""
        while doing:
            self._raise_end()
            self._show()
            done, doing = await asyncio.wait(doing, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()

    def _asked(self) -> dict[str, Any]:
        return {
            "suite": digest(_question(self.suite)),
            "model": {k: v for k, v in encode(replace(self.spec, batch_size=0)).items() if k != "batch_auto"},
        }

    # ----------------------------------------------------------------------------------------- the running

    async def _evaluate(self, tasks: Sequence[Task], known: dict[str, PreparedTask]) -> None:
        s = self.settings
        self.book = load_book(s.priors) if s.priors else PriorBook()
        load_s = self.book.start_s(self.located.model_b, s.device) if s.load_s is None else s.load_s
        costs = Costs(load_s, 0.005, s.cpu_workers)
        widths = [max(1, slot.width) for slot in s.slots] or [self.spec.gpus]
        self.dispatcher = Dispatcher((), widths, costs, stealing=s.stealing)
        waiting = [t for t in tasks if t.name not in known and t.name not in self.errors]
        self._unprepared = len(waiting)
        self._add(list(known.values()), budget=SIMULATED_PARCELS)
        needed = self._unprepared > 0 or not self.dispatcher.finished
        self._check_widths(tasks, widths)
        async with contextlib.AsyncExitStack() as stack:
            doing: list[asyncio.Task[None]] = []
            if needed:
                await stack.enter_async_context(self._listening())
                order = sorted(waiting, key=lambda t: -self._guess(t))
                doing = [asyncio.create_task(self._prepare_and_add(t)) for t in order]
                doing.append(asyncio.create_task(self._start_workers(stack)))
                for d in doing:
                    d.add_done_callback(self._look_at)
            try:
                await self._loop()
            finally:
                self._halt.set()
                self._ahead.cancel()
                for d in doing:
                    d.cancel()
                self._stop_workers(self.stopping or "done")
                for name in self._slots:
                    if name not in self.links:
                        self.engine.end(name)  # it has not connected yet, and will find nobody
                if needed:
                    await asyncio.get_running_loop().run_in_executor(None, self.engine.close)
                    await self._until_gone(5.0)

    def _check_widths(self, tasks: Sequence[Task], widths: Sequence[int]) -> None:
        for t in tasks:
            if self.settings.slots and t.gpus > max(widths):
                raise Abort(EvaluationError(f"task '{t.name}' needs a worker with {t.gpus} GPUs, the widest has {max(widths)}",
                                            where=self.suite.name, todo=f"Give --gpus-per-worker {t.gpus}"))  # fmt: skip

    def _guess(self, task: Task) -> float:
        """Expected seconds of a task that is not prepared yet: the order in which to prepare."""
        said = self.suite.priors.get(task.name)
        found = self.book.expect(task.name, said.samples if said and said.samples else 1000, features=Features(), model_b=self.located.model_b,
                                 device=self.settings.device, said=said)  # fmt: skip
        return found.seconds + found.score_s

    async def _prepare_and_add(self, task: Task) -> None:
        try:
            self._add([await self.intake.prepare(task)])
        except Exception as found:  # noqa: BLE001  whatever it is, the others must not wait for this task
            e = _told(found, f"task {task.name}")
            self.errors[task.name] = str(e)
            self.states[task.name] = "failed"
            self._note("task_failed", task=task.name, why=str(e))
            if not self.settings.keep_going:
                self._abort(e)
        finally:
            self._unprepared -= 1
        self._feed_all()

    def _add(self, found: Sequence[PreparedTask], *, budget: int | None = None) -> None:
        """Plans prepared tasks; what an earlier command answered is not asked again."""
        work, landed = [], []
        for p in found:
            name = p.task.name
            self.prepared[name] = p
            done = self.store.scan(p)
            self._say_passed_over(name)
            left = [b for b in range(p.blocks) if b not in done]
            self._reused += sum(len(p.samples_of(b)) for b in done)
            self.expected[name] = e = self.book.expect(
                name,
                p.samples,
                features_of(p),
                self.located.model_b,
                self.settings.device,
                self.suite.priors.get(name),
            )
            self._note(
                "task",
                task=name,
                samples=p.samples,
                blocks=p.blocks,
                reused=len(done),
                expected_s=e.seconds,
                prior=e.source,
            )
            if not left:
                self.states[name] = "landed"
                landed.append(name)
                continue
            self.states[name] = "running"
            weights = p.weights or tuple(float(len(p.samples_of(b))) for b in range(p.blocks))
            total = sum(weights) or 1.0
            work.append(
                Work(
                    name,
                    tuple(max(e.seconds * weights[b] / total, 1e-6) for b in left),
                    tuple(left),
                    e.score_s,
                    p.task.gpus,
                )
            )
        if budget is None:
            self.dispatcher.add(work)
        else:
            self.dispatcher.add(work, budget=budget)
        for name in landed:
            self._land(name)

    def _say_passed_over(self, task: str) -> None:
        """Lines of earlier commands that cannot be used are no defect of this one: their blocks are asked again."""
        for where, why in self.store.passed_over(task):
            self._note("passed_over", task=task, where=where, why=why)
            _log.warning("%s: stored answers were passed over, and are asked again: %s", where, why)

    async def _loop(self) -> None:
        """Until every task is scored or has failed."""
        while True:
            self._raise_end()
            gpu_done = self._unprepared == 0 and self.dispatcher.finished
            if gpu_done and not self._gpu_end:
                self._gpu_end = time.time()
                self._halt.set()  # whoever joined was faster than the fetch here
                self._stop_workers("every answer is here")
            self._collect()
            if gpu_done and self.landing.idle:
                self._collect()  # what ended since the look above
                return
            if not gpu_done:
                self._watch_workers()
            self._show()
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), TICK_S)

    def _raise_end(self) -> None:
        """Raises Abort if the run cannot go on, or was told to stop."""
        if self.problem is not None:
            raise Abort(self.problem)
        if self.stopping:
            todo = "The same command goes on where it was"
            raise Abort(RunInterrupted(f"stopped: {self.stopping}", where=str(self.folder.root), todo=todo))

    async def _until_gone(self, within_s: float) -> None:
        """Waits for the workers to close their connections; then closes them, so that the report has them all."""
        deadline = time.monotonic() + within_s
        while self.links and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for link in list(self.links.values()):
            self._gone(link, "it did not end when asked to")
            link.writer.close()

    def stop(self, why: str) -> None:
        """Ends the run as soon as it can: workers are told to stop after their block. For signal handlers."""
        self.stopping = self.stopping or why
        self._wake.set()

    # ----------------------------------------------------------------------------------------- the workers

    @contextlib.asynccontextmanager
    async def _listening(self) -> Any:
        self.token = secrets.token_hex(16)
        wide = self.engine.remote or not self.settings.slots
        listener = self._listener = Listener(self._serve, "0.0.0.0" if wide else "127.0.0.1")
        port = listener.address[1]
        host = (self.settings.advertise or _address()) if wide else "127.0.0.1"
        where = {"host": host, "port": port, "token": self.token, "shared": str(self.folder.shared.resolve())}
        write_secret(self.folder.cluster, json.dumps(where).encode())
        try:
            yield
        finally:
            self.folder.cluster.unlink(missing_ok=True)
            listener.close()
            for link in list(self.links.values()):
                link.writer.close()

    async def _start_workers(self, stack: contextlib.AsyncExitStack) -> None:
        """The engine's, once this node has its copy of the model; others may have joined and begun by then."""
        await self._hold_copy(stack)
        if self.located.held is not None:
            self.located.held.release()
        if not self._gpu_end:
            self._ahead.cancel()
            self._engine_at = self._engine_at or time.time()
            for slot in self.settings.slots:
                self._start(slot)
        self._staffed = True

    def _look_at(self, done: asyncio.Task[None]) -> None:
        """What nobody caught ends the run; the fetch that nobody needs any more may fail."""
        if not done.cancelled() and (e := done.exception()) is not None and not self._gpu_end:
            self._abort(_told(e, str(self.folder.root)))

    async def _hold_copy(self, stack: contextlib.AsyncExitStack) -> None:
        """Keeps this node's copy while workers come and go; fetches it if it is not there."""
        found = self.located
        if (
            found.cached
            and not self.engine.remote
            and self.settings.slots
            and found.source is not None
            and found.manifest is not None
        ):
            take = functools.partial(
                lease, found.source, found.manifest, self.settings.places, halt=self._halt
            )
            taking = asyncio.get_running_loop().run_in_executor(None, take)
            stack.push_async_callback(_give_back, taking)
            await asyncio.shield(taking)

    def _start(self, slot: Slot, tries: int = 0) -> None:
        self._slots[slot.name] = (slot, tries)
        self._started[slot.name] = time.time()
        self.engine.start(slot, self.folder.cluster)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link: Link | None = None
        why, blame = "the connection ended", True
        try:
            hello = await asyncio.wait_for(receive(reader, HELLO_BYTES), HELLO_S)
            if hello is None or not received.admits(hello, self.token):
                return
            self._listener.known(writer)
            link = self._welcome(hello, writer)
            while link is not None and (message := await receive(reader)) is not None:
                link.heard = time.monotonic()
                self._on(link, message)
                await writer.drain()
                if message["op"] == "bye":
                    why = link.leaving
        except (OSError, TimeoutError):
            pass  # as a closed connection: `_gone` says what follows
        except Malformed as e:  # the worker's, and no one else's: what it held goes to others
            why, blame = f"it sent a message that makes no sense: {e}", isinstance(e, received.BadAnswers)
        except Exception as e:  # noqa: BLE001  the server would swallow it: it is ours, and ends the run
            self._abort(
                e
                if isinstance(e, UnbrokenError)
                else EvaluationError(f"the coordinator failed: {type(e).__name__}: {e}")
            )
        finally:
            if link is not None:
                self._gone(link, why, blame=blame)
            writer.close()
            self._wake.set()

    def _welcome(self, m: Message, writer: asyncio.StreamWriter) -> Link | None:
        """The link of a worker that showed the token; None where it is refused. Raises Malformed."""
        known = m.get("version") == VERSION
        hello = received.hello(m) if known else None
        if hello is None or hello.name in self.links:
            why = "another version" if hello is None else "a worker of this name is here"
            writer.write(pack({"op": "refused", "why": why}))
            self._note("refused", name=received.words(m.get("name")), why=why)
            return None
        gpus = hello.gpus
        slot = self._slots.get(hello.name)
        width = max(1, slot[0].width if slot else len(gpus))
        shown = slot[0].gpus if slot and slot[0].gpus else gpus
        now = time.time()
        started = self._started.get(hello.name, now)
        link = Link(hello.name, hello.node, shown, width, writer, now - hello.now, hello.sees, started, hello.pid,
                    0.0 if self.engine.remote else now - started)  # fmt: skip
        self._engine_at = self._engine_at or now
        self.links[link.name] = link
        self._note("join", worker=link.name, node=link.node, gpus=list(gpus), pid=link.pid)
        link.send(
            "welcome",
            suite=self.suite.name,
            spec=encode(self.spec),
            model=self.located.told(self.settings.places),
            beat_s=self.settings.beat_s,
        )
        return link

    def _on(self, link: Link, m: Message) -> None:
        op, busy = m["op"], self.dispatcher.workers.get(link.name)
        held = busy.queue if busy is not None else ()
        if op == "block":
            self._on_block(link, received.block(m, held, self.prepared))
        elif op == "ready":
            if link.ready:
                raise Malformed("it was ready before")
            link.fetch_s, link.load_s, link.uncompiled = received.ready(m)
            link.ready = time.time()
            alive_s = max(0.0, link.ready - link.started)
            link.fetch_s, link.load_s = min(link.fetch_s, alive_s), min(link.load_s, alive_s)
            self._note("ready", worker=link.name, fetch_s=link.fetch_s, load_s=link.load_s)
            self.dispatcher.join(link.name, link.width)
            self._feed(link)
        elif op == "failed":
            self._on_failed(link, *received.failed(m, held))
        elif op == "yielded":
            given = received.yielded(m, held)
            for v in link.visits.values():
                v.shared = v.shared or any(t == v.task for t, _ in given)
            self.dispatcher.yielded(link.name, given)
            self._feed_all()
        elif op == "unfit":
            error = revive(received.unfit(m))
            link.leaving = error.what or "unfit"
            if link.name in self._slots:
                self._slots[link.name] = (self._slots[link.name][0], RESTARTS)
            self._note("unfit", worker=link.name, why=str(error))
            others = any(not x.leaving for x in self.links.values())
            if isinstance(error, ModelChanged) or (
                link.name in self._slots and not others and not self.blocks
            ):
                if self.engine.remote:
                    error.what += f" ({link.name} on {link.node})"
                self._abort(error)  # nobody could load it: trying again would not help
        elif op == "bye":
            link.leaving = received.words(m.get("why") or "left")
        elif op == "beat":
            at = received.beat(m)
            if at != link.at:
                link.at, link.since = at, time.monotonic()
        else:
            raise Malformed(f"'{op:.40}' is nothing that a worker says")

    def _on_block(self, link: Link, m: received.Block) -> None:
        task, number, bad = m.task, m.number, m.problems
        prepared = self.prepared[task]
        started, ended = link.believable(m.started, m.ended)
        self._slots[link.name] = (
            (self._slots[link.name][0], 0) if link.name in self._slots else (Slot(link.name), 0)
        )
        before = link.note_block(m.visit, number, started, ended, prefetched=True)
        if before is not None:
            self._close_visit(link, before.number)
        open_before = self.dispatcher.is_open((task, number))
        if (
            bad
            and self.dispatcher.failed(
                link.name, (task, number), f"{len(bad)} samples without an answer: {bad[0]}"
            )
            == []
        ):
            self._feed_all()
            return
        if open_before:
            try:
                self.store.append(prepared, number, m.conditions, m.answers)
            except OSError as e:
                self._abort(self._unwritable(e))
                return
            self.blocks.append(BlockTime(task, number, ended - started, prepared.task.gpus))
        last = (
            self.dispatcher.answered(link.name, (task, number), ended - started)
            if not bad
            else self.dispatcher.remaining_blocks(task) == 0
        )
        self._feed(link)
        if last and self.states[task] == "running":
            self._land(task)
        if self._unprepared == 0 and self.dispatcher.finished:
            self._wake.set()

    def _on_failed(self, link: Link, task: str, number: int, why: str) -> None:
        self._note("failed", worker=link.name, task=task, block=number, why=why)
        lost = self.dispatcher.failed(link.name, (task, number), why)
        if lost and self.dispatcher.remaining_blocks(task) == 0 and self.states[task] == "running":
            self._land(task)
        self._feed_all()

    def _feed_all(self) -> None:
        for link in self.links.values():
            if link.ready and not link.leaving:
                self._feed(link)
        self._wake.set()

    def _feed(self, link: Link) -> None:
        """Keeps a worker's queue from running dry: the next parcel is sent while its last block is answered."""
        busy = self.dispatcher.workers.get(link.name)
        while busy is not None and len(busy.queue) <= 1 and not link.leaving:
            parcel = self.dispatcher.next_parcel(link.name)
            if parcel is None:
                break
            for shard in parcel.shards:
                self._send_shard(link, shard.task, shard.blocks, shard.expected_s)
        if busy is not None and not busy.queue:
            for number in list(link.visits):
                self._close_visit(link, number)
            steal = self.dispatcher.steal_for(link.name)
            if steal is not None:
                self._note("steal", thief=link.name, victim=steal.victim, blocks=len(steal.blocks))
                self.links[steal.victim].send("yield", blocks=steal.blocks)

    def _send_shard(self, link: Link, task: str, blocks: Sequence[int], expected_s: float) -> None:
        prepared = self.prepared[task]
        if task not in link.told:
            link.told.add(task)
            link.send("task", prepared=encode(replace(prepared, weights=())))
        self._visits += 1
        link.visits[self._visits] = Visit(task, self._visits, expected_s)
        lines = None
        if not link.sees:
            lines = {b: _raw_lines(prepared, b) for b in blocks}
        link.send("work", visit=self._visits, task=task, blocks=list(blocks), lines=lines)

    def _close_visit(self, link: Link, number: int, outcome: str = "done", why: str = "") -> None:
        trial = link.close_visit(number, outcome, why)
        if trial is None:
            return
        self.trials.append(trial)
        self._note("trial", task=trial.task, worker=trial.worker, blocks=list(trial.blocks), started=trial.started, ended=trial.ended,
                   busy_s=trial.busy_s, outcome=trial.outcome, expected_s=trial.expected_s)  # fmt: skip

    def _gone(self, link: Link, why: str, *, blame: bool = True) -> None:
        """A connection ended: what it held is given to others, and its place filled again.

        `blame`: the block that it was at may be why.
        """
        if self.links.get(link.name) is not link:
            return
        del self.links[link.name]
        polite = bool(link.leaving)
        self._gaps += link.gaps
        lost = self.dispatcher.leave(link.name, blame=blame and not polite)
        for number, visit in list(link.visits.items()):
            self._close_visit(
                link, number, "done" if polite and visit.blocks else "lost", link.leaving or why
            )
        self.seen.append(link.seen(link.leaving or why, time.time()))
        self._note("gone", worker=link.name, why=link.leaving or why, given_up=[list(b) for b in lost])
        for task in {t for t, _ in lost}:
            if self.dispatcher.remaining_blocks(task) == 0 and self.states[task] == "running":
                self._land(task)
        self._feed_all()

    def _watch_workers(self) -> None:
        """Fills the places of workers that ended; ends those that hang; gives up when nobody is left."""
        for gone in self.engine.ended():
            slot, tries = self._slots.get(gone.name, (Slot(gone.name), 0))
            self._note("ended", worker=gone.name, why=gone.why)
            if self.problem is None and not self.stopping and tries < RESTARTS:
                base, _, count = slot.name.partition(".")
                self._start(replace(slot, name=f"{base}.{int(count or 1) + 1}"), tries + 1)
            else:
                self._last_why = gone.why
                self._slots.pop(gone.name, None)
        now = time.monotonic()
        for link in list(self.links.values()):
            if link.at[1] >= 0 and self.dispatcher.is_open(link.at):
                limit = max(
                    self.settings.stall_s, self.settings.stall_factor * self.dispatcher.expected([link.at])
                )
                if now - link.since > limit:
                    self._hang(link, f"it has been at one block for {now - link.since:.0f} s")
            if now - link.heard > max(60.0, 20 * self.settings.beat_s):
                self._hang(link, f"nothing was heard of it for {now - link.heard:.0f} s")
        self._end_silent()
        alive = bool(self.links) or self.engine.running() > 0 or not self._staffed
        if alive or not self.settings.slots:
            limit_s = self.settings.wait_for_workers_s
            self._alone_since = None if self.links or not limit_s else (self._alone_since or now)
            if (
                self._alone_since is not None
                and not self.links
                and now - self._alone_since > limit_s
                and not self.settings.slots
            ):
                self._abort(
                    EvaluationError(
                        "no worker joined",
                        where=str(self.folder.root),
                        todo="Start `unbroken eval join` where GPUs are free",
                    )
                )
            return
        self._abort(EvaluationError(f"no worker is left: {self._last_why}", where=f"{self.folder.root}/logs",
                                    todo="See the workers' logs; the same command goes on where it was"))  # fmt: skip

    def _end_silent(self) -> None:
        """Ends workers of this machine that have not connected (elsewhere they may wait for a place)."""
        if self.engine.remote:
            return
        for name in self._slots:
            silent_s = time.time() - self._started.get(name, time.time())
            if name not in self.links and silent_s > self.settings.stall_s:
                self._note("hang", worker=name, why=f"it has not connected for {silent_s:.0f} s")
                self._started.pop(name)
                self.engine.end(name)

    def _hang(self, link: Link, why: str) -> None:
        self._note("hang", worker=link.name, why=why, task=link.at[0], block=link.at[1])
        self.engine.end(link.name)
        link.writer.close()

    def _stop_workers(self, why: str) -> None:
        for link in self.links.values():
            if not link.leaving:
                link.leaving = why
                link.send("stop", why=why)

    # ----------------------------------------------------------------------------------------- the scoring

    def _land(self, task: str) -> None:
        """A task's last block is here."""
        self.states[task] = "landed"
        self.landing.land(
            self.prepared[task], {b: why for (t, b), why in self.dispatcher.given_up.items() if t == task}
        )

    def _collect(self) -> None:
        for done in self.landing.collect():
            self.scorings.append(done)
            self._note(
                "scored",
                task=done.task,
                worker=done.worker,
                started=done.started,
                ended=done.ended,
                parts=len(done.parts) or 1,
                error=done.error,
            )
        for task, why in self.landing.failed.items():
            if self.states[task] != "failed":
                self.errors[task], self.states[task] = why, "failed"
                self._note("task_failed", task=task, why=why)
        for task in self.landing.scores:
            self.states[task] = "scored"

    # ------------------------------------------------------------------------------------------ the ending

    def _finish(self) -> Report:
        for task, state in self.states.items():
            if state != "scored" and task not in self.errors:
                self.errors[task] = (
                    f"it ended as '{state}' without a score: a defect of unbroken; the same command tries again"
                )
        started = self._engine_at or min((s.started for s in self.scorings), default=time.time())
        order = {t: i for i, t in enumerate(self.states)}  # as the suite has them
        seen = Measured(self.suite.name, self.spec.title, self.located.checkpoint, started, self.trials, self.blocks, self.scorings, self.seen,
                        self.intake.seconds, self.settings.cpu_workers, self.dispatcher.plan.makespan_s, self._reused)  # fmt: skip
        scores = sorted(self.landing.scores.values(), key=lambda s: order.get(s.task, len(order)))
        found = report(seen, self.prepared, scores, self.groups, self.errors)
        try:
            atomic.write_json(self.folder.report, encode(with_times_of(found, self.folder.last_report())))
        except OSError as e:
            raise self._unwritable(e) from e
        self._save_priors()
        if self.watcher is not None:
            self.watcher(self.progress())
        self._note("end", makespan_s=found.makespan_s, lower_bound_s=found.lower_bound_s, busy=found.busy_fraction, gaps=len(self._gaps),
                   gap_max_s=max(self._gaps, default=0.0), gap_median_s=sorted(self._gaps)[len(self._gaps) // 2] if self._gaps else 0.0)  # fmt: skip
        return found

    def _save_priors(self) -> None:
        if self.settings.priors is None or not (self.blocks or self.scorings):
            return
        scoring = {s.task: s.seconds for s in self.scorings if s.score is not None}
        observed = []
        for name, p in self.prepared.items():
            mine = [b for b in self.blocks if b.task == name]
            samples = sum(len(p.samples_of(b.block)) for b in mine)
            score_s = scoring[name] * samples / p.samples if name in scoring and samples else None
            if mine:
                observed.append(Observation(name, self.located.model_b or 7.0, self.settings.device, samples, sum(b.seconds for b in mine),
                                            features_of(p), score_s, 0 if p.task.limit else p.samples))  # fmt: skip
        starts = [w.ready - w.started for w in self.seen if w.ready > w.started > 0 and w.start_s]
        if starts:  # of our own engine: nobody knows since when a joiner has waited
            observed.append(Observation(START, self.located.model_b or 7.0, self.settings.device, len(starts), sum(starts)))  # fmt: skip
        with contextlib.suppress(OSError):  # the next plan is less exact; the scores are here
            save_merged(self.settings.priors, observed)

    def _note(self, event: str, **fields: Any) -> None:
        if self.journal is not None:
            try:
                self.journal.write(event, **fields)
            except OSError as e:
                self._abort(self._unwritable(e))

    def _unwritable(self, e: OSError) -> UnbrokenError:
        return unwritable(e, self.folder.root)

    def _abort(self, error: UnbrokenError) -> None:
        self.problem = self.problem or error
        self._wake.set()

    def _show(self) -> None:
        now = time.monotonic()
        if self.watcher is None or now - self._last_shown < 0.25:
            return
        self._last_shown = now
        self.watcher(self.progress())

    def progress(self) -> Progress:
        """Where it stands."""
        if not self.states:
            i = self.intake
            what = (
                f"looking at the data: {i.looked} of {i.to_look} tasks"
                if i.to_look
                else "looking up the tasks"
            )
            if self._there.is_set():
                what = "fetching the model"
            return Progress(what, time.time(), 0.0, {}, {}, 0.0, 0.0, dict(self.errors))
        tasks: dict[str, dict[str, object]] = {}
        for name, state in self.states.items():
            p = self.prepared.get(name)
            blocks = p.blocks if p else 0
            score = self.landing.scores.get(name)
            tasks[name] = {
                "state": state,
                "blocks": blocks,
                "done": blocks - self.dispatcher.remaining_blocks(name),
                "missing": score.samples - score.scored if score else 0,
            }
        workers: dict[str, dict[str, object]] = {}
        span = max(time.time() - self._engine_at, 1e-6) if self._engine_at else 1.0
        for link in self.links.values():
            busy = sum(t.busy_s for t in self.trials if t.worker == link.name) + sum(
                v.busy_s for v in link.visits.values()
            )
            queue = self.dispatcher.workers[link.name].queue if link.name in self.dispatcher.workers else []
            state = (
                "leaving" if link.leaving else "loading" if not link.ready else "busy" if queue else "idle"
            )
            workers[link.name] = {"node": link.node, "gpus": list(link.gpus), "state": state, "task": queue[0][0] if queue else "",
                                  "busy": round(busy / span, 3)}  # fmt: skip
        left = self.dispatcher.remaining_s()
        able = sum(1 for link in self.links.values() if link.ready) or len(self.settings.slots) or 1
        phase = (
            "scoring"
            if self._gpu_end
            else "running"
            if self.links or (self._staffed and not self._unprepared)
            else "preparing"
        )
        if self.states and all(s in ("scored", "failed") for s in self.states.values()):
            phase = "finished"
        return Progress(
            phase, time.time(), self._engine_at, tasks, workers, left, left / able, dict(self.errors)
        )


def _question(suite: Suite) -> Any:
    """What a suite asks, as it has been written into folders since before its tasks had a `headline`, which asks nothing."""
    value = encode(replace(suite, folder=""))
    for task in value["tasks"]:
        del task["headline"]
    return value


def _raw_lines(prepared: PreparedTask, block: int) -> list[str]:
    return [encode_sample(s).decode() for s in read_block(prepared, block)]


async def _give_back(taking: asyncio.Future[Lease]) -> None:
    """Releases what was taken; where it is being fetched still, as soon as that has stopped."""
    try:
        held = await taking
    except Exception:  # noqa: BLE001  then nothing was taken, which has been said
        return
    held.release()


def _told(error: BaseException, where: str) -> UnbrokenError:
    """The error as it is told to the user."""
    if isinstance(error, UnbrokenError):
        return error
    if isinstance(error, OSError) and error.errno in FULL:
        return unwritable(error, Path(where))
    return EvaluationError(
        f"{type(error).__name__}: {error}", where=where, todo="Mend that, then run the same command"
    )


def _address() -> str:
    """This machine's address, as others reach it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect(("192.0.2.1", 9))  # no packet is sent: only the route is looked up
        return str(s.getsockname()[0])
    return socket.gethostname()
