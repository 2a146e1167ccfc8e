"""Who gets what next: the state of a plan while it runs, as pure code.

The coordinator feeds it what happens (a worker joined, a block was answered, a worker died) and asks what to do; the
simulator feeds it the same from simulated time. It does no input or output and reads no clock.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ..contracts import Shard
from .planner import SIMULATED_BUNDLES, Bundle, Costs, Plan, Work, plan
from .priors import Correction

TRIES = 3
"""A block that failed so often, or whose worker died so often while it ran, is given up."""
REPLAN_BUDGET = 3000
RECUT_RATIO = 1.25
"""The rest is planned again when the number of workers, or the priors, moved by more than this."""

_FEW = 16
"""Blocks that are in flight together after a worker died with more of them."""
_LOOKED_AT = 4
"""Victims that a thief looks at closely."""

Block = tuple[str, int]


@dataclass
class Busy:
    """A worker and what it still has to do, in order; the first block is being answered."""

    name: str
    gpus: int
    queue: list[Block] = field(default_factory=list)
    ahead: float = 0.0
    """Seconds of the queue by the priors alone: who has most is looked at first by a thief."""
    asked: bool = False
    """It was asked to give blocks away and has not replied."""


@dataclass(frozen=True)
class Steal:
    """Ask `victim` to give up these blocks, those that it has not begun."""

    victim: str
    blocks: tuple[Block, ...]


class Dispatcher:
    """The live plan."""

    def __init__(
        self, work: Iterable[Work], workers: Sequence[int], costs: Costs = Costs(), *, stealing: bool = True
    ) -> None:
        """`workers`: GPUs of each worker that is expected to join; the first plan is made for them."""
        self.work: dict[str, Work] = {}
        self.costs = costs
        self.stealing = stealing
        self.correction = Correction()
        self.workers: dict[str, Busy] = {}
        self.given_up: dict[Block, str] = {}
        self._expected_workers = list(workers)
        self._seconds: dict[str, dict[int, float]] = {}
        self._open: dict[str, set[int]] = {}
        self._failures: dict[Block, list[str]] = {}
        """Who failed at it, each time."""
        self._suspected: dict[Block, list[str]] = {}
        """Who died with it and others in flight."""
        self._urgent: list[Bundle] = []
        self._pending: list[Bundle] = []  # the next one is popped from the end
        self._planned_for = len(workers)
        self._answers = 0
        """Since what waits was planned."""
        self._outdated = False
        self._planned_with: dict[str, float] = {}
        """The correction of each task in the plan."""
        self.plan: Plan = plan((), workers, costs)
        self.add(work, budget=SIMULATED_BUNDLES)

    # ---- what happens

    def add(self, work: Iterable[Work], *, budget: int = REPLAN_BUDGET) -> None:
        """More tasks are ready to run; what waits is planned again together with them."""
        fresh = [w for w in work if w.block_s]
        for w in fresh:
            self.work[w.task] = w
            self._seconds[w.task] = dict(zip(w.numbers, w.block_s, strict=True))
            self._open[w.task] = set(self._seconds[w.task])
        if fresh:
            self._plan_waiting(fresh, budget)

    def join(self, name: str, gpus: int = 1) -> None:
        """A worker has loaded the model and is idle."""
        self.workers[name] = Busy(name, gpus)
        self._maybe_replan()

    def leave(self, name: str, *, blame: bool = True, at_once: int = 1) -> list[Block]:
        """A worker is gone; what it held goes back to the front. Returns the blocks that are given up now.

        `blame`: it died, perhaps because of a block that it was answering: of the first `at_once` of its queue. Where these are
        several they are only suspects, and the next time in flight with few others (`crowd_of`), until one is alone. A worker
        that left on request is no evidence against its blocks.
        """
        gone = self.workers.pop(name, None)
        if gone is None:
            return []
        left = [b for b in gone.queue if self.is_open(b)]
        lost: list[Block] = []
        if blame and left:
            suspects = self._in_flight(left, at_once)
            if len(suspects) == 1:
                why = "the worker died while answering it"
                for who in (*self._suspected.pop(left[0], ()), name):
                    lost = lost or self._note_failure(who, left[0], why)
            else:
                for b in suspects:
                    self._suspected.setdefault(b, []).append(name)
            left = [b for b in left if self.is_open(b)]
        self._requeue(left)
        return lost

    def answered(self, name: str, block: Block, seconds: float) -> bool:
        """A block has landed. Returns True if it is the task's last one."""
        self._drop(name, block)
        task, number = block
        if not self.is_open(block):
            return False
        self.correction.observe(task, self._seconds[task][number], seconds)
        self._open[task].discard(number)
        self._suspected.pop(block, None)
        self._answers += 1
        if not self._outdated:
            self._outdated = self._has_learnt(task)
        return not self._open[task]

    def failed(self, name: str, block: Block, why: str) -> list[Block]:
        """A block raised on a worker that lives on. Returns it if it is given up now."""
        self._drop(name, block)
        if not self.is_open(block):
            return []
        lost = self._note_failure(name, block, why)
        if not lost:
            self._requeue([block])
        return lost

    def yielded(self, name: str, blocks: Iterable[Block]) -> None:
        """A worker has given these up; they wait at the front of the queue."""
        busy = self.workers.get(name)
        given = list(blocks)
        if busy is not None:
            busy.asked = False
            gone = set(given)
            busy.queue = [b for b in busy.queue if b not in gone]
            busy.ahead = math.fsum(self._seconds[t][b] for t, b in busy.queue)
        self._requeue([b for b in given if self.is_open(b)])

    # ---- what to do

    def next_bundle(self, name: str) -> Bundle | None:
        """The most urgent bundle that this worker can take; it is the worker's from now on."""
        # Workers wait while it is planned, the longer the more waits: each bundle has to be worth an answer.
        if self._outdated and self._answers >= len(self._pending):
            self.replan()
        busy = self.workers[name]
        for waiting in (self._urgent, self._pending):
            for i in range(len(waiting) - 1, -1, -1):
                if waiting[i].gpus <= busy.gpus and not self._barred(name, waiting[i]):
                    bundle = self._still_open(waiting.pop(i))
                    if bundle is None:
                        return self.next_bundle(name)
                    taken = [(s.task, b) for s in bundle.shards for b in s.blocks]
                    busy.queue += taken
                    busy.ahead += math.fsum(self._seconds[t][b] for t, b in taken)
                    return bundle
        return None

    def steal_for(self, name: str) -> Steal | None:
        """Whom an idle worker should relieve, and of what: so that both end at about the same time."""
        thief = self.workers[name]
        if not self.stealing or thief.queue:
            return None
        best: tuple[float, Steal] | None = None
        rich = [b for b in self.workers.values() if not b.asked and len(b.queue) >= 2]
        for busy in heapq.nlargest(_LOOKED_AT, rich, key=lambda b: b.ahead):
            found = self._share(busy, thief)
            if found is not None and (best is None or found[0] > best[0]):
                best = found
        if best is None:
            return None
        self.workers[best[1].victim].asked = True
        return best[1]

    def is_open(self, block: Block) -> bool:
        """Neither landed nor given up."""
        return block[1] in self._open.get(block[0], ())

    def crowd_of(self, block: Block) -> int:
        """With at most so many blocks in flight, itself included; 0: any number."""
        deaths = len(self._suspected.get(block, ())) or (2 if block in self._failures else 0)
        return 0 if not deaths else _FEW if deaths == 1 else 1

    @property
    def finished(self) -> bool:
        """Every block has landed or is given up."""
        return not any(self._open.values())

    @property
    def waiting(self) -> bool:
        """Whether some bundle has no worker."""
        return bool(self._urgent or self._pending)

    def expected(self, blocks: Iterable[Block]) -> float:
        """Seconds that these blocks will take, by what is known now."""
        return math.fsum(self._seconds[t][b] * self.correction.factor(t) for t, b in blocks)

    def remaining_s(self) -> float:
        """Expected worker seconds still to do; blocks in flight count whole."""
        return math.fsum(
            math.fsum(self._seconds[t][b] for b in blocks) * self.correction.factor(t)
            for t, blocks in self._open.items()
            if blocks
        )

    def remaining_blocks(self, task: str) -> int:
        """How many blocks of a task are open."""
        return len(self._open.get(task, ()))

    # ---- inside

    def _share(self, busy: Busy, thief: Busy) -> tuple[float, Steal] | None:
        """(seconds gained, what to take) from one victim, or None if nothing is gained."""
        times = [self.expected([b]) for b in busy.queue]
        in_flight, ahead = times[0] / 2, math.fsum(times[1:])
        whole = in_flight + ahead
        goal = (whole - self.costs.switch_s) / 2
        taken: list[Block] = []
        seconds = 0.0
        for block, s in zip(reversed(busy.queue[1:]), reversed(times[1:]), strict=True):
            if self.work[block[0]].gpus > thief.gpus or self._for_others(thief.name, block):
                continue
            if taken and seconds + s / 2 > goal:
                break
            taken.append(block)
            seconds += s
        after = max(seconds + self.costs.switch_s, whole - seconds)
        gain = whole - after
        if not taken or gain <= self.costs.switch_s:
            return None
        return gain, Steal(busy.name, tuple(reversed(taken)))

    def _in_flight(self, queue: Sequence[Block], at_once: int) -> list[Block]:
        """What a worker had begun of its queue at most: it begins in order, and keeps to `crowd_of`."""
        found: list[Block] = []
        for b in queue:
            at_once = min(at_once, self.crowd_of(b) or at_once)
            if found and len(found) >= at_once:
                break
            found.append(b)
        return found

    def _drop(self, name: str, block: Block) -> None:
        busy = self.workers.get(name)
        if busy is not None and block in busy.queue:
            busy.queue.remove(block)
            busy.ahead -= self._seconds[block[0]][block[1]]

    def _for_others(self, name: str, block: Block) -> bool:
        """Whether this worker failed at the block and another one that is here has not tried: the fault may be the worker's."""
        tried = self._failures.get(block, ())
        return name in tried and self._untried(block)

    def _untried(self, block: Block) -> bool:
        tried, gpus = self._failures.get(block, ()), self.work[block[0]].gpus
        return any(w.gpus >= gpus and w.name not in tried for w in self.workers.values())

    def _barred(self, name: str, bundle: Bundle) -> bool:
        if not self._failures:
            return False
        return any(self._for_others(name, (s.task, b)) for s in bundle.shards for b in s.blocks)

    def _note_failure(self, name: str, block: Block, why: str) -> list[Block]:
        tried = self._failures.setdefault(block, [])
        tried.append(name)
        if len(tried) < TRIES or (len(set(tried)) < TRIES and self._untried(block)):
            return []
        self.given_up[block] = why
        self._open[block[0]].discard(block[1])
        return [block]

    def _requeue(self, blocks: Sequence[Block]) -> None:
        shards: list[Shard] = []
        for task, number in blocks:
            s, g = self._seconds[task][number], self.work[task].gpus
            if shards and shards[-1].task == task:
                last = shards.pop()
                shards.append(Shard(task, (*last.blocks, number), last.expected_s + s, g))
            else:
                shards.append(Shard(task, (number,), s, g))
        for shard in reversed(shards):
            self._urgent.append(Bundle((shard,), shard.expected_s + self.costs.switch_s))

    def _still_open(self, bundle: Bundle) -> Bundle | None:
        shards = []
        for s in bundle.shards:
            blocks = tuple(b for b in s.blocks if self.is_open((s.task, b)))
            if blocks:
                shards.append(
                    s if len(blocks) == len(s.blocks) else Shard(s.task, blocks, s.expected_s, s.gpus)
                )
        return Bundle(tuple(shards), bundle.expected_s, bundle.urgency) if shards else None

    def _maybe_replan(self) -> None:
        """Cuts again what waits, for the workers that are there, if there are many more than planned for."""
        n = len(self.workers)
        if n > max(self._planned_for, 1) * RECUT_RATIO and self._pending:
            self.replan()

    def _has_learnt(self, task: str) -> bool:
        """Whether this task, or the one that waits longest (and may not have been seen yet), takes another time than it was
        planned with."""
        if not self._pending:
            return False
        last = self._pending[0].shards[0].task
        return any(
            abs(math.log(self.correction.factor(t) / self._planned_with.get(t, 1.0))) > math.log(RECUT_RATIO)
            for t in {task, last}
        )

    def replan(self) -> None:
        """Plans again what waits, with what was learnt, for the workers that are there."""
        self._plan_waiting((), REPLAN_BUDGET)

    def _plan_waiting(self, fresh: Sequence[Work], budget: int) -> None:
        left: dict[str, list[int]] = {}
        for p in self._pending:
            for s in p.shards:
                left.setdefault(s.task, []).extend(b for b in s.blocks if self.is_open((s.task, b)))
        left |= {w.task: list(w.numbers) for w in fresh}
        work = []
        for task, blocks in left.items():
            if blocks:
                blocks.sort()
                factor = self.correction.factor(task)
                times = tuple(self._seconds[task][b] * factor for b in blocks)
                work.append(replace(self.work[task], block_s=times, blocks=tuple(blocks)))
        here = [w.gpus for w in self.workers.values()]
        workers = here if len(here) > len(self._expected_workers) else self._expected_workers
        widest = max((w.gpus for w in work), default=1)
        if max(workers, default=0) < widest:
            workers = [*workers, widest]  # waits until such a worker joins
        started = bool(self.workers)
        costs = Costs(0.0 if started else self.costs.load_s, self.costs.switch_s, self.costs.cpu_workers)
        found = plan(work, workers, costs, budget=budget)
        if not started:
            self.plan = found
        self._pending = list(reversed(found.bundles))
        self._planned_for = len(workers)
        self._answers, self._outdated = 0, False
        self._planned_with = {t: self.correction.factor(t) for t in self.work}
