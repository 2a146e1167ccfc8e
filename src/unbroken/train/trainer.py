"""One rank of a training: what it holds, one update of its weights, and how it goes on from a checkpoint."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from ..progress import Run
from .buckets import Buckets
from .checks.busy import BusyTime
from .checks.recheck import Recheck, StepNumbers, keep_generators
from .config import TrainConfig, learning_rate
from .corpus.order import SampleOrder, SamplePosition
from .corpus.samples import TextSamples, TrainingCorpus
from .corpus.tokens import Tokens
from .huggingface.names import description
from .model import Decoder
from .world import World

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
    order: SampleOrder
    position: SamplePosition
    step: int = 0
    """Steps completed."""
    recheck: Recheck | None = None
    busy: float = math.nan
    """Seconds that this rank's GPU worked on the last step's gradients, without waiting for other ranks; NaN without a GPU."""

    def __post_init__(self) -> None:
        self._busy = BusyTime(self.world.device)

    def state(self) -> dict[str, Any]:
        """The state as a checkpoint keeps it; its tensors are the live ones."""
        return {
            "model": dict(self.buckets.parameters()),
            "optimizer": {"exp_avg": self.buckets.exp_avg, "exp_avg_sq": self.buckets.exp_avg_sq},
            "training": training_values(
                self.config, self.step, self.tokens, description(self.config.model, self.config.data.seq)
            ),
        }

    def final_tensors(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """What this rank holds at the end: parameters, and optimizer state, by name."""
        moments = self.state()["optimizer"]
        return self.buckets.parameters(), {f"{k}.{n}": v for k, m in moments.items() for n, v in m.items()}

    @property
    def samples(self) -> TextSamples:
        """The text as samples."""
        return TextSamples(self.text, self.config.data.seq)

    @property
    def parameter_count(self) -> int:
        """Parameters of the whole model."""
        return sum(p.numel() for p in self.model.parameters())

    def resume(self, step: int, training: dict[str, Any], position: SamplePosition) -> None:
        """Goes on from a checkpoint whose tensors are loaded already; raises InputError if it is of another training."""
        check_same_training(self.config, self.tokens, step, training)
        self.step = step
        self.position = position.skipping(self.position.skips)

    def train_step(self, fence: Any, stop: bool) -> tuple[float, Tensor, bool, bytes]:
        """One update of the weights. Returns (mean loss of all ranks, gradient norm, whether any rank wants to stop,
        this rank's tokens)."""
        c, w, b = self.config, self.world, self.buckets
        indices, self.position = self.position.take(c.data.global_batch)
        mine = [self.order[indices[i]] for i in w.share(c.data.global_batch)]
        began = monotonic()
        batch = self._batch(mine)
        self.run.add_data_wait(monotonic() - began)
        parts = _parts(len(mine), c.data.micro_batch)
        put_generators_back = keep_generators(self.recheck is not None and c.model.dropout > 0)

        def compute() -> StepNumbers:
            data = torch.from_numpy(batch).to(w.device, torch.int64)
            norm = self._make_gradients(data, parts, stop)
            # The one time in a step that the host waits for the device: all numbers at once.
            return StepNumbers(norm, *torch.cat([norm.view(1), b.scalars]).tolist())

        def compute_again() -> StepNumbers:
            put_generators_back()
            return compute()

        made = compute()
        if self.recheck is not None:
            made = self.recheck.check(self.step + 1, made, compute_again)
        b.clip(made.norm_on_device, c.optim.clip)
        fence()
        b.adamw(
            self.step + 1,
            learning_rate(c.optim, self.step + 1, c.run.steps),
            (c.optim.beta1, c.optim.beta2),
            c.optim.eps,
            c.optim.weight_decay,
        )
        self.step += 1
        self.busy = self._busy.take()
        # Of the host, so that whoever reads it waits for nothing.
        return made.loss, torch.tensor(made.norm), made.stop > 0, batch.tobytes()

    def _make_gradients(self, data: Tensor, parts: list[slice], stop: bool) -> Tensor:
        """Leaves the gradients of this step in the buckets, reduced over the ranks; returns their norm."""
        b = self.buckets
        with self._busy:  # reductions run beside it, and are waited for after it
            b.zero()
            for i, part in enumerate(parts):
                last = i == len(parts) - 1
                loss = self._loss(data[part]) * ((part.stop - part.start) / len(data))
                b.scalars[0] += loss.detach()
                if last:
                    b.scalars[1] = float(stop)
                    b.expect()
                loss.backward()
        b.reduce(self.world.size)
        return b.norm()

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
    order = open_order(config, tokens)
    world.share(c.global_batch)
    torch.manual_seed(c.seed)
    model = Decoder(config.model, c.seq, c.seed).to(world.device)
    buckets = Buckets(model, config.run.bucket_mb * 1e6, world.device)
    if config.run.overlap and world.size > 1:
        buckets.hook()
    exact = config.run.mode == "deterministic"
    recheck = Recheck(world, buckets, exact=exact, say=_say) if config.run.recheck else None
    return Trainer(
        config,
        world,
        run,
        tokens,
        tokens.map(),
        model,
        buckets,
        order,
        SamplePosition().skipping([*c.skips, *run.skips]),
        recheck=recheck,
    )


def training_values(
    config: TrainConfig, step: int, tokens: TrainingCorpus, huggingface: dict[str, Any] | None
) -> dict[str, Any]:
    """What a checkpoint says beside its tensors: where it stands, of which training it is, what Hugging Face calls it."""
    return {
        "step": step,
        "identity": config.identity(tokens.fingerprint),
        "huggingface": huggingface,
    }


def check_same_training(
    config: TrainConfig, tokens: TrainingCorpus, step: int, training: dict[str, Any]
) -> None:
    """Raises InputError if a checkpoint is of another training than this one, saying what differs."""
    mine = config.identity(tokens.fingerprint)
    different = [k for k in mine if training["identity"].get(k) != mine[k]]
    if different:
        k = different[0]
        was = training["identity"].get(k)
        if k == "data" and isinstance(was, dict):
            inner = next(i for i in {**was, **mine[k]} if was.get(i) != mine[k].get(i))
            if inner == "sha256":
                # Two hashes tell nobody what to do, and what is told of a run is cut.
                raise InputError(
                    "the checkpoint is of another training: its text files were changed since, or --data names others",
                    where=f"checkpoint of step {step}",
                    hint="Put the text back, or start a new run directory",
                )
            raise InputError(
                f"the checkpoint is of another training: its {inner} is {was.get(inner)}, this one's is {mine[k].get(inner)}",
                where=f"checkpoint of step {step}",
                hint="Start with the same options, or in a new run directory",
            )
        raise InputError(
            f"the checkpoint is of another training: its {k} is {was}, this one's is {mine[k]}",
            where=f"checkpoint of step {step}",
            hint="Start with the same options and the same text, or in a new run directory",
        )


def open_order(config: TrainConfig, tokens: Tokens) -> SampleOrder:
    """The order of the samples, those that are held out left aside. Raises InputError for too little text."""
    return order_of((tokens.count - 1) // config.data.seq, config, f"{tokens.count} bytes")


def order_of(samples: int, config: TrainConfig, size: str) -> SampleOrder:
    """As `open_order`, of so many samples in all."""
    c = config.data
    samples -= config.run.eval_samples if config.run.eval_every else 0
    if samples < c.global_batch:
        raise InputError(
            f"the text has {size}: too few for one batch of {c.global_batch} samples of {c.seq}",
            where=f"--data {c.data}",
            hint="Give more text, a smaller --global-batch or a shorter --seq",
        )
    return SampleOrder(samples, c.seed)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk under the log is no reason to end a training
        print(text, flush=True)


def _parts(count: int, size: int) -> list[slice]:
    size = size or max(count, 1)
    return [slice(i, min(i + size, count)) for i in range(0, count, size)]
