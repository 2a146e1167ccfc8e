"""What an evaluation cost, from what its workers counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unbroken.evaluate.contracts import Assignment, Conditions, Metric, Report, Score, WorkerSeen
from unbroken.evaluate.result.cost import FORMULA, cost_of, peak_of
from unbroken.evaluate.result.page import render
from unbroken.evaluate.result.page.summary import cost_tiles


def report(device: str = "NVIDIA H200", model_b: float = 5.9) -> Report:
    ran = Conditions("transformers 5", device, "bfloat16", 0, "batches by tokens", 16384)
    score = Score("t", (Metric("acc", 0.5),), 10, 10, conditions=(ran,), partial=(3,))
    workers = (
        WorkerSeen("w0", "n", (0,), 0.0, ended=1800.0, energy_j=7.2e5),
        WorkerSeen("w1", "n", (1, 2), 0.0, ended=900.0, energy_j=3.6e6),
    )
    trials = (
        Assignment("t", "w0", (0,), 10.0, 110.0, 100.0, tokens_read=3_000_000, tokens_made=0),
        Assignment("t", "w1", (1,), 10.0, 60.0, 50.0, tokens_read=500_000, tokens_made=400_000),
    )
    return Report(
        "s", "m", "c" * 16, 0.0, 1900.0, (score,), {}, trials, (), workers, 10.0, 20.0, 0.5, model_b=model_b
    )


def test_seconds_and_hours_are_of_gpus_and_the_limit_is_the_longer_of_the_two() -> None:
    cost = cost_of(report())
    assert cost.gpu_hours == pytest.approx(1.0) and cost.busy_s == 200.0
    assert (cost.read_per_s, cost.made_per_s) == (17_500.0, 2_000.0)
    assert cost.energy_j == pytest.approx(4.32e6)
    assert cost.limit_share == pytest.approx(2 * 5.9e9 * 3.9e6 / 989e12 / 200)
    few_read = replace(report(), trials=(Assignment("t", "w0", (0,), 0.0, 9.0, 9.0, tokens_made=500_000),))
    by_memory, by_flops = 2 * 5.9e9 * 5e5 / 256 / 4.8e12, 2 * 5.9e9 * 5e5 / 989e12
    assert cost_of(few_read).limit_share == pytest.approx(max(by_memory, by_flops) / 9)


def test_what_is_not_known_is_not_claimed() -> None:
    assert cost_of(report(device="cpu")).limit_share is None and peak_of("Some GPU 9000") is None
    assert cost_of(report(model_b=0.0)).limit_share is None
    lost = replace(report().workers[1], energy_j=None)  # it died: nobody knows what it took
    assert cost_of(replace(report(), workers=(report().workers[0], lost))).energy_j is None
    assert peak_of("NVIDIA H100 80GB HBM3") == peak_of("H100") != peak_of("NVIDIA A100-SXM4-80GB")


def test_the_page_shows_it_with_the_formula_and_what_was_cut_short() -> None:
    figures = {what: (figure, more) for figure, what, more, _ in cost_tiles(report())}
    assert (
        figures["tokens a second per GPU"][0] == "19,500"
        and "2,000 made" in figures["tokens a second per GPU"][1]
    )
    assert figures["GPU hours"] == (
        "1.00",
        "from each worker's start to its end; 1.2 kWh by their own counters",
    )
    html = render(report())
    assert FORMULA.split("(")[0] in html and "1 cut short" in html and "1.2 kWh" in html
