"""What workers send, and what they get: blocks from the live plan, so that no queue runs dry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from ....errors import ModelChanged
from ....journal.codec import encode
from ....link.bounds import Malformed, Message
from ....units import plural
from ...contracts import PreparedTask
from ...engines.live import OpenAssignment, WorkerLink
from ...engines.wire import VERSION, pack
from ...plan.dispatch import Dispatcher
from ...plan.outcome import BlockTime
from ...preparation.prepare import revive
from ...suite import received
from ...suite.staged import encode_sample, read_block
from ..state import EvaluationRun
from ..tasks.tasks import Tasks
from .workers import Workers


class Feeder:
    """Answers each message of each worker. Used on the event loop's thread; what it raises ends the link, or the run."""

    def __init__(
        self,
        run: EvaluationRun,
        dispatcher: Dispatcher,
        tasks: Tasks,
        workers: Workers,
        links: dict[str, WorkerLink],
    ) -> None:
        self.run = run
        self.dispatcher = dispatcher
        self.tasks = tasks
        self.workers = workers
        self.links = links
        self._assignments = 0
        """So many were given out; the last one's number."""

    # ---- a connection begins and ends

    def welcome(self, m: Message, writer: asyncio.StreamWriter) -> WorkerLink | None:
        """The link of a worker that showed the token; None where it is refused. Raises Malformed."""
        known = m.get("version") == VERSION
        hello = received.hello(m) if known else None
        if hello is None or hello.name in self.links:
            why = "another version" if hello is None else "a worker of this name is here"
            writer.write(pack({"op": "refused", "why": why}))
            self.run.log.note("refused", name=received.words(m.get("name")), why=why)
            return None
        place = self.workers.places.get(hello.name)
        gpus = place.slot.gpus if place and place.slot.gpus else hello.gpus
        width = max(1, place.slot.width if place else len(hello.gpus))
        now = time.time()
        started = place.started if place else now
        start_s = 0.0 if self.workers.engine.remote else now - started
        link = WorkerLink(hello.name, hello.node, gpus, width, writer, now - hello.now, hello.sees, started, hello.pid,
                    start_s)  # fmt: skip
        self.run.observed.started = self.run.observed.started or now
        self.links[link.name] = link
        self.run.log.note("join", worker=link.name, node=link.node, gpus=list(hello.gpus), pid=link.pid)
        settings = self.run.settings
        link.send("welcome", suite=self.run.job.suite.name, spec=encode(self.run.job.spec),
                  model=self.run.located.for_worker(settings.places), beat_s=settings.beat_s)  # fmt: skip
        return link

    def gone(self, link: WorkerLink, why: str, *, blame: bool = True) -> None:
        """A connection ended: what the worker held is given to others. `blame`: the block that it was at may be why."""
        if self.links.get(link.name) is not link:
            return
        del self.links[link.name]
        polite = bool(link.leaving)
        self.run.observed.gaps += link.gaps
        lost = self.dispatcher.leave(link.name, blame=blame and not polite, at_once=link.at_once)
        for number, assignment in list(link.assignments.items()):
            outcome = "done" if polite and assignment.blocks else "lost"
            self._close_assignment(link, number, outcome, link.leaving or why)
        self.run.observed.workers.append(link.seen(link.leaving or why, time.time()))
        self.run.log.note("gone", worker=link.name, why=link.leaving or why, given_up=[list(b) for b in lost])
        for task in {t for t, _ in lost}:
            self.tasks.score_if_complete(task)
        self.feed_all()

    def stop_all(self, why: str) -> None:
        """Asks every worker to end after its block."""
        for link in self.links.values():
            if not link.leaving:
                link.leaving = why
                link.send("stop", why=why)

    async def wait_until_gone(self, within_s: float) -> None:
        """Waits for the workers to close their connections; then closes them, so that the report has them all."""
        deadline = time.monotonic() + within_s
        while self.links and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for link in list(self.links.values()):
            self.gone(link, "it did not end when asked to")
            link.writer.close()

    # ---- its messages

    def receive(self, link: WorkerLink, m: Message) -> None:
        """Acts on one message. Raises Malformed."""
        busy = self.dispatcher.workers.get(link.name)
        held = busy.queue if busy is not None else ()
        match m["op"]:
            case "block":
                self._block(link, received.block(m, held, self.run.table.every))
            case "ready":
                self._ready(link, m)
            case "failed":
                self._failed(link, *received.failed(m, held))
            case "yielded":
                self._yielded(link, received.yielded(m, held))
            case "unfit":
                self._unfit(link, m)
            case "bye":
                link.leaving = received.words(m.get("why") or "left")
                link.energy_j = received.energy(m)
            case "beat":
                at, steps = received.beat(m)
                if (at, steps) != (link.at, link.steps):
                    link.at, link.steps, link.since = at, steps, time.monotonic()
            case other:
                raise Malformed(f"'{other:.40}' is nothing that a worker sends")

    def _ready(self, link: WorkerLink, m: Message) -> None:
        if link.ready:
            raise Malformed("it was ready before")
        link.fetch_s, link.load_s, link.uncompiled, link.at_once = received.ready(m)
        link.ready = time.time()
        alive_s = max(0.0, link.ready - link.started)
        link.fetch_s, link.load_s = min(link.fetch_s, alive_s), min(link.load_s, alive_s)
        self.run.log.note("ready", worker=link.name, fetch_s=link.fetch_s, load_s=link.load_s)
        self.dispatcher.join(link.name, link.width)
        self._feed(link)

    def _block(self, link: WorkerLink, m: received.BlockAnswers) -> None:
        prepared, block = self.run.table.find(m.task), (m.task, m.number)
        started, ended = link.believable(m.started, m.ended)
        self.workers.has_answered(link.name)
        before = link.note_block(m.assignment, m.number, started, ended, True, m.tokens)
        if before is not None:
            self._close_assignment(link, before.number)
        own = link.assignments.get(m.assignment)
        if own is not None and own.left <= 0 and link.at_once > 1:
            self._close_assignment(link, own.number)
        was_open = self.dispatcher.is_open(block)
        if m.problems:
            why = f"{plural(len(m.problems), 'sample')} without an answer: {m.problems[0]}"
            if not self.dispatcher.failed(link.name, block, why):  # it is asked again
                self.feed_all()
                return
        if was_open:
            try:
                self.tasks.store.append(prepared, m.number, m.conditions, m.answers)
            except OSError as e:
                self.run.control.abort(self.run.control.unwritable(e))
                return
            if not prepared.exact:
                time_of = BlockTime(m.task, m.number, ended - started, prepared.task.gpus)
                self.run.observed.blocks.append(time_of)
        if not m.problems:
            self.dispatcher.answered(link.name, block, ended - started)
        self._feed(link)
        self._feed_idle(m.task)
        self.tasks.score_if_complete(m.task)
        if self.tasks.answered:
            self.run.control.wake()

    def _failed(self, link: WorkerLink, task: str, number: int, why: str) -> None:
        self.run.log.note("failed", worker=link.name, task=task, block=number, why=why)
        if self.dispatcher.failed(link.name, (task, number), why):
            self.tasks.score_if_complete(task)
        self.feed_all()

    def _yielded(self, link: WorkerLink, given: Sequence[tuple[str, int]]) -> None:
        for a in link.assignments.values():
            mine = [b for t, b in given if t == a.task and b in a.given]
            a.shared, a.left = a.shared or bool(mine), a.left - len(mine)
        self.dispatcher.yielded(link.name, given)
        self.feed_all()

    def _unfit(self, link: WorkerLink, m: Message) -> None:
        error = revive(received.unfit(m))
        link.leaving = error.message or "unfit"
        self.workers.give_up(link.name)
        self.run.log.note("unfit", worker=link.name, why=str(error))
        alone = link.name in self.workers.places and all(x.leaving for x in self.links.values())
        if isinstance(error, ModelChanged) or (alone and not self.run.observed.blocks):
            if self.workers.engine.remote:
                error.message += f" ({link.name} on {link.node})"
            self.run.control.abort(error)  # nobody could load it: trying again would not help

    # ---- what it gets

    def feed_all(self) -> None:
        """Gives blocks to every worker whose queue is short; those that have nothing come first.

        What a worker gave up for an idle one would else come back to it, to be asked for again at once, and so on.
        """
        busy = self.dispatcher.workers
        for link in sorted(self.links.values(), key=lambda x: x.name in busy and bool(busy[x.name].queue)):
            if link.ready and not link.leaving:
                self._feed(link)
        self.run.control.wake()

    def _feed(self, link: WorkerLink) -> None:
        """Keeps a worker's queue from running dry: the next bundle is sent while its last block is answered."""
        busy = self.dispatcher.workers.get(link.name)
        if busy is None:
            return
        while self._runs_short(link, busy.queue) and not link.leaving:
            bundle = self.dispatcher.next_bundle(link.name)
            if bundle is None:
                break
            for shard in bundle.shards:
                self._send_shard(link, shard.task, shard.blocks, shard.expected_s)
        if not busy.queue:
            self._steal_for(link)

    def _runs_short(self, link: WorkerLink, queue: Sequence[tuple[str, int]]) -> bool:
        """Whether a worker needs more than it has: one that answers many at once has so many samples, and one block more; but
        near the end no more than its share, or the others would have nothing."""
        if len(queue) <= 1 or link.at_once == 1:
            return len(queue) <= 1
        open_ones = sum(
            self.dispatcher.remaining_blocks(t) * self.run.table.find(t).block for t in self.dispatcher.work
        )
        workers = max(len(self.dispatcher.workers), len(self.run.settings.slots))
        wanted = min(link.at_once, -(-open_ones // workers))
        if len(queue) > wanted:
            return False
        return sum(len(self.run.table.find(t).samples_of(b)) for t, b in queue) < wanted

    def _feed_idle(self, task: str) -> None:
        """A block of this task has shown what it takes: what was not worth sharing before may be by now."""
        workers, gpus = self.dispatcher.workers, self.dispatcher.work[task].gpus
        for link in self.links.values():
            idle = link.ready and link.name in workers and not workers[link.name].queue
            if idle and not link.leaving and link.width >= gpus:
                self._feed(link)
                return

    def _steal_for(self, link: WorkerLink) -> None:
        """A worker with nothing to do gets the tail of another one's shard."""
        for number in list(link.assignments):
            self._close_assignment(link, number)
        steal = self.dispatcher.steal_for(link.name)
        if steal is not None:
            self.run.log.note("steal", thief=link.name, victim=steal.victim, blocks=len(steal.blocks))
            self.links[steal.victim].send("yield", blocks=steal.blocks)

    def _send_shard(self, link: WorkerLink, task: str, blocks: Sequence[int], expected_s: float) -> None:
        prepared = self.run.table.find(task)
        if task not in link.sent:
            link.sent.add(task)
            link.send("task", prepared=encode(replace(prepared, weights=())))
        self._assignments += 1
        link.assignments[self._assignments] = OpenAssignment(
            task, self._assignments, expected_s, given=frozenset(blocks), left=len(blocks)
        )
        lines = None if link.sees else {b: _raw_lines(prepared, b) for b in blocks}
        crowd = [self.dispatcher.crowd_of((task, b)) for b in blocks]
        link.send(
            "work",
            visit=self._assignments,
            task=task,
            blocks=list(blocks),
            lines=lines,
            crowd=crowd if any(crowd) else None,
        )

    def _close_assignment(self, link: WorkerLink, number: int, outcome: str = "done", why: str = "") -> None:
        ended = link.close_assignment(number, outcome, why)
        if ended is None:
            return
        self.run.observed.assignments.append(ended)
        self.run.log.note("trial", task=ended.task, worker=ended.worker, blocks=list(ended.blocks), started=ended.started,
                          ended=ended.ended, busy_s=ended.busy_s, outcome=ended.outcome, expected_s=ended.expected_s)  # fmt: skip


def _raw_lines(prepared: PreparedTask, block: int) -> list[str]:
    return [encode_sample(s).decode() for s in read_block(prepared, block)]
