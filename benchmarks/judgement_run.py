"""One simulated run of `judgement.py`: faults, verdicts, decisions, who leaves and returns, and what it costs."""

from __future__ import annotations

import heapq
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

try:
    import judgement_inputs as inputs
except ImportError:  # imported by a test
    from benchmarks import judgement_inputs as inputs

from unbroken.detect.pairwise import PairwiseTest
from unbroken.detect.stacks import Culprit
from unbroken.diagnose import Facts, HangFact
from unbroken.diagnose.engine import judge_unread
from unbroken.progress import Budgets, Policy
from unbroken.progress.records.decision import PastIncident
from unbroken.progress.records.verdict import Action, Category, Faulty, Outcome, Root, Verdict
from unbroken.recover.decide.policy import decide
from unbroken.testing.pair_field import PairFault, PairField

EXPLICIT = 0.7
"""Of faults that last, what a check of one node finds: the vendor's diagnostic about 70 % (ByteRobust)."""
FULL_CHECK_FINDS = 0.95
DURABLE_S = 300.0
"""What a whole switch takes with it is restored from the storage: one durable checkpoint in so long, assumed."""
REQUEUE_S = 768.0
"""Without a spare a node is asked of the scheduler (published, 16,384 GPUs)."""
TEN_MINUTES = 600.0


@dataclass(frozen=True)
class Rules:
    """How a contender reacts. `check_finds` is the share of faults that last which a check of all nodes finds; `group` is how many leave where nobody is certain; `returns` whether innocents come back when they
    were tested; `ladder_s` the published times from localisation to restart, by class."""

    name: str
    two_moves: bool = True
    check_finds: float = EXPLICIT
    group: int = 1
    returns: bool = True
    spares: float = math.inf
    person_each: bool = False
    disk_s: float = 0.0
    hang_s: float | None = None
    ladder_s: dict[str, float] = field(default_factory=dict)


PUBLISHED = {"CUDA error": 93.0, "InfiniBand": 60.0, "disk full": 58.0, "storage service": 58.0, "mount of a file system": 58.0, "kernel panic": 109.0, "GPU memory": 10.0, "NaN": 4289.0}  # fmt: skip


@dataclass
class Tally:
    """What a simulated run came to."""

    productive: float = 0.0
    wall: float = 0.0
    incidents: int = 0
    node_faults: int = 0
    repeats: int = 0
    persons: int = 0
    stops: Counter[str] = field(default_factory=Counter)
    evicted_bad: int = 0
    innocents: int = 0
    innocent_s: float = 0.0
    innocent_late_s: float = 0.0
    pair_tests: int = 0
    shortages: int = 0
    waited_s: float = 0.0
    during_recovery: int = 0
    replayed_s: float = 0.0
    losses: list[float] = field(default_factory=list)
    whys: Counter[str] = field(default_factory=Counter)
    cordons: list[float] = field(default_factory=list)

    @property
    def ettr(self) -> float:
        return self.productive / self.wall if self.wall else 0.0


