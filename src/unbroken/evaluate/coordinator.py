"""Runs one evaluation: checks, prepares, plans, feeds workers, keeps what they answer, hands it to scoring.

One process, one event loop, the only writer of the evaluation's files. It may be killed at any instant: answers that
reached it are on disk, the same command goes on with the rest. Workers may join and leave while it runs.

This file is long because it is one state machine; what is pure is elsewhere: planning in planner.py, decisions in
dispatch.py, bookkeeping of a connection in live.py, the report in outcome.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import atomic
from ..errors import EvaluationError, ModelChanged, UnbrokenError
from . import prepare as prep
from .answers import AnswerStore
from .cache import Places, default_places, fetch_unknown, lease
from .codec import decode, encode
from .contracts import (
    Conditions,
    ModelSpec,
    PreparedTask,
    Report,
    Score,
    ScoreDone,
    ScoreJob,
    ScoringPool,
    Suite,
    Task,
    Trial,
    WorkerSeen,
    digest,
)
from .dispatch import Dispatcher
from .engines import Engine, Slot
from .folder import EvalDir, read_json
from .journal import Journal, events
from .live import Link, Progress, Visit, Watcher
from .outcome import BlockTime, Measured, report
from .planner import SIMULATED_PARCELS, Costs, Work
from .priors import Expected, Features, Observation, PriorBook, features_of, load_book, save_merged
from .registry import get_backend, open_scoring
from .sources import Manifest, Source, hash_model, memo_folder, on_network, open_source, small_files
from .staged import encode_sample, read_block
from .wire import VERSION, Message, receive

TICK_S = 0.05
RESTARTS = 3
"""A worker's place is filled again so often without one answered block in between."""


@dataclass(frozen=True)
class Settings:
    """How to run it; nothing here changes a score."""

    slots: tuple[Slot, ...] = (Slot("w0"),)
    """Workers that the engine starts; none: only workers that join by themselves."""
    cpu_workers: int = 2
    """Processes for metrics."""
    prepare_workers: int = 2
    """Processes that build prompts."""
    cache: str = "auto"
    """'auto': copy the model into shared memory unless it lies on a disk of this machine; 'always'; 'never'."""
    places: Places = field(default_factory=default_places)
    priors: Path | None = None
    device: str = "cpu"
    """Name of the hardware, for priors."""
    load_s: float = 30.0
    """Expected seconds from a worker's start to its first block."""
    beat_s: float = 2.0
    stall_s: float = 600.0
    """A block that takes longer than this and than `stall_factor` times what was expected is taken to hang."""
    stall_factor: float = 30.0
    wait_for_workers_s: float = 0.0
    """How long to wait, without any worker, for one to join; 0: as long as it takes where no slots are given."""
    keep_going: bool = False
    """Go on without tasks that cannot be prepared; they are reported at the end."""
    stealing: bool = True
    advertise: str = ""
    """Host name that workers elsewhere connect to; empty: this machine's."""


@dataclass
class Abort(Exception):
    """Ends the event loop with an error for the user."""

    error: UnbrokenError


