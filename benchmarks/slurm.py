"""A node set down under a run in a Slurm job with a spare: how long until it is fenced, and until the first new step.

    python benchmarks/slurm.py -o slurm.json [--rounds 3] [--only unbroken-warm unbroken-cold torchrun-spare]

Starts the testbed of scripts/slurm_testbed.sh (Debian, root). Three nodes, two of them train, one process each, on the CPU.
`unbroken run --cluster slurm` and `torchrun` run the same script on the same fault. `unbroken-warm` has warm processes, and its node is
set down once all three nodes have theirs; `unbroken-cold` has none. torchrun is tried in both ways that it has:
`torchrun-spare` starts three agents of which it needs two (`--nnodes=2:2`), `torchrun-shrink` trains on all three and goes on
with two (`--nnodes=2:3`). Both get TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: as it is by default (`torchrun-default`, the first way) an
agent that joins in a later round waits for the address of rank 0, which was written in the first round alone; after a minute
all give up (torch 2.13, `_bootstrap_store_info` in dynamic_rendezvous.py; seen on one machine without Slurm too). Times are read
from what rank 0 writes at each step.

down -> fenced       (unbroken) nothing of the run can be left on the lost node
fenced -> new step   (unbroken) to the first step of the next attempt
cold start           from the launch of the first attempt to its first step
down -> new step     both

The figures are written after each round. At the end: whether each fence came within the lease and 3 s, and the share of a cold start
that each new start took.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import describe_machine
from own_folders import use_own_folders

ROOT = Path(__file__).resolve().parents[1]
TRAIN = """
import os, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import unbroken

steps, ours = 2000, "UNBROKEN_RUN_ID" in os.environ
folder = os.environ["BENCH_FOLDER"]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
torch.set_num_threads(1)
model = DistributedDataParallel(torch.nn.Linear(32, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
state = {"model": model, "optimizer": optimizer}
first, path = 1, os.path.join(folder, "own.pt")
if ours:
    checkpoints = unbroken.Checkpointer(snapshot_every=5, persist_every=20)
    first = getattr(checkpoints.restore(state), "step", 0) + 1
elif os.path.exists(path):
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"]); optimizer.load_state_dict(saved["optimizer"]); first = saved["step"] + 1
for step in range(first, steps + 1):
    time.sleep(0.05)
    model(torch.ones(4, 32)).sum().backward()
    optimizer.step(); optimizer.zero_grad()
    if rank == 0:
        with open(os.path.join(folder, "steps"), "a") as f:
            f.write(f"{time.time()} {step}\\n")
    if ours:
        unbroken.attach(total_steps=steps).step(step, loss=0.0)
        checkpoints.due(step) and checkpoints.save(step, state)
    elif rank == 0 and step % 20 == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path + ".aside")
        os.rename(path + ".aside", path)
"""
WITHIN_S, LEASE_S, MARGIN_S = 150.0, 15.0, 3.0


class Bed:
    """The testbed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        argv = ["bash", str(ROOT / "scripts" / "slurm_testbed.sh"), "up", str(folder), "3", "b", "21817"]
        subprocess.run(argv, check=True)
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *argv: str) -> str:
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, check=False, timeout=30)
        return done.stdout.strip()

    def clear(self) -> None:
        self.call("scancel", "--quiet", "-u", "root")
        self.call("scancel", "--quiet", "--full", "--signal=KILL", "-u", "root")
        until(lambda: not self.call("squeue", "-h"), "jobs to end")
        for i in (1, 2, 3):
            self.call("scontrol", "update", f"nodename=b{i}", "state=resume")
        until(
            lambda: set(self.call("sinfo", "-h", "-p", "main", "-N", "-o", "%T").split()) == {"idle"},
            "idle nodes",
        )

    def close(self) -> None:
        subprocess.run(
            ["bash", str(ROOT / "scripts" / "slurm_testbed.sh"), "down", str(self.folder)], check=False
        )
        shutil.rmtree(self.folder, ignore_errors=True)


