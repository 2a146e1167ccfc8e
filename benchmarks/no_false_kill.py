"""No healthy run is ever killed: many starts, steps and checkpoints with both cores loaded by something else.

    python benchmarks/no_false_kill.py [--starts 200] [--steps 5] [--long-steps 20000] [-o RESULT.json]

First one long run, then many starts of short ones; each is a real `unbroken run` of the reference trainer with
default deadlines; as many busy processes as there are cores run beside it all the time. Counts incidents and
suspicions; exits 1 if a run was killed or did not complete. Goes on where it was stopped when given the same --dir.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from machine import describe_machine

from unbroken.progress import RunDir, read_journal
from unbroken.progress.records.steps import read_steps

BUSY = "while True: sum(range(10000))"


def one(folder: Path, steps: int, nodes: int) -> dict[str, object]:
    """One start from nothing to the end; what its run directory says."""
    argv = [
        sys.executable, "-m", "unbroken", "run", "--run-dir", str(folder), "--nodes", str(nodes), "--",
        "-m", "unbroken.train", "--steps", str(steps), "--log-every", "50",
    ]  # fmt: skip
    done = subprocess.run(argv, cwd=folder.parent, capture_output=True, text=True, check=False)
    run_dir = RunDir(folder)
    journal = read_journal(run_dir).records
    kinds = [r["kind"] for r in journal]
    slowest = 0.0
    records = read_steps(run_dir.steps(1))
    for a, b in pairwise(records):
        slowest = max(slowest, b.time - a.time)
    return {
        "code": done.returncode,
        "steps": records[-1].step if records else 0,
        "checkpoints": kinds.count("durable"),
        "incidents": kinds.count("incident"),
        "suspected": kinds.count("suspected"),
        "attempts": kinds.count("attempt"),
        "first_step_s": next((r["seconds"] for r in journal if r["kind"] == "first_step"), None),
        "slowest_step_s": round(slowest, 3),
        "output": "" if done.returncode == 0 else done.stdout[-2000:] + done.stderr[-2000:],
    }


def main() -> int:
    """Runs the starts; prints and writes one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=200)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--long-steps", type=int, default=20_000)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("-o", "--out", type=Path, default=None)
    args = parser.parse_args()
    folder = args.dir or Path(tempfile.mkdtemp(prefix="unbroken-nfk-"))
    folder.mkdir(parents=True, exist_ok=True)
    tracker = folder / "starts.jsonl"
    rows = [json.loads(line) for line in tracker.read_text().splitlines()] if tracker.exists() else []
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(os.cpu_count() or 2)]
    began = time.monotonic()
    try:
        while len(rows) < args.starts:
            steps = args.long_steps if not rows else args.steps
            row = one(folder / f"run-{len(rows):04d}", steps, args.nodes)
            rows.append(row)
            with open(tracker, "a") as f:
                f.write(json.dumps(row) + "\n")
            if len(rows) % 10 == 0:
                print(f"{len(rows)} starts, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    finally:
        for process in busy:
            process.kill()
    total = {
        "starts": len(rows),
        "steps": sum(r["steps"] for r in rows),
        "checkpoints": sum(r["checkpoints"] for r in rows),
        "incidents": sum(r["incidents"] for r in rows),
        "suspected": sum(r["suspected"] for r in rows),
        "not_completed": sum(r["code"] != 0 for r in rows),
        "slowest_step_s": max(r["slowest_step_s"] for r in rows),
        "seconds": round(time.monotonic() - began),
        "machine": describe_machine(),
    }
    print(json.dumps(total))
    if args.out:
        args.out.write_text(json.dumps(total, indent=1) + "\n")
    return 1 if total["incidents"] or total["not_completed"] else 0


if __name__ == "__main__":
    sys.exit(main())