class Coordinator:
    """One evaluation by one process."""

    def __init__(
        self, suite: Suite, spec: ModelSpec, folder: EvalDir, engine: Engine, settings: Settings = Settings(), *,
        scoring: Callable[[int], ScoringPool] = open_scoring, watcher: Watcher | None = None, checkpoint: str = "",
    ) -> None:  # fmt: skip
        """`checkpoint`: the hash, where it is known already (a committed checkpoint's manifest); else it is computed."""
        self.suite = suite
        self.spec = spec
        self.folder = folder
        self.engine = engine
        self.settings = settings
        self.open_scoring = scoring
        self.watcher = watcher
        self.checkpoint = checkpoint
        self.links: dict[str, Link] = {}
        self.prepared: dict[str, PreparedTask] = {}
        self.states: dict[str, str] = {}
        self.scores: dict[str, Score] = {}
        self.groups: list[Score] = []
        self.errors: dict[str, str] = {}
        self.trials: list[Trial] = []
        self.blocks: list[BlockTime] = []
        self.scorings: list[ScoreDone] = []
        self.seen: list[WorkerSeen] = []
        self.prepare_s: dict[str, float] = {}
        self.expected: dict[str, Expected] = {}
        self.problem: UnbrokenError | None = None
        self.stopping = ""
        self._gaps: list[float] = []
        self._visits = 0
        self._unprepared = 0
        self._slots: dict[str, tuple[Slot, int]] = {}
        self._started: dict[str, float] = {}
        self._engine_at = 0.0
        self._gpu_end = 0.0
        self._landing: set[asyncio.Task[None]] = set()
        self._scoring: ScoringPool | None = None
        self._alone_since: float | None = None
        self._wake = asyncio.Event()
        self._last_shown = 0.0
        self._last_why = "all ended"

    # ------------------------------------------------------------------------------------------ the whole

    def run(self) -> Report:
        """Evaluates, and returns the report that is also in the folder. Raises UnbrokenError."""
        with self.folder.lock():
            try:
                return asyncio.run(self._run())
            except Abort as e:
                raise e.error from None

    async def _run(self) -> Report:
        self._wake = asyncio.Event()
        loop = asyncio.get_running_loop()
        self.incarnation = 1 + sum(1 for e in events(self.folder.journal) if e["event"] == "begin")
        preparers = prep.Preparers(self.settings.prepare_workers, self.folder.log("prepare"))
        journal = self.journal = None
        try:
            tasks, source = await asyncio.gather(
                self._expand(preparers), loop.run_in_executor(None, self._find_model)
            )
            self.key = self.spec.key(self.checkpoint)
            self.folder.claim(self._asked())
            journal = self.journal = Journal(self.folder.journal)
            self.store = AnswerStore(self.folder.answers(self.key), self.incarnation)
            self.journal.write(
                "begin",
                incarnation=self.incarnation,
                key=self.key,
                checkpoint=self.checkpoint,
                tasks=len(tasks),
            )
            files = await loop.run_in_executor(None, self._small_files, source)
            known = await self._check(preparers, tasks, files)
            await self._evaluate(preparers, tasks, known, files)
            await self._combine(preparers)
            return self._finish()
        finally:
            preparers.close()
            if self._scoring is not None:
                self._scoring.close()
            if journal is not None:
                self.journal = None
                self.store.close()
                journal.close()

    def _asked(self) -> dict[str, Any]:
        return {
            "suite": digest(encode(replace(self.suite, folder=""))),
            "model": encode(replace(self.spec, batch_size=0)),
            "checkpoint": self.checkpoint,
        }

    # ------------------------------------------------------------------------------------------- the model

    def _find_model(self) -> Source | None:
        """Hashes the model (reading it once, into the node's cache where it is wanted there). In a thread."""
        backend = get_backend(self.spec.backend)
        self.manifest: Manifest | None = None
        self.cached = False
        if not backend.needs_weights:
            self.checkpoint = (
                self.checkpoint
                or backend.fingerprint(self.spec)
                or digest([self.spec.source, self.spec.name])
            )
            return None
        source = open_source(self.spec.source)
        folder = Path(source.address) if "://" not in source.address else None
        self.cached = self.settings.cache == "always" or (
            self.settings.cache == "auto" and (folder is None or on_network(folder))
        )
        if not self.cached and folder is None:
            self.cached = True  # an object store cannot be mapped
        here = self.cached and not self.engine.remote
        reader = (lambda files: fetch_unknown(source, files, self.settings.places)) if here else None
        self.manifest = hash_model(source, memo_folder(), reader)
        if self.checkpoint and self.checkpoint != self.manifest.hash:
            raise ModelChanged("the model's files differ from those asked for", where=self.spec.source)
        self.checkpoint = self.manifest.hash
        return source

    def _small_files(self, source: Source | None) -> Path | None:
        return None if source is None else small_files(source, self.folder.model_files)

    @property
    def model_b(self) -> float:
        """Billions of parameters, from the bytes of the weights at two bytes each; 0 where unknown."""
        if self.manifest is None:
            return 0.0
        return sum(s for n, s, _ in self.manifest.files if n.endswith((".safetensors", ".bin"))) / 2e9

    # ------------------------------------------------------------------------------------------- the tasks

    async def _expand(self, preparers: prep.Preparers) -> list[Task]:
        found = await asyncio.gather(
            *(preparers.ask("expand", self.suite, task=encode(t)) for t in self.suite.tasks),
            return_exceptions=True,
        )
        self._raise_all(self.suite.tasks, found)
        tasks: dict[str, Task] = {}
        for answer in found:
            if not isinstance(answer, BaseException):
                for value in answer:
                    task = decode(Task, value)
                    if task.name in tasks:
                        raise Abort(EvaluationError(f"two tasks of the suite are called '{task.name}'", where=self.suite.name,
                                                    todo="A group holds it already: take it out of the suite"))  # fmt: skip
                    tasks[task.name] = task
        return list(tasks.values())

    async def _check(
        self, preparers: prep.Preparers, tasks: Sequence[Task], files: Path | None
    ) -> dict[str, PreparedTask]:
        """Tasks that are prepared already. Says what is missing before a GPU is taken."""
        self._marks = {t.name: prep.fingerprint(t, self.suite, self.spec, files) for t in tasks}
        known = {
            t.name: p
            for t in tasks
            if (p := prep.prepared_before(self.folder, t, self._marks[t.name])) is not None
        }
        rest = [t for t in tasks if t.name not in known]
        found = await asyncio.gather(
            *(preparers.ask("check", self.suite, task=encode(t)) for t in rest), return_exceptions=True
        )
        self._raise_all(rest, found)
        blind = [t for t, ok in zip(rest, found, strict=True) if ok is False]
        made = await asyncio.gather(
            *(self._prepare_one(preparers, t, files) for t in blind), return_exceptions=True
        )
        self._raise_all(blind, made)
        known |= {p.task.name: p for p in made if isinstance(p, PreparedTask)}
        for t in tasks:
            self.states[t.name] = "failed" if t.name in self.errors else "waiting"
        return known

    def _raise_all(self, tasks: Sequence[Task], results: Sequence[object]) -> None:
        """Raises the first error and names the others, or notes them all where we are to go on without those tasks."""
        bad = [(t, r) for t, r in zip(tasks, results, strict=True) if isinstance(r, BaseException)]
        for task, error in bad:
            if not isinstance(error, UnbrokenError):
                raise error
            self.errors[task.name] = str(error)
        if bad and not (self.settings.keep_going and len(bad) < len(tasks)):
            first = bad[0][1]
            assert isinstance(first, UnbrokenError)  # anything else was raised above
            if len(bad) > 1:
                first.what += (
                    f"; {len(bad) - 1} more tasks cannot run: {', '.join(t.name for t, _ in bad[1:6])}"
                )
            raise Abort(first)

    async def _prepare_one(self, preparers: prep.Preparers, task: Task, files: Path | None) -> PreparedTask:
        began = time.time()
        folder = self.folder.task(task.name)
        folder.mkdir(parents=True, exist_ok=True)
        value = await preparers.ask("prepare", self.suite, task=encode(task), spec=encode(self.spec),
                                    model_files=str(files) if files else None, folder=str(folder))  # fmt: skip
        prepared = decode(PreparedTask, value)
        prep.remember(self.folder, prepared, self._marks[task.name])
        self.prepare_s[task.name] = time.time() - began
        return prepared

    # ----------------------------------------------------------------------------------------- the running

    async def _evaluate(
        self,
        preparers: prep.Preparers,
        tasks: Sequence[Task],
        known: dict[str, PreparedTask],
        files: Path | None,
    ) -> None:
        s = self.settings
        self.book = load_book(s.priors) if s.priors else PriorBook()
        costs = Costs(s.load_s, 0.005, s.cpu_workers)
        widths = [max(1, slot.width) for slot in s.slots] or [self.spec.gpus]
        self.dispatcher = Dispatcher((), widths, costs, stealing=s.stealing)
        waiting = [t for t in tasks if t.name not in known and t.name not in self.errors]
        self._unprepared = len(waiting)
        self._add(list(known.values()), budget=SIMULATED_PARCELS)
        needed = self._unprepared > 0 or not self.dispatcher.finished
        self._check_widths(tasks, widths)
        async with contextlib.AsyncExitStack() as stack:
            preparing: list[asyncio.Task[None]] = []
            if needed:
                await stack.enter_async_context(self._listening())
                self._hold_copy(stack)
                self._engine_at = time.time()
                for slot in s.slots:
                    self._start(slot)
                order = sorted(waiting, key=lambda t: -self._guess(t))
                preparing = [asyncio.create_task(self._prepare_and_add(preparers, t, files)) for t in order]
            try:
                await self._loop()
            finally:
                for p in preparing:
                    p.cancel()
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
        found = self.book.expect(task.name, said.samples if said and said.samples else 1000, features=Features(), model_b=self.model_b,
                                 device=self.settings.device, said=said)  # fmt: skip
        return found.seconds + found.score_s

    async def _prepare_and_add(self, preparers: prep.Preparers, task: Task, files: Path | None) -> None:
        try:
            prepared = await self._prepare_one(preparers, task, files)
            self._unprepared -= 1
            self._add([prepared])
        except UnbrokenError as e:
            self._unprepared -= 1
            self.errors[task.name] = str(e)
            self.states[task.name] = "failed"
            self._note("task_failed", task=task.name, why=str(e))
            if not self.settings.keep_going:
                self._abort(e)
        self._feed_all()

    def _add(self, found: Sequence[PreparedTask], *, budget: int | None = None) -> None:
        """Plans prepared tasks; what an earlier command answered is not asked again."""
        work, landed = [], []
        for p in found:
            name = p.task.name
            self.prepared[name] = p
            done = self.store.scan(p)
            left = [b for b in range(p.blocks) if b not in done]
            self.expected[name] = e = self.book.expect(
                name,
                p.samples,
                features_of(p),
                self.model_b,
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

    async def _loop(self) -> None:
        """Until every task is scored or has failed."""
        while True:
            if self.problem is not None:
                raise Abort(self.problem)
            if self.stopping:
                raise Abort(
                    EvaluationError(
                        f"stopped: {self.stopping}",
                        where=str(self.folder.root),
                        todo="The same command goes on where it was",
                    )
                )
            gpu_done = self._unprepared == 0 and self.dispatcher.finished
            if gpu_done and not self._gpu_end:
                self._gpu_end = time.time()
                self._stop_workers("every answer is here")
            self._collect()
            if gpu_done and not self._landing and (self._scoring is None or self._scoring.pending == 0):
                return
            if not gpu_done:
                self._watch_workers()
            self._show()
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), TICK_S)

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
        server = await asyncio.start_server(self._serve, "0.0.0.0" if wide else "127.0.0.1", 0, limit=1 << 24)
        port = server.sockets[0].getsockname()[1]
        host = (self.settings.advertise or _address()) if wide else "127.0.0.1"
        where = {"host": host, "port": port, "token": self.token, "shared": str(self.folder.shared.resolve())}
        aside = self.folder.cluster.with_suffix(".new")
        aside.touch(mode=0o600)
        aside.write_text(json.dumps(where))
        aside.replace(self.folder.cluster)
        try:
            yield
        finally:
            self.folder.cluster.unlink(missing_ok=True)
            server.close()
            for link in list(self.links.values()):
                link.writer.close()

    def _hold_copy(self, stack: contextlib.AsyncExitStack) -> None:
        """Keeps this node's copy while workers come and go."""
        if self.cached and not self.engine.remote and self.manifest is not None and self.settings.slots:
            held = lease(open_source(self.spec.source), self.manifest, self.settings.places)
            stack.callback(held.release)

    def _start(self, slot: Slot, tries: int = 0) -> None:
        self._slots[slot.name] = (slot, tries)
        self._started[slot.name] = time.time()
        self.engine.start(slot, self.folder.cluster)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link: Link | None = None
        why = "the connection ended"
        try:
            hello = await asyncio.wait_for(receive(reader), 30)
            link = self._welcome(hello, writer)
            while link is not None and (message := await receive(reader)) is not None:
                link.heard = time.monotonic()
                self._on(link, message)
                await writer.drain()
                if message["op"] == "bye":
                    why = message.get("why") or why
        except (OSError, TimeoutError):
            pass  # as a closed connection: `_gone` says what follows
        except (KeyError, TypeError, ValueError) as e:
            why = f"it sent a message that makes no sense: {type(e).__name__}: {e}"
        except Exception as e:  # noqa: BLE001  the server would swallow it: it is ours, and ends the run
            self._abort(
                e
                if isinstance(e, UnbrokenError)
                else EvaluationError(f"the coordinator failed: {type(e).__name__}: {e}")
            )
        finally:
            if link is not None:
                self._gone(link, why)
            writer.close()
            self._wake.set()

    def _welcome(self, hello: Message | None, writer: asyncio.StreamWriter) -> Link | None:
        if (
            hello is None
            or hello.get("op") != "hello"
            or not hmac.compare_digest(str(hello.get("token")), self.token)
        ):
            return None
        if hello.get("version") != VERSION or hello["name"] in self.links:
            why = "another version" if hello.get("version") != VERSION else "a worker of this name is here"
            writer.write(b"")
            self._note("refused", name=hello["name"], why=why)
            return None
        gpus = tuple(int(g) for g in hello["gpus"])
        slot = self._slots.get(hello["name"])
        width = max(1, slot[0].width if slot else len(gpus))
        shown = slot[0].gpus if slot and slot[0].gpus else gpus
        link = Link(hello["name"], str(hello["node"]), shown, width, writer, time.time() - float(hello["now"]), bool(hello["sees"]),
                    self._started.get(hello["name"], time.time()), int(hello["pid"]))  # fmt: skip
        self.links[link.name] = link
        self._note("join", worker=link.name, node=link.node, gpus=list(gpus), pid=link.pid)
        model: dict[str, Any] = {
            "cache": self.cached,
            "address": self.spec.source,
            "manifest": None,
            "memory": None,
            "disks": [],
        }
        if self.manifest is not None:
            source = open_source(self.spec.source)
            model |= {"address": source.address, "manifest": encode(self.manifest) if self.cached else None,
                      "memory": str(self.settings.places.memory) if self.settings.places.memory else None,
                      "disks": [str(d) for d in self.settings.places.disks]}  # fmt: skip
        link.send("welcome", spec=encode(self.spec), model=model, beat_s=self.settings.beat_s)
        return link

    def _on(self, link: Link, m: Message) -> None:
        op = m["op"]
        if op == "block":
            self._on_block(link, m)
        elif op == "ready":
            link.ready, link.fetch_s, link.load_s = time.time(), float(m["fetch_s"]), float(m["load_s"])
            self._note("ready", worker=link.name, fetch_s=link.fetch_s, load_s=link.load_s)
            self.dispatcher.join(link.name, link.width)
            self._feed(link)
        elif op == "failed":
            self._on_failed(link, m["task"], m["block"], m["why"])
        elif op == "yielded":
            given = [(str(t), int(b)) for t, b in m["blocks"]]
            for v in link.visits.values():
                v.shared = v.shared or any(t == v.task for t, _ in given)
            self.dispatcher.yielded(link.name, given)
            self._feed_all()
        elif op == "unfit":
            error = prep.revive(m)
            link.leaving = error.what
            if link.name in self._slots:
                self._slots[link.name] = (self._slots[link.name][0], RESTARTS)
            self._note("unfit", worker=link.name, why=str(error))
            if not any(x.ready for x in self.links.values()) and not self.blocks:
                self._abort(error)  # nobody could load it: trying again would not help
        elif op == "bye":
            link.leaving = m.get("why") or "left"
        elif op == "beat":
            at = (str(m["task"]), int(m["block"]))
            if at != link.at:
                link.at, link.since = at, time.monotonic()

    def _on_block(self, link: Link, m: Message) -> None:
        task, number = str(m["task"]), int(m["block"])
        prepared = self.prepared[task]
        started, ended = float(m["started"]) + link.offset, float(m["ended"]) + link.offset
        self._slots[link.name] = (
            (self._slots[link.name][0], 0) if link.name in self._slots else (Slot(link.name), 0)
        )
        before = link.note_block(int(m["visit"]), number, started, ended, prefetched=True)
        if before is not None:
            self._close_visit(link, before.number)
        bad = [a["problem"] for a in m["answers"] if a.get("problem")]
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
            self.store.append(prepared, number, decode(Conditions, m["conditions"]), m["answers"])
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
        if len(self.trials) % 16 == 0 and self.dispatcher.waiting:
            self.dispatcher.resort()

    def _gone(self, link: Link, why: str) -> None:
        """A connection ended: what it held is given to others, and its place filled again."""
        if self.links.get(link.name) is not link:
            return
        del self.links[link.name]
        polite = bool(link.leaving)
        self._gaps += link.gaps
        lost = self.dispatcher.leave(link.name, blame=not polite)
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
        alive = bool(self.links) or self.engine.running() > 0
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
        """A task's last block is here: its exact set is written and scored while the GPUs go on."""
        self.states[task] = "landed"
        job = asyncio.get_running_loop().create_task(self._land_async(task))
        self._landing.add(job)
        job.add_done_callback(self._landing.discard)

    async def _land_async(self, task: str) -> None:
        try:
            job = await asyncio.get_running_loop().run_in_executor(None, self._merge, task)
        except (UnbrokenError, OSError) as e:
            self.errors[task] = str(e)
            self.states[task] = "failed"
            self._note("task_failed", task=task, why=str(e))
        else:
            if job is not None:  # handed over on this thread: a pool is used by one thread only
                if self._scoring is None:
                    self._scoring = self.open_scoring(self.settings.cpu_workers)
                self._scoring.submit(job)
        self._wake.set()

    def _merge(self, task: str) -> ScoreJob | None:
        """Writes the exact set; None if an earlier command scored it already. In a thread."""
        prepared = self.prepared[task]
        given_up = {b: why for (t, b), why in self.dispatcher.given_up.items() if t == task}
        answers = self.folder.landed(self.key, task)
        conditions = self.store.merge(prepared, given_up, answers)
        self.store.sync()
        result = self.folder.score(self.key, task)
        before = self._scored_before(result, prepared) if not given_up else None
        if before is not None:
            self.scores[task] = before
            self.states[task] = "scored"
            return None
        result.parent.mkdir(parents=True, exist_ok=True)
        return ScoreJob(prepared, str(answers), str(result), self.checkpoint, conditions)

    def _scored_before(self, path: Path, prepared: PreparedTask) -> Score | None:
        """A score that an earlier command computed from the same answers, unless samples were left unscored."""
        if not path.exists():
            return None
        score = decode(Score, read_json(path), where=str(path))
        same = (score.version, score.prompt_hash, score.checkpoint) == (
            prepared.version,
            prepared.prompt_hash,
            self.checkpoint,
        )
        return score if same and score.scored == score.samples == prepared.samples else None

    def _collect(self) -> None:
        for done in self._scoring.collect() if self._scoring is not None else ():
            self.scorings.append(done)
            if done.score is None:
                self.errors[done.task] = done.error
                self.states[done.task] = "failed"
            else:
                self.scores[done.task] = done.score
                self.states[done.task] = "scored"
            self._note(
                "scored",
                task=done.task,
                worker=done.worker,
                started=done.started,
                ended=done.ended,
                error=done.error,
            )

    async def _combine(self, preparers: prep.Preparers) -> None:
        """Scores of groups from those of their leaves, where every leaf has one."""
        groups: dict[tuple[str, str], list[str]] = {}
        for name, p in self.prepared.items():
            if p.task.group:
                groups.setdefault((p.task.harness, p.task.group), []).append(name)
        for (_, group), names in groups.items():
            if not all(n in self.scores for n in names):
                self.errors[group] = "some of its tasks have no score"
                continue
            try:
                value = await preparers.ask("combine", self.suite, group=group, prepared=[encode(self.prepared[n]) for n in names],
                                            scores=[encode(self.scores[n]) for n in names])  # fmt: skip
            except UnbrokenError as e:
                self.errors[group] = str(e)
                continue
            if value is not None:
                self.groups.append(decode(Score, value))

    # ------------------------------------------------------------------------------------------ the ending

    def _finish(self) -> Report:
        for task, state in self.states.items():
            if state != "scored" and task not in self.errors:
                self.errors[task] = (
                    f"it ended as '{state}' without a score: a defect of unbroken; the same command tries again"
                )
        started = self._engine_at or min((s.started for s in self.scorings), default=time.time())
        order = {t: i for i, t in enumerate(self.states)}  # as the suite has them
        seen = Measured(self.suite.name, self.spec.title, self.checkpoint, started, self.trials, self.blocks, self.scorings, self.seen,
                        self.prepare_s, self.settings.cpu_workers, self.dispatcher.plan.makespan_s)  # fmt: skip
        scores = sorted(self.scores.values(), key=lambda s: order.get(s.task, len(order)))
        found = report(seen, self.prepared, scores, self.groups, self.errors)
        atomic.write_json(self.folder.report, encode(found))
        self._save_priors()
        if self.watcher is not None:
            self.watcher(self.progress())
        self._note("end", makespan_s=found.makespan_s, lower_bound_s=found.lower_bound_s, busy=found.busy_fraction, gaps=len(self._gaps),
                   gap_max_s=max(self._gaps, default=0.0), gap_median_s=sorted(self._gaps)[len(self._gaps) // 2] if self._gaps else 0.0)  # fmt: skip
        return found

    def _save_priors(self) -> None:
        if self.settings.priors is None or not (self.blocks or self.scorings):
            return
        scoring = {s.task: s.ended - s.started for s in self.scorings if s.score is not None}
        observed = []
        for name, p in self.prepared.items():
            mine = [b for b in self.blocks if b.task == name]
            samples = sum(len(p.samples_of(b.block)) for b in mine)
            score_s = scoring[name] * samples / p.samples if name in scoring and samples else None
            if mine:
                observed.append(Observation(name, self.model_b or 7.0, self.settings.device, samples, sum(b.seconds for b in mine),
                                            features_of(p), score_s))  # fmt: skip
        save_merged(self.settings.priors, observed)

    def _note(self, event: str, **fields: Any) -> None:
        if self.journal is not None:
            self.journal.write(event, **fields)

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
        tasks: dict[str, dict[str, object]] = {}
        for name, state in self.states.items():
            p = self.prepared.get(name)
            blocks = p.blocks if p else 0
            tasks[name] = {
                "state": state,
                "blocks": blocks,
                "done": blocks - self.dispatcher.remaining_blocks(name),
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
            "scoring" if self._gpu_end else "running" if self.links or not self._unprepared else "preparing"
        )
        if self.states and all(s in ("scored", "failed") for s in self.states.values()):
            phase = "finished"
        return Progress(
            phase, time.time(), self._engine_at, tasks, workers, left, left / able, dict(self.errors)
        )


def _raw_lines(prepared: PreparedTask, block: int) -> list[str]:
    return [encode_sample(s).decode() for s in read_block(prepared, block)]


def _address() -> str:
    """This machine's address, as others reach it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect(("192.0.2.1", 9))  # no packet is sent: only the route is looked up
        return str(s.getsockname()[0])
    return socket.gethostname()
