"""How well the cost model of `unbroken train plan` explains what was published, and whether its bytes are those of real ranks.

    python benchmarks/plan.py --out benchmarks/results/plan.json [--bytes 8 16] [--kills 4 8]

Fits one bandwidth and one latency for each of two kinds of links to the published table of 7 B (32 cells), prints each cell's
error, the crossings, and what the model says of V1 and V2 for 123 B. `--bytes N ...` starts N processes over gloo in one
launch each, which walk through all legal group sizes and compare their storages with the formula (minutes). `--kills N ...` trains
each plan of tests/support/plans.py on N ranks, undisturbed and killed with -9 at a random step: losses, batches, weights and moments must have
the same bits; then the next plan in the list goes on from its checkpoint, whose losses must be those of one rank to 2e-4.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import describe_machine
from own_folders import use_own_folders

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]


def published() -> dict[str, Any]:
    """The fit and its errors."""
    from plan_published import GPUS, SETTINGS, crossings, fit, speedup_of_v2, table

    hw = fit()
    cells = table(hw)
    for setting in SETTINGS:
        row = {c.gpus: c for c in cells if c.setting == setting}
        print(f"{setting:32}" + "".join(f"{row[g].predicted:6.0f} {100 * row[g].error:+5.1f}%" for g in GPUS))
    print(f"largest error {100 * max(abs(c.error) for c in cells):.1f} %")
    found = [{f"{a} -> {b}": n for (a, b), n in crossings(lambda c, k=k: getattr(c, k), cells).items()}
             for k in ("measured", "predicted")]  # fmt: skip
    print("crossings measured ", found[0], "\ncrossings predicted", found[1])
    v2 = {
        f"{gpus} GPUs, sequence {seq}, {batch} samples": speedup_of_v2(gpus, seq=seq, batch=batch)
        for gpus in (1024, 2048)
        for seq, batch in ((2048, 2048), (2048, 4096), (4096, 2048))
    }
    print("123 B, V2 over V1 (published on 2,048: 1.16):", {k: round(v, 3) for k, v in v2.items()})
    return {"hardware": dataclasses.asdict(hw), "cells": [dataclasses.asdict(c) | {"error": c.error} for c in cells],
            "largest_error": max(abs(c.error) for c in cells), "crossings_measured": found[0],
            "crossings_predicted": found[1], "v2_over_v1_123b": v2}  # fmt: skip


def real_bytes(world: int) -> dict[str, Any]:
    """All legal group sizes of so many ranks: how many cases, and how many of them differ from the formula."""
    from tests.support.plans import byte_cases, run_plans

    result = {}
    for dtype in ("float32", "bfloat16"):
        found = run_plans(world, byte_cases(world, dtype), timeout_s=3600)
        wrong = [(n, r) for n, ranks in found.items() for r, (held, said) in enumerate(ranks) if held != said]
        result[dtype] = {"cases": len(found), "ranks": world, "differences": wrong}
        print(f"{world} ranks, {dtype}: {len(found)} legal group sizes, {len(wrong)} differences")
    return result


def kills(ranks: int) -> dict[str, Any]:
    """Of each plan on so many ranks: the step after which all were killed, and what differed."""
    import signal

    from tests.support.fork_server import ForkServer, Training
    from tests.support.plans import EIGHT, FOUR, TINY, WORDS

    plans = {4: FOUR, 8: EIGHT}[ranks]
    server = ForkServer("unbroken.train.parallel.trainer")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "words.txt").write_text("".join(f"{i} {WORDS}" for i in range(600)))
        argv = [*TINY, "--data", str(folder / "words.txt"), "--cache", str(folder / "cache"), "--global-batch", "16", "--lr", "0.01",
                "--warmup", "2", "--decay-steps", "10", "--snapshot-every", "1", "--persist-every", "2", "--comm-timeout", "120", "--device", "cpu",
                "--log-every", "100"]  # fmt: skip
        one = Training(server, folder / "one", 1, [*argv, "--engine", "reference", "--steps", "10"])
        one.start()
        one.finish()
        expected = one.step_digests(0).losses
        for i, (plan, options) in enumerate(plans.items()):
            rng = random.Random(f"{ranks} {plan}")
            undisturbed = Training(server, folder / f"{i}a", ranks, [*argv, *options, "--steps", "8"])
            undisturbed.start()
            undisturbed.finish()
            kept = ["--checkpoints", str(folder / f"{i}c")]
            killed = Training(server, folder / f"{i}b", ranks, [*argv, *options, *kept, "--steps", "8"])
            killed.start()
            at = rng.randint(3, 6)
            killed.wait_for_step(at)
            for rank in range(ranks):
                killed.kill(rank)
            codes = set(killed.codes())
            killed.start()
            killed.finish()
            other, others = list(plans.items())[(i + 1) % len(plans)]
            on = Training(server, folder / f"{i}d", ranks, [*argv, *others, *kept, "--steps", "10"])
            on.start()
            on.finish()
            pairs = zip(undisturbed.all_step_digests(), killed.all_step_digests(), strict=True)
            losses = on.step_digests(0).losses
            found[plan] = {
                "killed_after": at, "killed": codes == {-signal.SIGKILL}, "resumed": "resumed step" in killed.log(0).read_text(),
                "differences": [d for x, y in pairs if (d := x.difference(y))],
                "went_on_as": other, "from_step": min(losses),
                "off_by": max(abs(float.fromhex(v) / float.fromhex(expected[s]) - 1) for s, v in losses.items()),
            }  # fmt: skip
            good = held(found[plan])
            print(f"{ranks} ranks, {plan}: killed after step {at}, {'the same bits' if not found[plan]['differences'] else 'DIFFERS'}; "
                  f"as {other} from step {min(losses)}: losses off by {found[plan]['off_by']:.1e}{'' if good else ' NOT AS PROMISED'}", flush=True)  # fmt: skip
    server.close()
    return found


def held(row: dict[str, Any]) -> bool:
    """Whether a killed plan did what is promised."""
    return row["killed"] and row["resumed"] and not row["differences"] and row["off_by"] < 2e-4


def main() -> int:
    """Prints and writes the figures; 1 if one of them is not as promised."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, help="JSON file for the figures")
    p.add_argument("--bytes", type=int, nargs="*", default=[], help="numbers of ranks to compare bytes on")
    p.add_argument(
        "--kills", type=int, nargs="*", default=[], choices=(4, 8), help="numbers of ranks to kill plans on"
    )
    args = p.parse_args()
    use_own_folders()
    result: dict[str, Any] = {"machine": describe_machine(), "published": published()}
    result["bytes"] = {str(n): real_bytes(n) for n in args.bytes}
    result["kills"] = {str(n): kills(n) for n in args.kills}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    good = (
        result["published"]["largest_error"] < 0.1
        and not any(d["differences"] for n in result["bytes"].values() for d in n.values())
        and all(held(r) for n in result["kills"].values() for r in n.values())
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
