"""torchtitan's own trainer as a contender of benchmarks/train.py: its Llama 3 of the same sizes, blocks and loss compiled.

Two versions are known: 0.2.2 runs with torch 2.11, 0.3.0 wants a newer one and more packages (torch_checkpointing, spmd_types, einops, pillow,
tensorboard, wandb). On one GPU both compute under autocast, read no number from the GPU between the first step and the last, and leave the choice
of an attention kernel to an order of their own (cuDNN's first); 0.3.0 records forward and backward pass as a CUDA graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from train_contenders import Case

from unbroken.train.config import ModelConfig
from unbroken.train.world import World


def titan_loop(case: Case, model: ModelConfig, world: World, folder: Path, *, seq: int, tiny: bool, on_step: Callable[[int], None]) -> None:  # fmt: skip
    """Trains some steps on random tokens; `on_step` is called after each."""
    old = version("torchtitan").startswith("0.2.")
    loop = _train_with_job_config if old else _train_with_trainer_config
    loop(case, model, world, folder, seq=seq, tiny=tiny, on_step=on_step)


def _train_with_job_config(case: Case, model: ModelConfig, world: World, folder: Path, *, seq: int, tiny: bool, on_step: Callable[[int], None]) -> None:  # fmt: skip
    """Version 0.2.2."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.config import JobConfig
    from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.train import Trainer

    class Words(BaseDataLoader):
        def __init__(self, **_: Any) -> None:
            pass

        def __iter__(self) -> Iterator[Any]:
            while True:
                x = torch.randint(0, model.vocab, (case.micro, seq + 1))
                yield {"input": x[:, :-1]}, x[:, 1:]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    class Steps(Trainer):
        def train_step(self, rows: Any) -> None:
            super().train_step(rows)
            on_step(self.step)

    sizes = TransformerModelArgs(
        dim=model.dim, n_layers=model.layers, n_heads=model.heads, n_kv_heads=model.kv_heads, vocab_size=model.vocab,
        multiple_of=128, rope_theta=model.rope_base,
    )  # fmt: skip
    register_train_spec("unbroken", dataclasses.replace(
        get_train_spec(), model_args={case.size: sizes}, build_dataloader_fn=Words, build_tokenizer_fn=None, build_validator_fn=None,
        state_dict_adapter=None,
    ))  # fmt: skip
    config = JobConfig()
    config.job.dump_folder = str(folder / "titan")
    config.model.name, config.model.flavor = "unbroken", case.size
    config.training.local_batch_size, config.training.seq_len = case.micro, seq
    config.training.steps = case.warm + case.steps
    config.compile.enable, config.activation_checkpoint.mode = not tiny, case.recompute
    config.metrics.log_freq = 1000
    trainer = Steps(config)
    _check_sizes(trainer, model if not tiny else None)
    trainer.train()


def _train_with_trainer_config(case: Case, model: ModelConfig, world: World, folder: Path, *, seq: int, tiny: bool, on_step: Callable[[int], None]) -> None:  # fmt: skip
    """Version 0.3.0."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.components.validate import Validator
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.trainer import Trainer

    class Words(BaseDataLoader):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            pass

        def __iter__(self) -> Iterator[Any]:
            while True:
                x = torch.randint(0, model.vocab, (case.micro, seq + 1))
                yield {"input": x[:, :-1]}, x[:, 1:]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    class NoTokenizer(BaseTokenizer):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__()

        def encode(self, *args: Any, **kwargs: Any) -> list[int]:
            return []

        def decode(self, *args: Any, **kwargs: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return model.vocab

    class Steps(Trainer):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(Trainer.Config):
            pass

        def train_step(self, *args: Any, **kwargs: Any) -> None:
            super().train_step(*args, **kwargs)
            on_step(self.step)

    spec = llama3.model_registry("debugmodel")
    debug = spec.model
    rope = dataclasses.replace(
        debug.layers[0].attention.rope,
        dim=model.dim // model.heads,
        max_seq_len=seq,
        theta=model.rope_base,
        scaling="none",
    )
    layers = llama3._build_llama3_layers(
        n_layers=model.layers, dim=model.dim, n_heads=model.heads, n_kv_heads=model.kv_heads, hidden_dim=model.hidden, rope=rope, attn_backend="flex",
    )  # fmt: skip
    for layer in layers:  # its masked kernels are for several documents in a row: here there is one
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    spec.model = dataclasses.replace(
        debug, dim=model.dim, vocab_size=model.vocab, layers=layers,
        tok_embeddings=dataclasses.replace(debug.tok_embeddings, num_embeddings=model.vocab, embedding_dim=model.dim),
        norm=dataclasses.replace(debug.norm, normalized_shape=model.dim),
        lm_head=dataclasses.replace(debug.lm_head, in_features=model.dim, out_features=model.vocab),
    )  # fmt: skip
    config = Steps.Config(
        dump_folder=str(folder / "titan"), model_spec=spec, loss=CrossEntropyLoss.Config(), tokenizer=NoTokenizer.Config(),
        dataloader=Words.Config(), optimizer=default_adamw(lr=1e-4), lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        training=TrainingConfig(local_batch_size=case.micro, seq_len=seq, steps=case.warm + case.steps, disable_cuda_graphs=tiny),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"), metrics=MetricsProcessor.Config(log_freq=1000),
        checkpoint=CheckpointManager.Config(enable=False), activation_checkpoint=None, validator=Validator.Config(enable=False),
        compile=CompileConfig(enable=not tiny),
    )  # fmt: skip
    trainer = config.build()
    _check_sizes(trainer, model)
    trainer.train()


def _check_sizes(trainer: Any, model: ModelConfig | None) -> None:
    """Raises AssertionError where its model has other sizes."""
    if model is None:
        return
    shapes = {n: tuple(p.shape) for n, p in trainer.model_parts[0].named_parameters()}
    hidden = {s[0] for n, s in shapes.items() if n.endswith("feed_forward.w1.weight")}
    layers = sum(n.endswith("attention_norm.weight") for n in shapes)
    assert (hidden, layers) == ({model.hidden}, model.layers), f"not the same sizes: {shapes}"
