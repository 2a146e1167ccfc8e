"""What the hooks cost a training on a CPU, per step, in microseconds of processor time of our own code.

    python benchmarks/hooks.py                    # prints a table, writes benchmarks/results/hooks.json
    python benchmarks/hooks.py --check 200        # exit 1 if a hook's median step without a save is above 200 us

Each hook trains its script of examples/hooks in one process, without workers' time: what is counted are calls of ours (the end of
a step, notes of the loss, what the loader adds to the loader inside of it), not what the framework does. It is processor time of
the calling thread, so that a busy machine changes it little. The progress page is a real one; checkpoints go to a real
keeper every tenth step, which is told apart.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

SCRIPTS = {
    "transformers": "transformers_trainer.py", "accelerate": "accelerate_loop.py", "lightning": "lightning_fit.py",
}  # fmt: skip
SAVE_EVERY = 10
WARM = 5
"""Steps at the beginning that count for nothing: the first ones set up the keeper."""


END = object()


def count(framework: str, folder: Path) -> None:
    """Trains in this process, and prints what each step cost: whether it was saved, and nanoseconds."""
    from unbroken.hooks import steps, training
    from unbroken.progress import page

    os.environ["UNBROKEN_PAGE"] = str(folder / "pages" / "rank-0.page")
    page.create(Path(os.environ["UNBROKEN_PAGE"]), rank=0, attempt=1)
    found: list[tuple[bool, int]] = []
    ours, inside, ended = 0, 0, list[int]()
    end_step, note = training.HookedTraining.end_step, training.Loss.note
    iterate, fetch = steps.StepLoader.__iter__, steps.data.Loader.__iter__

    def timed_end_step(self: Any, step: int) -> None:
        self.checkpoints.due = lambda step: step % SAVE_EVERY == 0
        ended.append(step)
        end_step(self, step)

    def timed_note(self: Any, loss: Any) -> None:
        nonlocal ours
        began = time.thread_time_ns()
        note(self, loss)
        ours += time.thread_time_ns() - began - clock()

    def timed_fetch(self: Any) -> Iterator[Any]:
        nonlocal inside
        batches = fetch(self)
        while True:
            began = time.thread_time_ns()
            batch = next(batches, END)
            inside += time.thread_time_ns() - began
            if batch is END:
                return
            yield batch

    def timed_iterate(self: Any) -> Iterator[Any]:
        """What the loop waits for, but for the loader within, is ours: the end of the step before is in it."""
        nonlocal ours, inside
        batches = iterate(self)
        while True:
            inside, began = 0, time.thread_time_ns()
            batch = next(batches, END)
            ours += time.thread_time_ns() - began - inside - 2 * clock()
            if ended:
                found.append((ended.pop() % SAVE_EVERY == 0, ours))
                ours = 0
            if batch is END:
                return
            yield batch

    training.HookedTraining.end_step, training.Loss.note = timed_end_step, timed_note  # type: ignore[method-assign]
    steps.StepLoader.__iter__, steps.data.Loader.__iter__ = timed_iterate, timed_fetch  # type: ignore[method-assign]
    script = ROOT / "examples" / "hooks" / SCRIPTS[framework]
    sys.argv = [str(script), "--out", str(folder / "out"), "--epochs", "30"]
    runpy.run_path(str(script), run_name="__main__")
    print("RESULT " + json.dumps(found[WARM:]), flush=True)


def clock() -> int:
    """What a look at the clock takes now: some microseconds on a virtual machine, and each measurement has one in it."""
    began = time.thread_time_ns()
    return time.thread_time_ns() - began


def measure(framework: str) -> dict[str, Any]:
    """Microseconds of a hook's steps, by whether they were saved."""
    with tempfile.TemporaryDirectory() as folder:
        env = {k: v for k, v in os.environ.items() if not k.startswith("UNBROKEN_")} | {
            "OMP_NUM_THREADS": "1"
        }
        done = subprocess.run(
            [sys.executable, __file__, "--count", framework, "--folder", folder], env=env, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
    steps = json.loads(lines[-1].removeprefix("RESULT "))
    plain, saved = ([ns / 1000 for is_saved, ns in steps if is_saved is kind] for kind in (False, True))
    return {
        "version": version(framework), "steps": len(steps), "plain_us": figures(plain), "saved_us": figures(saved),
    }  # fmt: skip


def figures(values: list[float]) -> dict[str, float]:
    """Median, mean and 95th percentile."""
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 1), "mean": round(statistics.fmean(ordered), 1),
        "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", type=float, help="exit 1 above so many microseconds (median step without a save)"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "hooks.json")
    parser.add_argument("--count", choices=list(SCRIPTS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.count:
        count(args.count, args.folder)
        return
    from machine import describe_machine

    result = {
        "machine": describe_machine(),
        "save_every": SAVE_EVERY,
        "hooks": {f: measure(f) for f in SCRIPTS},
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{'hook':14} {'steps':>6} {'median us':>10} {'mean':>8} {'p95':>8} {'with a save: median':>20}")
    for name, row in result["hooks"].items():
        plain, saved = row["plain_us"], row["saved_us"]
        print(
            f"{name:14} {row['steps']:6} {plain['median']:10} {plain['mean']:8} {plain['p95']:8} {saved['median']:20}"
        )
    worst = max(row["plain_us"]["median"] for row in result["hooks"].values())
    raise SystemExit(args.check is not None and worst > args.check)


if __name__ == "__main__":
    main()
