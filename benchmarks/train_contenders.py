"""The contenders of benchmarks/train.py: each makes a function that does one step, on the same model and random tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unbroken.train.config import ModelConfig, TrainConfig, build
from unbroken.train.parallel.attention import use_attention
from unbroken.train.parallel.stage import Stage
from unbroken.train.world import World

Step = Callable[[], Any]
"""Returns the loss: a number, or a tensor that nobody waits for."""


@dataclass(frozen=True)
class Case:
    """One contender at one size of batch."""

    contender: str
    """ours, fsdp2, trainer (of transformers), or titan (torchtitan)."""
    size: str
    micro: int
    attention: str = "cudnn"
    recompute: str = "none"
    accumulate: int = 1
    """Micro-batches in a step."""
    plan: str = "{}"
    """More of [plan], as JSON (ours)."""
    warm: int = 3
    steps: int = 8
    trace: bool = False
    """Whether two steps more are traced."""
    beside: tuple[str, ...] = ()
    """More contenders in the same process, whose windows of steps alternate with this one's: they share heat and power."""
    windows: int = 1
    """Of `steps` steps each, of every contender."""


def ours(case: Case, model: ModelConfig, world: World, folder: Path, *, seq: int, tiny: bool) -> tuple[Step, Any]:  # fmt: skip
    """A step of our trainer, and the trainer."""
    import json

    from unbroken.progress import attach
    from unbroken.train.training import open_corpus, open_training

    plan = json.loads(case.plan)
    split = plan.get("pipeline", 1) * plan.get("tensor", 1) * plan.get("context", 1)
    batch = world.size // split * case.micro * case.accumulate
    config: TrainConfig = build({
        "model": dataclasses.asdict(model),
        "data": {"data": tokens_file(folder, model.vocab, 64 * batch * seq + 1), "cache": str(folder), "seq": seq,
                 "global_batch": batch, "micro_batch": case.micro},
        "optim": {"lr": 1e-4, "min_lr": 1e-4, "warmup": 1},
        "run": {"mode": "fast", "dtype": "bfloat16", "steps": 1000, "device": world.device.type},
        "plan": {"engine": "plan", "compile": not tiny, "attention": "auto" if tiny else case.attention,
                 "gradient_dtype": "bfloat16", "recompute": case.recompute, **plan},
    })  # fmt: skip
    trainer = open_training(config, world, attach(), open_corpus(config))

    def step() -> float:
        return trainer.train_step(lambda: None, False)[0]

    return step, trainer


def fsdp2(case: Case, model: ModelConfig, world: World, folder: Path, *, seq: int, tiny: bool) -> tuple[Step, Any]:  # fmt: skip
    """FSDP2 as torch's documentation has it: float32 weights, bf16 computation, blocks and loss compiled, fused AdamW, clipping.

    It never waits for its loss.
    """
    import torch.nn.functional as F
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with torch.device(world.device):
        net = Stage(model, range(model.layers))
    for p in net.parameters():
        torch.nn.init.normal_(p, 0.0, 0.02) if p.ndim > 1 else torch.nn.init.ones_(p)
    net.set_positions(model, torch.arange(seq), world.device)
    use_attention(net, None if tiny else case.attention)
    for name in list(net.blocks):
        if case.recompute == "full":
            net.blocks[name] = checkpoint_wrapper(net.blocks[name], preserve_rng_state=False)  # type: ignore[no-untyped-call]
        if not tiny:
            net.blocks[name].compile()
    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in net.blocks.values():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=world.device.type == "cuda")

    def entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    loss_of = entropy if tiny else torch.compile(entropy)

    def step() -> torch.Tensor:
        total = torch.zeros((), device=world.device)
        for _ in range(case.accumulate):
            x = torch.randint(0, model.vocab, (case.micro, seq + 1), device=world.device)
            loss = loss_of(net(x[:, :-1]), x[:, 1:]) / case.accumulate
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step, net


def trainer_loop(case: Case, model: ModelConfig, world: World, folder: Path, *, seq: int, tiny: bool, on_step: Callable[[int], None]) -> None:  # fmt: skip
    """transformers' Trainer on its Llama, bf16, compiled, as its documentation has it; `on_step` is called after each step."""
    from torch.utils.data import IterableDataset
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Words(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            while True:
                x = torch.randint(0, model.vocab, (seq,))
                yield {"input_ids": x, "labels": x}

    class Each(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            on_step(state.global_step)
            return control

    config = LlamaConfig(
        hidden_size=model.dim, intermediate_size=model.hidden, num_hidden_layers=model.layers, vocab_size=model.vocab,
        num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, max_position_embeddings=seq,
        attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    with world.device:  # drawn where they stay: on one core of a processor this takes longer than the steps
        net = LlamaForCausalLM(config)
    args = TrainingArguments(
        output_dir=str(folder / "trainer"), per_device_train_batch_size=case.micro, max_steps=case.warm + case.steps,
        gradient_accumulation_steps=case.accumulate, bf16=not tiny, torch_compile=not tiny, logging_steps=1000, save_strategy="no",
        optim="adamw_torch" if tiny else "adamw_torch_fused", report_to=[], disable_tqdm=True, use_cpu=tiny,
        gradient_checkpointing=case.recompute == "full", max_grad_norm=1.0, dataloader_pin_memory=not tiny,
    )  # fmt: skip
    Trainer(net, args, train_dataset=Words(), callbacks=[Each()]).train()


def tokens_file(folder: Path, vocab: int, count: int) -> str:
    """Random tokens as datatrove lays them out."""
    import numpy as np

    path = folder / f"tokens-{vocab}-{count}.ds"
    if not path.exists():
        np.random.default_rng(0).integers(0, vocab, count, dtype=np.uint32).tofile(path)
        np.array([count], np.uint64).tofile(path.with_name(path.name + ".index"))
    return str(path)
