"""What a step takes longer when the state is copied to the host beside it, before any checkpoint engine has its say.

    torchrun --nproc-per-node 2 benchmarks/copy_limits.py --model 7b [--repeat 4] [--out limits.json]

The same training as in checkpoint.py, with bare copies of its state to pinned memory on a stream of their own: from the
training's thread and from another, at once in a few hundred pieces, in more pieces than a driver's queue holds, in as
many pieces handed over a few hundred at a time; and, without a copy, an idle moment before the step, a thread that holds
the interpreter's lock, a copy within the GPU. Each is told as the time of one step, the call included, minus the median
of the steps around it. The last lines show which kernels a step with copies waits for. Needs a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import checkpoint as bench

HOST_BYTES = 4 << 30
MANY = 1500
"""More than a driver's queue holds (about a thousand)."""
AT_A_TIME = 256
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def local_bytes(t: torch.Tensor) -> torch.Tensor:
    return getattr(t, "_local_tensor", t).detach().view(-1).view(torch.uint8)


class Copies:
    """Bare copies of a training's state, in turn to the places of one pinned buffer."""

    def __init__(self, t: bench.Training) -> None:
        self.sources = [local_bytes(x) for x in bench.tensors_of(t)]
        self.size = sum(s.numel() for s in self.sources)
        self.host = torch.empty(HOST_BYTES, dtype=torch.uint8, pin_memory=True)
        self.stream = torch.cuda.Stream(t.device)
        self.scratch: torch.Tensor | None = None
        self.ended = threading.Event()

    def pairs(self, share: float = 1.0, pieces: int = 0) -> Pairs:
        """(target, source) of this share of the state, cut into at least so many."""
        largest = min(HOST_BYTES, -(-self.size // pieces) if pieces else HOST_BYTES)
        found: Pairs = []
        at = done = 0
        for source in self.sources:
            for piece in source.split(largest):
                if done >= share * self.size:
                    return found
                at = at if at + piece.numel() <= HOST_BYTES else 0
                found.append((self.host[at : at + piece.numel()], piece))
                at += piece.numel()
                done += piece.numel()
        return found

    def issue(self, pairs: Pairs, begin: torch.cuda.Event, at_a_time: int = 0) -> None:
        ends: list[torch.cuda.Event] = []
        with torch.no_grad(), torch.cuda.stream(self.stream):
            self.stream.wait_event(begin)
            size = at_a_time or max(1, len(pairs))
            for i in range(0, len(pairs), size):
                while at_a_time and len(ends) > 1 and not ends[-2].query():
                    time.sleep(0.004)
                part = pairs[i : i + size]
                torch._foreach_copy_([a for a, _ in part], [b for _, b in part], non_blocking=True)
                ends.append(torch.cuda.Event())
                ends[-1].record(self.stream)
        self.ended.set()

    def begin(self, pairs: Pairs, *, thread: bool = True, at_a_time: int = 0) -> None:
        self.ended.clear()
        event = torch.cuda.Event()
        event.record()
        if thread:
            threading.Thread(target=self.issue, args=(pairs, event, at_a_time)).start()
        else:
            self.issue(pairs, event, at_a_time)

    def on_device(self) -> None:
        if self.scratch is None:
            self.scratch = torch.empty(self.size, dtype=torch.uint8, device=self.stream.device)
        rows = self.scratch.split([s.numel() for s in self.sources])
        torch._foreach_copy_(list(rows), self.sources)

    def wait(self) -> None:
        self.ended.wait()
        self.stream.synchronize()


def spin(seconds: float) -> None:
    """Holds the interpreter's lock, as threads take it from each other."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def excess(clock: bench.Clock, copies: Copies, do: Callable[[], object]) -> tuple[float, float]:
    """(seconds of the call, seconds that call and step take longer than a step)."""
    before = [clock.step()[0] for _ in range(2)]
    began = clock.start()
    do()
    call = time.perf_counter() - began
    took = clock.step()[0]
    copies.wait()
    clock.start()
    clock.step()
    return call, took - statistics.median([*before, *(clock.step()[0] for _ in range(2))])


def kernels(
    t: bench.Training, clock: bench.Clock, copies: Copies, do: Callable[[], object]
) -> dict[str, Any]:
    """Milliseconds of each kind of kernel in one step, and those in which the training's stream had nothing to do."""
    kinds = {"nccl": "nccl", "dtoh": "copy to host", "memcpy": "copy", "adam": "optimizer", "gemm": "gemm",
             "nvjet": "gemm", "cutlass": "gemm", "fmha": "attention", "flash": "attention"}  # fmt: skip
    clock.step()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        do()
        clock.step()
        copies.wait()
        t.wait()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        p.export_chrome_trace(str(path))
        events = [
            e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy")
        ]
    times: dict[str, float] = defaultdict(float)
    on_stream: dict[int, float] = defaultdict(float)
    for e in events:
        name = e["name"].lower().replace(" ", "")
        kind = next((v for k, v in kinds.items() if k in name), "other")
        times[kind] += e["dur"] / 1e3
        if kind == "gemm":
            on_stream[e["args"]["stream"]] += e["dur"]
    if not on_stream:
        return {"kernels_ms": dict(times)}
    main = max(on_stream, key=lambda s: on_stream[s])
    row = sorted((e for e in events if e["args"].get("stream") == main), key=lambda e: float(e["ts"]))
    gaps = [
        (round((b["ts"] - a["ts"] - a["dur"]) / 1e3, 2), round((b["ts"] - row[0]["ts"]) / 1e3))
        for a, b in itertools.pairwise(row)
    ]
    return {
        "kernels_ms": {k: round(v, 1) for k, v in times.items()},
        "idle_ms": round(sum(g for g, _ in gaps), 1),
        "longest_gaps_ms_and_when": sorted(gaps, reverse=True)[:6],
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", choices=list(bench.MODELS), default="7b")
    p.add_argument("--repeat", type=int, default=4)
    p.add_argument("--out", type=Path)
    a = p.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU")
    for k, v in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29518", "RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(k, v)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    t = bench.Training(device, bench.MODELS[a.model])
    clock = bench.Clock(t)
    for _ in range(6):
        clock.step()
    copies = Copies(t)
    whole, half, tenth, many = copies.pairs(), copies.pairs(0.5), copies.pairs(0.1), copies.pairs(pieces=MANY)
    ways: dict[str, Callable[[], object]] = {
        "the whole state, from the training's thread": lambda: copies.begin(whole, thread=False),
        "the whole state, from another thread": lambda: copies.begin(whole),
        "half of it": lambda: copies.begin(half),
        "a tenth of it": lambda: copies.begin(tenth),
        f"the whole in {len(many)} pieces at once": lambda: copies.begin(many),
        f"the whole in {len(many)} pieces, {2 * AT_A_TIME} at a time": lambda: copies.begin(many, at_a_time=AT_A_TIME),
        "nothing, 20 ms idle before": lambda: time.sleep(0.02),
        "nothing, a thread that computes for 20 ms": lambda: threading.Thread(target=spin, args=(0.02,)).start(),
        "a copy within the GPU": copies.on_device,
    }  # fmt: skip
    copies.ended.set()
    result: dict[str, Any] = {
        "machine": bench.machine(device), "model": a.model, "state_bytes": copies.size, "tensors": len(copies.sources), "ways": {},
    }  # fmt: skip
    bench.say(json.dumps(result))
    for name, do in ways.items():
        if do == copies.on_device and torch.cuda.mem_get_info(device)[0] < copies.size + (2 << 30):
            continue
        rows = [excess(clock, copies, do) for _ in range(a.repeat)]
        result["ways"][name] = {"call_s": [r[0] for r in rows], "excess_s": [r[1] for r in rows]}
        bench.say(
            f"{name}: {1e3 * statistics.median(r[1] for r in rows):.1f} ms longer {[round(1e3 * r[1], 1) for r in rows]},"
            f" of which the call {1e3 * statistics.median(r[0] for r in rows):.1f} ms"
        )
        keep(a.out, result)
    copies.scratch = None
    result["kernels"] = {}
    for name, do in {
        "a step alone": lambda: None,
        **{k: v for k, v in ways.items() if "the whole" in k},
    }.items():
        result["kernels"][name] = kernels(t, clock, copies, do)
        bench.say(f"{name}: {result['kernels'][name]}")
    keep(a.out, result)
    torch.distributed.destroy_process_group()


def keep(out: Path | None, result: dict[str, Any]) -> None:
    if out is not None and bench.RANK == 0:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
