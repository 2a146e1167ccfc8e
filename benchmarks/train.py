"""What training reaches on this machine's GPUs, beside plain FSDP2 in the same run.

    torchrun --nproc-per-node N benchmarks/train.py --out RESULT.json [--sizes 1b 3b 7b] [--peers fsdp2 fsdp2-full] [--tiny]

Each contender trains the same model on the same random tokens (bfloat16, AdamW, each block compiled): the plans of `OURS` that go
with N GPUs, with flash and cuDNN attention, and FSDP2 as torch's own tutorial has it, with and without recomputation. Each is tried
with growing micro-batches until memory ends, and reports its best: median of ten steps, tokens/s/GPU, MFU = tokens/s x (6 N + 12 L d T)
/ 989 TFLOP/s (Hopper's dense bf16, N without the embedding, attention counted whole), the share of this card's measured rate of
matrix products, peak memory, and SM activity over the ten steps where NVML's GPM gives it. The contenders come one after the
other, and round again (`--rounds`), so that a card that grows hot slows all. `--tiny` goes through all of it on a processor with
gloo, to see that the script works: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import describe_machine
from own_folders import use_own_folders

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from unbroken.train.config import ModelConfig, RunConfig, TrainConfig, build  # noqa: E402
from unbroken.train.planning.sizes import RECIPES, flops_per_token  # noqa: E402
from unbroken.train.world import World, start_world  # noqa: E402

PEAK = 989e12
TINY = ModelConfig(dim=64, layers=4, heads=4, kv_heads=4, hidden=128, vocab=512)
OURS: dict[str, dict[str, Any]] = {
    "zero-1": {"engine": "plan", "optimizer": -1},
    "V2": {"parameters": -1},
    "V2, recomputed": {"parameters": -1, "recompute": "full"},
    "V2, selective": {"parameters": -1, "recompute": "selective"},
    "V1": {"pipeline": 2, "tensor": 2, "optimizer": -1},
}
STEPS, WARM = 10, 5


def tokens_file(folder: Path, vocab: int, count: int) -> str:
    """Random tokens as datatrove lays them out."""
    import numpy as np

    path = folder / "tokens.ds"
    if not path.exists():
        np.random.default_rng(0).integers(0, vocab, count, dtype=np.uint32).tofile(path)
        np.array([count], np.uint64).tofile(folder / "tokens.ds.index")
    return str(path)


def ours(plan: dict[str, Any], attention: str, model: ModelConfig, world: World, args: argparse.Namespace, micro: int) -> Callable[[], float]:  # fmt: skip
    """One step of our trainer; returns the loss."""
    from unbroken.progress import attach
    from unbroken.train.training import open_corpus, open_training

    copies = world.size // (plan.get("pipeline", 1) * plan.get("tensor", 1))
    n = 2 * plan.get("pipeline", 1) if plan.get("pipeline", 1) > 1 else 1
    batch = copies * micro * n
    source = tokens_file(args.folder, model.vocab, 64 * batch * args.seq + 1)
    config: TrainConfig = build({
        "model": dataclasses.asdict(model),
        "data": {"data": source, "cache": str(args.folder), "seq": args.seq, "global_batch": batch, "micro_batch": micro},
        "run": {"mode": "fast", "dtype": "bfloat16", "steps": 1000},
        "plan": {"compile": not args.tiny, "attention": attention, "gradient_dtype": "bfloat16", **plan},
    })  # fmt: skip
    trainer = open_training(config, world, attach(), open_corpus(config))
    return lambda: trainer.train_step(lambda: None, False)[0]


def plain_fsdp2(recompute: bool, model: ModelConfig, world: World, args: argparse.Namespace, micro: int) -> Callable[[], float]:  # fmt: skip
    """FSDP2 as torch's documentation has it: float32 weights, bf16 computation, each block wrapped and compiled."""
    import torch.nn.functional as F
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from unbroken.train.parallel.stage import Stage

    with torch.device(world.device):
        net = Stage(model, range(model.layers))
    net.set_positions(model, torch.arange(args.seq), world.device)
    for name in list(net.blocks):
        if recompute:
            net.blocks[name] = checkpoint_wrapper(net.blocks[name], preserve_rng_state=False)
        if not args.tiny:
            net.blocks[name].compile()
    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in net.blocks.values():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=world.device.type == "cuda")

    def step() -> float:
        x = torch.randint(0, model.vocab, (micro, args.seq + 1), device=world.device)
        loss = F.cross_entropy(net(x[:, :-1]).flatten(0, 1).float(), x[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def measure(make: Callable[[int], Callable[[], float]], world: World, args: argparse.Namespace) -> dict[str, Any] | None:  # fmt: skip
    """The best of growing micro-batches; None if not even one sample fits."""
    best: dict[str, Any] | None = None
    for micro in (1, 2, 4, 8, 12, 16) if not args.tiny else (1, 2):
        try:
            found = _timed(make(micro), micro, world, args)
        except torch.OutOfMemoryError:
            found = None
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        fits = torch.tensor(float(found is not None), device=world.device)
        dist.all_reduce(fits, op=dist.ReduceOp.MIN)
        if not fits.item():
            break
        if best is None or (found and found["step_s"] / micro < best["step_s"] / best["micro_batch"]):
            best = found
    return best


def _timed(step: Callable[[], float], micro: int, world: World, args: argparse.Namespace) -> dict[str, Any]:
    wait = torch.cuda.synchronize if world.device.type == "cuda" else lambda: None
    for _ in range(WARM if not args.tiny else 1):
        step()
    before = _gpm(world)
    times = []
    for _ in range(STEPS if not args.tiny else 2):
        wait()
        began = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - began)
    memory = torch.cuda.max_memory_allocated() if world.device.type == "cuda" else 0
    return {"micro_batch": micro, "step_s": statistics.median(times), "steps_s": times, "peak_bytes": memory,
            "activity": _activity(before, _gpm(world))}  # fmt: skip


def _gpm(world: World) -> Any:
    """A sample of NVML's GPM; None where there is none."""
    if world.device.type != "cuda":
        return None
    try:
        import pynvml as nv

        nv.nvmlInit()
        handle = nv.nvmlDeviceGetHandleByUUID(
            "GPU-" + str(torch.cuda.get_device_properties(world.device).uuid)
        )
        sample = nv.nvmlGpmSampleAlloc()
        nv.nvmlGpmSampleGet(handle, sample)
        return sample
    except Exception as e:  # noqa: BLE001  an older card or driver: the figure is left out, and said so
        return str(e)


def _activity(a: Any, b: Any) -> dict[str, float] | str | None:
    if a is None or isinstance(a, str) or isinstance(b, str):
        return a if isinstance(a, str) else b if isinstance(b, str) else None
    import pynvml as nv

    ids = {"sm": 2, "occupancy": 3, "tensor": 5, "dram": 10, "pcie_tx_mib_s": 20, "pcie_rx_mib_s": 21}
    get = nv.c_nvmlGpmMetricsGet_t()
    get.version, get.numMetrics, get.sample1, get.sample2 = nv.NVML_GPM_METRICS_GET_VERSION, len(ids), a, b
    for i, metric in enumerate(ids.values()):
        get.metrics[i].metricId = metric
    nv.nvmlGpmMetricsGet(get)
    return {name: get.metrics[i].value for i, name in enumerate(ids)}


def matrix_rate(world: World) -> float | None:
    """FLOP/s of a bare product of 8,192 x 8,192 in bfloat16."""
    if world.device.type != "cuda":
        return None
    a, b = (torch.randn(8192, 8192, device=world.device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(20):
        a @ b
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(100):
        a @ b
    torch.cuda.synchronize()
    return float(100 * 2 * 8192**3 / (time.perf_counter() - began))


def contenders(args: argparse.Namespace, world: World, model: ModelConfig) -> dict[str, Callable[[int], Callable[[], float]]]:  # fmt: skip
    """Name -> what makes a step of it for a micro-batch."""
    found: dict[str, Callable[[int], Callable[[], float]]] = {}
    for name, plan in OURS.items():
        if world.size % (plan.get("pipeline", 1) * plan.get("tensor", 1)) or (world.size == 1 and "V2" in name and "rec" not in name and "sel" not in name):  # fmt: skip
            continue
        for attention in ["auto"] if args.tiny else ["flash", "cudnn"]:
            found[f"{name}, {attention}"] = lambda m, p=plan, a=attention: ours(p, a, model, world, args, m)  # type: ignore[misc]
    for peer in args.peers:
        found[peer] = lambda m, r=peer == "fsdp2-full": plain_fsdp2(r, model, world, args, m)  # type: ignore[misc]
    return found


def main() -> int:
    """Measures all, prints and writes; 0."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path)
    p.add_argument("--sizes", nargs="+", default=["1b"], choices=sorted(RECIPES))
    p.add_argument("--peers", nargs="*", default=["fsdp2", "fsdp2-full"], choices=["fsdp2", "fsdp2-full"])
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--seq", type=int, default=4096)
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--folder", type=Path, help="where the random tokens lie meanwhile")
    args = p.parse_args()
    use_own_folders()
    torch.set_float32_matmul_precision("high")
    world = start_world(RunConfig(mode="fast", device="cpu" if args.tiny else "auto", backend="gloo" if args.tiny else "auto"))  # fmt: skip
    args.folder = (args.folder or Path(tempfile.gettempdir())) / f"unbroken-train-{os.getppid()}-{world.rank}"
    args.folder.mkdir(parents=True, exist_ok=True)
    if not dist.is_initialized():
        dist.init_process_group("gloo" if args.tiny else "nccl", init_method="tcp://127.0.0.1:29517", rank=0, world_size=1)  # fmt: skip
    if args.tiny:
        args.seq, args.rounds, args.sizes = 64, 1, ["tiny"]
    rate = matrix_rate(world)
    result: dict[str, Any] = {"machine": describe_machine(), "torch": torch.__version__, "ranks": world.size, "seq": args.seq,
                              "gpu": torch.cuda.get_device_name() if rate else None, "matrix_flops": rate, "runs": []}  # fmt: skip
    for size in args.sizes:
        model = TINY if args.tiny else RECIPES[size]
        for round_ in range(args.rounds):
            for name, make in contenders(args, world, model).items():
                found = measure(make, world, args)
                if world.rank == 0:
                    result["runs"].append(_said(size, name, round_, found, model, world, args, rate))
                    print(json.dumps({k: v for k, v in result["runs"][-1].items() if k != "steps_s"}), flush=True)  # fmt: skip
                    if args.out:
                        args.out.write_text(json.dumps(result, indent=1) + "\n")
    for file in args.folder.iterdir():
        file.unlink()
    args.folder.rmdir()
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _said(size: str, name: str, round_: int, found: dict[str, Any] | None, model: ModelConfig, world: World, args: argparse.Namespace, rate: float | None) -> dict[str, Any]:  # fmt: skip
    said: dict[str, Any] = {"size": size, "contender": name, "round": round_}
    if found is None:
        return said | {"fits": False}
    plan = next((p for n, p in OURS.items() if name == f"{n}, {name.rsplit(', ', 1)[-1]}"), {})
    pipeline, tensor = plan.get("pipeline", 1), plan.get("tensor", 1)
    samples = found["micro_batch"] * (2 * pipeline if pipeline > 1 else 1) / (pipeline * tensor)
    tokens = samples * args.seq / found["step_s"]
    flops = tokens * flops_per_token(model, args.seq)
    return said | found | {"tokens_s_gpu": tokens, "mfu": flops / PEAK, "of_matrix_rate": flops / rate if rate else None}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
