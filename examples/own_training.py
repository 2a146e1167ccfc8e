"""A model and data of your own on any plan: what you write is what differs; survival, plans and checkpoints are `unbroken`'s.

    unbroken run --run-dir runs/own --nproc 2 -- examples/own_training.py --pipeline 2 --steps 60
    unbroken run --amend --run-dir runs/own --nproc 2 -- examples/own_training.py --parameters 2 --steps 120    # goes on, on another plan
    unbroken checkpoint export runs/own/checkpoints --to huggingface --out own           # a Qwen3, as transformers knows it

The options are those of `unbroken train`. The model is a Llama that normalises queries and keys, as Qwen3 does; the data are sums.
"""

import sys

import numpy as np
from torch import Tensor, nn

from unbroken.train.command import main
from unbroken.train.config import ModelConfig, TrainConfig
from unbroken.train.corpus.samples import IGNORED, ArrayCorpus, PackedSamples
from unbroken.train.huggingface.names import description
from unbroken.train.model import Attention, Block, RMSNorm, rotate
from unbroken.train.parallel.stage import Stage
from unbroken.train.parallel.trainer import build


class NormedAttention(Attention):
    """Attention whose queries and keys are normalised, head by head."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__(c)
        self.query_norm, self.key_norm = RMSNorm(self.width, c.norm_eps), RMSNorm(self.width, c.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (m(x).view(b, t, -1, self.width) for m in (self.query, self.key, self.value))
        q, k = rotate(self.query_norm(q), cos, sin), rotate(self.key_norm(k), cos, sin)
        # self.attend: the kernel that the plan chose, over what other ranks hold of the sequence.
        y = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0)
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


class Model(Stage):
    """A decoder of such blocks."""

    def block(self, c: ModelConfig) -> nn.Module:
        block = Block(c)
        block.attention = NormedAttention(c)
        return block

    def huggingface(self, c: ModelConfig, seq: int) -> dict:
        """The names of a Llama, those of the two norms, and the configuration of a Qwen3."""
        said = description(c, seq)
        for i in range(c.layers):
            for ours, theirs in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
                said["names"][f"blocks.{i}.attention.{ours}.weight"] = (
                    f"model.layers.{i}.self_attn.{theirs}.weight"
                )
        said["files"]["config.json"] |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
        return said


def open_sums(config: TrainConfig) -> ArrayCorpus:
    """Rows of sums as bytes, of which the results are learnt."""
    rng, seq = np.random.default_rng(config.data.seed), config.data.seq
    tokens = np.zeros((2000, seq + 1), np.int64)
    learnt = np.zeros((2000, seq + 1), bool)
    for row, mask in zip(tokens, learnt, strict=True):
        at = 0
        while True:
            a, b = rng.integers(0, 50, 2)
            asked, answer = f"{a}+{b}=".encode(), f"{a + b}\n".encode()
            end = at + len(asked) + len(answer)
            if end > seq + 1:
                break
            row[at:end] = list(asked + answer)
            mask[at + len(asked) : end] = True
            at = end
    return ArrayCorpus(
        "sums below 50", PackedSamples(tokens[:, :-1], np.where(learnt, tokens, IGNORED)[:, 1:])
    )


def open_trainer(*args):
    return build(*args, make_stage=Model)


if __name__ == "__main__":
    sys.exit(main(open_data=open_sums, open_trainer=open_trainer))