def until(condition: Callable[[], object], what: str, within_s: float = WITHIN_S) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            print(f"gave up waiting for {what}", file=sys.stderr)
            return False
        time.sleep(0.05)
    return True


def read_steps(folder: Path) -> list[tuple[float, int]]:
    try:
        lines = (folder / "steps").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [(float(t), int(s)) for t, s in (line.split() for line in lines if line.count(" ") == 1)]


def submit(bed: Bed, folder: Path, command: str) -> str:
    (folder / "train.py").write_text(TRAIN)
    job = folder / "job.sh"
    job.write_text(f"#!/bin/bash\nexport BENCH_FOLDER={folder}\n{command}\n")
    return bed.call(
        "sbatch", "--parsable", "--no-kill", "-N3", "-o", str(folder / "out"), "-D", str(folder), str(job)
    )


def break_node(
    bed: Bed, folder: Path, job: str, ready: Callable[[], object] = lambda: True
) -> dict[str, Any]:
    """Sets the second node down in full training, once it is `ready`, and waits for the first step after it."""
    if not until(lambda: len(read_steps(folder)) >= 60 and ready(), "training"):
        out = folder / "out"
        return {"failed": out.read_text(errors="replace")[-800:] if out.exists() else "the job did not start"}
    down = time.time()
    bed.call("scontrol", "update", "nodename=b2", "state=down", "reason=benchmark")
    # A step that was under way may still end: what comes after a pause is the next attempt's.

    def resumed() -> list[float]:
        times = [t for t, _ in read_steps(folder)]
        return [b for a, b in itertools.pairwise(times) if b > down and b - a > 0.5]

    over = until(lambda: resumed() or not bed.call("squeue", "-h", "-j", job), "a new step")
    if not over or not resumed():
        said = (folder / "out").read_text(errors="replace").splitlines()
        return {"failed": "it trained no more", "after_s": round(time.time() - down, 1), "said": said[-6:]}
    kept = bed.call("squeue", "-h", "-j", job, "-o", "%T")
    return {
        "down": down,
        "step_at": resumed()[0],
        "down_to_step_s": round(resumed()[0] - down, 2),
        "job_kept": kept == "RUNNING",
    }


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The run's journal."""
    files = sorted((folder / "run" / "journal").glob("*.jsonl"))
    return [json.loads(x) for p in files for x in p.read_text().split("\n")[:-1]]


def measure_unbroken(bed: Bed, folder: Path, *, warm: bool) -> dict[str, Any]:
    how = "--warm --warm-after 1s" if warm else "--no-warm"
    command = (
        f"exec {sys.executable} -m unbroken run --cluster slurm --nodes 2 --spares 1 --lease {LEASE_S:g}s {how} "
        f"--run-dir {folder}/run -- train.py"
    )

    def ready() -> bool:
        return not warm or len({r["node"] for r in read_records(folder) if r["kind"] == "warm"}) == 3

    found = break_node(bed, folder, submit(bed, folder, command), ready)
    if "step_at" not in found:
        return found
    until(lambda: any(r["kind"] == "resumed" for r in read_records(folder)), "the end of the incident", 20)
    incident = json.loads(next((folder / "run" / "incidents").glob("*.json")).read_text())
    records = read_records(folder)
    launched = next(r["t"] for r in records if r["kind"] == "attempt")
    fenced = incident["detected"] + incident["phases"].get("stop", 0.0)
    return found | {
        "down_to_fenced_s": round(fenced - found["down"], 2),
        "fenced_to_step_s": round(found["step_at"] - fenced, 2),
        "cold_start_s": round(read_steps(folder)[0][0] - launched, 2),
        "phases": incident["phases"], "what": incident["kind"], "warm_ranks": incident.get("warm"),
        "cold_why": incident.get("cold_why"), "warm": [r for r in records if r["kind"] == "warm"],
    }  # fmt: skip


