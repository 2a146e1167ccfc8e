"""What training reaches on this machine's GPUs, beside plain FSDP2, transformers' Trainer and torchtitan in the same run.

    python benchmarks/train.py --out FOLDER [--gpus N] [--parts rates 1b flash 3b 7b trainer titan two four] [--seconds S] [--tiny]

Each case is a process of its own (one for each GPU), with a time-out, and writes its figure as soon as it has it: FOLDER/PART.jsonl,
all together FOLDER/train.json. Cases come one after the other, contenders in turn, so that a card that grows hot slows all.
Every contender trains the same model on random tokens with bf16 arithmetic, AdamW in float32, clipping, compiled blocks and loss. A figure
is the mean over steps between two synchronisations, so that nobody is made to wait after each step. MFU = tokens/s x (6 N + 12 L d T)
/ 989 TFLOP/s (Hopper's dense bf16; N without the embedding, attention counted whole); `of_matrix_rate` divides by what a bare
product of 8,192^3 reaches on this card in this run. Activity is NVML's GPM; where the time goes is from a trace of two more steps.
`--tiny` goes through all of it on a processor, to see that the script works: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import describe_machine
from own_folders import use_own_folders

from checkpoint import student

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
from train_contenders import Case, fsdp2, ours, trainer_loop  # noqa: E402
from train_titan import titan_loop  # noqa: E402

from unbroken.train.config import RECIPES, ModelConfig, RunConfig  # noqa: E402
from unbroken.train.planning.sizes import flops_per_token, parameter_count  # noqa: E402
from unbroken.train.profiling.activity import Activity, ActivityRecorder  # noqa: E402
from unbroken.train.profiling.kernels import longest, read_trace, time_by_kind  # noqa: E402
from unbroken.train.world import World, start_world  # noqa: E402

PEAK = 989e12
LOOPS = {"trainer": trainer_loop, "titan": titan_loop}
"""Trainers that run a loop of their own, on one GPU."""
TINY = ModelConfig(dim=64, layers=4, heads=4, kv_heads=4, hidden=128, vocab=512)
PIPELINE = '{"pipeline": 2, "schedule": "interleaved", "stages": 2, "optimizer": -1, "micro_batch": 2}'
"""The published V1's way: more micro-batches, so that the pipeline is seldom empty."""
PARTS: dict[str, tuple[int, list[Case]]] = {
    # Part: (seconds that one case may take, its cases).
    "rates": (25, []),
    # Each in one process with plain FSDP2, in turns; batch 16 has room for one of them.
    "1b": (150, [
        Case("ours", "1b", 8, beside=("fsdp2",), windows=6, steps=4, trace=True),
        Case("ours", "1b", 12, beside=("fsdp2",), windows=4, steps=4),
        Case("fsdp2", "1b", 16, warm=3, steps=10), Case("ours", "1b", 16, warm=3, steps=10),
    ]),
    "flash": (60, [Case("fsdp2", "1b", 8, "flash", steps=5), Case("ours", "1b", 8, "flash", steps=5)]),
    "3b": (120, [
        Case("ours", "3b", 4, beside=("fsdp2",), windows=4, steps=4),
        Case("fsdp2", "3b", 8, warm=2, steps=6), Case("ours", "3b", 8, warm=2, steps=6),
    ]),
    "7b": (70, [Case("ours", "7b", 2, recompute="selective", warm=2, steps=6), Case("fsdp2", "7b", 8, recompute="full", warm=1, steps=2)]),
    "trainer": (150, [Case("trainer", "1b", 8, "default", steps=6)]),
    "titan": (80, [Case("titan", "1b", 8, "default", steps=10), Case("titan", "1b", 12, "default", steps=8)]),
    # Several GPUs: plans beside plain FSDP2, in turns, each with the same global batch; V1 cuts matrices or layers, V2 shares states.
    "two": (150, [
        Case("ours", "1b", 8, plan='{"optimizer": -1}', beside=("fsdp2", '{"parameters": -1}', '{"tensor": 2}', PIPELINE), windows=4, steps=3, trace=True),
        Case("ours", "7b", 4, plan='{"optimizer": -1}', recompute="selective", warm=2, steps=4),
        Case("fsdp2", "7b", 8, recompute="full", warm=2, steps=3), Case("fsdp2", "7b", 2, warm=2, steps=6),
    ]),
    "four": (150, [
        Case("ours", "1b", 8, plan='{"optimizer": -1}', beside=("fsdp2", '{"parameters": -1}', f'{{"tensor": 2, {PIPELINE[1:]}'), windows=4, steps=3),
        Case("ours", "7b", 4, plan='{"optimizer": -1}', recompute="selective", warm=2, steps=4),
        Case("fsdp2", "7b", 8, recompute="full", warm=2, steps=3), Case("fsdp2", "7b", 4, warm=2, steps=6),
    ]),
}  # fmt: skip