class Simulation:
    """One run of one contender over the faults."""

    def __init__(
        self,
        rules: Rules,
        times: inputs.Times,
        cases: Sequence[inputs.Case],
        nodes: int,
        days: float,
        events: Sequence[inputs.FaultEvent],
        seed: int,
        policy: Policy | None = None,
        bad_spares: int = 0,
        mad_s: float = 0.0,
    ) -> None:
        self.rules, self.times, self.nodes, self.end = rules, times, nodes, days * inputs.DAY_S
        self.cases, self.draw = cases, random.Random(seed)
        self.policy = policy or Policy(on_doubt="test" if rules.two_moves else "keep")
        self.tally = Tally()
        spares = 4 * nodes if math.isinf(rules.spares) else int(rules.spares)
        self.used = set(range(nodes))
        self.spare = list(range(nodes, nodes + spares))
        self.bad: dict[int, tuple[inputs.FaultClass, float, float]] = {}
        for n in self.spare[:bad_spares]:
            self.bad[n] = (inputs.CLASSES[0], 60.0, inputs.DAY_S)
        self.heap: list[tuple[float, int, str, Any]] = []
        self.count = itertools.count()
        for e in events:
            self.push(e.at, "fault", e)
        changes = len(events) * inputs.CODE_CHANGES
        for _ in range(round(changes)):
            self.push(self.draw.uniform(0, self.end), "amend", None)
        if mad_s:
            for k in range(1, int(self.end / mad_s)):
                self.push(k * mad_s, "mad", None)
        self.ready = 0.0
        self.reached = 0.0
        self.code_at: float | None = None
        self.generation = 0
        self.history: list[PastIncident] = []
        self.cordons: list[tuple[float, str]] = []
        self.between = math.sqrt(2 * max(times.block, 1e-3) * self.end / max(1, len(events)))
        self.between = max(self.between, times.step)

    def push(self, at: float, what: str, value: Any) -> None:
        heapq.heappush(self.heap, (at, next(self.count), what, value))

    def run(self) -> Tally:
        now = 0.0
        while self.heap:
            at, _, what, value = heapq.heappop(self.heap)
            if at >= self.end:
                break
            now = self.train(now, at)
            if what == "fault":
                self.on_fault(at, value)
            elif what == "again" and value[0] == self.generation:
                self.on_again(at, value[1])
            elif what == "code" and value == self.generation:
                self.incident(at, inputs.CLASSES[0], (), code=True)
            elif what == "amend" and at >= self.ready:
                self.ready = at + self.times.amend + self.times.join
            elif what == "back":
                self.spare.append(value)
            elif what == "mad":
                self.incident(at, inputs.CLASSES[0], (), mad=True)
        self.train(now, self.end)
        self.tally.wall = self.end
        save_s = self.times.block / self.between
        self.tally.productive /= 1 + save_s
        return self.tally

    def train(self, now: float, until: float) -> float:
        begun = max(now, self.ready)
        if until > begun:
            self.tally.productive += until - begun
            self.reached = max(self.reached, self.tally.productive)
        return until

    # --- what happens

    def on_fault(self, at: float, event: inputs.FaultEvent) -> None:
        mine = tuple(n for n in event.nodes if n in self.used)
        for n in event.nodes:
            self.bad[n] = (event.kind, event.lasts, event.repair_s)
        if event.nodes and not mine:
            return  # a spare, or one that is away: it shows when it is used
        self.tally.node_faults += bool(mine)
        self.incident(at, event.kind, mine, code=event.code)

    def on_again(self, at: float, node: int) -> None:
        if node in self.used and node in self.bad:
            self.tally.repeats += 1
            self.incident(at, self.bad[node][0], (node,))

    def incident(
        self,
        at: float,
        kind: inputs.FaultClass,
        bad: tuple[int, ...],
        *,
        code: bool = False,
        mad: bool = False,
    ) -> None:
        t, rules, tally = self.times, self.rules, self.tally
        tally.incidents += 1
        tally.during_recovery += at < self.ready
        before = max(at, self.ready)
        self.generation += 1
        detect = {"exit": t.detect_exit, "hang": rules.hang_s or t.detect_hang, "lost": t.detect_lost, "nan": t.detect_nan}[kind.seen]  # fmt: skip
        lost = rules.disk_s or (DURABLE_S if len(bad) >= inputs.SWITCH_NODES else self.between)
        replay = min(tally.productive, self.draw.uniform(0, lost)) if at >= self.ready else 0.0
        tally.productive -= replay
        tally.replayed_s += replay
        clock = at + detect
        if rules.person_each:
            clock = self.react_as_torchrun(clock, kind, bad)
        elif rules.ladder_s:
            clock = self.react_as_published(clock, kind, bad, code)
        else:
            clock = self.react(clock, kind, bad, code, mad)
        clock = self.fill(clock)
        self.ready = clock + t.stop_to_step + t.join + t.step
        tally.losses.append(self.ready - before + replay)
        for n in self.used & self.bad.keys():
            mean_s = self.bad[n][1]
            if math.isfinite(mean_s):
                self.push(self.ready + self.draw.expovariate(1 / max(mean_s, 1.0)), "again", (self.generation, n))  # fmt: skip
        if code and self.code_at is not None:
            self.push(self.ready + t.step, "code", self.generation)

    def react(
        self, clock: float, kind: inputs.FaultClass, bad: tuple[int, ...], code: bool, mad: bool
    ) -> float:
        """Ours: verdict, decision, and who leaves."""
        tally, t = self.tally, self.times
        if code and self.code_at is None:
            self.code_at = self.tally.productive
        verdict, facts = self.judge(clock, kind, bad, code, mad)
        free = len(self.spare)
        decision = decide(verdict, facts, self.history, Budgets(), free, self.policy, self.cordons)
        suspects = {int(n) for n in decision.suspects}
        self.history.append(decision.charged)
        tally.whys[decision.action.value] += 1
        if "see whether the detection is right" in decision.why:
            tally.whys["the limit was told"] += 1
        leaving = {int(n) for n in decision.exclude}
        self.cordons += [(facts.noticed or 0.0, str(verdict.reason))] * len(leaving)
        self.cordons += [(facts.noticed or 0.0, "suspect")] * len(suspects)
        tally.cordons += [clock] * (len(leaving) + len(suspects))
        clock += decision.delay_s
        if decision.action is Action.STOP:
            tally.persons += 1
            who = "the code" if code else "not the code"
            tally.stops[f"{who}, {decision.charged.cause}: {decision.why[:100]}"] += 1
            clock += t.person
            self.code_at, self.history = None, []
            leaving |= set(bad)  # whoever comes sees which one it is
        elif self.rules.two_moves and not mad:
            at_node = verdict.category is Category.INFRASTRUCTURE or verdict.outcome is Outcome.HUNG
            if at_node:
                clock += t.check
                finds = self.rules.check_finds
                leaving |= {n for n in bad if math.isfinite(self.bad[n][1]) and self.draw.random() < finds}
            leaving |= suspects
            if decision.test_pairs and not leaving:
                clock, found = self.test_pairs(clock)
                leaving |= found
        self.leave(clock, leaving)
        return clock

    def judge(
        self, clock: float, kind: inputs.FaultClass, bad: tuple[int, ...], code: bool, mad: bool
    ) -> tuple[Verdict, Facts]:
        """What the logs, or the facts, say. A node that is only named, and not to be cordoned, is the verdict's `faulty`."""
        step = int(self.tally.productive / self.times.step)
        facts = Facts(step=step, run_step=int(self.reached / self.times.step), noticed=clock)
        if mad:
            node = self.draw.choice(sorted(self.used))
            root = Root(text="a detector that is wrong", node=str(node))
            wrong = Verdict(Outcome.FAILED, Category.INFRASTRUCTURE, "ECCError", root, faulty=Faulty(str(node)), recoverable=True, cordon=(str(node),), action=Action.RESTART_ELSEWHERE, confidence=0.95, decided_by="mad")  # fmt: skip
            return wrong, facts
        if kind.seen == "lost" and bad:
            facts = replace(facts, lost_nodes=tuple(str(n) for n in bad))
            return judge_unread(facts, ""), facts
        if kind.seen == "hang":
            # Recall and precision of who is named: benchmarks/results/hangs.json, where it was measured.
            named = bad[0] if bad and self.draw.random() < HANG_RECALL else None
            late = (0,) if named is not None else ()
            who = (Culprit(0, "runs its own code", "stands still"),) if late else ()
            hang = HangFact(step, "training", self.times.detect_hang, late, None, f"{self.generation}", who)
            facts = replace(facts, hang=hang, nodes=((0, str(named)),) if late else ())
            return judge_unread(facts, ""), facts
        wanted = CODE_REASONS if code else kind.reasons
        fitting = [c for c in self.cases if c.reason in wanted and c.passes is not code]
        case = self.draw.choice(fitting)
        named = None
        if case.named:
            named = bad[0] if bad and case.right else self.draw.choice(sorted(self.used))
        verdict = case.verdict
        if case.cordons and named is not None:
            return replace(verdict, faulty=Faulty(str(named)), cordon=(str(named),)), facts
        faulty = Faulty(str(named)) if named is not None and bad else None
        return replace(verdict, cordon=(), faulty=faulty), facts

    def test_pairs(self, clock: float) -> tuple[float, set[int]]:
        """The real test over simulated pairs: five minutes in which nobody trains."""
        self.tally.pair_tests += 1
        names = {f"n{n:05d}": n for n in self.used}
        faulty = {}
        for name, n in names.items():
            if n in self.bad and math.isfinite(self.bad[n][1]):
                lasting = self.bad[n][1] <= 2 * inputs.LASTING_S
                faulty[name] = PairFault.DEAD if lasting else PairFault.INTERMITTENT
        pairs = PairField(sorted(names), faulty, seed=self.generation, fails=0.05)
        test = PairwiseTest(sorted(names), seed=self.generation, seconds=120.0)
        for k in range(4):
            test.take(pairs.test(test.next_round(30.0 * k)))
        return clock + 120.0, {names[n] for n in test.judge().kept_off}

    def leave(self, clock: float, leaving: set[int]) -> None:
        """Nodes go; bad ones come back repaired, innocents when they were tested."""
        tally, t = self.tally, self.times
        for n in leaving & self.used:
            self.used.discard(n)
            if n in self.bad:
                _, mean_s, repair_s = self.bad[n]
                # One that fails now and then may pass a test, and come back as it is.
                lasting = math.isfinite(mean_s) and mean_s <= 2 * inputs.LASTING_S
                found = not math.isfinite(mean_s) or self.draw.random() < (
                    FULL_CHECK_FINDS if lasting else 0.5
                )
                tally.evicted_bad += 1
                if found:
                    self.bad.pop(n)
                self.push(clock + (repair_s if found else t.full_check + t.pairwise), "back", n)
                continue
            away = t.full_check + t.pairwise if self.rules.returns else inputs.DAY_S
            tally.innocents += 1
            tally.innocent_s += away
            tally.innocent_late_s += max(0.0, away - TEN_MINUTES)
            self.push(clock + away, "back", n)

    def fill(self, clock: float) -> float:
        """Spares take the places; without one it is waited for."""
        while len(self.used) < self.nodes:
            back = sorted(e for e in self.heap if e[2] == "back" and e[0] <= clock)
            for e in back:
                self.heap.remove(e)
                self.spare.append(e[3])
            if back:
                heapq.heapify(self.heap)
            if self.spare:
                self.used.add(self.spare.pop(0))
                continue
            self.tally.shortages += 1
            waits = min((e[0] for e in self.heap if e[2] == "back"), default=clock + REQUEUE_S)
            until = min(waits, clock + REQUEUE_S)
            self.tally.waited_s += until - clock
            clock = until
            if waits > until:
                # The scheduler finds as many as are missing; they stay.
                start = max([*self.used, *self.bad, 10 * self.nodes]) + 1
                self.spare += range(start, start + self.nodes - len(self.used))
        return clock

    # --- the others

    def react_as_published(
        self, clock: float, kind: inputs.FaultClass, bad: tuple[int, ...], code: bool
    ) -> float:
        """ByteRobust: sure events evict one, others the group of eight, and nobody returns for a day."""
        clock += self.rules.ladder_s.get(kind.name, 93.0)
        if code:
            self.tally.persons += 1
            return clock + self.times.person
        if bad:
            sure = kind.seen == "lost" or self.draw.random() < EXPLICIT
            leaving = set(bad)
            if not sure:
                for n in bad:
                    first = n - n % self.rules.group
                    leaving |= {m for m in range(first, first + self.rules.group) if m in self.used}
            self.leave(clock, leaving)
        return clock

    def react_as_torchrun(self, clock: float, kind: inputs.FaultClass, bad: tuple[int, ...]) -> float:
        """A host that is gone is left out; all else ends the job after 23 s, and somebody starts it again without that node."""
        if kind.seen == "lost" and bad:
            self.leave(clock, set(bad))
            return clock + 36.4
        self.tally.persons += 1
        self.leave(clock, set(bad))
        return clock + 23.0 + self.times.person


def read_hang_recall() -> float:
    """How often the rank that holds the others up was named: `hangs.py`; 0.9 where it was not measured."""
    path = inputs.RESULTS / "hangs.json"
    return float(json.loads(path.read_text())["total"]["recall"]) if path.is_file() else 0.9


HANG_RECALL = read_hang_recall()
CODE_REASONS = ("KeyError", "TypeError", "AssertionError", "ValueError", "IndexError", "AttributeError", "NameError", "RuntimeError")  # fmt: skip
