"""What scoring generated code costs where the installation has no compiled bytecode, with and without ours.

    python benchmarks/evaluation_sandbox.py --out benchmarks/results/evaluation_sandbox.json

lm_eval's code metrics run programs in their own process, so each job's sandbox imports lm_eval. The same job of five small
programs is scored with no bytecode at all ("none": what a container image without it was), with the folder that we keep
("kept", read-only in the sandbox) and with what the installation has ("installed"), in turn. Seconds of a whole job.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import describe_machine
from own_folders import use_own_folders

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

PREPARE = """
import sys
from pathlib import Path
from tests.support.tiny_tasks import CODE, write_tiny_tasks
from unbroken.evaluate.contracts import Answer, ModelSpec, Suite, Task
from unbroken.evaluate.suite import staged
from unbroken.journal.codec import encode
from unbroken.evaluate.suite.registry import get_harness
import json

folder = Path(sys.argv[1])
write_tiny_tasks(folder / "tasks")
task = Task(CODE, options={"include": str(folder / "tasks"), "bootstrap_iters": 10})
suite = Suite("s", (task,))
harness = get_harness("lm_eval")
(leaf,) = harness.expand(task, suite)
place = folder / "prepared"
place.mkdir()
prepared = harness.prepare(leaf, suite, ModelSpec("none"), None, place)
lines = []
for block in range(prepared.blocks):
    for s in staged.read_block(prepared, block):
        outputs = tuple("text" for _ in s.requests)
        lines.append(staged.encode_answer(Answer(s.id, s.prompt_hash, outputs)))
(folder / "answers.jsonl").write_text("".join(f"{line}\\n" for line in lines))
(folder / "prepared.json").write_text(json.dumps(encode(prepared)))
"""


def score(folder: Path, prefix: str | None) -> dict[str, Any]:
    """One job in its sandbox, with this folder of bytecode."""
    from unbroken.evaluate.contracts import PreparedTask, ScoreJob
    from unbroken.evaluate.scoring.sandboxed import score_in_sandbox
    from unbroken.journal.codec import decode

    prepared = decode(PreparedTask, json.loads((folder / "prepared.json").read_text()))
    job = ScoreJob(prepared, str(folder / "answers.jsonl"), str(folder / "score.json"), "c0ffee")
    sys.pycache_prefix = prefix
    try:
        began = time.monotonic()
        answer, why, _ = score_in_sandbox(job, {}, 4 << 30, 60.0, 300.0)
        seconds = time.monotonic() - began
    finally:
        sys.pycache_prefix = None
    if answer is None or "score" not in answer:
        raise SystemExit(f"the job was not scored: {why or answer}")
    metrics = [(m["name"], m["value"], m["stderr"]) for m in answer["score"]["metrics"]]
    return {"seconds": round(seconds, 2), "metrics": metrics}


def main() -> int:
    """Prints each job, and writes them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as aside:
        place = Path(aside)
        paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        # Like the processes that prepare and score, it leaves the bytecode of what it imports in the folder.
        env = {
            **os.environ,
            "PYTHONPYCACHEPREFIX": str(place / "kept"),
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPATH": paths,
        }
        subprocess.run([sys.executable, "-c", PREPARE, str(place)], env=env, check=True)
        subprocess.run([sys.executable, "-m", "unbroken.evaluate.processes.bytecode"], env=env, check=True)
        rows: dict[str, list[float]] = {}
        metrics: list[Any] = []
        for _ in range(given.rounds):
            none = place / "nothing"
            (none / sys.prefix.lstrip("/")).mkdir(
                parents=True, exist_ok=True
            )  # a folder that is there, and empty
            for name, prefix in (("none", str(none)), ("kept", str(place / "kept")), ("installed", None)):
                row = score(place, prefix)
                print(name, row["seconds"], flush=True)
                rows.setdefault(name, []).append(row["seconds"])
                metrics.append(row["metrics"])
    if any(m != metrics[0] for m in metrics):
        raise SystemExit("the scores differ")
    result = {
        "machine": describe_machine(),
        "median_s": {name: statistics.median(times) for name, times in rows.items()}, "seconds": rows,
    }  # fmt: skip
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    use_own_folders()
    sys.exit(main())