def main() -> int:
    """Runs the parts and prints what they found; 1 if a part came to no figure."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True, help="folder for the figures")
    p.add_argument("--gpus", type=int, default=1)
    p.add_argument(
        "--parts", nargs="+", default=["rates", "1b", "3b", "7b", "trainer"], choices=sorted(PARTS)
    )
    p.add_argument(
        "--seconds", type=float, default=3600, help="all parts together; what would come later is left out"
    )
    p.add_argument("--seq", type=int, default=4096)
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--job", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.job:
        return run_job(args)
    use_own_folders()
    args.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + args.seconds
    jobs = [f"{part}.{i}" for part in args.parts for i in range(max(1, len(PARTS[part][1])))]
    bad, started = 0, {}
    for n, job in enumerate(jobs):
        for ahead in jobs[n : n + 4]:  # they import meanwhile; each then waits for its turn
            if ahead not in started:
                started[ahead] = start_job(ahead, args)
        (args.out / f"{job}.go").touch()
        most = PARTS[job.split(".")[0]][0]
        bad += not finish_job(job, started[job], min(until, time.monotonic() + most), args)
    rows = [json.loads(x) for f in sorted(args.out.glob("*.jsonl")) for x in f.read_text().splitlines()]
    rate = next((r["matrix_flops"] for r in rows if r.get("matrix_flops")), None)
    for r in rows:
        if rate and r.get("flops_s"):
            r["of_matrix_rate"] = r["flops_s"] / rate
    result = {"machine": describe_machine(), "seq": args.seq, "gpus": args.gpus, "rows": rows}
    (args.out / "train.json").write_text(json.dumps(result, indent=1) + "\n")
    table(rows)
    return min(bad, 1)


def start_job(job: str, args: argparse.Namespace) -> list[subprocess.Popen[bytes]]:
    """The processes of a case, one for each GPU, in a process group each."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, __file__, *sys.argv[1:], "--job", job]
    alone = job.startswith(("rates", *LOOPS))
    found = []
    size = 1 if alone else args.gpus
    for rank in range(size):
        env = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
                            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                            "PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")}  # fmt: skip
        with open(args.out / f"{job}.{rank}.log", "wb") as log:
            found.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True))
    return found


def finish_job(job: str, processes: list[subprocess.Popen[bytes]], until: float, args: argparse.Namespace) -> bool:  # fmt: skip
    """Waits for a case, at most so long; whether it came to its end. What it wrote stays."""
    began = time.monotonic()
    while any(p.poll() is None for p in processes) and time.monotonic() < until:
        time.sleep(0.05)
    late = [p for p in processes if p.poll() is None]
    for p in late:
        os.killpg(p.pid, signal.SIGKILL)
    codes = [p.wait() for p in processes]
    said = f"{job}: {time.monotonic() - began:.0f} s, " + ("cut off" if late else f"codes {codes}")
    if any(codes):
        said += "\n" + (args.out / f"{job}.0.log").read_text(errors="replace")[-1500:]
    print(said, flush=True)
    return not any(codes)


