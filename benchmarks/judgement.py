"""1,200 nodes for 90 simulated days: what verdicts and decisions are worth, beside the published rules and torchrun.

    python benchmarks/judgement.py [--nodes 1200] [--days 90] [--seeds 3] [-o RESULT.json]

The same faults for everybody (`judgement_inputs.py`: published mix and rates, real repair times, lemons, faults in pairs, one
switch). For ours each incident is a labelled log that `diagnose` reads, and the real `decide` with its history, budgets and limits.
Where a verdict of the infrastructure or a hang leaves open which node it was, a quick check looks at all, whoever is named leaves at
once, is tested aside and returns, and where two in an hour name nobody the real pairwise test runs on simulated pairs: the *two
moves*; without them is a contender of its own. Times are from results of other benchmarks or cited; half and twice of all of
them are run too. ETTR is productive time (no step counted twice) over wall time, beside the exact form
1 / (1 + b/D + loss per incident / M) with its inputs. Two rates: the one for which the best published ETTR, 0.97, holds, and four times
that. Then: a crash loop, spares that are bad, second failures during recovery, a detector gone mad. Exits 1 where a check fails.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

try:
    import judgement_inputs as inputs
    from machine import describe_machine
except ImportError:  # imported by a test
    from benchmarks import judgement_inputs as inputs
    from benchmarks.machine import describe_machine

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
    """How a contender reacts. `group` is how many leave where nobody is certain; `returns` whether innocents come back when they
    were tested; `ladder_s` the published times from localisation to restart, by class."""

    name: str
    two_moves: bool = True
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
        policy: Policy = Policy(),
        bad_spares: int = 0,
        mad_s: float = 0.0,
    ) -> None:
        self.rules, self.times, self.nodes, self.end = rules, times, nodes, days * inputs.DAY_S
        self.cases, self.policy, self.draw = cases, policy, random.Random(seed)
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
        self.unnamed: list[float] = []
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
        verdict, facts, named = self.judge(clock, kind, bad, code, mad)
        free = len(self.spare)
        decision = decide(verdict, facts, self.history, Budgets(), free, self.policy, self.cordons)
        self.history.append(decision.charged)
        tally.whys[decision.action.value] += 1
        if "see whether the detection is right" in decision.why:
            tally.whys["the limit was told"] += 1
        leaving = {int(n) for n in decision.exclude}
        self.cordons += [(facts.noticed or 0.0, str(verdict.reason))] * len(leaving)
        tally.cordons += [clock] * len(leaving)
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
                leaving |= {n for n in bad if math.isfinite(self.bad[n][1]) and self.draw.random() < EXPLICIT}
            if named is not None and at_node:
                leaving.add(named)
            elif at_node and not leaving:
                self.unnamed = [u for u in self.unnamed if clock - u < 3600.0] + [clock]
                if len(self.unnamed) >= 2:
                    clock, found = self.test_pairs(clock)
                    leaving |= found
                    self.unnamed = []
        self.leave(clock, leaving)
        return clock

    def judge(
        self, clock: float, kind: inputs.FaultClass, bad: tuple[int, ...], code: bool, mad: bool
    ) -> tuple[Verdict, Facts, int | None]:
        """(verdict, facts, the node that is named without being cordoned)."""
        step = int(self.tally.productive / self.times.step)
        facts = Facts(step=step, run_step=int(self.reached / self.times.step), noticed=clock)
        if mad:
            node = self.draw.choice(sorted(self.used))
            root = Root(text="a detector that is wrong", node=str(node))
            wrong = Verdict(Outcome.FAILED, Category.INFRASTRUCTURE, "ECCError", root, faulty=Faulty(str(node)), recoverable=True, cordon=(str(node),), action=Action.RESTART_ELSEWHERE, confidence=0.95, decided_by="mad")  # fmt: skip
            return wrong, facts, None
        if kind.seen == "lost" and bad:
            facts = replace(facts, lost_nodes=tuple(str(n) for n in bad))
            return judge_unread(facts, ""), facts, None
        if kind.seen == "hang":
            # Recall and precision of who is named: benchmarks/results/hangs.json, where it was measured.
            named = bad[0] if bad and self.draw.random() < HANG_RECALL else None
            late = (0,) if named is not None else ()
            who = (Culprit(0, "runs its own code", "stands still"),) if late else ()
            hang = HangFact(step, "training", self.times.detect_hang, late, None, f"{self.generation}", who)
            facts = replace(facts, hang=hang, nodes=((0, str(named)),) if late else ())
            return judge_unread(facts, ""), facts, named
        wanted = CODE_REASONS if code else kind.reasons
        fitting = [c for c in self.cases if c.reason in wanted and c.passes is not code]
        case = self.draw.choice(fitting)
        named = None
        if case.named:
            named = bad[0] if bad and case.right else self.draw.choice(sorted(self.used))
        verdict = case.verdict
        if case.cordons and named is not None:
            verdict = replace(verdict, faulty=Faulty(str(named)), cordon=(str(named),))
            return verdict, facts, None
        return replace(verdict, cordon=()), facts, named if bad else None

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


def advise_spares(nodes: int, per_node_day: float, away_s: float, sure: float = 0.99) -> int:
    """The smallest pool that suffices with this probability: nodes away at a time are Poisson."""
    load = nodes * per_node_day * away_s / inputs.DAY_S
    term = total = math.exp(-load)
    k = 0
    while total < sure:
        k += 1
        term *= load / k
        total += term
    return k


def report(tally: Tally, times: inputs.Times, between: float) -> dict[str, Any]:
    m = tally.productive / max(1, tally.incidents)
    loss = mean(tally.losses) if tally.losses else 0.0
    faults = max(1, tally.node_faults)
    return {
        "ettr": tally.ettr,
        "exact_form": {
            "ettr": 1 / (1 + times.block / between + loss / m),
            "M_s": m,
            "D_s": between,
            "b_s": times.block,
            "loss_per_incident_s": loss,
        },
        "incidents": tally.incidents,
        "node_faults": tally.node_faults,
        "came_again": tally.repeats,
        "persons": tally.persons,
        "persons_share": tally.persons / max(1, tally.incidents),
        "stops": dict(tally.stops),
        "evicted_at_fault": tally.evicted_bad,
        "evicted_innocent": tally.innocents,
        "innocent_node_hours_per_fault": tally.innocent_s / 3600 / faults,
        "innocent_node_hours_per_fault_after_ten_minutes": tally.innocent_late_s / 3600 / faults,
        "pair_tests": tally.pair_tests,
        "pool_empty": tally.shortages,
        "waited_for_nodes_s": tally.waited_s,
        "more_lost_than_with_unlimited_spares": tally.waited_s / max(1.0, sum(tally.losses) - tally.waited_s),
        "during_recovery": tally.during_recovery,
        "replayed_s": tally.replayed_s,
        "loss_mean_s": loss,
        "loss_median_s": sorted(tally.losses)[len(tally.losses) // 2] if tally.losses else 0.0,
    }


def try_hardships(times: inputs.Times, cases: Sequence[inputs.Case], nodes: int) -> dict[str, Any]:
    """What a recovery itself may meet: each run for two days, with what came of it and whether that is well."""
    ours = Rules("ours", spares=16)
    code = inputs.FaultEvent(3600.0, inputs.CLASSES[0], code=True)
    loop = Simulation(ours, times, cases, nodes, 2, [code], seed=1).run()
    one = inputs.FaultEvent(3600.0, inputs.CLASSES[0], (3,), 600.0, repair_s=inputs.DAY_S)
    spares = Simulation(ours, times, cases, nodes, 2, [one], seed=1, bad_spares=3).run()
    lost = next(c for c in inputs.CLASSES if c.name == "kernel panic")
    twice = [
        inputs.FaultEvent(at, lost, (n,), math.inf, repair_s=3600.0)
        for n, at in enumerate(x for k in range(1, 25) for x in (k * 3600.0, k * 3600.0 + 20.0))
    ]
    again = Simulation(ours, times, cases, nodes, 2, twice, seed=1).run()
    mad = Simulation(ours, times, cases, nodes, 2, [], seed=1, mad_s=300.0).run()
    most = max((sum(1 for x in mad.cordons if c <= x < c + 3600.0) for c in mad.cordons), default=0)
    return {
        "crash loop": {
            "attempts_until_stopped": loop.incidents,
            "stopped_and_told": loop.persons == 1,
            "well": loop.persons == 1 and loop.incidents <= 3,
        },
        "three of the spares are bad": {
            **_brief(spares),
            "well": spares.ettr > 0.95 and not spares.persons,
        },
        "a second failure in each recovery": {
            **_brief(again),
            "during_recovery": again.during_recovery,
            "well": again.ettr > 0.9 and not again.persons and again.during_recovery >= 20,
        },
        "a detector gone mad, every five minutes": {
            **_brief(mad),
            "most_cordons_in_an_hour": most,
            "told_in": mad.whys["the limit was told"],
            "well": most <= Policy().cordons_per_hour
            and mad.whys["the limit was told"] > 0
            and not mad.persons,
        },
    }


def _brief(t: Tally) -> dict[str, Any]:
    return {"ettr": round(t.ettr, 4), "incidents": t.incidents, "persons": t.persons}


def merge(tallies: Sequence[Tally]) -> Tally:
    """Several seeds as one."""
    total = Tally()
    for t in tallies:
        for name, value in vars(t).items():
            setattr(total, name, getattr(total, name) + value)
    return total


def choose_contenders(pool: int) -> list[Rules]:
    """Ours and what it is compared with."""
    return [
        Rules("ours", spares=pool),
        Rules("ours, without the two moves", two_moves=False, spares=pool),
        Rules("published rules", group=8, returns=False, spares=5, hang_s=600.0, ladder_s=PUBLISHED),
        Rules("torchrun", spares=pool, person_each=True, disk_s=1800.0, hang_s=600.0),
    ]


@dataclass(frozen=True)
class Setting:
    """What all contenders of a rate share."""

    times: inputs.Times
    cases: Sequence[inputs.Case]
    repairs: Sequence[float]
    nodes: int
    days: float
    seeds: int
    rate: float

    def run(self, rules: Rules, scale: float = 1.0) -> dict[str, Any]:
        times, tallies = self.times.scale(scale), []
        for seed in range(self.seeds):
            events = inputs.draw_faults(self.nodes, self.days, self.rate, self.repairs, seed)
            simulation = Simulation(rules, times, self.cases, self.nodes, self.days, events, seed)
            tallies.append(simulation.run())
        found = report(merge(tallies), times, simulation.between)
        print(f"{self.rate:.2e} {rules.name} x{scale:g}: ETTR {found['ettr']:.4f}, {found['incidents']} incidents", file=sys.stderr, flush=True)  # fmt: skip
        return found

    def compare(self, pool: int) -> dict[str, Any]:
        contenders = choose_contenders(pool)
        rows = {r.name: self.run(r) for r in contenders}
        rows["ours, times x0.5"], rows["ours, times x2"] = (
            self.run(contenders[0], 0.5),
            self.run(contenders[0], 2.0),
        )
        return rows


def main() -> int:
    """Runs everything; prints and writes one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1200)
    parser.add_argument("--days", type=float, default=90.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", type=Path, default=inputs.DATA)
    parser.add_argument("-o", "--out", type=Path)
    args = parser.parse_args()
    began = time.process_time()
    cases = inputs.read_cases([args.data / "failure_logs", args.data / "failure_logs_wild"], CODE_REASONS)
    repairs = inputs.read_repairs(args.data / "node_faults") if cases else []
    if not cases or not repairs:
        print(f"there are no log cases or node faults in {args.data}", file=sys.stderr)
        return 2
    read_s = time.process_time() - began
    times, away = inputs.read_times(), mean(repairs)
    node_share = sum(c.share * c.node for c in inputs.CLASSES) / sum(c.share for c in inputs.CLASSES)
    rates, pools = {}, {}
    for name, rate in (("published", inputs.PUBLISHED_RATE), ("four times that (Meta)", inputs.META_RATE)):
        pools[name] = advise_spares(args.nodes, rate * node_share * (1 + inputs.TOGETHER), away)
        setting = Setting(times, cases, repairs, args.nodes, args.days, args.seeds, rate)
        rates[name] = {"incidents_per_node_day": rate, "pool": pools[name], **setting.compare(pools[name])}
    hardships = try_hardships(times, cases, args.nodes)
    ours, torchrun = rates["published"]["ours"], rates["published"]["torchrun"]
    checks = {
        "ettr_at_least_0.99": ours["ettr"] >= 0.99,
        "innocent_hours_below_1_after_ten_minutes": ours["innocent_node_hours_per_fault_after_ten_minutes"]
        < 1,
        "pool_within_3_percent_of_unlimited": ours["more_lost_than_with_unlimited_spares"] <= 0.03,
        "persons_90_percent_fewer_than_torchrun": ours["persons"] <= 0.1 * torchrun["persons"],
        **{name: h["well"] for name, h in hardships.items()},
    }
    result = {
        "machine": describe_machine(),
        "cpu_s": round(time.process_time() - began, 1),
        "of_that_reading_logs_s": round(read_s, 1),
        "nodes": args.nodes,
        "days": args.days,
        "seeds": args.seeds,
        "log_cases": len(cases),
        "log_cases_with_a_node": sum(c.named for c in cases),
        "log_cases_whose_node_is_named_right": sum(c.right for c in cases),
        "real_repairs": len(repairs),
        "mean_repair_h": round(away / 3600, 2),
        "times": asdict(times),
        "rates": inputs.describe(rates),
        "hardships": hardships,
        "checks": checks,
    }
    short = {
        n: {c: round(v["ettr"], 4) for c, v in r.items() if isinstance(v, dict)} for n, r in rates.items()
    }
    print(json.dumps({"ettr": short, "pools": pools, "checks": checks}, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
