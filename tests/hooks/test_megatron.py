"""Megatron's own optimizers, taken apart: a training of a DDP model in bf16 goes on from what was saved, bit for bit.

Its trainer wants GPUs; here are megatron.core's DistributedDataParallel, ChainedOptimizer, DistributedOptimizer and
Float16OptimizerWithFloat16Params, on one CPU rank, with "cuda" answered by the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from unbroken import Checkpointer

pytest.importorskip("megatron.core", reason="needs requirements/hooks-components.txt")
pytestmark = [pytest.mark.slow]


class OnProcessor(TorchFunctionMode):
    """Tensors asked for on a GPU are made on the CPU, and say that they are a GPU's."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        found = function(*args, **kwargs)
        if function is torch.Tensor.type and len(args) == 1:
            return found.replace("torch.", "torch.cuda.")
        return found


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    from megatron.core import parallel_state

    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setitem(os.environ, name, value)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    with OnProcessor():
        yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def build(distributed: bool, seed: int) -> tuple[Any, Any]:
    """A model in bf16 in Megatron's DDP, and its optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(seed)
    how = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, bf16=True, params_dtype=torch.bfloat16
    )
    layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).bfloat16()
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed, overlap_grad_reduce=False)
    model = DistributedDataParallel(how, ddp, layers)
    config = OptimizerConfig(
        optimizer="adam", lr=1e-2, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=distributed, clip_grad=0.0,
    )  # fmt: skip
    return model, get_megatron_optimizer(config, [model])


def train(model: Any, optimizer: Any, steps: range) -> list[float]:
    found = []
    for step in steps:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
        loss = model(x).float().square().mean()
        loss.backward()
        model.finish_grad_sync()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.usefixtures("own_keepers", "megatron")
@pytest.mark.parametrize("distributed", [True, False], ids=["DistributedOptimizer", "Float16Optimizer"])
def test_a_training_goes_on_from_megatrons_optimizer(tmp_path: Path, distributed: bool) -> None:
    import unbroken.hooks.wrappers  # noqa: F401  it registers
    from unbroken.checkpoint.capture.adapters import parts_of, take_apart
    from unbroken.checkpoint.capture.state import capture

    model, optimizer = build(distributed, 0)
    assert parts_of(optimizer) is not None, type(optimizer)
    first = train(model, optimizer, range(3))
    captured = capture(take_apart({"model": model.module, "optimizer": optimizer}))
    assert sum(t.dtype is torch.float32 for t in captured.pieces.values()) >= 12, (
        "masters and two moments of four"
    )
    with Checkpointer(tmp_path / "c") as checkpoints:
        checkpoints.save(3, {"model": model.module, "optimizer": optimizer}, persist=True)
        checkpoints.wait("disk", 60)
        rest = train(model, optimizer, range(3, 6))
        model, optimizer = build(distributed, 1)
        assert train(model, optimizer, range(1)) != first[:1], "other weights"
        assert checkpoints.restore({"model": model.module, "optimizer": optimizer})
    assert train(model, optimizer, range(3, 6)) == rest
