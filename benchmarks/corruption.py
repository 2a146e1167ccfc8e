"""Injected corruption: which kinds are found and how often, what lies below the noise, and what looking for it costs.

    python benchmarks/corruption.py [--trials 40] [--device auto] [--dim 1024 --layers 8 ...] [--only cost] [--full-check 55] [-o RESULT.json]

Kinds of three places. *State*: one of four replicas is hurt between two checkpoints; found where the digests name exactly that
replica. *Steps*: the reference trainer's gradients are hurt once, or each time with a chance, before they are reduced; found where
the step is computed again and the card does not agree with itself. *Device* (--full-check): results of the full check's products,
memory and copies are hurt. Costs: the share of a step that watching takes, step by step in turns with and without; the time of the
digests of a whole state against the time of the steps between two checkpoints; the time of a full check.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch

from unbroken.checkpoint.capture.digests import digest_tensors
from unbroken.detect.corruption import ReplicaWatch, SuspicionSettings
from unbroken.detect.node.whole import leave
from unbroken.errors import SilentCorruption
from unbroken.progress import attach
from unbroken.train.checks.recheck import Recheck
from unbroken.train.config import parse
from unbroken.train.corpus.tokens import open_tokens
from unbroken.train.trainer import Trainer, build
from unbroken.train.world import World, pin_environment, start_world

try:
    from corruption_kinds import BLIND_KINDS, SMALL_STEP_KINDS, STATE_KINDS, STEP_KINDS, Hurt
    from machine import describe_machine
except ImportError:  # imported by a test
    from benchmarks.corruption_kinds import BLIND_KINDS, SMALL_STEP_KINDS, STATE_KINDS, STEP_KINDS, Hurt
    from benchmarks.machine import describe_machine

RANKS, BETWEEN = 4, 100
"""Replicas, and steps between two checkpoints."""
State = dict[str, torch.Tensor]


# --- state


def make_state(device: torch.device, seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(514, 257, generator=generator).to(device) for n in ("w", "m", "v")}


def compare(states: list[State], step: int) -> dict[str, Any]:
    """What a keeper would say of the digests of these ranks."""
    digests = [dict(zip(s, digest_tensors(list(s.values())).tolist(), strict=True)) for s in states]
    differences = []
    for name in states[0]:
        groups: dict[int, list[int]] = {}
        for rank, d in enumerate(digests):
            groups.setdefault(d[name], []).append(rank)
        if len(groups) > 1:
            differences.append({"name": name, "groups": [[r, len(r)] for r in groups.values()]})
    return {
        "step": step, "compared": len(states[0]), "alone": 0, "differing": len(differences), "differences": differences,
    }  # fmt: skip


def try_state(kinds: dict[str, tuple[str, Hurt]], device: torch.device, trials: int) -> dict[str, Any]:
    found = {}
    for kind, (name, hurt) in kinds.items():
        right = 0
        for trial in range(trials):
            random = Random(trial)
            good = make_state(device, trial)
            states = [{n: t.clone() for n, t in good.items()} for _ in range(RANKS)]
            watch, victim = ReplicaWatch(), random.randrange(RANKS)
            assert watch.take(1, compare(states, 1)) is None
            hurt(states[victim][name], random)
            finding = watch.take(1, compare(states, 2))
            right += finding is not None and finding.ranks == (victim,)
        found[kind] = {"by": "replicas", "found": right, "of": trials}
    healthy = sum(
        ReplicaWatch((1, 0)).take(1, compare([make_state(device, t)] * RANKS, 2)) is not None
        for t in range(trials)
    )
    found["healthy replicas"] = {"by": "replicas", "found": healthy, "of": trials, "should_be": 0}
    return found


# --- steps


CHANCES = (1.0, 0.3, 0.1, 0.01)


def make_trainer(args: argparse.Namespace, world: World, mode: str) -> Trainer:
    words = [
        "--data", "stdlib", "--dim", str(args.dim), "--layers", str(args.layers), "--heads", str(args.heads), "--kv-heads", str(args.heads),
        "--hidden", str(args.hidden), "--seq", str(args.seq), "--global-batch", str(args.batch), "--mode", mode, "--steps", "100000",
        "--bucket-mb", str(args.bucket_mb), "--clip", "0",
        *(["--dtype", "bfloat16"] if world.device.type == "cuda" else []),
    ]  # fmt: skip
    config = parse(words)
    return build(config, world, attach(), open_tokens("stdlib", None))


class Injector:
    """Hurts gradients before they are looked at: where `when` says so, of the computations of the steps since it was set."""

    def __init__(self, trainer: Trainer) -> None:
        self.take = trainer.buckets.before_reduce
        self.hurt: Hurt | None = None
        self.random = Random(0)
        self.when: Callable[[], bool] = lambda: False
        trainer.buckets.before_reduce = self

    def __call__(self, i: int, gradients: torch.Tensor) -> None:
        if i == 0 and self.hurt is not None and self.when():
            self.hurt(gradients, self.random)
        self.take(i, gradients)


def try_steps(
    args: argparse.Namespace, world: World, mode: str, kinds: dict[str, Hurt], trials: int
) -> dict[str, Any]:
    """Each trial hurts one computation of one step; the step is not applied, whatever comes of it."""
    trainer = make_trainer(args, world, mode)
    assert trainer.recheck is not None
    trainer.recheck._say = lambda text: None
    trainer.recheck.suspicion.settings = SuspicionSettings(audit_every=0, budget=1e9)
    injector = Injector(trainer)
    for _ in range(30):
        trainer.train_step(lambda: None, False)
    found: dict[str, Any] = {}
    for kind, hurt in kinds.items():
        right = 0
        for trial in range(trials):
            left = [1]
            injector.hurt, injector.random = hurt, Random(trial)
            injector.when = lambda left=left: bool(left) and bool(left.pop())  # type: ignore[misc]
            try:
                step_without_update(trainer)
            except SilentCorruption:
                right += 1
            injector.hurt = None
        found[kind] = {"by": f"steps, {mode}", "found": right, "of": trials}
    healthy = 0
    trainer.recheck.suspicion.settings = SuspicionSettings(audit_every=1, budget=1e9)
    for _ in range(trials):  # each of these is computed again
        try:
            step_without_update(trainer)
        except SilentCorruption:
            healthy += 1
    found[f"healthy steps, {mode}"] = {"by": f"steps, {mode}", "found": healthy, "of": trials, "should_be": 0}
    return found


def step_without_update(trainer: Trainer) -> None:
    before, update = trainer.step, trainer.buckets.adamw
    trainer.buckets.adamw = lambda *a, **k: None  # type: ignore[method-assign, assignment]
    try:
        trainer.train_step(lambda: None, False)
    finally:
        trainer.buckets.adamw = update  # type: ignore[method-assign]
        trainer.step = before


def try_audits(args: argparse.Namespace, world: World, trials: int) -> dict[str, Any]:
    """A card that hurts any step with a chance, by so little that no norm shows it: by how many audits it is found."""
    trainer = make_trainer(args, world, "deterministic")
    assert trainer.recheck is not None
    trainer.recheck._say = lambda text: None
    trainer.recheck.suspicion.settings = SuspicionSettings(audit_every=1, budget=1e9)
    injector = Injector(trainer)
    for _ in range(5):
        trainer.train_step(lambda: None, False)
    out = {}
    for chance in CHANCES:
        caught = 0
        for trial in range(trials):
            random = Random(trial)
            injector.hurt, injector.random = SMALL_STEP_KINDS["gradient: a bit of the mantissa, once"], random
            injector.when = lambda random=random, chance=chance: random.random() < chance  # type: ignore[misc]
            try:
                step_without_update(trainer)
            except SilentCorruption:
                caught += 1
        injector.hurt = None
        expected = 1 - chance**3 - (1 - chance) ** 3 if chance < 1 else 1.0
        out[f"each computation with a chance of {chance:g}, a bit of the mantissa"] = {
            "found_by_one_audit": caught / trials, "of": trials, "expected": round(expected, 4),
            "steps_until_half_are_found": round(2000 * _half(caught / trials)) if caught else None,
        }  # fmt: skip
    return out


def _half(p: float) -> float:
    import math

    return 1.0 if p >= 1 else math.log(0.5) / math.log(1 - p)


# --- costs


WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum of int64": lambda g: torch.sum(g.view(torch.int64)),
    "sum of int32": lambda g: torch.sum(g.view(torch.int32), dtype=torch.int32),
    "sum of columns of int64": lambda g: torch.sum(g[: len(g) // 2048 * 2048].view(torch.int64).view(-1, 1024), dim=0),
    "norm": torch.linalg.vector_norm,
    "norm by foreach": lambda g: torch._foreach_norm([g])[0],
    "sum of float32": torch.sum,
    "product with itself": lambda g: torch.dot(g, g),
}  # fmt: skip
"""What may be taken of a bucket: the first are exact digests, the others move within a fast mode's noise."""


