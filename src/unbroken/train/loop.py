"""The training itself: restore, then forward, backward, reduce, update, report, save, until done or asked to stop."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..errors import Exit, InputError
from ..progress import Run, attach
from .buckets import Buckets
from .config import TrainConfig
from .model import Decoder
from .order import Order, Position
from .saving import Saving, open_saving
from .schedule import learning_rate
from .tokens import Tokens, open_tokens
from .witness import WitnessWriter, digest, witness_path
from .world import World, start_world, stop_world

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass
class Trainer:
    """One rank of a training: what it holds and what a checkpoint must hold of it."""

    config: TrainConfig
    world: World
    run: Run
    tokens: Tokens
    text: NDArray[np.uint8]
    """The tokens, memory-mapped."""
    model: Decoder
    buckets: Buckets
    order: Order
    position: Position
    step: int = 0
    """Steps completed."""

    def state(self) -> dict[str, Any]:
        """The state as a checkpoint keeps it; its tensors are the live ones."""
        return {
            "model": dict(self.buckets.parameters()),
            "optimizer": {"exp_avg": self.buckets.exp_avg, "exp_avg_sq": self.buckets.exp_avg_sq},
            "training": {"step": self.step, "identity": self.config.identity(self.tokens.fingerprint)},
        }

    def resume(self, step: int, training: dict[str, Any], position: Position) -> None:
        """Goes on from a checkpoint whose tensors are loaded already; raises InputError if it is of another training."""
        mine = self.config.identity(self.tokens.fingerprint)
        different = [k for k in mine if training["identity"].get(k) != mine[k]]
        if different:
            k = different[0]
            raise InputError(
                f"the checkpoint is of another training: its {k} is {training['identity'].get(k)}, this one's is {mine[k]}",
                where=f"checkpoint of step {step}",
                todo="Start with the same options and the same text, or in a new run directory",
            )
        self.step = step
        self.position = position.skipping(self.position.skips)

    def train_step(self, fence: Any, stop: bool) -> tuple[float, Tensor, bool, bytes]:
        """One update of the weights. Returns (mean loss of all ranks, gradient norm, whether any rank wants to stop,
        this rank's tokens)."""
        c, w, b = self.config, self.world, self.buckets
        indices, self.position = self.position.take(c.data.global_batch)
        mine = [self.order[indices[i]] for i in w.share(c.data.global_batch)]
        batch = self._batch(mine)
        parts = _parts(len(mine), c.data.micro_batch)
        b.zero()
        data = torch.from_numpy(batch).to(w.device, torch.int64)
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            loss = self._loss(data[part]) * ((part.stop - part.start) / len(mine))
            b.scalars[0] += loss.detach()
            if last:
                b.scalars[1] = float(stop)
                b.expect()
            loss.backward()
        b.reduce(w.size)
        norm = b.clip(c.optim.clip)
        # Read before the optimizer overwrites the weights: a snapshot may still be copying them.
        mean, wish = b.scalars.tolist()
        fence()
        b.adamw(
            self.step + 1,
            learning_rate(c.optim, self.step + 1, c.run.steps),
            (c.optim.beta1, c.optim.beta2),
            c.optim.eps,
            c.optim.weight_decay,
        )
        self.step += 1
        return mean, norm, wish > 0, batch.tobytes()

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss on the held-out samples, the same on every rank."""
        c, w = self.config, self.world
        first = self.order.samples
        mine = [first + i for i in range(w.rank, c.run.eval_samples, w.size)]
        self.model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=w.device)
        for part in _parts(len(mine), c.data.micro_batch):
            batch = torch.from_numpy(self._batch(mine[part])).to(w.device, torch.int64)
            sums = [float(self._loss(batch)) * len(batch), float(len(batch))]
            total += torch.tensor(sums, dtype=torch.float64, device=w.device)
        self.model.train()
        if w.size > 1:
            import torch.distributed as dist

            dist.all_reduce(total)
        return float(total[0] / total[1])

    def _batch(self, samples: list[int]) -> NDArray[np.uint8]:
        seq = self.config.data.seq
        return np.stack([self.text[s * seq : s * seq + seq + 1] for s in samples])

    def _loss(self, batch: Tensor) -> Tensor:
        low = self.config.run.dtype == "bfloat16"
        scope = torch.autocast(self.world.device.type, torch.bfloat16) if low else contextlib.nullcontext()
        with scope:
            loss: Tensor = self.model(batch[:, :-1], batch[:, 1:])
        return loss


def build(config: TrainConfig, world: World, run: Run, tokens: Tokens) -> Trainer:
    """A rank at step 0. Raises InputError for too little text."""
    c = config.data
    held_out = config.run.eval_samples if config.run.eval_every else 0
    samples = (tokens.count - 1) // c.seq - held_out
    if samples < c.global_batch:
        raise InputError(
            f"the text has {tokens.count} bytes: too few for one batch of {c.global_batch} samples of {c.seq}",
            where=f"--data {c.data}",
            todo="Give more text, a smaller --global-batch or a shorter --seq",
        )
    world.share(c.global_batch)
    torch.manual_seed(c.seed)
    model = Decoder(config.model, c.seq, c.seed).to(world.device)
    buckets = Buckets(model, config.run.bucket_mb * 1e6, world.device)
    if config.run.overlap and world.size > 1:
        buckets.hook()
    order = Order(samples, c.seed)
    return Trainer(
        config, world, run, tokens, tokens.map(), model, buckets, order, Position().skipping(c.skips)
    )


def train(config: TrainConfig) -> int:
    """Runs a training to its end, or to a stop on request; returns the exit code."""
    run = attach(total_steps=config.run.steps)
    with run.phase("starting"), _stop_signals() as wish:
        tokens = open_tokens(config.data.data, Path(config.data.cache) if config.data.cache else None)
        world = start_world(config.run)
        trainer = build(config, world, run, tokens)
        saving, resumed = open_saving(config.run, run, trainer)
        if world.rank == 0:
            _say(_banner(trainer))
            if resumed:
                _say(resumed)
        stopped = _steps(trainer, saving, wish)
        stop_world(world)
    return Exit.RANK_STOPPED_ON_REQUEST if stopped else Exit.OK


def _steps(t: Trainer, saving: Saving, wish: list[int]) -> bool:
    """Trains until the last step; True if it ended before on request."""
    c, run, world = t.config.run, t.run, t.world
    writer = (
        WitnessWriter(witness_path(c.trace, world.rank, world.size), world.rank, run.attempt)
        if c.trace
        else None
    )
    tokens_per_step = t.config.data.global_batch * t.config.data.seq
    asked = False
    before = time.perf_counter()
    # Until the first step is complete this is the phase "starting", with its long deadline: step() ends it.
    while t.step < c.steps and not asked:
        asked = bool(wish) or run.should_stop(t.step + 1)
        loss, norm, asked, batch = t.train_step(saving.fence, asked)
        if writer:
            writer.step(t.step, loss, batch)
        run.step(t.step, loss=loss, tokens=tokens_per_step)
        now = time.perf_counter()
        if world.rank == 0 and (t.step % c.log_every == 0 or t.step in (1, c.steps)):
            rate = tokens_per_step / (now - before)
            _say(
                f"step {t.step} loss {loss:.4f} grad {float(norm):.3f} {1e3 * (now - before):.0f} ms {rate:,.0f} tokens/s"
            )
        before = now
        if c.eval_every and t.step % c.eval_every == 0:
            with run.phase("evaluating"):
                held_out = t.evaluate()
            if world.rank == 0:
                _say(f"eval step {t.step} loss {held_out:.4f}")
        if not asked and t.step < c.steps and saving.due():
            saving.save()  # holds nothing up: a rank that hangs in it is found by the step's deadline
    stopped = asked and t.step < c.steps
    run.phase("stopping")
    if stopped:
        _say(f"stopping after step {t.step}, as asked")
    else:
        parameters = digest(t.buckets.parameters())
        optimizer = digest({f"{k}.{n}": v for k, m in t.state()["optimizer"].items() for n, v in m.items()})
        _say(f"final step {t.step} parameters {parameters} optimizer {optimizer}")
        if writer:
            writer.final(t.step, parameters, optimizer)
    saving.last()
    if writer:
        writer.close()
    return stopped


def _banner(t: Trainer) -> str:
    n = sum(p.numel() for p in t.model.parameters())
    w, c = t.world, t.config
    ranks = f"{w.size} ranks over {w.backend}" if w.size > 1 else "one rank"
    return (
        f"training {n:,} parameters on {t.tokens.count:,} bytes of {t.tokens.source} "
        f"(sha256 {t.tokens.fingerprint[:12]}), {ranks} on {w.device.type}, from step {t.step} to {c.run.steps}"
    )


def _parts(count: int, size: int) -> list[slice]:
    size = size or max(count, 1)
    return [slice(i, min(i + size, count)) for i in range(0, count, size)]


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """The signals that ask to stop, in a list that grows; a second Ctrl-C interrupts at once."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if number in seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        seen.append(number)

    old = {s: signal.signal(s, note) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield seen
    finally:
        for s, handler in old.items():
            signal.signal(s, handler)


def _say(text: str) -> None:
    # A full disk under the log is no reason to end a training.
    with contextlib.suppress(OSError):
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
