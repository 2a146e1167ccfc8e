"""Which machine it was: faults of three scenarios over a fake cluster, and whom the supervisor names, with denominators.

    python benchmarks/localisation.py [--seeds 20] [--nodes 16] [--jobs 2] [--kinds disk ...] [-o RESULT.json]

The real supervisor, diagnosis, hang and straggler detection, policy and pairwise test; nodes and ranks are simulated, and their clocks
differ by minutes (`localisation_kinds.py` has the faults). Named is every node that an incident's verdict has at fault or out of use, that
a slow training is put down to, that left as a suspect, or that a test of pairs convicts: one that is not at fault counts against
precision, one at fault that is never named against recall. A fault that is no node's has nobody to name. What is named by a link counts
as its two ends. Exits 1 where precision is below 0.97 or recall below 0.95.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from unbroken.errors import UnbrokenError
from unbroken.progress import Timeouts
from unbroken.testing.fake_cluster import Script, SimulatedLoop, run_simulated
from unbroken.testing.fake_cluster.simulated_run import SimulatedRun

try:
    from localisation_kinds import KINDS, NPROC, Broken
    from machine import describe_machine
except ImportError:  # imported by a test
    from benchmarks.localisation_kinds import KINDS, NPROC, Broken
    from benchmarks.machine import describe_machine

SPARES = 4
PRECISION, RECALL = 0.97, 0.95
_WAIT_S, _QUIET_S = 2400.0, 60.0


def find_named(run: SimulatedRun) -> set[str]:
    """All nodes that the run's record puts down as at fault, or perhaps at fault."""
    names: set[str] = set()
    for incident in run.incidents():
        verdict = incident["verdict"]
        names |= {*verdict["cordon"], *(place["node"] for k in ("faulty", "root") if (place := verdict[k]))}
    for record in run.journal_text():
        match record["kind"]:
            case "slow":
                names |= {*record["nodes"]}
            case "suspect" | "cordon" | "lost":
                names.add(record["node"])
            case "pairs":
                names |= {*record["convicted"]}
    return names - {None, ""}


def one(seed: int, kind: str, nodes: int) -> dict[str, Any]:
    """One fault: who it was, who was named, and after how many simulated seconds the first name came."""
    draw = Random(f"{kind} {seed}")

    async def main(loop: SimulatedLoop) -> dict[str, Any]:
        run = SimulatedRun(
            loop, Path(place) / "run", nodes, spares=SPARES, nproc=NPROC,
            script=Script(start_s=20, step_s=2, save_every=10, work_s=1.4),
            timeouts=Timeouts(suspect=5, hang=60, lease=15, first_step=120),  # type: ignore[arg-type]
        )  # fmt: skip
        for name in run.hardware.nodes:
            run.faults.skew(name, draw.uniform(-300, 300))
        await run.until(lambda: run.step() >= 130)
        slots = run.journal("attempt")[0]["slots"]
        i = draw.randrange(nodes)
        broken = Broken(run, draw, slots[i], i * NPROC + draw.randrange(NPROC))
        began = loop.time()
        guilty = await KINDS[kind][1](broken)
        first: float | None = None
        try:
            await run.until(lambda: find_named(run), _WAIT_S if guilty else _WAIT_S / 2)
            first = loop.time() - began
            settled = loop.time() + _QUIET_S
            await run.until(lambda: loop.time() > settled, 4 * _QUIET_S)
        except (TimeoutError, UnbrokenError):
            pass  # nobody was named, or the run has stopped: what it has named by then counts
        named = find_named(run)
        if broken.background is not None:
            broken.background.cancel()
        if not run.task.done():
            run.supervisor.request_stop()
            await run.until(run.task.done, 900)
        return {
            "guilty": sorted(guilty), "named": sorted(named), "seconds": first,
            "told": sorted({r["what"] for r in run.journal("slow")}),
        }  # fmt: skip

    # Simulated agents answer no health check, and each is told of.
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with tempfile.TemporaryDirectory(prefix="unbroken-where-") as place:
            return run_simulated(main)
    finally:
        logging.disable(before)


def summarise(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Precision and recall over nodes, with what they are of."""
    guilty = sum(len(f["guilty"]) for f in found)
    named = sum(len(f["named"]) for f in found)
    right = sum(len({*f["guilty"]} & {*f["named"]}) for f in found)
    seconds = sorted(f["seconds"] for f in found if f["seconds"] is not None and f["guilty"])
    return {
        "faults": len(found), "at_fault": guilty, "named": named, "right": right,
        "precision": round(right / named, 4) if named else None, "recall": round(right / guilty, 4) if guilty else None,
        "seconds_until_named": {
            "median": round(median(seconds), 1), "p90": round(seconds[int(0.9 * (len(seconds) - 1))], 1), "most": round(seconds[-1], 1),
        } if seconds else None,
    }  # fmt: skip


def main() -> int:
    """Runs all kinds; prints and writes one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument(
        "--jobs", type=int, default=2, help="processes; the answer is the same for any number"
    )
    parser.add_argument("--kinds", nargs="*", default=[], help="only kinds with such a word in their name")
    parser.add_argument("-o", "--out", type=Path)
    args = parser.parse_args()
    kinds = [k for k in KINDS if not args.kinds or any(w in k for w in args.kinds)]
    result: dict[str, Any] = {
        "machine": describe_machine(), "nodes": args.nodes, "ranks": args.nodes * NPROC, "seeds": args.seeds, "kinds": {},
    }  # fmt: skip
    of: dict[int, list[dict[str, Any]]] = {}
    with ProcessPoolExecutor(args.jobs) as pool:
        for kind in kinds:
            found = list(pool.map(partial(one, kind=kind, nodes=args.nodes), range(args.seeds)))
            of.setdefault(KINDS[kind][0], []).extend(found)
            wrong = [f for f in found if f["guilty"] != f["named"]]
            told = Counter(t for f in found for t in f["told"])
            result["kinds"][kind] = {
                "scenario": KINDS[kind][0],
                **summarise(found),
                "told": told,
                "not_right": wrong[:5],
            }
            print(f"{kind}: {json.dumps(result['kinds'][kind])}", file=sys.stderr, flush=True)
    result["scenarios"] = {n: summarise(found) for n, found in sorted(of.items())}
    result["all"] = summarise([f for found in of.values() for f in found])
    print(json.dumps({k: v for k, v in result.items() if k != "kinds"}, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    total = result["all"]
    return 0 if (total["precision"] or 0) >= PRECISION and (total["recall"] or 0) >= RECALL else 1


if __name__ == "__main__":
    sys.exit(main())
