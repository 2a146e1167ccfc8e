"""What being survivable costs our trainer in fast mode: windows of steps with and without, in turn, in one process.

    python benchmarks/train_survivable.py --out FILE.json [--pairs 24] [--seconds 190]     # one H200, about three minutes
    python benchmarks/train_survivable.py --out FILE.json --tiny --pairs 3                 # on a processor, for the script itself

The training runs under `unbroken run`. A window *with* reports each step to the agent, asks it whether to stop, takes a snapshot of
the whole state after its first step, and each minute one that goes to disk: such a window goes on until that is durable, so that
nothing of it falls into a window *without*, which makes plain steps. A pair is one of each, their order alternates; the
excess is the mean of their ratios less one, with its 95 % interval (Student). Pairs with a checkpoint on disk count as the others do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics as st
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import describe_machine
from own_folders import use_own_folders

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

WINDOW = 5
"""Steps, of which the first is followed by a snapshot."""
PERSIST_S = 60.0
"""Seconds of windows with it between two snapshots that go to disk."""


def main() -> int:
    """Starts the training under `unbroken run` and prints what it found."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--pairs", type=int, default=24, help="of windows")
    p.add_argument("--seconds", type=float, default=190, help="no further pair begins after so long")
    p.add_argument("--size", default="1b")
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--attention", default="cudnn")
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.inner:
        return inner(args)
    use_own_folders()
    with tempfile.TemporaryDirectory() as folder:
        asked = [__file__, *sys.argv[1:], "--inner", "--out", str(args.out.resolve())]
        command = [
            sys.executable,
            "-m",
            "unbroken",
            "run",
            "--nproc",
            "1",
            "--run-dir",
            f"{folder}/run",
            "--",
            *asked,
        ]
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks")])}
        code = subprocess.run(command, env=env, check=False).returncode
    if not args.out.exists():
        return code or 1
    found = json.loads(args.out.read_text())
    print(f"{found['windows']} windows, step {found['step_s'] * 1e3:.1f} ms, {found['persisted']} on disk (durable after "
          f"{', '.join(f'{s:.1f}' for s in found['durable_s'])} s): excess {100 * found['excess']:+.3f} +- {100 * found['half']:.3f} %")  # fmt: skip
    return code


def inner(args: argparse.Namespace) -> int:
    """The training: one rank."""
    import torch
    from train_contenders import ours

    from train import TINY, Case, card, commit
    from unbroken.train.config import RECIPES, RunConfig
    from unbroken.train.saving import open_saving
    from unbroken.train.world import start_world

    began = time.monotonic()
    torch.set_float32_matmul_precision("high")
    world = start_world(RunConfig(mode="fast", device="cpu" if args.tiny else "auto"))
    model = TINY if args.tiny else RECIPES[args.size]
    case = Case("ours", args.size, 2 if args.tiny else args.batch, args.attention)
    with tempfile.TemporaryDirectory() as folder:
        _, trainer = ours(case, model, world, Path(folder), seq=64 if args.tiny else 4096, tiny=args.tiny)
        options = RunConfig(snapshot_every=WINDOW, persist_every=10**9, keep=1)
        saving, _ = open_saving(options, trainer.run, trainer, {})
        course = Course(trainer, saving)
        course.prepare()
        pairs: list[tuple[float, float]] = []
        while len(pairs) < args.pairs and (len(pairs) < 2 or time.monotonic() - began < args.seconds):
            took = {
                with_: course.window(with_) for with_ in ((True, False) if len(pairs) % 2 else (False, True))
            }
            pairs.append((took[True], took[False]))
        result = figures(pairs) | {
            "machine": describe_machine(), **card(world), "torch": torch.__version__, "commit": commit(), "size": args.size,
            "batch": case.micro, "attention": args.attention, "window_steps": WINDOW, "windows": 2 * len(pairs), "pairs_s": pairs,
            "persisted": len(course.durable_s), "durable_s": course.durable_s, "pinned_s": course.pinned_s, "snapshots": course.snapshots,
        }  # fmt: skip
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    trainer.run.phase("stopping")
    sys.stdout.flush()
    os._exit(0)


class Course:
    """One training, whose windows are survivable or not."""

    def __init__(self, trainer: Any, saving: Any) -> None:
        self._trainer, self._saving = trainer, saving
        self._with_s = 0.0
        self._persisted_at: float | None = None
        self.durable_s: list[float] = []
        self.pinned_s = 0.0
        self.snapshots = 0

    def prepare(self) -> None:
        """Steps with snapshots until everything is compiled and every buffer known to the device."""
        began = time.monotonic()
        for _ in range(3):
            self._step(True)
        self._save(False).host.result(120)
        buffers = self._saving._checkpoints._opened().buffers.device
        while (
            buffers.pinning is not None
            and time.monotonic() - began < 90
            and not all(b.pinned for b in self._saving._checkpoints.memory.buffers.values())
        ):
            self._step(True)
        self.pinned_s = time.monotonic() - began
        self.snapshots = 0
        self.window(False)

    def window(self, survivable: bool) -> float:
        """Seconds of a step, the mean of a window."""
        synchronize()
        began = time.monotonic()
        steps, pending, saved = 0, None, None
        while True:
            for i in range(WINDOW):
                self._step(survivable)
                if survivable and i == 0:
                    disk = pending is None and self._disk_is_due(began)
                    saved = self._save(disk)
                    pending = saved if disk else pending
            steps += WINDOW
            if pending is None or pending.disk.done():
                break
        synchronize()
        seconds = time.monotonic() - began
        if saved is not None:
            saved.host.result(60)
        if survivable:
            self._with_s += seconds
        if pending is not None:
            self.durable_s.append(pending.disk.result())
        return seconds / steps

    def _disk_is_due(self, began: float) -> bool:
        now = self._with_s + time.monotonic() - began
        if self._persisted_at is not None and now - self._persisted_at < PERSIST_S:
            return False
        self._persisted_at = now
        return True

    def _step(self, survivable: bool) -> None:
        t = self._trainer
        if not survivable:
            t.train_step(lambda: None, False)
            return
        loss, norm, _, _ = t.train_step(self._saving.wait_for_copies, t.run.should_stop(t.step + 1))
        c = t.config.data
        t.run.step(t.step, loss=loss, norm=float(norm), tokens=c.global_batch * c.seq)

    def _save(self, disk: bool) -> Any:
        from unbroken.train.saving import position_of

        t = self._trainer
        self.snapshots += 1
        return self._saving._checkpoints.save(t.step, t.state(), position=position_of(t), persist=disk)


def synchronize() -> None:
    """Waits for the device, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def figures(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """The excess of windows with over those without, and half of its interval."""
    from checkpoint import student

    ratios = [a / b - 1 for a, b in pairs]
    return {
        "excess": st.mean(ratios), "excess_median": st.median(ratios),
        "half": student(len(ratios)) * st.stdev(ratios) / len(ratios) ** 0.5, "step_s": st.mean(b for _, b in pairs),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