def time_prints(trainer: Trainer) -> dict[str, Any]:
    """Milliseconds in which each way reads all gradients once, bucket by bucket, as launched by the host and waited for."""
    buckets = [b.gradients for b in trainer.buckets.buckets]
    size = sum(g.numel() * g.element_size() for g in buckets)
    out: dict[str, Any] = {"gigabytes": size / 1e9, "buckets": len(buckets)}
    for name, way in WAYS.items():
        taken = []
        for i in range(13):
            _wait(trainer.world)
            began = time.perf_counter()
            for g in buckets:
                way(g)
            _wait(trainer.world)
            if i >= 3:
                taken.append(time.perf_counter() - began)
        out[name] = {"ms": 1e3 * median(taken), "gigabytes_per_s": size / 1e9 / median(taken)}
    return out


def time_steps(trainer: Trainer, mode: str, steps: int, several: bool, beside: bool = True) -> dict[str, Any]:
    """Seconds of a step with and without watching, in turns, by the wall clock around work that is waited for. `several`: as each
    of several ranks pays for it, whose prints are taken of every step beside the backward pass, since the reduction (here over a
    group of this rank alone, with and without watching) overwrites the gradients; `beside` False takes them in the backward pass's own stream."""
    world, buckets = trainer.world, trainer.buckets
    buckets.before_reduce = lambda i, g: None
    recheck = Recheck(world, buckets, exact=mode == "deterministic", say=print, at_once=several)
    recheck.suspicion.settings = SuspicionSettings(audit_every=0)
    take = buckets.before_reduce
    if several:
        _join_itself(trainer)
    if not beside:
        buckets._beside = nullcontext  # type: ignore[method-assign]
    taken: dict[bool, list[float]] = {True: [], False: []}
    for i in range(2 * steps + 10):
        watched = i % 4 in (0, 3)  # on, off, off, on: what drifts falls on both alike
        trainer.recheck = recheck if watched else None
        buckets.before_reduce = take if watched else lambda i, g: None
        _wait(world)
        began = time.perf_counter()
        trainer.train_step(lambda: None, False)
        _wait(world)
        if i >= 10:
            taken[watched].append(time.perf_counter() - began)
    on, off = median(taken[True]), median(taken[False])
    pairs = [100 * (a - b) / b for a, b in zip(taken[True], taken[False], strict=True)]
    low, high = _interval(pairs)
    return {
        "step_ms": 1e3 * off, "watched_step_ms": 1e3 * on, "overhead_pct": 100 * (on - off) / off,
        "median_of_pairs_pct": median(pairs), "from_pct": low, "to_pct": high, "pairs": len(pairs),
    }  # fmt: skip


