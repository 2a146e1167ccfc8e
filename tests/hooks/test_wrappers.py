"""Other frameworks' optimizers, taken apart by name: stand-ins with their names and fields, as facts of their sources say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbroken.hooks.wrappers  # noqa: F401  it registers
from unbroken import Checkpointer
from unbroken.checkpoint.capture.adapters import take_apart
from unbroken.checkpoint.capture.state import capture


def of(name: str, **fields: Any) -> Any:
    """An object of a class with this full name."""
    module, _, short = name.rpartition(".")
    wrapper = type(short, (), {"__module__": module, "__qualname__": short})()
    vars(wrapper).update(fields)
    return wrapper


class Scaler:
    """DeepSpeed's DynamicLossScaler: numbers, and no state dict."""

    def __init__(self) -> None:
        self.cur_scale, self.last_overflow_iter, self.dtype = 65536.0, -1, torch.float16


class Half(nn.Module):
    """Weights in half precision, stepped by masters in full."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(4).bfloat16())


def trained(masters: list[Any], optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        for p in masters:
            p.grad = torch.full_like(p, 0.5)
        optimizer.step()


def wrappers(masters: list[Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    megatron = "megatron.core.optimizer"
    distributed = of(
        f"{megatron}.distrib_optimizer.DistributedOptimizer", optimizer=optimizer, shard_fp32_from_float16_groups=[masters],
        is_stub_optimizer=False, grad_scaler=None,
    )  # fmt: skip
    stub = of(f"{megatron}.distrib_optimizer.DistributedOptimizer", optimizer=None, is_stub_optimizer=True)
    return {
        "accelerate": of("accelerate.optimizer.AcceleratedOptimizer", optimizer=optimizer),
        "lightning": of("lightning.pytorch.core.optimizer.LightningOptimizer", optimizer=optimizer),
        "torchft": of("torchft.optim.OptimizerWrapper", optim=optimizer),
        "torchtitan": of("torchtitan.components.optimizer.OptimizersContainer", optimizers=[optimizer]),
        "zero": of(
            "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer", optimizer=optimizer,
            single_partition_of_fp32_groups=masters, loss_scaler=Scaler(),
        ),
        "megatron": of(f"{megatron}.optimizer.ChainedOptimizer", chained_optimizers=[distributed, stub]),
        "megatron, half": of(
            f"{megatron}.optimizer.Float16OptimizerWithFloat16Params", optimizer=optimizer, fp32_from_float16_groups=[masters],
            grad_scaler=torch.amp.GradScaler("cpu", init_scale=8.0),
        ),
    }  # fmt: skip


NAMES = list(wrappers([], torch.optim.SGD([torch.zeros(1)])))


def build(name: str) -> tuple[Half, list[Any], torch.optim.Optimizer, Any]:
    model = Half()
    masters = [model.w.detach().float().clone().requires_grad_()]
    optimizer = torch.optim.AdamW(masters, lr=0.1)
    return model, masters, optimizer, wrappers(masters, optimizer)[name]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_the_state_is_left_out_and_all_of_it_is_protected(name: str) -> None:
    model, masters, optimizer, wrapper = build(name)
    trained(masters, optimizer, 3)
    captured = capture(take_apart({"model": model, "optimizer": wrapper}))
    kept = {t.data_ptr() for t in captured.pieces.values()}
    momentum = optimizer.state[masters[0]]
    assert {
        momentum["exp_avg"].data_ptr(),
        momentum["exp_avg_sq"].data_ptr(),
        momentum["step"].data_ptr(),
    } <= kept
    if name in ("zero", "megatron", "megatron, half"):
        assert masters[0].data_ptr() in kept
    moments = {n for n in captured.pieces if "exp_avg" in n}
    assert moments and moments <= captured.protected, "a copy may run on until the next step"


@pytest.mark.usefixtures("own_keepers")
def test_a_training_goes_on_from_the_parts(tmp_path: Path) -> None:
    def state(built: dict[str, Any]) -> dict[str, Any]:
        return {name: [model, wrapper] for name, (model, _, _, wrapper) in built.items()}

    first = {name: build(name) for name in ("zero", "megatron", "megatron, half")}
    for _, masters, optimizer, _ in first.values():
        trained(masters, optimizer, 3)
    first["zero"][3].loss_scaler.cur_scale = 1024.0
    with Checkpointer(tmp_path / "c") as checkpoints:
        checkpoints.save(3, state(first), persist=True)
        checkpoints.wait("disk", 60)
        second = {name: build(name) for name in first}
        for _, masters, optimizer, _ in second.values():
            trained(masters, optimizer, 1)
        assert checkpoints.restore(state(second))
    for name, (_, masters, optimizer, wrapper) in second.items():
        _, others, other, _ = first[name]
        trained(masters, optimizer, 2), trained(others, other, 2)
        assert torch.equal(masters[0], others[0]), name
        if name == "zero":
            assert wrapper.loss_scaler.cur_scale == 1024.0
