"""One side of a test of two nodes: data each way, then together, over the backend that a training uses. Needs torch.

    python -m unbroken.detect.pairwise.probe --rank 0 --address HOST:PORT [--backend gloo|nccl] [--megabytes 64] [--within 30]

Both nodes of a pair start it, with ranks 0 and 1 and the address of the first. It prints one line of JSON; a side that prints none in
time has failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

MARK = "unbroken-pair "
READY = "unbroken-pair-ready"
"""Printed once everything is imported: until then a slow side is a busy machine, and no test."""


@dataclass(frozen=True)
class ProbeOptions:
    """`address` is the first node's, HOST:PORT; `megabytes` are sent each time; `pause_s` slows each time down, for tests."""

    rank: int
    address: str
    backend: str = "gloo"
    megabytes: float = 64.0
    times: int = 8
    within_s: float = 30.0
    pause_s: float = 0.0


@dataclass(frozen=True)
class ProbeResult:
    """What one side saw: `received` says that the other's data came, `rate` is in bytes per second (0 where it failed), `ready_s` is how long
    it took to start, None where it did not in time: then there was no test; `answered` is False where nothing was heard of the side: whether it
    received is not known then."""

    passed: bool
    received: bool = False
    rate: float = 0.0
    why: str = ""
    ready_s: float | None = 0.0
    answered: bool = True


def probe(o: ProbeOptions) -> ProbeResult:
    """Never raises: what goes wrong is the result."""
    import torch
    import torch.distributed as dist

    received = False
    try:
        device = torch.device("cuda", 0) if o.backend == "nccl" else torch.device("cpu")
        dist.init_process_group(
            o.backend,
            init_method=f"tcp://{o.address}",
            rank=o.rank,
            world_size=2,
            timeout=timedelta(seconds=o.within_s),
        )
        try:
            count = max(1024, int(o.megabytes * 1e6 / 4))
            # Whole numbers: a sum of two of them is exact.
            mine = (torch.arange(count, dtype=torch.float32, device=device) % 1021) * (o.rank + 1)
            theirs = torch.empty_like(mine)
            for sender in (0, 1):
                if sender == o.rank:
                    dist.send(mine, 1 - o.rank)
                else:
                    dist.recv(theirs, 1 - o.rank)
            if not torch.equal(theirs * (o.rank + 1), mine * (2 - o.rank)):
                return ProbeResult(False, False, why="what came is not what was sent")
            received = True
            seconds = []
            for _ in range(o.times):
                both = mine.clone()
                began = time.monotonic()
                dist.all_reduce(both)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                time.sleep(o.pause_s)
                seconds.append(time.monotonic() - began)
                if not torch.equal(both, mine + theirs):
                    return ProbeResult(False, True, why="a sum of both is wrong")
            best = sorted(seconds)[len(seconds) // 2]
            dist.barrier()
            return ProbeResult(True, True, 4 * count / best)
        finally:
            dist.destroy_process_group()
    except Exception as e:  # noqa: BLE001  whatever a library says of a bad node or link
        return ProbeResult(False, received, why=f"{type(e).__name__}: {e}"[:300])


def read_probe(text: str) -> ProbeResult:
    """What a side printed; a failure where it printed nothing that can be read."""
    for line in reversed(text.splitlines()):
        if line.startswith(MARK):
            try:
                value = json.loads(line[len(MARK) :])
                return ProbeResult(
                    bool(value["passed"]), bool(value["received"]), float(value["rate"]), str(value["why"])
                )
            except (ValueError, KeyError, TypeError):
                break
    return ProbeResult(False, why="no answer", answered=False)


def make_arguments(o: ProbeOptions) -> list[str]:
    """The command line of these options, after the module's name."""
    return [
        "--rank", str(o.rank), "--address", o.address, "--backend", o.backend, "--megabytes", str(o.megabytes),
        "--times", str(o.times), "--within", str(o.within_s), "--pause", str(o.pause_s),
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 where the test passed, 1 where it did not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True, choices=(0, 1))
    parser.add_argument("--address", required=True)
    parser.add_argument("--backend", default="gloo", choices=("gloo", "nccl"))
    parser.add_argument("--megabytes", type=float, default=64.0)
    parser.add_argument("--times", type=int, default=8)
    parser.add_argument("--within", type=float, default=30.0)
    parser.add_argument("--pause", type=float, default=0.0)
    a = parser.parse_args(arguments)
    import torch.distributed  # noqa: F401

    print(READY, flush=True)
    found = probe(ProbeOptions(a.rank, a.address, a.backend, a.megabytes, a.times, a.within, a.pause))
    print(MARK + json.dumps(asdict(found)), flush=True)
    return 0 if found.passed else 1


if __name__ == "__main__":
    sys.exit(main())
