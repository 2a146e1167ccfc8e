"""Writes the golden set: what this version leaves on disk, small, for every later version to read.

    python -m tests.golden.make            # adds tests/golden/data/<version of the format>/, never changes one that is there

A set is made once and committed; `test_golden.py` reads all of them. A change of a format raises its `schema` and adds a new
set beside the old ones. The runs work in /srv/golden (their journals name their own folder), which is removed again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DATA = HERE / "data"
WORK = Path("/srv/golden")
BESIDE = ("token", "agents", "report.html")
"""What a run directory holds beside its record: a secret, the logs of our own processes, and a page made from the record."""

TRAIN = """
import os, sys, time
import torch
import torch.distributed as dist
import unbroken

dist.init_process_group("gloo")
run = unbroken.attach(total_steps=int(sys.argv[1]))
checkpoints = unbroken.Checkpointer(snapshot_every=5, persist_every=10)
rank = int(os.environ["RANK"])
state = {"w": torch.zeros(8), "rank": torch.tensor(rank), "seen": []}
restored = checkpoints.restore(state)
for step in range(restored.step + 1 if restored else 1, int(sys.argv[1]) + 1):
    state["w"] += 1
    state["seen"] = [step]
    time.sleep(float(sys.argv[2]))
    print("step", step, "loss", 1 / step, flush=True)
    run.step(step, loss=1 / step, tokens=64)
    if checkpoints.due(step):
        checkpoints.save(step, state, position={"samples": [[0, step * 4]]})
