"""Who is named for being slow: one rank of eight that works a tenth more, and nobody in 20,000 steps of runs that are well.

    python benchmarks/stragglers.py [--steps 20000] [--slow-ms 100] [--well-ms 20] [--work processor | device] [-o RESULT.json]
    python benchmarks/stragglers.py --replay RESULT.json...

Real runs of `straggler_script.py`, four virtual nodes of two ranks on this machine, without a spare; what the supervisor told is
read from the journal (`slow`). Each rank is pinned to a core of its own where there are eight: two threads of one core slow each other
by more than a tenth; some virtual machines hide which those are. `--work device` needs no cores: each rank waits as for a GPU, and tells how long
(`run.step(busy=)`). The result keeps what each rank worked in each window, and `--replay` gives that to the rule as it is now. How much work takes `--slow-ms` or `--well-ms` is
measured first; 20,000 steps of 20 ms take 7 minutes. Of the slow one: after how many steps it was named, and whether it alone. Of the others (steady,
uneven lengths, pauses, waiting for data; a quarter of the steps each): how often a node was named, which has to be never, and what
else was told. The same in simulated time with 64 ranks: `pytest tests/recover/test_slow_simulated.py`, and pure:
`tests/detect/test_stragglers.py`. Exits 1 where the slow one was not named within 100 steps, or anybody else was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    from machine import describe_machine
    from straggler_script import FROM, SEEN, SIZE, SLOW_RANK
except ImportError:  # imported by a test
    from benchmarks.machine import describe_machine
    from benchmarks.straggler_script import FROM, SEEN, SIZE, SLOW_RANK

from unbroken.detect.stragglers import RankWork, SlowFinding, SlowWatch
from unbroken.detect.work import LEAST_S, LEAST_STEPS
from unbroken.progress import RunDir, read_journal
from unbroken.progress.records.steps import read_steps

SCRIPT = Path(__file__).with_name("straggler_script.py")
WELL = ("steady", "uneven", "pauses", "loader")
WITHIN, RANKS = 100, 8


def count_products(ms: float) -> int:
    """How many products of the script make a step of so many milliseconds on one core."""
    import torch

    torch.set_num_threads(1)
    a = torch.randn(SIZE, SIZE)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(1000):
            a @ a
        best = min(best, time.perf_counter() - began)
    return max(10, round(ms / best))


def pick_cores() -> list[int]:
    """One processor of each of eight cores that this process may use; all that it may use where they are fewer."""
    allowed = sorted(os.sched_getaffinity(0))
    cores: dict[str, int] = {}
    for cpu in allowed:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(path.read_text() if path.exists() else str(cpu), cpu)
    picked = list(cores.values())
    return picked[:RANKS] if len(picked) >= RANKS else []


@dataclass(frozen=True)
class Made:
    """What came of a run: what was told of slowness, steps made, seconds a step, and the windows of `read_windows`."""

    told: list[dict[str, Any]]
    steps: int
    each: float
    windows: list[list[Any]]

    def describe(self) -> dict[str, Any]:
        """The common part of a result."""
        return {"steps": self.steps, "step_ms": round(1e3 * self.each, 2)}


def read_windows(folder: Path, device: bool) -> list[list[Any]]:
    """What the ranks saw, as `[last step, seconds a step, [work of each rank], [most work of a step of each rank]]`, in windows as the agents make
    them; empty where a rank left nothing."""
    paths = [folder / f"rank-{r}" for r in range(RANKS)]
    seen = [list(SEEN.iter_unpack(p.read_bytes())) for p in paths if p.is_file()]
    if len(seen) < RANKS:
        return []
    out, first = [], 0
    for last in range(1, min(map(len, seen))):
        steps, wall = last - first, seen[0][last][0] - seen[0][first][0]
        if steps < LEAST_STEPS or wall < LEAST_S:
            continue
        busy, most = [], []
        for rank in seen:
            each = [b for _, b, _ in rank[first + 1 : last + 1]]
            mean = sum(each) / steps if device else (rank[last][2] - rank[first][2]) / steps
            busy.append(round(mean, 6))
            most.append(round(max(each), 6) if device else None)
        out.append([last + 1, round(wall / steps, 6), busy, most])
        first = last
    return out


def replay(windows: Sequence[Sequence[Any]]) -> list[SlowFinding]:
    """All findings of the rule as it is now, two ranks a node."""
    watch = SlowWatch({r: f"node-{r // 2:03d}" for r in range(RANKS)})
    found = []
    for step, step_s, busy, most in windows:
        work = {r: RankWork(b, m) for r, (b, m) in enumerate(zip(busy, most, strict=True))}
        found.append(watch.observe(step, step_s, work))
    return [f for f in found if f is not None]


def replay_all(paths: Sequence[Path]) -> int:
    """Prints who would be named; 1 where anybody is in windows that are well, or the slow one is not."""
    wrong = 0
    for path in paths:
        kinds: dict[str, Any] = json.loads(path.read_text())["windows"]
        for kind, windows in kinds.items():
            named = [f for f in replay(windows) if f.nodes]
            first = f", first at step {named[0].step}: {named[0].why}" if named else ""
            steps = windows[-1][0] if windows else 0
            print(
                f"{path.name}: {kind}: {steps} steps, {len(windows)} windows, {len(named)} with a name{first}"
            )
            wrong += (not named or named[0].ranks != (SLOW_RANK,)) if kind == "slow" else bool(named)
    return 1 if wrong else 0


def run(folder: Path, kind: str, steps: int, work: int, where: str) -> Made:
    """One run, to its end."""
    seen = folder.with_suffix(".seen")
    seen.mkdir()
    argv = [
        sys.executable, "-m", "unbroken", "run", "--run-dir", str(folder), "--nodes", "4", "--nproc", "2", "--",
        str(SCRIPT), kind, str(steps), str(work), where, str(seen),
    ]  # fmt: skip
    with folder.with_suffix(".txt").open("w") as out:
        subprocess.run(argv, stdout=out, stderr=subprocess.STDOUT, check=False)
    records = read_journal(RunDir(folder)).records
    made = read_steps(RunDir(folder).steps(1))
    each = (made[-1].time - made[0].time) / max(1, len(made) - 1) if made else 0.0
    told = [r for r in records if r["kind"] == "slow"]
    return Made(told, made[-1].step if made else 0, each, read_windows(seen, where == "device"))


def write(path: Path, result: dict[str, Any]) -> None:
    """A window a line: many numbers, that people rarely read."""
    text = json.dumps({k: v for k, v in result.items() if k != "windows"}, indent=1)
    kinds = ",\n".join(
        f"  {json.dumps(kind)}: [\n" + ",\n".join(f"   {json.dumps(w)}" for w in windows) + "\n  ]"
        for kind, windows in result["windows"].items()
    )
    path.write_text(f'{text[:-2]},\n "windows": {{\n{kinds}\n }}\n}}\n')


def main() -> int:
    """Runs them; prints and writes one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--slow-ms", type=float, default=100.0)
    parser.add_argument("--well-ms", type=float, default=20.0)
    parser.add_argument("--work", choices=("processor", "device"), default="processor")
    parser.add_argument("--replay", type=Path, nargs="+", metavar="RESULT.json")
    parser.add_argument("-o", "--out", type=Path)
    args = parser.parse_args()
    if args.replay:
        return replay_all(args.replay)
    device = args.work == "device"
    where = args.work if device else ",".join(map(str, pick_cores()))

    def measure(ms: float) -> int:
        return round(1e3 * ms) if device else count_products(ms)

    result: dict[str, Any] = {
        "machine": describe_machine(),
        "ranks": RANKS,
        "work": args.work,
        "cores": where,
        "well": {},
        "windows": {},
    }
    with tempfile.TemporaryDirectory(prefix="unbroken-slow-") as place:
        made = run(Path(place) / "slow", "slow", 300, measure(args.slow_ms), where)
        first = next((t for t in made.told if t["nodes"]), None)
        result["windows"]["slow"] = made.windows
        result["slow"] = {
            **made.describe(),
            "named_after_steps": first["step"] - FROM if first else None,
            "ranks": first["ranks"] if first else [],
            "right": bool(first) and first["ranks"] == [SLOW_RANK],
            "why": first["why"] if first else "",
        }
        print(f"slow: {json.dumps(result['slow'])}", file=sys.stderr, flush=True)
        work = measure(args.well_ms)
        for kind in WELL:
            made = run(Path(place) / kind, kind, args.steps // len(WELL), work, where)
            result["windows"][kind] = made.windows
            result["well"][kind] = {
                **made.describe(),
                "nodes_named": sum(bool(t["nodes"]) for t in made.told),
                "told": dict(Counter(t["what"] for t in made.told)),
                "why": [t["why"] for t in made.told][:4],
            }
            print(f"{kind}: {json.dumps(result['well'][kind])}", file=sys.stderr, flush=True)
            if args.out:
                write(args.out, result)
    result["steps_that_are_well"] = sum(w["steps"] for w in result["well"].values())
    result["nodes_named_wrongly"] = sum(w["nodes_named"] for w in result["well"].values())
    print(json.dumps({k: v for k, v in result.items() if k != "windows"}, indent=1))
    if args.out:
        write(args.out, result)
    after = result["slow"]["named_after_steps"]
    good = result["slow"]["right"] and after is not None and after <= WITHIN
    return 0 if good and not result["nodes_named_wrongly"] else 1


if __name__ == "__main__":
    sys.exit(main())