def measure_torchrun(bed: Bed, folder: Path, nodes: str, *, share_store: bool = False) -> dict[str, Any]:
    torchrun = (
        f"env TORCH_DISABLE_SHARE_RDZV_TCP_STORE={int(not share_store)} {sys.executable} -m torch.distributed.run --nnodes={nodes} --nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d "
        "--rdzv-endpoint=127.0.0.1:29617 --rdzv-conf=join_timeout=60,last_call_timeout=5 --rdzv-id=bench train.py"
    )
    # The store is the first agent's, whose node stays: the others begin once it listens, the third one last. On a busy machine a pause
    # alone had let the lost node have it, and without its store torchrun ends.
    listens = "until (exec 3<>/dev/tcp/127.0.0.1/29617) 2>/dev/null; do sleep 0.2; done"
    command = "\n".join(
        f"({listens if i else 'true'}; sleep {i * 3}; srun --overlap --mem=0 --cpu-bind=none -w b{i + 1} -N1 -n1 {torchrun}) &"
        for i in range(3)
    )
    return break_node(bed, folder, submit(bed, folder, f"{command}\nwait"))


CONTENDERS: dict[str, Callable[[Bed, Path], dict[str, Any]]] = {
    "unbroken-warm": lambda bed, folder: measure_unbroken(bed, folder, warm=True),
    "unbroken-cold": lambda bed, folder: measure_unbroken(bed, folder, warm=False),
    "torchrun-spare": lambda bed, folder: measure_torchrun(bed, folder, "2:2"),
    "torchrun-shrink": lambda bed, folder: measure_torchrun(bed, folder, "2:3"),
    "torchrun-default": lambda bed, folder: measure_torchrun(bed, folder, "2:2", share_store=True),
}


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    keys = ("down_to_fenced_s", "fenced_to_step_s", "cold_start_s", "down_to_step_s")
    spread = {}
    for key in keys:
        if values := [r[key] for r in rows if key in r]:
            spread[key] = {"min": min(values), "median": statistics.median(values), "max": max(values)}
    shares = [r["fenced_to_step_s"] / r["cold_start_s"] for r in rows if "fenced_to_step_s" in r]
    if shares:
        spread["share_of_a_cold_start"] = {
            "min": round(min(shares), 2), "median": round(statistics.median(shares), 2), "max": round(max(shares), 2)
        }  # fmt: skip
        spread["fenced_within_the_lease_and_3_s"] = all(
            r["down_to_fenced_s"] <= LEASE_S + MARGIN_S for r in rows if "down_to_fenced_s" in r
        )
    return spread | {"rounds": len(rows), "failed": sum("failed" in r for r in rows)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    args = parser.parse_args()
    use_own_folders()
    place = Path(tempfile.mkdtemp(prefix="unbroken-slurm-"))
    place.chmod(0o755)
    bed = Bed(place)
    result: dict[str, Any] = {
        "machine": describe_machine(), "slurm": bed.call("sinfo", "--version"),
        "containment": (place / "containment").read_text().strip(), **{name: [] for name in args.only},
    }  # fmt: skip
    try:
        for _ in range(args.rounds):
            for name, measure in ((n, CONTENDERS[n]) for n in args.only):
                folder = Path(tempfile.mkdtemp(prefix="round-", dir=place))
                try:
                    result[name].append(measure(bed, folder))
                except (OSError, ValueError, StopIteration, subprocess.TimeoutExpired) as e:
                    result[name].append({"failed": f"{type(e).__name__}: {e}"})
                print(name, json.dumps(result[name][-1]), flush=True)
                result["summary"] = {n: summarize(result[n]) for n in args.only}
                args.output.write_text(json.dumps(result, indent=1) + "\n")
                bed.clear()
    finally:
        bed.close()
    print(json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()