checkpoints.close()
"""


def until(condition: Callable[[], object], within: float = 90.0) -> None:
    """Waits for a condition. Raises TimeoutError."""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("did not come true")
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="name of the new set, such as 2026-11")
    name = parser.parse_args().name
    target = DATA / name
    if target.exists():
        sys.exit(f"{target} is there; a golden set is never changed, give the new one another name")
    WORK.mkdir(parents=True)
    try:
        expected = {
            part.__name__: part(target)
            for part in (runs, checkpoints, bucket, diagnosis, evaluations, trace, telemetry)
        }
        without_interpreter(target / "evaluations")
        (target / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
    finally:
        shutil.rmtree(WORK, ignore_errors=True)
    print(f"{target}: {sum(f.stat().st_size for f in target.rglob('*') if f.is_file()) / 1024:.0f} KiB")


# --- runs


def start(name: str, steps: int, seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "unbroken", "run", "--run-dir", name, "--nodes", "2", "--host-memory", "64MiB", "--",
         "train.py", str(steps), str(seconds)],
        cwd=WORK, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def runs(target: Path) -> dict[str, Any]:
    """Three run directories: finished after a killed rank, taken over by a second supervisor, killed with all of its processes."""
    from unbroken.progress import RunDir
    from unbroken.testing.faults import RunFaults

    (WORK / "train.py").write_text(TRAIN)

    def followed(name: str) -> RunFaults:
        until(lambda: (WORK / name / "run.toml").exists())
        return RunFaults(RunDir(WORK / name))

    first = start("finished", 40, 0.05)
    faults = followed("finished")
    faults.wait_for_step(23, within=90, alive=lambda: first.poll() is None)
    faults.kill_rank(1)
    assert first.wait(120) == 0

    first = start("taken_over", 120, 0.1)
    faults = followed("taken_over")
    faults.wait_for_step(15, within=90)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert start("taken_over", 120, 0.1).wait(120) == 0

    first = start("killed", 60, 0.05)
    faults = followed("killed")
    faults.wait_for_step(35, within=90)
    until(lambda: list((WORK / "killed" / "checkpoints").glob("step-00000030*/COMMITTED")))
    first.send_signal(signal.SIGKILL)
    first.wait()
    faults.end_everything()

    found = {}
    for name in ("finished", "taken_over", "killed"):
        # Copied, so moved: what a run says of its own folder must not be where it once stood.
        shutil.copytree(WORK / name, target / "runs" / name, ignore=shutil.ignore_patterns(*BESIDE))
        for folder in ("checkpoints", "attempts", "incidents", "epochs", "journal"):
            (target / "runs" / name / folder).mkdir(exist_ok=True)
        found[name] = {
            "status": cli_json("status", target / "runs" / name, "--json")["status"],
            "checkpoints": sorted(p.parent.name for p in (WORK / name).glob("checkpoints/*/COMMITTED")),
            "incidents": [
                json.loads(p.read_text())["kind"] for p in sorted((WORK / name / "incidents").glob("*.json"))
            ],
        }
    return found


def cli_json(*words: object) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "unbroken", *map(str, words)], capture_output=True, text=True, check=False, cwd=WORK,
        env=os.environ | {"HOME": str(WORK)},
    )  # fmt: skip
    value: dict[str, Any] = json.loads(done.stdout.splitlines()[0] if done.stdout else done.stderr)
    return value


# --- checkpoints


def tensors() -> dict[str, Any]:
    """One of every kind of thing that a state may hold on a machine without GPUs."""
    import torch

    tied = torch.arange(6, dtype=torch.float32)
    every = {str(d).removeprefix("torch."): torch.arange(4).to(d) for d in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    )}  # fmt: skip
    return {
        "every": every, "tied": {"a": tied, "b": tied, "view": tied[2:4]}, "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5), "plain": {"int": 3, "float": 0.1, "text": "ä", "bytes": b"\x00\xff", "none": None,
        "list": [1, (2.0, "x")], 7: "a key that is a number"},
    }  # fmt: skip


def checkpoints(target: Path) -> dict[str, Any]:
    """Folders of checkpoints: replicated, aliased and carrier types alone; sharded over two ranks; local on two ranks."""
    import torch.multiprocessing as mp

    from unbroken import Checkpointer

    os.environ["UNBROKEN_SCRATCH"] = str(WORK)
    folder = target / "checkpoints"
    c = Checkpointer(folder / "every_type", snapshot_every=1, persist_every=1, memory="64MiB")
    c.save(1, tensors(), position={"samples": [[0, 12], [16, 20]]}, persist=True)
    c.close()
    mp.spawn(_sharded, args=(str(folder / "sharded"), str(WORK / "store")), nprocs=2)
    return {p.name: sorted(f.parent.name for f in p.glob("*/COMMITTED")) for p in sorted(folder.iterdir())}


def without_interpreter(folder: Path) -> None:
    """Names the interpreter, which preparations are seen to read, as any machine could."""
    for path in folder.rglob("*"):
        if path.is_file() and sys.base_prefix in (text := path.read_text(errors="replace")):
            path.write_text(text.replace(sys.base_prefix, "/usr"))


def _sharded(rank: int, folder: str, store: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from unbroken import Checkpointer

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 3))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    c = Checkpointer(folder, snapshot_every=1, persist_every=1, memory="64MiB")
    for step in (1, 2):
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        c.save(
            step,
            {"model": model, "optimizer": optimizer, "only mine": torch.full((rank + 1,), float(rank))},
            persist=True,
        )
    c.close()
    dist.destroy_process_group()


def bucket(target: Path) -> dict[str, Any]:
    """A checkpoint as objects, as an object store holds them: one file an object, its name the key."""
    from tests.support.checkpoints import save_small
    from unbroken.testing.object_store import FakeS3

    with FakeS3() as store:
        name = save_small(store.storage("bucket/run"), 7)
        objects = dict(store.objects)
    for key, data in objects.items():
        path = target / "bucket" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return {"name": name, "objects": sorted(objects)}


# --- the rest


def diagnosis(target: Path) -> dict[str, Any]:
    """A store of past incidents with one in it, and the log that it came from."""
    folder = target / "diagnosis"
    folder.mkdir(parents=True)
    log = folder / "train.log"
    log.write_text(
        "".join(f"step {n} loss {4 / n:.3f}\n" for n in range(1, 30))
        + 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    x = batch["labels"]\n'
        + "KeyError: 'labels'\n"
    )
    value = cli_json("diagnose", log, "--store", folder / "incidents.sqlite", "--json")
    for extra in folder.glob("incidents.sqlite-*"):
        extra.unlink()
    return {"incident": value["incident"], "reason": value["reason"]}


def evaluations(target: Path) -> dict[str, Any]:
    """Two evaluations of the same suite: finished, and killed before its end."""
    suite = WORK / "suite"
    shutil.copytree(HERE.parents[1] / "examples" / "evaluate_own_tasks", suite)
    common = [
        sys.executable, "-m", "unbroken", "eval", "run", "suite/suite.toml", "--tasks", "sums,likely", "--workers", "1",
        "--model", "fake", "--backend", "unbroken.testing.fake_models:FakeBackend",
    ]  # fmt: skip
    env = os.environ | {"HOME": str(WORK)}
    subprocess.run([*common, "--out", "evaluation"], cwd=WORK, check=True, stdout=subprocess.DEVNULL, env=env)
    leave = shutil.ignore_patterns("lock", "*.lock", "cluster.*", "report.html")
    shutil.copytree(WORK / "evaluation", target / "evaluations" / "finished", ignore=leave)
    report = json.loads((WORK / "evaluation" / "report.json").read_text())
    scores = {s["task"]: {m["name"]: m["value"] for m in s["metrics"]} for s in report["scores"]}
    for attempt in range(10):
        out = WORK / f"killed-{attempt}"
        child = subprocess.Popen(
            [*common, "--out", out.name], cwd=WORK, stdout=subprocess.DEVNULL, env=env, start_new_session=True
        )
        until(lambda out=out: any(p.stat().st_size for p in out.glob("answers/*/*/*.jsonl")))  # type: ignore[misc]
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        if not (out / "report.json").exists():
            shutil.copytree(out, target / "evaluations" / "killed", ignore=leave)
            return {"scores": scores, "checkpoint": report["checkpoint"]}
    raise RuntimeError("no evaluation could be killed before its end")


def trace(target: Path) -> dict[str, Any]:
    """A trace in the one schema, drawn from the published marginals."""
    folder = target / "trace"
    cli_json(
        "trace",
        "synth",
        "-o",
        folder,
        "--jobs",
        "200",
        "--sample-nodes",
        "1",
        "--sample-hours",
        "1",
        "--json",
    )
    stats = cli_json("trace", "stats", folder, "--json")
    return {"files": sorted(p.name for p in folder.iterdir()), "keys": sorted(stats)}


def telemetry(target: Path) -> dict[str, Any]:
    """Two seconds of this node's host, as `telemetry record` writes them."""
    folder = target / "telemetry"
    cli_json(
        "telemetry", "record", "-o", folder, "--for", "2s", "--every", "500ms", "--node", "node-000", "--json"
    )
    return {"files": len(list(folder.rglob("*.parquet")))}


if __name__ == "__main__":
    main()