def _interval(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """Where the median lies with 95 % confidence (bootstrap)."""
    random = Random(0)
    found = sorted(median(random.choices(values, k=len(values))) for _ in range(draws))
    return found[draws // 40], found[-draws // 40]


def _join_itself(trainer: Trainer) -> None:
    """From now on the trainer reduces its gradients as one of several ranks does, bucket by bucket during the backward pass."""
    import torch.distributed as dist

    if dist.is_initialized():
        return
    backend = "nccl" if trainer.world.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    buckets, reduce = trainer.buckets, trainer.buckets.reduce
    buckets.hook()
    buckets.reduce = lambda world_size: reduce(2)  # type: ignore[method-assign]


def time_digests(trainer: Trainer, step_s: float) -> dict[str, float]:
    """The digests of a whole state (weights and two moments), against the steps between two checkpoints."""
    world = trainer.world
    tensors = [t for b in trainer.final_tensors() for t in b.values()]
    digest_tensors(tensors)
    taken, launched = [], []
    for _ in range(10):
        _wait(world)
        began = time.perf_counter()
        digest_tensors(tensors)
        launched.append(time.perf_counter() - began)
        _wait(world)
        taken.append(time.perf_counter() - began)
    size = sum(t.numel() * t.element_size() for t in tensors)
    seconds = median(taken)
    return {
        "gigabytes": size / 1e9, "tensors": len(tensors), "ms": 1e3 * seconds, "launch_ms": 1e3 * median(launched),
        "gigabytes_per_s": size / 1e9 / seconds, "pct_of_the_steps_between_two_checkpoints": 100 * seconds / (BETWEEN * step_s),
    }  # fmt: skip


def _wait(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()


# --- the device itself


def try_full_check(device: torch.device, seconds: float) -> dict[str, Any]:
    """How long it takes, what it says of healthy hardware, and which flips it finds."""
    from unbroken.detect.node import State
    from unbroken.detect.node.active.full import FullCheck, check_fully
    from unbroken.detect.node.whole import check_this_node, open_nvml

    began = time.monotonic()
    quick = check_this_node(folders=[Path("/tmp")])
    quick_s = time.monotonic() - began
    nvml, _ = open_nvml()
    began = time.monotonic()
    results = check_fully(FullCheck(nvml, [Path("/tmp")], seconds))
    took = time.monotonic() - began
    names = ("gpu products", "gpu memory") if device.type == "cuda" else ("products", "memory")
    flipped: set[tuple[str, torch.dtype]] = set()

    def meddle(check: str, written: torch.Tensor) -> None:
        """One bit of the first product of each kind of number, and of the first block of memory."""
        if check in names and (check, written.dtype) not in flipped:
            flipped.add((check, written.dtype))
            words = written.view(-1).view(torch.int16)
            words[Random(len(flipped)).randrange(len(words))] ^= 1 << len(flipped)

    meddled = check_fully(FullCheck(nvml, [], min(seconds, 30.0), 1 << 28, meddle=meddle))
    found = [f"{c.name} {c.device}: {c.text}" for c in meddled if c.state is State.BAD]
    return {
        "quick_s": round(quick_s, 2), "quick_fit": quick.fit, "seconds": round(took, 1),
        "results": [f"{c.state} {c.name} {c.device}: {c.text}" for c in (*quick.checks, *results)],
        "flips_injected": len(flipped), "flips_found": len(found), "found": found,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=344)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--bucket-mb", type=float, default=64)
    parser.add_argument(
        "--only",
        choices=("kinds", "cost", "check"),
        action="append",
        help="such parts alone; may be repeated",
    )
    parser.add_argument("--full-check", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("-o", "--out", type=Path)
    args = parser.parse_args()
    pin_environment()
    world = start_world(parse(["--device", args.device]).run)
    began = time.monotonic()
    result: dict[str, Any] = {"machine": describe_machine()}

    def part(name: str, make: Callable[..., Any], *arguments: Any) -> Any:
        """One part; an error in it does not take the others along."""
        try:
            result[name] = make(*arguments)
        except Exception as e:  # noqa: BLE001
            result[name] = {"error": f"{type(e).__name__}: {e}"}
        print(f"--- {name} ({time.monotonic() - began:.0f} s)", flush=True)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
        return result[name]

    wanted = args.only or ["kinds", "cost", "check"]
    if "kinds" in wanted:
        part("state", try_state, STATE_KINDS, world.device, args.trials)
        part("state, known to be invisible", try_state, BLIND_KINDS, world.device, args.trials)
        for mode in ("deterministic", "fast"):
            part(f"steps, {mode}", try_steps, args, world, mode, STEP_KINDS, args.trials)
            part(
                f"steps below the noise, {mode}", try_steps, args, world, mode, SMALL_STEP_KINDS, args.trials
            )
        part("audits", try_audits, args, world, args.trials)
    if "cost" in wanted:
        trainer = make_trainer(args, world, "deterministic")
        part("ways to take a print", time_prints, trainer)
        for mode in ("deterministic", "fast"):
            timed = part(f"cost of a step, {mode}", time_steps, trainer, mode, args.steps, False)
            if mode == "deterministic" and "step_ms" in timed:
                part("cost of digests", time_digests, trainer, timed["step_ms"] / 1e3)
        for mode in ("deterministic", "fast"):
            part(f"cost of a step, {mode}, one of several ranks", time_steps, trainer, mode, args.steps, True)
        name = "cost of a step, fast, one of several ranks, in line"
        part(name, time_steps, trainer, "fast", args.steps, True, False)
        del trainer
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    if "check" in wanted and args.full_check:
        part("full check", try_full_check, world.device, args.full_check)
    listed = [
        v for k in ("state", "steps, deterministic", "steps, fast")
        for v in result.get(k, {}).values() if isinstance(v, dict) and "should_be" not in v
    ]  # fmt: skip
    total, right = sum(v["of"] for v in listed), sum(v["found"] for v in listed)
    false = sum(
        v["found"] for k in result if isinstance(result[k], dict)
        for v in result[k].values() if isinstance(v, dict) and v.get("should_be") == 0
    )  # fmt: skip
    result["listed_kinds"] = {
        "kinds": len(listed),
        "injected": total,
        "found": right,
        "share": right / max(1, total),
        "false_alarms": false,
    }
    result["seconds"] = round(time.monotonic() - began)
    print(json.dumps({k: v for k, v in result.items() if k != "full check"}, indent=1))
    print(json.dumps(result.get("full check", {}), indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if right >= 0.95 * total and not false else 1


if __name__ == "__main__":
    code = main()
    leave(code)
    sys.exit(code)
