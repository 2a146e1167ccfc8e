"""`unbroken train plan`: what a model needs and takes on some GPUs, and the best plan for it; nothing is started."""

from __future__ import annotations

import argparse
import dataclasses
import json
import typing
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from ...errors import UnknownKey, UsageError
from ..config import RECIPES, PlanConfig, add_option
from .cost import TrainingWorkload
from .hardware import HARDWARE, Hardware
from .search import Estimate, estimate, search
from .sizes import active_count, parameter_count


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint="`unbroken train plan --help` lists the options")


def main(argv: Sequence[str]) -> int:
    """Prints the estimates; returns 0. Raises UsageError for what cannot fit or divide, saying why."""
    args = _parser().parse_args(list(argv))
    hw = _hardware(args)
    if args.model not in RECIPES:
        raise UnknownKey(args.model, RECIPES, what="model")
    model = RECIPES[args.model]
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(PlanConfig)}
    given = {k: v for k, v in given.items() if v is not None}
    batch = args.global_batch or 2 * args.gpus
    work = TrainingWorkload(model, args.seq, batch, args.micro_batch)
    if given.keys() - {"gradient_dtype", "compile", "attention"}:
        plan = PlanConfig(**(given | {"engine": "plan"}))
        found = [estimate(plan, args.gpus, replace(work, micro_batch=args.micro_batch or 1), hw)]
    else:
        found = search(args.gpus, work, hw, PlanConfig(**given))[: args.top]
    if args.json:
        print(json.dumps({"schema": 1, "model": args.model, "gpus": args.gpus, "hardware": dataclasses.asdict(hw),
                          "parameters": parameter_count(model), "seq": args.seq, "global_batch": batch,
                          "plans": [as_json(e) for e in found]}, indent=2))  # fmt: skip
    else:
        _show(args, found, hw)
    return 0


def as_json(e: Estimate) -> dict[str, Any]:
    """An estimate as it is printed: bytes, seconds."""
    return {
        "plan": _said(e.plan) | {"micro_batch": e.micro_batch},
        "memory_bytes": dataclasses.asdict(e.memory) | {"total": e.memory.total},
        "step_seconds": {
            "total": e.step.seconds, "compute": e.step.compute, "bubble": e.step.bubble, "update": e.step.update,
            "communication_exposed": e.step.exposed, "computation_slowed": e.step.taken,
        },
        "communication": [dataclasses.asdict(t) for t in e.step.traffic],
        "tokens_per_second_per_gpu": e.tokens_per_second,
        "share_of_reachable_flops": e.mfu,
    }  # fmt: skip


def _said(plan: PlanConfig) -> dict[str, Any]:
    """What of a plan is not as by default: as it stands in [plan]."""
    usual = PlanConfig()
    return {
        f.name: getattr(plan, f.name)
        for f in dataclasses.fields(plan)
        if getattr(plan, f.name) != getattr(usual, f.name)
    }


def _parser() -> argparse.ArgumentParser:
    p = _Parser(
        prog="unbroken train plan", allow_abbrev=False, usage="%(prog)s [OPTIONS]", description=__doc__
    )
    p.add_argument("--model", default="7b", metavar="NAME", help=f"{', '.join(RECIPES)} [default: 7b]")
    p.add_argument("--gpus", type=_count, default=8, metavar="N", help="GPUs [default: 8]")
    p.add_argument(
        "--hardware", default="h200", metavar="NAME", help=f"{', '.join(HARDWARE)} [default: h200]"
    )
    p.add_argument("--seq", type=_count, default=4096, metavar="N", help="tokens in a sample [default: 4096]")
    p.add_argument("--global-batch", type=_count, default=0, metavar="N", help="samples in a step [default: 2 for each GPU]")  # fmt: skip
    p.add_argument("--micro-batch", type=_count, default=0, metavar="N", help="samples at once on a rank [default: tried]")  # fmt: skip
    p.add_argument("--network", type=float, metavar="GB/S", help="bytes per second between nodes, of a node and a direction, 10^9")  # fmt: skip
    p.add_argument("--top", type=_count, default=5, metavar="N", help="plans to show [default: 5]")
    p.add_argument("--json", action="store_true", help="as JSON")
    group = p.add_argument_group("plan", "one that is given is reckoned; without, the best ones are searched")
    for f in dataclasses.fields(PlanConfig):
        add_option(group, f, typing.get_type_hints(PlanConfig)[f.name])
    return p


def _count(text: str) -> int:
    n = int(text)
    if n < 1:
        raise argparse.ArgumentTypeError(f"{n} is not above 0")
    return n


def _hardware(args: argparse.Namespace) -> Hardware:
    if args.hardware not in HARDWARE:
        raise UnknownKey(args.hardware, HARDWARE, what="hardware")
    hw = HARDWARE[args.hardware]
    if args.network is not None:
        if not args.network > 0:
            raise UsageError(f"--network {args.network} is not above 0")
        hw = replace(hw, between=replace(hw.between, bandwidth=args.network * 1e9))
    return hw


def _show(args: argparse.Namespace, found: list[Estimate], hw: Hardware) -> None:
    model = RECIPES[args.model]
    print(f"{args.model}: {parameter_count(model) / 1e9:.2f} B parameters, {active_count(model) / 1e9:.2f} B for each token, "
          f"sequence {args.seq}; {args.gpus} x {hw.name} ({hw.source})")  # fmt: skip
    for i, e in enumerate(found, 1):
        m, s = e.memory, e.step
        options = " ".join(
            f"--{k.replace('_', '-')} {v}" for k, v in _said(e.plan).items() if k not in ("engine", "reshard")
        )
        print(f"\n{i}. {options or '--engine plan'} --micro-batch {e.micro_batch}")
        print(f"   {e.tokens_per_second:,.0f} tokens/s/GPU, step {s.seconds:.2f} s: arithmetic {s.compute:.2f}, pipeline empty "
              f"{s.bubble:.2f}, communication not hidden {s.exposed:.2f}, slowed by it {s.taken:.2f}, update {s.update:.3f}")  # fmt: skip
        print(f"   {m.total / 1e9:.1f} GB: parameters {m.parameters / 1e9:.1f}, gradients {m.gradients / 1e9:.1f}, optimizer "
              f"{m.optimizer / 1e9:.1f}, activations about {m.activations / 1e9:.1f}, gathered {m.gathered / 1e9:.1f}")  # fmt: skip
        for t in s.traffic:
            where = "between nodes" if t.between_nodes else "inside a node"
            print(f"   {t.what}: {t.bytes / 1e9:.2f} GB among {t.ranks} {where}, {t.seconds:.3f} s, {t.hidden:.3f} of them hidden")  # fmt: skip
