"""What an agent reads of a rank's work from its GPU's counters, against what it works: two GPUs, FSDP2 over NCCL.

    python benchmarks/gpu_work.py [--seconds 9] [--out results/gpu-work.json]

The ranks train a stack of transformer blocks in bfloat16 and tell nothing but their steps, as a script of somebody else's would. This
process reads them as an agent does (`WorkMeter`, `NodeCounters`). Parts, one after the other, in the same two processes:

    wait        rank 1 waits in an all-reduce in which rank 0 does not join: how busy SMs and tensor cores are meanwhile (`a_wait`)
    equal       both ranks have the same work
    more        rank 1 computes a tenth more (more sequences): its work is to be told as so much more
    less        rank 1 computes a tenth less: it waits in NCCL, and must not be told as working more
    processor   rank 0 stands still on its processor for a tenth of each step: nobody has more work
    behind      rank 1 computes a tenth more, and rank 0 stands still for three: rank 1 waits all the same

Each part is told by the ratio of rank 1 to rank 0 in each window: by busy SMs, which is what is compared, by tensor cores, and by how long SMs
are busy for each second of the tensor cores: above 1 rank 1 waits more than rank 0, and is not named. `rows` are, of each rank and window, its last
step, its steps, seconds a step, of these with busy tensor cores, and the share of busy SMs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

try:
    from machine import describe_machine
except ImportError:  # imported by a test
    from benchmarks.machine import describe_machine

from unbroken.detect.work import WorkMeter, WorkWindow
from unbroken.progress import PageReader
from unbroken.progress import page as layout
from unbroken.recover.node.ranks.counters import NodeCounters

SEQUENCES, LENGTH, WIDTH, LAYERS = 20, 1024, 2048, 6
PARTS = {"equal": (0, 0.0), "more": (2, 0.0), "less": (-2, 0.0), "processor": (0, 0.1), "behind": (2, 0.3)}
"""Sequences that rank 1 has more, and how long rank 0 stands still, as a share of a step."""
POLL_S = 0.05


# --- one rank


def train(folder: Path, seconds: float) -> None:
    """One rank: each part for so long."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import unbroken

    rank = int(os.environ["RANK"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    clock = dist.new_group(backend="gloo")  # that no part is left by one alone, without a word on the GPU
    run = unbroken.attach()
    if cuda:
        wait_alone(rank, device, folder)
    torch.manual_seed(1)
    width, length, sequences = (WIDTH, LENGTH, SEQUENCES) if cuda else (32, 8, SEQUENCES)
    kind = torch.bfloat16 if cuda else torch.float32
    layer = {"nhead": 16, "dim_feedforward": 4 * width, "batch_first": True, "dropout": 0.0}
    blocks = [
        torch.nn.TransformerEncoderLayer(width, device=device, dtype=kind, **layer)  # type: ignore[arg-type]
        for _ in range(LAYERS)
    ]
    model = torch.nn.Sequential(*blocks)
    if cuda:
        for block in model:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    usual, step, ahead = 0.0, 0, []
    for name, (more, still) in PARTS.items():
        x = torch.randn(sequences + (more if rank == 1 else 0), length, width, device=device, dtype=kind)
        until, end, made = time.monotonic() + seconds, torch.zeros(1), 0
        if rank == 0:
            mark(folder, name)
        began = time.monotonic()
        while not end.item():
            if rank == 0 and still:
                if cuda:
                    torch.cuda.synchronize()
                time.sleep(still * usual)
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step, made = step + 1, made + 1
            if cuda:  # its processor runs ahead by two steps at most
                ahead.append(torch.cuda.Event())
                ahead[-1].record()
                if len(ahead) > 2:
                    ahead.pop(0).synchronize()
            run.step(step)
            end[0] = float(rank == 0 and time.monotonic() > until)
            if made % 10 == 0:
                dist.broadcast(end, 0, group=clock)
            else:
                end[0] = 0.0
        if name == "equal":
            usual = (time.monotonic() - began) / made
    if rank == 0:
        mark(folder, "end")
    dist.destroy_process_group()


def wait_alone(rank: int, device: Any, folder: Path) -> None:
    """Rank 1 waits for 3 seconds in an all-reduce of 256 MiB."""
    import torch
    import torch.distributed as dist

    value = torch.ones(1 << 26, device=device)
    dist.all_reduce(value)
    torch.cuda.synchronize()
    if rank == 0:
        mark(folder, "wait")
        time.sleep(3.0)
    dist.all_reduce(value)
    torch.cuda.synchronize()
    if rank == 0:
        mark(folder, "start")


def mark(folder: Path, name: str) -> None:
    """Says which part has begun."""
    with open(folder / "parts", "a") as f:
        f.write(json.dumps([name, time.monotonic()]) + "\n")


# --- as the agent


def measure(folder: Path, seconds: float, within_s: float) -> dict[str, Any]:
    """Starts the ranks, reads them until they end, and says what was read in each part."""
    from unbroken.train.profiling.activity import ActivityRecorder

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")
    counters = NodeCounters()
    processes, pages, meters = [], [], []
    for rank in range(2):
        path = folder / "pages" / f"rank-{rank}.page"
        layout.create(path, rank=rank, attempt=1)
        env = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "UNBROKEN_PAGE": str(path), "CUDA_VISIBLE_DEVICES": visible,
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        words = [sys.executable, __file__, "--rank", str(folder), "--seconds", str(seconds)]
        processes.append(subprocess.Popen(words, env=env))
        pages.append(PageReader(path))
        meters.append(WorkMeter(processes[-1].pid, on_processor=False, gpu=counters.of_rank(env)))
    recorder = ActivityRecorder()
    recorder.start()
    windows: list[tuple[float, int, WorkWindow]] = []
    until = time.monotonic() + within_s
    while any(p.poll() is None for p in processes) and time.monotonic() < until:
        now = time.monotonic()
        for rank, (page, meter) in enumerate(zip(pages, meters, strict=True)):
            progress = page.read()
            found = meter.take(progress.count, page.take(), now, progress.peers, progress.data_s)
            if found is not None:
                windows.append((now, rank, found))
        time.sleep(POLL_S)
    for p in processes:
        if p.poll() is None:
            p.kill()
    codes = [p.wait() for p in processes]
    activity = recorder.stop()
    parts = [tuple(json.loads(line)) for line in (folder / "parts").read_text().splitlines()]
    return {
        "codes": codes, "lacking": counters.lacking, "not_measured": activity.not_measured,
        "parts": {
            name: describe(begin, end, windows, activity.between(begin, end).means())
            for (name, begin), (_, end) in itertools.pairwise(parts) if name != "start"
        },
        "calls": cost_of_reading(visible),
    }  # fmt: skip


def describe(
    begin: float,
    end: float,
    windows: list[tuple[float, int, WorkWindow]],
    counted: dict[int, dict[str, float]],
) -> dict[str, Any]:
    """What was read between two moments, by windows that lie within, and by all counters."""
    within = [(r, w) for at, r, w in windows if at - w.wall * w.steps > begin + 0.3 and at < end]
    of = [[w for r, w in within if r == rank] for rank in range(2)]
    both = list(zip(*of, strict=False))
    tensor = [(b.tensor or 0.0) / (a.tensor or 1.0) for a, b in both]
    active = [(b.busy / b.wall) / (a.busy / a.wall) for a, b in both]
    return {
        "windows": len(both), "step_s": [statistics.fmean(w.wall for w in ws) if ws else None for ws in of],
        "tensor_ratio": summarise(tensor), "active_ratio": summarise(active), "waits_ratio": summarise([a / t for a, t in zip(active, tensor, strict=True)]),
        "rows": [[[w.step, w.steps, w.wall, (w.tensor or 0.0) * w.wall, w.busy / w.wall] for w in ws] for ws in of], "counted": counted,
    }  # fmt: skip


def summarise(ratios: list[float]) -> dict[str, float]:
    """Mean and spread of what each window says."""
    if not ratios:
        return {}
    return {
        "mean": statistics.fmean(ratios), "least": min(ratios), "most": max(ratios),
        "spread": statistics.pstdev(ratios),
    }  # fmt: skip


def cost_of_reading(visible: str) -> dict[str, float]:
    """Milliseconds of one reading of one GPU, ranks having ended."""
    counters, took = NodeCounters(), []
    for _ in range(12):
        began = time.perf_counter()
        try:
            counters._read(visible.split(",")[0])
        except Exception as e:  # noqa: BLE001
            return {str(e): 0.0}
        took.append(1e3 * (time.perf_counter() - began))
        time.sleep(0.15)
    return {"first_ms": took[0], "median_ms": statistics.median(took[1:]), "most_ms": max(took[1:])}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--within", type=float, default=100.0, help="seconds for all of it")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu-work.json")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        train(args.rank, args.seconds)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), args.seconds, args.within)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"machine": describe_machine(), **found}, indent=1) + "\n")
    print(
        f"exit codes {found['codes']}; lacking: {found['lacking'] or 'nothing'}; a reading: {found['calls']}"
    )
    for name, part in found["parts"].items():
        print(f"{name:<10} windows {part['windows']:>2}  step {part['step_s']}")
        print(f"{'':<10} by tensor cores {part['tensor_ratio']}")
        print(f"{'':<10} by busy SMs     {part['active_ratio']}")
        print(f"{'':<10} the one by the other {part['waits_ratio']}")
        for gpu, means in part["counted"].items():
            print(f"{'':<10} GPU {gpu}: " + ", ".join(f"{k} {v:.4g}" for k, v in means.items()))


if __name__ == "__main__":
    main()
