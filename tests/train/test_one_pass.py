"""The update in one pass is torch's AdamW, on its state, with clipping and the copy of 16 bits in it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from unbroken.train.parallel.zero.one_pass import OnePass


@pytest.mark.slow  # the compiler alone takes seconds to import
def test_it_updates_as_adamw_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch.manual_seed(0)
    shapes = [(6, 4), (9,)]
    ours = [nn.Parameter(torch.randn(s)) for s in shapes]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    a, b = (
        torch.optim.AdamW([{"params": x[:1], "weight_decay": 0.1}, {"params": x[1:], "weight_decay": 0.0}], lr=1.0)
        for x in (ours, theirs)
    )  # fmt: skip
    for w in ours:  # its state is there from the start
        w.grad = torch.zeros_like(w)
    for g in a.param_groups:
        g["lr"] = 0.0
    a.step()
    for s in a.state.values():
        s["step"].zero_()
    lows = [torch.zeros(s, dtype=torch.bfloat16) for s in shapes]
    assert OnePass.can(a)
    one = OnePass(a)
    for step in range(4):
        grads = [torch.randn(s).bfloat16() for s in shapes]
        for o in (a, b):
            for g in o.param_groups:
                g["lr"] = 0.01 * (step + 1)
        one.begin(torch.device("cpu"))
        one.update(zip(ours, grads, lows, strict=True), torch.tensor(0.5))
        for w, grad in zip(theirs, grads, strict=True):
            w.grad = grad.float() * 0.5
        b.step()
        for x, y, low in zip(ours, theirs, lows, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
            assert torch.equal(low, x.detach().bfloat16())
            assert a.state[x]["step"].item() == step + 1
            torch.testing.assert_close(a.state[x]["exp_avg_sq"], b.state[y]["exp_avg_sq"])


def test_only_a_plain_adamw_is_taken_over() -> None:
    w = [nn.Parameter(torch.zeros(2))]
    assert not OnePass.can(torch.optim.AdamW(w, amsgrad=True))
    assert not OnePass.can(torch.optim.SGD(w, lr=0.1))
