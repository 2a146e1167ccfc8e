"""One rank of a profile: some steps of a plan, watched; rank 0 writes what all of them found."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ... import atomic
from ...progress import attach
from ..callbacks import Callback
from ..config import ModelConfig, TrainConfig
from ..parallel.trainer import PlanTrainer
from ..planning.sizes import flops_per_token, layer_flops_per_token
from ..training import open_corpus, open_training
from ..world import start_world, stop_world
from .activity import ActivityRecorder
from .kernels import estimated_sm_activity, longest, read_trace, time_by_kind
from .memory import held_bytes, peak_bytes

PEAKS = {"H200": 989e12, "H100": 989e12, "H20": 148e12, "B200": 2250e12, "A100": 312e12}
"""Dense bf16 FLOP/s of a card, by a word of its name, as NVIDIA states them; the first that is in the name."""
MFU = "tokens/s x (6 N + 12 L d T) / peak; N without the embedding, attention counted whole (Narayanan et al. 2021)"
HFU = "as MFU, with the blocks' forward pass once more where it is recomputed in full"


def run_rank(config: TrainConfig, out: Path, *, warm: int, steps: int) -> None:
    """Trains `warm` and then `steps` steps of a plan, two more under a trace, and writes `out` on rank 0."""
    world = start_world(config.run)
    trainer = open_training(config, world, attach(), open_corpus(config))
    assert isinstance(trainer, PlanTrainer)
    for _ in range(warm):
        trainer.train_step(_nothing, False)
    watch = StepWatch(trainer)
    for _ in range(steps):
        loss, *_ = trainer.train_step(_nothing, False)
        watch.step()
    watch.stop()
    found = watch.found(loss, _traced(trainer, world.device.type == "cuda"))
    if found is not None:
        atomic.write_text(out, json.dumps(found, indent=1) + "\n")
    stop_world(world)


class StepWatch:
    """Steps of a plan that are watched: when each was complete, what the devices did meanwhile, what memory they took."""

    def __init__(self, trainer: PlanTrainer) -> None:
        self._trainer = trainer
        self._cuda = trainer.world.device.type == "cuda"
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._recorder = ActivityRecorder() if trainer.world.local_rank == 0 else None
        if self._recorder:
            self._recorder.start()
        self._first_step = trainer.step + 1
        self._moments = [time.monotonic()]

    def step(self) -> None:
        """After each step."""
        self._moments.append(time.monotonic())

    def stop(self) -> None:
        """After the last one: waits for it."""
        if self._cuda:
            torch.cuda.synchronize()
        self._moments[-1] = time.monotonic()
        self._last_step = self._trainer.step
        self._activity = (
            self._recorder.stop().between(self._moments[0], self._moments[-1]) if self._recorder else None
        )

    def found(self, loss: float, kernels: dict[str, Any] | None) -> dict[str, Any] | None:
        """The profile, on rank 0; every rank calls it."""
        t, moments = self._trainer, self._moments
        world = t.world
        held = held_bytes(t)
        mine = {"rank": world.rank, "bytes": held | peak_bytes(held, world.device), "kernels": kernels}
        everyone: list[Any] = [mine]
        if world.size > 1:
            everyone = [None] * world.size
            dist.all_gather_object(everyone, mine)
        if world.rank != 0 or self._activity is None:
            return None
        seconds = (moments[-1] - moments[0]) / (len(moments) - 1)
        device = torch.cuda.get_device_name() if self._cuda else "cpu"
        without = (
            {}
            if self._cuda
            else {"activations": "only CUDA's allocator counts them", "kernels": "no GPU here"}
        )
        return {
            "plan": t.config.plan.options or "as by default", "device": device, "torch": torch.__version__, "ranks": world.size, "first_step": self._first_step,
            "last_step": self._last_step, "parameters": t.parameter_count, "loss": loss, "step_seconds": seconds,
            "steps": [m - moments[0] for m in moments],
            "activity": [{"at": s.at - moments[0], "gpu": s.gpu, **s.values} for s in self._activity.samples],
            "activity_means": {str(g): m for g, m in self._activity.means().items()}, "by_rank": everyone,
            **_rates(t.config, seconds, world.size, device), "not_measured": self._activity.not_measured | without,
        }  # fmt: skip


class ProfileRun(Callback):
    """Measures some steps of a run, early in each attempt, for its report."""

    AFTER, STEPS = 10, 10

    def __init__(self, out: Path) -> None:
        self._out = out
        self._watch: StepWatch | None = None

    def on_start(self, training: Any) -> None:
        self._begin = training.step + self.AFTER

    def on_step(self, training: Any, loss: float, norm: Tensor) -> None:
        if training.step == self._begin:
            self._watch = StepWatch(training)
        elif self._watch is not None:
            self._watch.step()
            if training.step == self._begin + self.STEPS:
                self._watch.stop()
                found = self._watch.found(loss, None)
                self._watch = None
                if found is not None:
                    with contextlib.suppress(OSError):  # a full disk is no reason to end a training
                        atomic.write_text(self._out, json.dumps(found) + "\n")


def _nothing() -> None:
    pass


def _rates(config: TrainConfig, seconds: float, ranks: int, device: str) -> dict[str, Any]:
    """Tokens/s of a rank, MFU and HFU with their formulas; None where the peak of the device is not known."""
    d = config.data
    tokens = d.global_batch * d.seq / seconds / ranks
    flops = flops_per_token(config.model, d.seq)
    hardware = flops + (_again(config.model, d.seq) if config.plan.recompute == "full" else 0.0)
    peak = next((p for word, p in PEAKS.items() if word in device), None)
    return {
        "tokens_per_second_per_rank": tokens, "peak_flops": peak,
        "mfu": tokens * flops / peak if peak else None, "hfu": tokens * hardware / peak if peak else None,
        "formulas": {"mfu": MFU, "hfu": HFU},
    }  # fmt: skip


def _again(model: ModelConfig, seq: int) -> float:
    """Operations of the blocks' forward pass: a third of forward and backward."""
    return layer_flops_per_token(model, seq) / 3


def _traced(trainer: PlanTrainer, cuda: bool) -> dict[str, Any] | None:
    """Two steps under torch's profiler; every rank takes them."""
    if not cuda:
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(2):
            trainer.train_step(_nothing, False)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profile.export_chrome_trace(str(file))
        kernels = read_trace(file)
    processors = torch.cuda.get_device_properties(trainer.world.device).multi_processor_count
    return {"seconds_by_kind": time_by_kind(kernels), "longest": longest(kernels),
            "estimated_sm_active_pct": 100 * estimated_sm_activity(kernels, processors)}  # fmt: skip
