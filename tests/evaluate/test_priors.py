from __future__ import annotations

import random
from pathlib import Path

import pytest

from unbroken.errors import ContractError
from unbroken.evaluate.contracts import TaskPrior
from unbroken.evaluate.plan.priors import (
    START,
    Correction,
    Features,
    Observation,
    PriorBook,
    fit_rates,
    load_book,
    measured_on,
    save_merged,
    scale,
)


def seen(
    task: str, samples: int, seconds: float, model_b: float = 7.0, device: str = "A100", **more: object
) -> Observation:
    return Observation(task, model_b, device, samples, seconds, **more)  # type: ignore[arg-type]


def test_sources_from_best_to_worst() -> None:
    said = TaskPrior(samples=100, seconds=50.0, score_s=10.0)
    book = PriorBook()
    assert book.expect("t", 200, Features(), 7.0, "A100", said).seconds == pytest.approx(100.0)
    assert book.expect("t", 200, Features(), 7.0, "A100", said).score_s == pytest.approx(20.0)
    assert book.expect("t", 100, Features(), 70.0, "A100", said).seconds == pytest.approx(
        50.0 * scale(7.0, 70.0)
    )
    book = book.observe(seen("t", 100, 30.0))
    found = book.expect("t", 200, Features(), 7.0, "A100", said)
    assert (found.source, found.seconds) == ("measured", pytest.approx(60.0))
    other = book.expect("t", 100, Features(), 14.0, "A100", said)
    assert other.source == "scaled from 7B"
    assert other.seconds == pytest.approx(30.0 * 2**0.9)
    assert other.spread > found.spread


def test_run_times_of_one_engine_are_a_guess_for_another() -> None:
    fast, exact = (measured_on("A100", "transformers", exact=e) for e in (False, True))
    assert (fast, exact, measured_on("A100", "vllm", exact=False)) == ("A100", "A100 (exact)", "A100 (vllm)")
    assert measured_on("A100", "package.module:Own", exact=True) == "A100"
    book = PriorBook().observe(seen("t", 100, 30.0, device=fast)).observe(seen("t", 100, 300.0, device=exact))
    assert book.expect("t", 100, Features(), 7.0, exact).seconds == pytest.approx(300.0)
    assert book.expect("t", 100, Features(), 7.0, fast).seconds == pytest.approx(30.0)
    assert book.expect("t", 100, Features(), 7.0, "A100 (vllm)").source != "measured"


def test_unknown_tasks_are_fitted_to_lengths() -> None:
    r = random.Random(3)
    book = PriorBook()
    for i in range(12):
        f = Features(r.uniform(100, 4000), r.choice([0.0, 50.0, 300.0]), r.choice([1.0, 2.0, 4.0]))
        each = 2e-5 * f.prompt_chars + 1e-3 * f.output_tokens + 3e-3 * f.requests
        book = book.observe(seen(f"t{i}", 500, 500 * each * r.uniform(0.95, 1.05), features=f))
    found = book.expect("new", 1000, Features(2000.0, 100.0, 1.0), 7.0, "A100")
    assert found.source == "fitted to 12 tasks"
    assert found.seconds == pytest.approx(1000 * (0.04 + 0.1 + 0.003), rel=0.15)
    assert found.spread < 1.5
    blind = PriorBook().expect("new", 1000, Features(2000.0, 100.0, 1.0), 7.0, "A100")
    assert blind.source == "guessed from lengths"
    assert blind.spread > found.spread


def test_rates_are_never_negative() -> None:
    rates, _ = fit_rates([(100.0, 0.0, 1.0), (100.0, 10.0, 1.0), (200.0, 5.0, 1.0)], [1.0, 0.5, 1.2])
    assert min(rates) >= 0


def test_the_size_of_a_task_is_learnt_though_fewer_were_asked() -> None:
    book = PriorBook().observe(seen("t", 10, 1.0, size=300)).observe(seen("t", 10, 1.0, 70.0, size=10))
    assert (book.size("t"), book.size("other")) == (300, 0)


def test_the_spread_of_measurements_is_learnt() -> None:
    steady, wild = PriorBook(), PriorBook()
    for i in range(20):
        steady = steady.observe(seen("t", 10, 10.0))
        wild = wild.observe(seen("t", 10, 10.0 * (3.0 if i % 2 else 1 / 3)))
    assert steady.expect("t", 10, Features(), 7.0, "A100").spread < 1.1
    assert 2.5 < wild.expect("t", 10, Features(), 7.0, "A100").spread < 3.5


def test_the_store_adds_up_and_survives(tmp_path: Path) -> None:
    store = tmp_path / "state" / "priors.json"
    save_merged(store, [seen("t", 10, 10.0, score_s=1.0)])
    save_merged(store, [seen("t", 30, 60.0), seen("u", 5, 1.0)])
    row = load_book(store).row("t", 7.0, "A100")
    assert (row.count, row.samples) == (2, 40)
    assert load_book(store).expect("t", 10, Features(), 7.0, "A100").score_s == pytest.approx(1.0)
    store.write_text("{")
    with pytest.raises(ContractError, match="cannot be read"):
        load_book(store)
    store.write_text('{"schema": 99}')
    with pytest.raises(ContractError, match="another schema"):
        load_book(store)


def test_a_run_corrects_its_priors_as_it_goes() -> None:
    c = Correction()
    assert c.factor("a") == 1.0
    for task in ("a", "b", "c", "d"):
        for _ in range(5):
            c.observe(task, 1.0, 2.0)
    assert 1.6 < c.factor("never seen") < 2.0
    for _ in range(50):
        c.observe("a", 1.0, 8.0)
    assert 5.0 < c.factor("a") < 8.5
    assert c.factor("b") < 3.0


def test_it_says_what_real_suites_cost(shared_data: Path) -> None:
    """Published whole-suite times of models from 1 B to 12 B: longer with size, and within a factor of 3 of the scaling
    by parameters to the power 0.9 that is used between sizes."""
    import csv
    import statistics

    gaps: dict[str, list[float]] = {}
    with open(shared_data / "eval_priors" / "pythia_eval_gaps.csv") as f:
        for row in csv.DictReader(f):
            if row["gap_to_previous_s"] and row["shots"] == "five-shot":
                gaps.setdefault(row["model"], []).append(float(row["gap_to_previous_s"]))
    big = statistics.median(gaps["pythia-12b"])
    mid = statistics.median(gaps["pythia-6.9b"])
    assert big > mid
    assert 1 / 3 < (big / mid) / scale(6.9, 12.0) < 3


def test_a_start_is_learnt() -> None:
    book = PriorBook()
    assert 8 < book.start_s(7.0, "h") < 20 < book.start_s(70.0, "h"), (
        "a rule of thumb, until one was measured"
    )
    book = book.observe(Observation(START, 1.0, "h", 4, 12.0))
    assert book.start_s(1.0, "h") == pytest.approx(3.0)
    assert book.start_s(8.0, "h") == pytest.approx(10.0)
    assert book.start_s(0.1, "h") == pytest.approx(2.1)
    assert book.start_s(1.0, "another") == pytest.approx(3.0), "better than a guess"
    for i in range(4):
        book = book.observe(Observation(f"t{i}", 1.0, "h", 10, 1.0, Features(100.0, 0.0, 1.0)))
    assert book.expect("new", 10, Features(100.0, 0.0, 1.0), 1.0, "h").source == "fitted to 4 tasks"
