"""The watch over the loss: quiet where a spike heals, at once where there is no number, in time where it diverges."""

from __future__ import annotations

import csv
import math
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from unbroken.detect import Level, LossFinding, LossKind, LossWatch

REPO = Path(__file__).resolve().parents[2]
CURVES = Path(os.environ.get("UNBROKEN_DATA", REPO.parent / "shared" / "data")) / "loss_curves"


def watch(losses: Sequence[float], norms: Sequence[float] | None = None) -> list[LossFinding]:
    w = LossWatch()
    found = [w.observe(i, x, norms[i] if norms else None) for i, x in enumerate(losses)]
    return [f for f in found if f is not None]


def noisy(
    length: int, shape: Callable[[int], float] = lambda k: 0.0, at: int = 400, seed: int = 1
) -> list[float]:
    draw = random.Random(seed)
    return [3.0 + draw.gauss(0, 0.08) + (shape(i - at) if i >= at else 0.0) for i in range(length)]


@pytest.mark.skipif(not CURVES.is_dir(), reason=f"no real loss curves in {CURVES}")
def test_no_step_of_the_real_curves_is_rolled_back() -> None:
    for path in sorted(CURVES.glob("*.csv")):
        with path.open() as f:
            curve = [float(row["train_loss"]) for row in csv.DictReader(f)]
        assert len(curve) > 1000
        assert watch(curve) == []


@pytest.mark.parametrize("shape", [
    lambda k: 8.0 if k == 0 else 0.0,
    lambda k: 2.0 if k < 7 else 0.0,
    lambda k: max(0.0, 4.0 * (1 - k / 30)),
    lambda k: 6.0 * 0.5 ** (k / 5),
    lambda k: min(1.0, (k + 1) / 2) * 3.0 * 0.5 ** (k / 10),
])  # fmt: skip
def test_a_spike_that_heals_is_left_alone(shape: Callable[[int], float]) -> None:
    for seed in range(2):
        assert [f for f in watch(noisy(900, shape, seed=seed)) if f.level is Level.DECLARED] == []


@pytest.mark.parametrize("shape", [
    lambda k: 0.8,
    lambda k: 7.0,
    lambda k: 0.1 * (k + 1),
    lambda k: 0.05 * 2 ** min(k / 2, 30),
])  # fmt: skip
def test_a_divergence_is_declared_within_20_steps_and_says_where_it_began(
    shape: Callable[[int], float],
) -> None:
    for seed in range(2):
        found = watch(noisy(460, shape, seed=seed))
        assert found, seed
        first = found[0]
        assert (first.kind, first.level) == (LossKind.DIVERGENCE, Level.DECLARED)
        assert 400 < first.step <= 420
        assert 395 < first.since <= 412
        assert str(first.since) in first.why


def test_nan_is_noticed_at_once_and_declared_when_it_stays() -> None:
    found = watch([*noisy(100), math.nan, math.nan, math.nan])
    assert [(f.step, f.level) for f in found] == [
        (100, Level.SUSPECT),
        (101, Level.SUSPECT),
        (102, Level.DECLARED),
    ]
    assert {f.since for f in found} == {100}
    assert watch([math.inf])[0].kind is LossKind.NAN, "also in the very first step"


def test_a_single_nan_is_no_more_than_a_suspicion() -> None:
    losses = noisy(200)
    losses[100] = math.nan
    assert [f.level for f in watch(losses)] == [Level.SUSPECT]


def test_a_norm_that_is_no_number_counts_as_nan() -> None:
    losses = noisy(50)
    assert watch(losses, [1.0] * 49 + [math.inf])[0].kind is LossKind.NAN


def test_gradients_out_of_their_band_make_it_surer_of_a_loss_that_rises() -> None:
    shape = lambda k: 0.46 + 0.001 * k  # noqa: E731
    losses = noisy(440, shape)
    draw = random.Random(2)
    norms = [math.exp(draw.gauss(0, 0.2)) * (50.0 if i >= 400 else 1.0) for i in range(440)]
    alone, together = watch(losses), watch(losses, norms)
    assert together and "gradient norm" in together[0].why
    assert not alone or together[0].step <= alone[0].step
    assert watch(noisy(440), norms) == [], "the norm alone rolls nothing back"


def test_a_slow_divergence_is_told_as_one_and_never_declared() -> None:
    losses = [x + max(0, i - 1000) * 0.3 / 1000 for i, x in enumerate(noisy(3000))]
    found = watch(losses)
    assert [f.kind for f in found] == [LossKind.SLOW], "said once"
    assert found[0].level is Level.SUSPECT and found[0].since >= 900


def test_a_loss_without_any_noise_is_no_divergence() -> None:
    assert watch([3.0 - i * 1e-4 for i in range(500)]) == []
    assert watch([0.0] * 500) == []
