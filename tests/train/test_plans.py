"""Every plan trains the same model: all axes and their pairs in one launch for each number of ranks (gloo)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.plans import EIGHT, FOUR, TINY, ZERO_BUBBLE, byte_cases, run_plans
from unbroken.train.planning.layout import group_sizes

pytestmark = [pytest.mark.slow, pytest.mark.integration]

SAME = 2e-6
"""Relative: sums in float32 of a few thousand terms, grouped otherwise."""
BASE = [*TINY, "--global-batch", "16", "--lr", "0.01", "--warmup", "2", "--eval-every", "1", "--eval-samples", "16"]  # fmt: skip
EXPERTS = {
    "experts": [],
    "experts x tensor": ["--tensor", "2", "--parameters", "2"],
    "experts x context": ["--context", "2"],
    "experts x pipeline": ZERO_BUBBLE,
}


def cases(base: list[str], plans: dict[str, list[str]]) -> list[dict[str, Any]]:
    return [{"name": n, "argv": [*base, *p], "steps": 3} for n, p in plans.items()]


def assert_same(found: dict[str, Any], to: dict[str, Any], rel: float) -> None:
    for name, got in found.items():
        assert "error" not in got, (name, got)
        for key in ("losses", "held_out"):
            if key in to:
                assert got[key] == pytest.approx(to[key], rel=rel), (name, key)
        assert got["norms"] == pytest.approx(to["norms"], rel=20 * rel), name


CHAT = [*TINY, "--task", "sft", "--data", "{folder}/chat.jsonl", "--global-batch", "16", "--lr", "0.01"]
"""Rows with different numbers of tokens to learn: a mean of means would be another loss."""


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    """The same trainings on one rank."""
    low = [*BASE, "--dtype", "bfloat16", "--engine", "plan"]
    alone = cases(BASE, {"dense": ["--engine", "reference"]}) + cases(
        [*BASE, "--experts", "4"], {"experts": []}
    )
    return run_plans(1, [*alone, *cases(CHAT, {"chat": []}), {"name": "bfloat16", "argv": low, "steps": 3}])


LOW = {
    "data": ["--engine", "plan"],
    "groups": ["--parameters", "2", "--optimizer", "4"],
    "tensor": ["--tensor", "2"],
}
FIFTY = [*BASE, "--dim", "16", "--layers", "2", "--hidden", "32"]


@pytest.fixture(scope="module")
def four() -> dict[str, Any]:
    """All that four ranks are asked, in one launch."""
    low = [{**c, "name": f"bfloat16 {c['name']}"} for c in cases([*BASE, "--dtype", "bfloat16"], LOW)]
    fifty = [{"name": "zero", "argv": [*FIFTY, "--parameters", "2", "--gradients", "2", "--optimizer", "4"], "steps": 50},
             {"name": "ddp", "do": "ddp", "argv": [*FIFTY, "--engine", "plan"], "steps": 50}]  # fmt: skip
    sizes = [{**c, "name": f"{c['name']} {d}"} for d in ("float32", "bfloat16") for c in byte_cases(4, d)]
    return run_plans(4, cases(BASE, FOUR) + cases([*BASE, "--experts", "4"], EXPERTS) + low + fifty + sizes)


def test_every_axis_on_four_ranks(one: dict[str, Any], four: dict[str, Any]) -> None:
    assert_same({n: four[n] for n in FOUR}, one["dense"], SAME)
    assert_same({n: four[n] for n in EXPERTS}, one["experts"], SAME)
    # Activations of 16 bits: their last digits differ with every order of sums.
    assert_same({n: four[n] for n in four if n.startswith("bfloat16")}, one["bfloat16"], 2e-3)


def test_pairs_of_axes_on_eight_ranks(one: dict[str, Any]) -> None:
    chat = cases(CHAT, {"chat": ["--pipeline", "2", "--tensor", "2", "--optimizer", "2"]})
    found = run_plans(8, [*cases(BASE, EIGHT), *chat])
    assert_same({"chat": found.pop("chat")}, one["chat"], SAME)
    assert_same(found, one["dense"], SAME)


def test_fifty_steps_are_those_of_ddp(four: dict[str, Any]) -> None:
    assert four["zero"]["losses"] == pytest.approx(four["ddp"], rel=2e-5)
    assert four["ddp"][-1] < four["ddp"][0] - 1


def test_bytes_by_category_are_those_of_the_formula(four: dict[str, Any]) -> None:
    """Parts that do not divide, all legal group sizes of four ranks; of 8 and 16: benchmarks/plan.py --bytes."""
    for sizes in group_sizes(4):
        for dtype in ("float32", "bfloat16"):
            for rank, (held, said) in enumerate(four[" ".join(map(str, sizes)) + f" {dtype}"]):
                assert held == said, (sizes, dtype, rank)
