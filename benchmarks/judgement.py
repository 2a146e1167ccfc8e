"""1,200 nodes for 90 simulated days: what verdicts and decisions are worth, beside the published rules and torchrun.

    python benchmarks/judgement.py [--nodes 1200] [--days 90] [--seeds 3] [-o RESULT.json]

The same faults for everybody (`judgement_inputs.py`: published mix and rates, real repair times, lemons, faults in pairs, one
switch). For ours each incident is a labelled log that `diagnose` reads, and the real `decide` with its history, budgets and limits says who leaves
for good, who leaves at once to be tested aside, and when all are tested in pairs (the *two moves*; the real pairwise test on simulated
pairs). A check of all nodes after an incident of the infrastructure or a hang finds a share of the faults that last. Without both is
a contender of its own. Times are from results of other benchmarks or cited; half and twice of all of
them are run too. ETTR is productive time (no step counted twice) over wall time, beside the exact form
1 / (1 + b/D + loss per incident / M) with its inputs. Two rates: the one for which the best published ETTR, 0.97, holds, and four times
that. Then: a crash loop, spares that are bad, second failures during recovery, a detector gone mad. Exits 1 where a check fails.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

try:
    import judgement_inputs as inputs
    from judgement_run import CODE_REASONS, PUBLISHED, Rules, Simulation, Tally
    from machine import describe_machine
except ImportError:  # imported by a test
    from benchmarks import judgement_inputs as inputs
    from benchmarks.judgement_run import CODE_REASONS, PUBLISHED, Rules, Simulation, Tally
    from benchmarks.machine import describe_machine

from unbroken.progress import Policy


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
        Rules("ours, a check finds 3 of 10", check_finds=0.3, spares=pool),
        Rules("ours, without check and two moves", two_moves=False, spares=pool),
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
