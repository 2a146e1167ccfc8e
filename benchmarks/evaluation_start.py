"""How long a worker takes from its start to its first block: without bytecode, with ours, and forked from one that has imported.

    python benchmarks/evaluation_start.py --out results/start.json [--model FOLDER]

The same small suite is evaluated four times: "empty" with an empty cache folder (where the installation has no bytecode, it is
compiled beside the imports), "kept" with what that left, "forked" with a fork server that was started with the evaluation, and
"again" with the same server, as between two checkpoints of a watch. GPU workers where there are GPUs. Seconds; one line each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import describe_machine
from own_folders import use_own_folders

ONE = """
import json, sys, time
from pathlib import Path
from unbroken.evaluate.processes.bytecode import keep_bytecode
from unbroken.evaluate.model.cache import default_places
from unbroken.evaluate.contracts import ModelSpec
from unbroken.evaluate.run.coordinator import Coordinator
from unbroken.evaluate.run.job import Job, Launchers
from unbroken.evaluate.engines import Slot
from unbroken.evaluate.engines.local import LocalEngine, count_gpus, imports_for
from unbroken.evaluate.result.folder import EvalDir
from unbroken.evaluate.run.settings import Settings
from unbroken.evaluate.suite.reader import read_suite

suite, model, place, forked = sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4] == "forked"
gpus = count_gpus()
slots = tuple(Slot(f"w{i}", (i,), 1) for i in range(gpus)) or (Slot("w0"),)
threads = None if gpus else 1
imports = imports_for("transformers", slots, place / "imports", threads) if forked else None
for name in ("forked", "again") if forked else (sys.argv[4],):
    began = time.time()
    folder = EvalDir(place / name)
    spec = ModelSpec(model, dtype="float32")
    engine = LocalEngine(folder.root / "logs", threads=threads, imports=imports)
    settings = Settings(slots=slots, cpu_workers=2, prepare_workers=2, places=default_places(), cache="always")
    report = Coordinator(Job(read_suite(suite), spec, folder), Launchers(engine), settings).run()
    assert not report.errors and report.scores, report.errors
    w = max(report.workers, key=lambda w: w.ready - w.started)
    print(json.dumps({
        "start": name, "workers": len(report.workers), "from start to ready": round(w.ready - w.started, 2), "fetch": round(w.fetch_s, 2),
        "load": round(w.load_s, 2), "connected after": round(w.start_s, 2), "command": round(time.time() - began, 2),
        "modules without bytecode": w.uncompiled, "bytecode kept in": keep_bytecode().get("PYTHONPYCACHEPREFIX", ""),
        "unfit to fork": imports.unfit if imports is not None else "", "scores": [m.value for s in report.scores for m in s.metrics],
    }), flush=True)
if imports is not None:
    imports.close()
"""


def main() -> int:
    """Prints each start, and writes them."""
    use_own_folders()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="")
    given = parser.parse_args()
    root = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as aside:
        place = Path(aside)
        model = given.model
        if not model:
            sys.path.append(str(root))
            from tests.support.tiny_model import write_tiny_model

            model = str(write_tiny_model(place / "model"))
        suite = place / "suite.toml"
        examples = root / "examples" / "evaluate_own_tasks"
        suite.write_text(f'[suite]\nname = "start"\n[defaults]\nharness = "plain"\n[[task]]\nname = "sums"\ntarget = "{examples / "sums"}"\n')  # fmt: skip
        env = {
            **os.environ,
            "XDG_CACHE_HOME": str(place / "cache"),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        rows = []
        for how in ("empty", "kept", "forked"):
            said = subprocess.run(
                [sys.executable, "-c", ONE, str(suite), model, str(place / how), how],
                env=env,
                capture_output=True,
                text=True,
            )
            if said.returncode:
                print(said.stdout, said.stderr[-3000:], file=sys.stderr)
                for log in (place / how).rglob("*.log"):
                    print(log.name, log.read_text()[-1500:], file=sys.stderr)
                return 1
            for line in said.stdout.splitlines():
                if line.startswith("{"):
                    print(line, flush=True)
                    rows.append(json.loads(line))
            time.sleep(0.5)
        if len({json.dumps(r["scores"]) for r in rows}) != 1:
            print("the scores differ", file=sys.stderr)
            return 1
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({"starts": rows, "machine": describe_machine()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
