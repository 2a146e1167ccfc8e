"""Where the reference trainer's cold start goes: processor time of each part, median of several fresh processes.

python3 benchmarks/train_start.py [-o RESULT.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
ROUNDS = 5
PARTS = """
import json, sys, time
marks = {}
def mark(name, last=[time.process_time()]):
    now = time.process_time(); marks[name] = now - last[0]; last[0] = now
from unbroken.train.__main__ import main
from unbroken.train.config import parse
from unbroken.train.world import pin_environment
pin_environment(); config = parse([]); mark("options")
import torch; mark("import torch")
from unbroken.train.loop import attach, open_tokens, start_world; from unbroken.train.trainer import build; mark("import the trainer")
import unbroken.checkpoint.checkpointer; mark("import the checkpointer")
tokens = open_tokens("stdlib"); mark("open the tokens")
world = start_world(config.run); trainer = build(config, world, attach(), tokens); mark("build the model")
trainer.train_step(lambda: None, False); mark("first step")
marks["total"] = time.process_time()
marks["compiler imported"] = "torch._dynamo" in sys.modules
if len(sys.argv) > 1:
    torch.use_deterministic_algorithms(True); mark("what torch.use_deterministic_algorithms would add")
print(json.dumps(marks))
"""


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("-o", "--out", type=Path, default=REPO / "benchmarks" / "results" / "train_start.json")
    args = p.parse_args()
    env = {**os.environ, "PYTHONPATH": str(REPO / "src")}
    rounds = [run(env) for _ in range(ROUNDS)]
    trap = run(env, "trap")
    parts: dict[str, Any] = {
        name: round(statistics.median(r[name] for r in rounds), 3)
        for name in rounds[0]
        if name != "compiler imported"
    }
    added = "what torch.use_deterministic_algorithms would add"
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=REPO, capture_output=True, text=True, check=False
        ).stdout.strip(),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "rounds": ROUNDS,
        "processor_seconds": parts,
        "compiler_imported": any(r["compiler imported"] for r in rounds),
        added: round(trap[added], 3),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0


def run(env: dict[str, str], *argv: str) -> dict[str, Any]:
    """The parts of one fresh process, in seconds of processor time."""
    p = subprocess.run(
        [sys.executable, "-c", PARTS, *argv], env=env, capture_output=True, text=True, check=True
    )
    parts: dict[str, Any] = json.loads(p.stdout.splitlines()[-1])
    return parts


if __name__ == "__main__":
    sys.exit(main())
