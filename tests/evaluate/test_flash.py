"""The adapter of torch's flash attention to continuous batching, with the kernel written out in plain torch: it runs on CUDA
only, but whether the right keys are read and the new ones are put in the right place shows here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed (requirements/all.txt)")

import torch

from tests.support.tiny_model import write_tiny_model
from unbroken.evaluate.contracts import ModelSpec, Request
from unbroken.evaluate.harness.fast import flash
from unbroken.evaluate.harness.fast import model as fast_model
from unbroken.evaluate.harness.fast.continuous import Continuous, WantedAnswer
from unbroken.evaluate.harness.fast.model import FastModel
from unbroken.evaluate.harness.transformers import TransformersBackend
from unbroken.evaluate.harness.transformers_model import TransformersModel

WITH_PAGES: list[bool] = []


def varlen(q: Any, k: Any, v: Any, starts: Any, ends: Any, longest_q: int, longest_k: int, *, scale: float, window_size: tuple[int, int],
           enable_gqa: bool, seqused_k: Any = None, block_table: Any = None) -> Any:  # fmt: skip
    """What `torch.nn.attention.varlen.varlen_attn` computes: causal, the last query beside the last key."""
    assert window_size[1] == 0 and enable_gqa and q.is_contiguous()
    WITH_PAGES.append(block_table is not None)
    out = torch.full_like(q, float("nan"))
    for i in range(len(starts) - 1):
        a, b = int(starts[i]), int(starts[i + 1])
        if a == b:
            continue
        assert b - a <= longest_q
        if block_table is None:
            own = slice(int(ends[i]), int(ends[i + 1]))
            keys, values = k[own], v[own]
        else:
            n = int(seqused_k[i])
            keys, values = (x[block_table[i].long()].flatten(0, 1)[:n] for x in (k, v))
        assert len(keys) <= longest_k
        before = len(keys) - (b - a)
        padded = torch.cat([torch.zeros(before, *q.shape[1:]), q[a:b]])
        out[a:b] = flash._plain(torch, padded, keys, values, scale)[before:]
    return out


@pytest.fixture
def plain_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "varlen", varlen)
    WITH_PAGES.clear()


def test_the_trial_passes_with_the_right_kernel_and_fails_with_another(
    plain_kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = torch, torch.device("cpu"), torch.float32, 4, 2, 16
    assert flash.trial(*asked) < 1e-5
    monkeypatch.setattr(flash, "varlen", lambda *a, **k: varlen(*a, **{**k, "scale": 1.1 * k["scale"]}))
    assert flash.trial(*asked) > flash.ERROR

    def forgets_one(*a: Any, **k: Any) -> Any:
        return varlen(*a, **{**k, "seqused_k": k["seqused_k"] - 1} if k.get("block_table") is not None else k)

    monkeypatch.setattr(flash, "varlen", forgets_one)
    assert flash.trial(*asked) > flash.ERROR


@pytest.mark.slow
@pytest.mark.parametrize("pages", [True, False], ids=["pages", "torch 2.11"])
def test_texts_are_those_of_generate(
    plain_kernel: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: bool
) -> None:
    monkeypatch.setattr(flash, "has_pages", lambda: pages)
    folder = write_tiny_model(tmp_path / "model")
    exact = TransformersBackend().load(ModelSpec(str(folder), dtype="float32"), folder, ())
    assert isinstance(exact, TransformersModel)
    prompts = [[2 + (7 * i * j) % 300 for j in range(5 + 23 * (i % 4))] for i in range(9)]
    wanted = {}
    with torch.inference_mode():
        for i, p in enumerate(prompts):
            made = exact.model.generate(
                torch.tensor([p]), do_sample=False, max_new_tokens=4 + 5 * i, pad_token_id=0
            )
            wanted[i] = made[0, len(p) :].tolist()
        model = Continuous(exact.model, lambda t: "", lambda s: 1, longest=256, at_once=4, own_flash=True)
        model.put([WantedAnswer(i, tuple(p), 4 + 5 * i) for i, p in enumerate(prompts)])
        found: dict[Any, list[int]] = {}
        while model.open:
            found.update({m.key: list(m.tokens) for m in model.take(1.0)})
        model.close()
    assert found == wanted
    assert any(WITH_PAGES) == pages and not all(WITH_PAGES), "each way of the kernel was used where it can be"
    assert exact.model.config._attn_implementation == "sdpa"


@pytest.mark.slow
def test_a_model_that_attends_so_answers_the_other_ways_in_between(
    plain_kernel: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "reason_against", lambda torch, model: None)
    monkeypatch.setattr(fast_model, "SLICE", 2)
    folder = write_tiny_model(tmp_path / "model")
    model = TransformersBackend().load(ModelSpec(str(folder), dtype="float32", exact=False), folder, ())
    assert isinstance(model, FastModel)
    texts = [Request("generate_until", (f"amber {'birch ' * i}", {"until": [stop], "max_gen_toks": 6 + 3 * i}))
             for i, stop in enumerate(["\n", "zz", "\n", "q", "\n"])]  # fmt: skip
    pairs = [Request("loglikelihood", (f"cedar {'delta ' * i}", " ember")) for i in range(5)]
    wanted = model.respond_exactly(texts), model.respond_exactly(pairs)
    for _ in range(2):
        assert model.respond(texts) == wanted[0]
        assert "flash" in model.exact.model.config._attn_implementation
        assert model.respond_exactly(texts) == wanted[0]
        for found, known in zip(model.respond(pairs), wanted[1], strict=True):
            assert found == [pytest.approx(known[0], abs=1e-3), known[1]]
    assert WITH_PAGES
    model.close()
    assert model.exact.model is None