def run_job(args: argparse.Namespace) -> int:
    """One process of a case."""
    faulthandler.enable()  # a crash in a library leaves its stack in the log
    part, _, number = args.job.partition(".")
    if part == "trainer":
        import transformers  # noqa: F401
    while not (args.out / f"{args.job}.go").exists():
        time.sleep(0.02)
    torch.set_float32_matmul_precision("high")
    world = start_world(RunConfig(mode="fast", device="cpu" if args.tiny else "auto"))
    file = args.out / f"{part}.jsonl"
    about = {"part": part, "torch": torch.__version__, "commit": commit(), **card(world)}
    if part == "rates":
        for row in rates(world, args):
            note(file, about | row)
        return 0
    case = PARTS[part][1][int(number)]
    if args.tiny:
        case = dataclasses.replace(case, micro=min(2, case.micro), warm=1, steps=2)
    row = about | dataclasses.asdict(case) | {"ranks": world.size}
    with tempfile.TemporaryDirectory() as folder:
        try:
            if case.beside:
                take_turns(
                    case, world, Path(folder), args, lambda found: world.rank or note(file, row | found)
                )
                sys.stdout.flush()
                os._exit(0)
            row |= run_case(case, world, Path(folder), args)
        except torch.OutOfMemoryError as e:
            row["out_of_memory"] = str(e)[:200]
        if world.rank == 0:
            note(file, row)
    sys.stdout.flush()
    os._exit(0)  # what compiles in the background is of no more use


def note(file: Path, row: dict[str, Any]) -> None:
    """Adds a figure to a part's file at once."""
    with open(file, "a") as f:
        f.write(json.dumps(row) + "\n")


