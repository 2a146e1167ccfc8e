"""The test of pairs over a real NCCL (or gloo): two nodes of one GPU each, then ten nodes of which two are at fault.

    python benchmarks/pairwise_real.py [--backend nccl | gloo] [--nodes 10] [--faults hanging slow] [--test-s 7] [-o RESULT.json]

Each node is a process's environment on this machine: a GPU of its own, or of several nodes in turn, and a host name of its own
(`NCCL_HOSTID`), so that NCCL takes the way over the network between any two of them, here the loopback. A side is started as an
agent starts it: `python -m unbroken.detect.pairwise.probe`. Faults: dead (no process comes up), hanging (stops in the middle of the
test), slow (each exchange takes longer), half (half of its tests do not come up). First one pair with each fault at its second node
and one without, then all nodes in rounds as a run tests them (`PairwiseTest`), with its answer.
Exits 1 where a pair says other than what was made, a faulty node was neither convicted nor kept off, or a healthy one was convicted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

try:
    from machine import describe_machine, driver
except ImportError:  # imported by a test
    from benchmarks.machine import describe_machine, driver

from unbroken.detect.pairwise import NodeFault, PairwiseTest
from unbroken.detect.pairwise.probe import ProbeOptions, ProbeResult
from unbroken.detect.pairwise.running import PairwiseRun
from unbroken.recover.node.ranks.pair_side import run_side

DEAD, HANGING, SLOW, HALF = "dead", "hanging", "slow", "half"
ROUNDS, ANSWER_S = 7, 3.0
HANG_S, SLOW_S = 600.0, 0.4


@dataclass
class Nodes:
    """Nodes of this machine; `hosts` False leaves NCCL its own way between two GPUs of one host."""

    gpus: int
    faults: Mapping[str, str]
    test_s: float
    hosts: bool = True
    draw: random.Random = field(default_factory=lambda: random.Random(3))
    ready: list[float] = field(default_factory=list)

    async def meet(self, pair: tuple[str, str]) -> str:
        """A free port, which the first node's process opens."""
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            return f"127.0.0.1:{s.getsockname()[1]}"

    async def start(self, node: str, options: ProbeOptions) -> ProbeResult:
        """One side, as an agent runs it (`PairTests`)."""
        fault = self.faults.get(node)
        if fault == DEAD or (fault == HALF and self.draw.random() < 0.5):
            raise ConnectionError("the node does not answer")
        pause = {HANGING: HANG_S, SLOW: SLOW_S}.get(fault or "", 0.0)
        found = await run_side(
            replace(options, within_s=0.9 * self.test_s, pause_s=pause), self._make_env(node)
        )
        if found.ready_s:
            self.ready.append(found.ready_s)
        return found

    def _make_env(self, node: str) -> dict[str, str]:
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        if self.hosts:
            env["NCCL_HOSTID"] = node
        if self.gpus:
            given = os.environ.get("CUDA_VISIBLE_DEVICES")
            cards = given.split(",") if given else [str(i) for i in range(self.gpus)]
            env["CUDA_VISIBLE_DEVICES"] = cards[int(node[1:]) % self.gpus]
        return env

    def plan(self, backend: str, megabytes: float) -> PairwiseRun:
        """As long again as a test is allowed for the start of its processes, as in a run."""
        return PairwiseRun(self.start, self.meet, 2 * self.test_s + ANSWER_S, backend, megabytes)


async def try_pairs(args: argparse.Namespace, gpus: int) -> dict[str, Any]:
    """What a single pair says, well and with each fault: by the way between the GPUs of one host, and by the network."""
    out: dict[str, Any] = {}
    cases = [("well", False), ("well, as of two hosts", True), (DEAD, True), (HANGING, True), (SLOW, True)]
    for name, hosts in cases:
        nodes = Nodes(gpus, {"n1": name}, args.test_s, hosts)
        began = time.monotonic()
        (found,) = await nodes.plan(args.backend, args.megabytes).run_round([("n0", "n1")]) or [None]
        out[name] = {
            "seconds": round(time.monotonic() - began, 1),
            "ready_s": [round(r, 1) for r in nodes.ready],
        }
        out[name] |= asdict(found) if found else {"passed": None}
        print(f"{name}: {json.dumps(out[name])}", file=sys.stderr, flush=True)
    usual = out["well, as of two hosts"].get("rate") or 0.0
    for name, row in out.items():
        made_to_fail = name in (DEAD, HANGING)
        row["as_made"] = row["passed"] is not made_to_fail and (
            name != SLOW or 0.0 < row["rate"] < 0.8 * usual
        )
        row["as_made"] &= row["passed"] is not None
    return out


