"""Flat buckets train exactly as torch's own AdamW and clipping do, and their order does not depend on the run."""

from __future__ import annotations

import copy

import pytest
import torch

from unbroken.train.buckets import ALIGN, SCALARS, Buckets
from unbroken.train.config import ModelConfig
from unbroken.train.model import Decoder

CPU = torch.device("cpu")


def decoder(seed: int = 0) -> Decoder:
    return Decoder(ModelConfig(dim=16, layers=2, heads=2, kv_heads=1, hidden=24), seq=8, seed=seed)


def batch(seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (3, 9), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bucket_bytes", [1, 5_000, 1e9])
def test_equals_torch_adamw(bucket_bytes: float) -> None:
    model = decoder()
    plain = copy.deepcopy(model)
    buckets = Buckets(model, bucket_bytes, CPU)
    matrices = [p for p in plain.parameters() if p.ndim > 1]
    vectors = [p for p in plain.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    for step in range(1, 6):
        data = batch(step)
        buckets.zero()
        model(data[:, :-1], data[:, 1:]).backward()
        buckets.reduce(1)
        norm = buckets.norm()
        buckets.clip(norm, 0.5)
        buckets.adamw(step, 0.01, (0.9, 0.95), 1e-8, 0.1)
        adamw.zero_grad()
        plain(data[:, :-1], data[:, 1:]).backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        adamw.step()
        assert norm == pytest.approx(float(expected), rel=1e-5)
        assert norm > 0.5
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=name)
        state = adamw.state[b]
        torch.testing.assert_close(buckets.exp_avg[name], state["exp_avg"], rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(buckets.exp_avg_sq[name], state["exp_avg_sq"], rtol=1e-4, atol=1e-9)


def test_layout_follows_from_the_model_alone() -> None:
    a, b = (Buckets(decoder(seed), 4_000, CPU) for seed in (0, 1))
    assert [x.weights.numel() for x in a.buckets] == [x.weights.numel() for x in b.buckets]
    assert len(a.buckets) > 3
    for buckets in (a, b):
        for p in buckets.model.parameters():
            assert p.grad is not None and p.data_ptr() % (4 * ALIGN) == 0 == p.grad.data_ptr() % (4 * ALIGN)
        assert buckets.buckets[-1].gradients.numel() == buckets.buckets[-1].weights.numel() + SCALARS


def test_gradients_stay_in_their_buckets_and_scalars_do_not_leak_into_the_norm() -> None:
    buckets = Buckets(decoder(), 4_000, CPU)
    addresses = [p.grad.data_ptr() for p in buckets.model.parameters() if p.grad is not None]
    data = batch(1)
    for _ in range(2):
        buckets.zero()
        buckets.model(data[:, :-1], data[:, 1:]).backward()
        buckets.scalars[0] = 1e6
        assert float(buckets.norm()) < 100
    assert addresses == [p.grad.data_ptr() for p in buckets.model.parameters() if p.grad is not None]


def test_weights_are_a_function_of_the_seed() -> None:
    a, b, c = (dict(decoder(s).named_parameters()) for s in (1, 1, 2))
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert any(not torch.equal(a[n], c[n]) for n in a)


def test_the_model_does_not_look_ahead() -> None:
    model = decoder()
    logits = []

    def keep(_m: object, _i: object, out: torch.Tensor) -> None:
        logits.append(out.detach())

    model.head.register_forward_hook(keep)
    data = batch(3)
    other = data.clone()
    other[:, 5] = (other[:, 5] + 1) % 256
    for d in (data, other):
        model(d[:, :-1], d[:, 1:])
    assert torch.equal(logits[0][:, :5], logits[1][:, :5])
    assert not torch.equal(logits[0][:, 5], logits[1][:, 5])