def run_case(case: Case, world: World, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one case."""
    model = TINY if args.tiny else RECIPES[case.size]
    cuda = world.device.type == "cuda"
    began = time.monotonic()
    recorder = ActivityRecorder() if world.rank == 0 else None
    moments: list[float] = []
    losses: list[Any] = []
    options: dict[str, Any] = {"seq": 64 if args.tiny else args.seq, "tiny": args.tiny}
    if case.contender in LOOPS:

        def each(done: int) -> None:
            if done in (case.warm, case.warm + case.steps) and cuda:
                torch.cuda.synchronize()
            moments.append(time.monotonic())

        if recorder:
            recorder.start()
        LOOPS[case.contender](case, model, world, folder, on_step=each, **options)
        moments = moments[case.warm - 1 :]
        step = None
    else:
        step, _ = {"ours": ours, "fsdp2": fsdp2}[case.contender](case, model, world, folder, **options)
        losses = [step() for _ in range(case.warm)]
        synchronize(world)
        if recorder:
            recorder.start()
        moments = [time.monotonic()]
        for _ in range(case.steps):
            losses.append(step())
            moments.append(time.monotonic())
        synchronize(world)
        moments[-1] = time.monotonic()
    found = recorder.stop().between(moments[0], moments[-1]) if recorder else None
    seconds = (moments[-1] - moments[0]) / case.steps
    split = 1
    for axis in ("pipeline", "tensor", "context"):
        split *= json.loads(case.plan).get(axis, 1)
    tokens = case.micro * case.accumulate * options["seq"] / seconds / split
    row = {
        "parameters": parameter_count(model), "step_s": seconds, "losses": [float(x) for x in losses], "moments": [m - moments[0] for m in moments],
        "tokens_s_gpu": tokens, "flops_s": tokens * flops_per_token(model, options["seq"]),
        "mfu": tokens * flops_per_token(model, options["seq"]) / PEAK,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "activity": found.means() if found else None, "activity_samples": len(found.samples) if found else 0,
        "not_measured": found.not_measured if found else {}, "seconds_in_all": time.monotonic() - began,
    }  # fmt: skip
    if case.trace and step is not None:
        row["time"] = traced(step, world, folder)
    return row


def take_turns(case: Case, world: World, folder: Path, args: argparse.Namespace, tell: Any) -> None:
    """Several contenders in one process, a window of steps each in turn; a row of each, with what each pair of windows said."""
    model = TINY if args.tiny else RECIPES[case.size]
    seq = 64 if args.tiny else args.seq
    contenders = {c.contender if c.contender == "fsdp2" else c.plan: c for c in each_of(case, world.size)}
    steps = {}
    for n, c in contenders.items():
        steps[n], _ = (fsdp2 if n == "fsdp2" else ours)(c, model, world, folder, seq=seq, tiny=args.tiny)
        for _ in range(case.warm):
            steps[n]()
        synchronize(world)
    took: dict[str, list[tuple[float, float]]] = {n: [] for n in contenders}
    losses: dict[str, Any] = {}
    recorder = ActivityRecorder()
    recorder.start()
    for turn in range(case.windows):
        for n in contenders if turn % 2 else reversed(contenders):
            losses[n] = steps[n]()  # the one before has left the card as it is: one step is not looked at
            synchronize(world)
            began = time.monotonic()
            for _ in range(case.steps):
                losses[n] = steps[n]()
            synchronize(world)
            took[n].append((began, time.monotonic()))
    activity = recorder.stop()
    seconds = {n: [(b - a) / case.steps for a, b in windows] for n, windows in took.items()}
    for n, c in contenders.items():
        ratios = [a / b for a, b in zip(seconds["fsdp2"], seconds[n], strict=True)]
        tokens = case.micro * case.accumulate * seq / statistics.mean(seconds[n])
        flops = tokens * flops_per_token(model, seq)
        within = [s for a, b in took[n] for s in activity.between(a, b).samples]
        row = dataclasses.asdict(c) | {
            "parameters": parameter_count(model), "step_s": statistics.mean(seconds[n]), "windows_s": seconds[n], "losses": [float(losses[n])],
            "tokens_s_gpu": tokens, "flops_s": flops, "mfu": flops / PEAK, "over_fsdp2": statistics.mean(ratios),
            "half": student(len(ratios)) * statistics.stdev(ratios) / len(ratios) ** 0.5, "activity": Activity(within).means(),
            "activity_samples": len(within), "not_measured": activity.not_measured,
            "peak_bytes": torch.cuda.max_memory_allocated() if world.device.type == "cuda" else None, "seconds_in_all": 0.0,
        }  # fmt: skip
        if case.trace:
            row["time"] = traced(steps[n], world, folder)
        tell(row)


def each_of(case: Case, ranks: int) -> list[Case]:
    """A case and those beside it: FSDP2, or our trainer on other plans, all with the same global batch."""
    found = [case]
    batch = ranks * case.micro * case.accumulate
    for n in case.beside:
        plan = json.loads(n) if n.startswith("{") else {}
        micro = plan.pop("micro_batch", case.micro)
        copies = ranks // (plan.get("pipeline", 1) * plan.get("tensor", 1) * plan.get("context", 1))
        name = "ours" if n.startswith("{") else n
        found.append(
            dataclasses.replace(
                case, contender=name, plan=json.dumps(plan), micro=micro, accumulate=batch // copies // micro
            )
        )
    return found


def traced(step: Any, world: World, folder: Path) -> dict[str, Any]:
    """Where the time of two steps goes; every rank calls it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if world.device.type == "cuda":
        activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(2):
            step()
        synchronize(world)
    file = folder / f"trace-{world.rank}.json"
    profile.export_chrome_trace(str(file))
    kernels = read_trace(file)
    return {"seconds_by_kind": time_by_kind(kernels), "longest": longest(kernels, 60), "steps": 2}


def rates(world: World, args: argparse.Namespace) -> list[dict[str, Any]]:
    """What this card reaches alone: products of matrices of the models' shapes, attention, copies."""
    n = 256 if args.tiny else 8192
    found: list[dict[str, Any]] = [{"matrix_flops": product_rate(world, n, n, n)}]
    tokens = 256 if args.tiny else 65536
    libraries = ["cublas", "cublaslt"] if world.device.type == "cuda" else [""]
    for library in libraries:
        if library:
            torch.backends.cuda.preferred_blas_library(library)
        for width, out in ((2048, 2048), (2048, 5504), (5504, 2048), (2048, 32000), (4096, 11008)):
            if args.tiny:
                width, out = 64, 96
            found.append({"library": library, "shape": [tokens, width, out], "flops": product_rate(world, tokens, width, out),
                          "flops_of_weight_gradient": product_rate(world, width, tokens, out)})  # fmt: skip
    return found


def product_rate(world: World, m: int, k: int, n: int) -> float:
    """FLOP/s of a bf16 product of (m, k) and (n, k) transposed, random values."""
    a = torch.randn(m, k, device=world.device, dtype=torch.bfloat16)
    b = torch.randn(n, k, device=world.device, dtype=torch.bfloat16).t()
    times = max(3, min(100, int(6e13 / (2 * m * k * n)))) if world.device.type == "cuda" else 2
    for _ in range(3):
        a @ b
    synchronize(world)
    began = time.perf_counter()
    for _ in range(times):
        a @ b
    synchronize(world)
    return times * 2 * m * k * n / (time.perf_counter() - began)


def synchronize(world: World) -> None:
    """Waits for the device."""
    if world.device.type == "cuda":
        torch.cuda.synchronize()


def card(world: World) -> dict[str, Any]:
    """Card and driver."""
    if world.device.type != "cuda":
        return {"gpu": None}
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    told = subprocess.run(asked, capture_output=True, text=True, check=False)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    index = seen if seen.isdigit() else "0"  # NVML counts all GPUs of the machine
    return {"gpu": torch.cuda.get_device_name(), "gpu_index": index, "driver": told.stdout.strip() or None}


def commit() -> str | None:
    """The commit, also where only its tree was brought."""
    file = ROOT / "COMMIT"
    found: str | None = file.read_text().strip() if file.exists() else describe_machine()["commit"]
    return found


def table(rows: list[dict[str, Any]]) -> None:
    """What was found, a line each."""
    for r in rows:
        if "matrix_flops" in r:
            print(f"bare product of 8,192^3: {r['matrix_flops'] / 1e12:.0f} TFLOP/s")
        elif "shape" in r:
            print(f"product {r['shape']} {r['library']}: {r['flops'] / 1e12:.0f}, of weight gradients {r['flops_of_weight_gradient'] / 1e12:.0f} TFLOP/s")  # fmt: skip
        else:
            name = f"{r['contender']:7} {r['size']:3} batch {r['micro']}x{r['accumulate']} {r['attention']:7} {r['recompute']:9} {r['plan']}"
            if "step_s" not in r:
                print(name, "out of memory")
                continue
            activity = (r["activity"] or {}).get(r.get("gpu_index", "0"), {})
            said = " ".join(f"{k.split('_')[0]} {activity[k]:.0f}" for k in ("sm_active_pct", "tensor_active_pct", "dram_active_pct", "gpu_power_w") if k in activity)  # fmt: skip
            if "over_fsdp2" in r:
                print(f"   in turns: {r['over_fsdp2']:.4f} +- {r['half']:.4f} x FSDP2's")
            print(f"{name}: {r['tokens_s_gpu']:,.0f} tokens/s/GPU, {r['step_s'] * 1e3:.0f} ms, MFU {100 * r['mfu']:.1f} %, of matrix rate "
                  f"{100 * r.get('of_matrix_rate', 0):.1f} %, peak {(r['peak_bytes'] or 0) / 1e9:.0f} GB; {said}; loss {' '.join(f'{x:.3f}' for x in r['losses'][:1] + r['losses'][-1:])}; took {r['seconds_in_all']:.0f} s")  # fmt: skip
            if "time" in r:
                whole = sum(r["time"]["seconds_by_kind"].values()) or 1
                print("   " + ", ".join(f"{k} {100 * v / whole:.1f} %" for k, v in sorted(r["time"]["seconds_by_kind"].items(), key=lambda x: -x[1])))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
