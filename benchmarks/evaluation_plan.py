"""How far `unbroken eval plan` is from what the evaluation then takes, for three kinds of suites.

    python benchmarks/evaluation_plan.py --out benchmarks/results/evaluation_plan.json [--model FOLDER --device-b 7]

Each suite is first evaluated in part (`--limit`), which is what teaches run times, then planned in full, then evaluated in
full, in another folder: "likelihoods" (answers are compared, nothing is written), "texts" (answers of different lengths are
generated) and "long metrics" (short answers, and a metric on the CPU that takes longer than the model). The ratio is
actual over expected makespan; on a busy machine both runs are slower, the second one not always as much: `rounds` are shown.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import describe_machine
from own_folders import use_own_folders

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

TASKS: dict[str, dict[str, tuple[str, str]]] = {
    "likelihoods": {
        "short_endings": (
            "def rows():\n    return [{'c': f'Case {i}: rain falls from the', 'e': [' clouds', ' carpet', ' spoon'], 'r': i % 3} for i in range(ROWS)]\n"
            "def prompt(row):\n    return {'context': row['c'], 'choices': row['e']}\n",
            "def score(row, output):\n    return float(max(range(3), key=lambda i: output[i][0]) == row['r'])\n",
        ),
        "long_contexts": (
            "def rows():\n    return [{'c': f'Case {i}. ' + 'the river runs north to the delta ' * 12, 'e': [' north', ' south'], 'r': 0} for i in range(ROWS // 2)]\n"
            "def prompt(row):\n    return {'context': row['c'], 'choices': row['e']}\n",
            "def score(row, output):\n    return float(output[0][0] > output[1][0])\n",
        ),
    },
    "texts": {
        f"tokens_{n}": (
            f"def rows():\n    return [{{'q': f'{{i}} + {n} ='}} for i in range(ROWS)]\n"
            f"def prompt(row):\n    return {{'prompt': row['q'], 'max_tokens': {n}}}\n",
            "def score(row, output):\n    return float(len(output) > 0)\n",
        )
        for n in (4, 24)
    },
    "long metrics": {
        "judged_on_cpu": (
            "def rows():\n    return [{'q': f'{i} times two ='} for i in range(ROWS)]\n"
            "def prompt(row):\n    return {'prompt': row['q'], 'max_tokens': 2}\n",
            "def score(row, output):\n    n = 0\n    for i in range(WORK):\n        n = (n * 31 + i) % 1000003\n    return float(n % 2)\n",
        ),
        "quick": (
            "def rows():\n    return [{'q': f'{i} and two ='} for i in range(ROWS)]\n"
            "def prompt(row):\n    return {'prompt': row['q'], 'max_tokens': 8}\n",
            "def score(row, output):\n    return 1.0\n",
        ),
    },
}  # fmt: skip
PART = 0.2


def write_suite(folder: Path, name: str, rows: int, work: int) -> Path:
    """The suite's TOML, with its tasks beside it."""
    lines = [f'[suite]\nname = "{name}"\n[defaults]\nharness = "plain"\n']
    for task, (infer, score) in TASKS[name].items():
        place = folder / name / task
        place.mkdir(parents=True)
        (place / "infer.py").write_text(f"ROWS = {rows}\n{infer}")
        (place / "score.py").write_text(f"WORK = {work}\n{score}")
        lines.append(f'[[task]]\nname = "{task}"\ntarget = "{place}"\n')
    path = folder / name / "suite.toml"
    path.write_text("".join(lines))
    return path


def unbroken(*arguments: str | Path) -> Any:
    """The JSON object that a command prints. Raises SystemExit if it fails."""
    command = [sys.executable, "-m", "unbroken", "eval", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(suite: Path, model: str, given: argparse.Namespace, place: Path) -> dict[str, Any]:
    """One suite: learnt from a part, planned, evaluated."""
    priors, workers = place / "priors.json", str(given.workers)
    how = ["--gpus", workers] if given.gpu else ["--workers", workers]
    run = ["run", suite, "-m", model, *how, "--priors", priors]
    unbroken(*run, "--limit", str(PART), "--out", place / "part")
    size = next(r["model_b"] for r in json.loads(priors.read_text())["rows"])
    cpus = max(1, len(os.sched_getaffinity(0)) - given.workers)  # as `run` takes them
    plan = unbroken(
        "plan",
        suite,
        "--gpus",
        workers,
        "--model-b",
        str(size),
        "--priors",
        priors,
        "--cpu-workers",
        str(cpus),
    )
    full = unbroken(*run, "--out", place / "full")
    return {
        "expected_s": round(plan["makespan_s"], 2), "actual_s": round(full["makespan_s"], 2),
        "ratio": round(full["makespan_s"] / plan["makespan_s"], 2), "start_s": round(plan["parcels"][0]["start_s"], 2),
        "tasks": {t: round(e["seconds"], 2) for t, e in plan["tasks"].items()}, "lower_bound_s": round(full["lower_bound_s"], 2),
    }  # fmt: skip


def main() -> int:
    """Prints each suite, and writes them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="", help="default: a tiny one with random weights")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--work", type=int, default=400_000, help="loop rounds of the long metric, per row")
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as aside:
        model = given.model or tiny_model(Path(aside) / "model")
        for name in TASKS:
            suite = write_suite(Path(aside), name, given.rows, given.work)
            found[name] = []
            for i in range(given.rounds):
                row = measure(suite, model, given, Path(aside) / f"{name}-{i}")
                found[name].append(row)
                print(name, json.dumps(row), flush=True)
    result = {
        "machine": describe_machine(),
        "part": PART,
        "rows": given.rows,
        "suites": found,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def tiny_model(place: Path) -> str:
    """A model with random weights; its answers mean nothing, and take as long as any."""
    from tests.support.tiny_model import write_tiny_model

    return str(write_tiny_model(place, hidden=256, layers=4))


if __name__ == "__main__":
    use_own_folders()
    sys.exit(main())
