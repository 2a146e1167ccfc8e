"""torchtitan with two lines of ours (marked +): killed at any moment, the same command goes on, bit for bit.

unbroken run --nproc 2 -- examples/hooks/torchtitan_train.py
torchrun --nproc-per-node 2 examples/hooks/torchtitan_train.py --out runs/llama
"""

import argparse
from dataclasses import dataclass

import torch
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from unbroken.hooks.torchtitan import UnbrokenCheckpoints  # +


class Text(IterableDataset):
    """Sequences of tokens without an end; what is drawn for a sample comes from a generator that is part of the state."""

    def __init__(self, rank: int, length: int) -> None:
        self.length, self.generator = length, torch.Generator().manual_seed(rank)

    def __iter__(self):
        while True:
            tokens = torch.randint(0, 64, (self.length + 1,), generator=self.generator)
            yield {"input": tokens[:-1]}, tokens[1:]

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])


class TextLoader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(
        self, config, *, dp_world_size, dp_rank, seq_len, local_batch_size, snapshot_every_n_steps, **_
    ):
        super().__init__(
            Text(dp_rank, seq_len), dp_rank, dp_world_size, batch_size=local_batch_size,
            snapshot_every_n_steps=snapshot_every_n_steps,
        )  # fmt: skip


class NoTokenizer(BaseTokenizer):
    """The dataset has numbers already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, *, tokenizer_path):
        super().__init__()

    def encode(self, *args, **kwargs):
        return []

    def decode(self, *args, **kwargs):
        return ""

    def get_vocab_size(self):
        return 64


class Printing(Trainer):
    """Prints each micro-batch's loss, so that two runs can be compared."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def forward_backward_step(self, **how):
        loss = super().forward_backward_step(**how)
        rank = torch.distributed.get_rank()
        print(f"rank {rank} step {self.step} loss {loss.item().hex()}", flush=True)
        return loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    torch.set_num_threads(1)
    spec = model_registry("debugmodel", attn_backend="flex")
    del spec.model.layers[2:]
    if not torch.cuda.is_available():  # flex attention has no backward pass on a CPU
        for layer in spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config = Printing.Config(
        dump_folder=options.out,
        model_spec=spec,
        loss=CrossEntropyLoss.Config(),
        tokenizer=NoTokenizer.Config(),
        dataloader=TextLoader.Config(),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=4),
        training=TrainingConfig(
            local_batch_size=2, global_batch_size=8, seq_len=32, steps=options.steps, disable_cuda_graphs=True
        ),
        debug=DebugConfig(seed=1),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        metrics=MetricsProcessor.Config(log_freq=5),
        checkpoint=UnbrokenCheckpoints.Config(options={"snapshot_every": 2, "persist_every": 4}),  # +
    )
    trainer = config.build()
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