async def try_nodes(args: argparse.Namespace, gpus: int) -> dict[str, Any]:
    """All nodes in rounds; the last so many are at fault, one in each way."""
    names = [f"n{i}" for i in range(args.nodes)]
    faults = dict(zip(names[:: -max(2, args.nodes // 4)], args.faults, strict=False))
    nodes = Nodes(gpus, faults, args.test_s)
    test = PairwiseTest(names, seconds=ROUNDS * args.test_s, test_s=args.test_s, seed=1)
    run, seconds = nodes.plan(args.backend, args.many_megabytes), []
    for number in range(ROUNDS):
        began = time.monotonic()
        pairs = test.next_round(number * args.test_s)
        if not pairs:
            break
        test.take(await run.run_round(pairs))
        seconds.append(round(time.monotonic() - began, 1))
        print(f"round {number + 1}: {len(pairs)} pairs, {seconds[-1]} s", file=sys.stderr, flush=True)
    answer = test.judge()
    rates = [r.rate for r in test.results if r.rate]
    convicted = {c.node: str(c.fault) for c in answer.convicted}
    return {
        "nodes": len(names), "faults": faults, "tests": len(test.results), "seconds_of_rounds": seconds,
        "start_s": {"median": median(nodes.ready), "most": max(nodes.ready)} if nodes.ready else None,
        "median_rate": median(rates) if rates else None, "convicted": convicted, "kept_off": sorted(answer.kept_off),
        "undecided": answer.undecided, "links": [str(x) for x in answer.links],
        "every_faulty_one_convicted_or_kept_off": {*faults} <= answer.kept_off | convicted.keys(),
        "healthy_convicted": sorted(convicted.keys() - faults.keys()),
        "slow_told_as_slow": all(convicted.get(n) == str(NodeFault.SLOW) for n, f in faults.items() if f == SLOW),
    }  # fmt: skip


async def run_all(args: argparse.Namespace) -> dict[str, Any]:
    gpus = _count_gpus() if args.backend == "nccl" else 0
    result: dict[str, Any] = {
        "machine": describe_machine(), "driver": driver(), "gpus": gpus, "backend": args.backend, "megabytes": args.megabytes,
    }  # fmt: skip
    if args.backend == "gloo" or gpus > 1:
        result["pairs"] = await try_pairs(args, gpus)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    result["rounds"] = await try_nodes(args, gpus)
    return result


def _count_gpus() -> int:
    """How many this process may use, without a context on any."""
    import torch

    return torch.cuda.device_count()


def main() -> int:
    """Runs them; prints and writes one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--nodes", type=int, default=10)
    parser.add_argument("--faults", nargs="*", choices=(DEAD, HANGING, SLOW, HALF), default=[HANGING, SLOW])
    parser.add_argument("--megabytes", type=float, default=64.0)
    parser.add_argument(
        "--many-megabytes", type=float, default=8.0, help="of each test while all nodes are tested"
    )
    parser.add_argument("--test-s", type=float, default=7.0)
    parser.add_argument("-o", "--out", type=Path)
    args = parser.parse_args()
    if args.backend == "nccl" and not _count_gpus():
        print("there is no GPU here: use --backend gloo", file=sys.stderr)
        return 2
    result = asyncio.run(run_all(args))
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    rounds = result["rounds"]
    good = rounds["every_faulty_one_convicted_or_kept_off"] and not rounds["healthy_convicted"]
    return 0 if good and all(p["as_made"] for p in result.get("pairs", {}).values()) else 1


if __name__ == "__main__":
    sys.exit(main())
