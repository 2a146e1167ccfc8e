"""Twenty kinds of hangs made on purpose, and twenty scripts that are only slow: who is suspected when, who is named, who is killed.

    python benchmarks/hangs.py [--only NAME ...] [--at-once 2] [-o RESULT.json]

Each is a real `unbroken run` of `hang_kinds.py` on four ranks, with the default suspicion (5 s) and a step declared hung after
15 s. *Suspected*: from the moment the script wrote down to the record in the journal (of the incident, where the others fail at once). *Named*: the ranks in `waiting.json`
are exactly those that were made to hang. A machine is localised where its rank is: precision and recall are over ranks.
Exits 1 where a hang was not suspected within 10 s, fewer than 18 of 20 were named, or a healthy script was killed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

try:
    from hang_kinds import HANGS, HEALTHY
    from machine import describe_machine
except ImportError:  # imported by a test
    from benchmarks.hang_kinds import HANGS, HEALTHY
    from benchmarks.machine import describe_machine

from unbroken.progress import RunDir, read_journal
from unbroken.progress.records.incident import read_incidents
from unbroken.progress.rundir import WAITING

SCRIPT = Path(__file__).with_name("hang_kinds.py")
RANKS, HANG_S, MOST_S, WITHIN_S = 4, 15, 240, 10.0


def run_one(name: str, folder: Path) -> list[dict[str, Any]]:
    """The run's journal; what it printed goes into a file beside it."""
    argv = [
        sys.executable, "-m", "unbroken", "run", "--run-dir", str(folder), "--nproc", str(RANKS), "--hang-after", f"{HANG_S}s",
        "--evaluating", "40s", "--checkpointing", "40s", "--", str(SCRIPT), name,
    ]  # fmt: skip
    with folder.with_suffix(".txt").open("w") as out:
        subprocess.run(argv, stdout=out, stderr=subprocess.STDOUT, timeout=MOST_S, check=False)
    return read_journal(RunDir(folder)).records


def judge_hang(name: str, folder: Path) -> dict[str, Any]:
    """One hang: when it was suspected, who was named, and what the named were said to do."""
    kind, records = HANGS[name], run_one(name, folder)
    began = min((float(p.read_text()) for p in folder.glob("began-*")), default=None)
    suspected = next((r["t"] for r in records if r["kind"] in ("suspected", "incident")), None)
    path = RunDir(folder).evidence(1) / WAITING
    culprits = json.loads(path.read_text())["culprits"] if path.is_file() else []
    incident = next(iter(read_incidents(RunDir(folder))), None)
    if not culprits and incident is not None and incident["verdict"].get("decided_by") == "early-exit":
        # The others do not hang then: they lose their connections, and the verdict names who left.
        who = incident["verdict"]["faulty"]["rank"]
        text = incident["verdict"]["root"]["text"]
        culprits = [{"rank": who, "doing": "has finished", "text": text, "missed": ""}]
    named = sorted(c["rank"] for c in culprits)
    return {
        "suspected_s": None if began is None or suspected is None else round(suspected - began, 2),
        "made": list(kind.odd),
        "named": named,
        "right": named == sorted(kind.odd),
        "recognised": bool(culprits) and all(c["doing"] == kind.doing for c in culprits),
        "said": [c["text"] for c in culprits],
        "missed": sorted({c["missed"] for c in culprits}),
    }


def judge_healthy(name: str, folder: Path) -> dict[str, Any]:
    """One that is only slow: whether it was let alone."""
    records = run_one(name, folder)
    kinds = [r["kind"] for r in records]
    return {
        "killed": any(r["kind"] == "incident" for r in records),
        "attempts": kinds.count("attempt"),
        "completed": any(r["kind"] == "status" and r.get("status") == "completed" for r in records),
        "suspected": kinds.count("suspected"),
    }


def summarise(hangs: dict[str, Any], slow: dict[str, Any]) -> dict[str, Any]:
    made = sum(len(h["made"]) for h in hangs.values())
    named = sum(len(h["named"]) for h in hangs.values())
    hit = sum(len({*h["made"]} & {*h["named"]}) for h in hangs.values())
    times = sorted(h["suspected_s"] for h in hangs.values() if h["suspected_s"] is not None)
    return {
        "hangs": len(hangs),
        "suspected_within_10_s": sum(t <= WITHIN_S for t in times),
        "slowest_suspicion_s": times[-1] if times else None,
        "right_ranks_named": sum(h["right"] for h in hangs.values()),
        "recognised": sum(h["recognised"] for h in hangs.values()),
        "ranks_made": made,
        "ranks_named": named,
        "precision": round(hit / named, 3) if named else None,
        "recall": round(hit / made, 3) if made else None,
        "healthy": len(slow),
        "healthy_killed": sum(s["killed"] for s in slow.values()),
        "healthy_completed": sum(s["completed"] for s in slow.values()),
    }


def main() -> int:
    """Runs them; prints and writes one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("-o", "--out", type=Path)
    args = parser.parse_args()
    names = [n for n in [*HANGS, *HEALTHY] if not args.only or n in args.only]
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="unbroken-hangs-") as folder,
        ThreadPoolExecutor(args.at_once) as pool,
    ):

        def one(name: str) -> dict[str, Any]:
            found = (judge_hang if name in HANGS else judge_healthy)(name, Path(folder) / name)
            print(f"{name}: {json.dumps(found)}", file=sys.stderr, flush=True)
            return found

        rows = dict(zip(names, pool.map(one, names), strict=True))
    hangs = {n: r for n, r in rows.items() if n in HANGS}
    slow = {n: r for n, r in rows.items() if n in HEALTHY}
    total = summarise(hangs, slow)
    result = {
        "machine": describe_machine(),
        "seconds": round(time.monotonic() - began),
        "total": total,
        "hangs": hangs,
        "healthy": slow,
    }
    print(json.dumps(total, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    wrong = (
        total["suspected_within_10_s"] < len(hangs)
        or total["right_ranks_named"] < len(hangs) - 2
        or total["healthy_killed"]
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
