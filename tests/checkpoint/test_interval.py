"""Young's and Daly's interval."""

from __future__ import annotations

import math
import time

import pytest

from unbroken.checkpoint.interval import GPU_MTBF_S, Bounds, IntervalController, daly, mtbf


@pytest.mark.parametrize(("cost", "mean"), [(0.01, 1e4), (1.0, 1e5), (30.0, 3600.0)])
def test_the_interval_is_where_the_least_time_is_lost(cost: float, mean: float) -> None:
    def lost(interval: float) -> float:  # Daly's own model of the whole run, equation 20, per second of work
        return mean * math.exp(cost / mean) * (math.exp((interval + cost) / mean) - 1) / interval

    best = daly(cost, mean)
    assert all(lost(best) <= lost(best * f) * (1 + 1e-6) for f in (0.5, 0.8, 0.95, 1.05, 1.25, 2.0))


def test_limits_of_the_interval() -> None:
    assert daly(0.0, 100.0) == 0.0
    assert daly(300.0, 100.0) == 100.0


def test_failures_of_the_run_itself_are_learnt() -> None:
    assert mtbf(16384, 0, 0) == pytest.approx(GPU_MTBF_S / 16384)
    assert mtbf(16384, 9, 3600) < mtbf(16384, 0, 0) / 5
    assert mtbf(8, 0, 86400) > mtbf(8, 0, 0)


def test_decisions_are_bounded_and_explained() -> None:
    controller = IntervalController(8, bounds=Bounds(1.0, 100.0), began=time.time())
    assert controller.decide() is None
    for step in range(1, 6):
        controller.step(step, 0.5 * step)
    controller.saved(0.02)
    controller.durable(10.0)
    found = controller.decide()
    assert found is not None
    assert 2 <= found.snapshot <= 200 and found.persist % found.snapshot == 0 and found.persist >= 25
    assert "0.5s" in found.why or "500ms" in found.why
