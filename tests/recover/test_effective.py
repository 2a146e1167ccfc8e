"""Effective time by both published forms, budgets, spares: against the published figures."""

from __future__ import annotations

import pytest

from unbroken.cli.main import dispatch
from unbroken.status.effective import (
    Inputs,
    advise_spares,
    budget_per_incident,
    exact_ettr,
    lose_by_cause,
    small_loss_ettr,
)


def test_both_forms_at_a_failure_each_eighteen_minutes() -> None:
    inputs = Inputs(between=18 * 60, interval=0.0, blocking=0.0, recovery=10 * 60)
    assert exact_ettr(inputs) == pytest.approx(0.643, abs=0.001)
    assert small_loss_ettr(inputs) == pytest.approx(0.444, abs=0.001)
    rare = Inputs(between=1e6, interval=100, blocking=0.1, recovery=60)
    assert exact_ettr(rare) == pytest.approx(small_loss_ettr(rare), abs=1e-5)


@pytest.mark.parametrize(("goal", "minutes"), [(0.97, 5.7), (0.99, 1.87)])
def test_a_goal_gives_each_incident_its_time(goal: float, minutes: float) -> None:
    budget = budget_per_incident(185 * 60, goal)
    assert budget["all"] / 60 == pytest.approx(minutes, abs=0.05)
    assert sum(v for k, v in budget.items() if k != "all") == pytest.approx(budget["all"])


def test_published_pools_and_those_of_a_faster_replacement() -> None:
    day = 86_400.0
    assert [advise_spares(n, 0.0012, day) for n in (128, 256, 512, 1024)] == [2, 2, 3, 4]
    pairs = [(1800, 1, 2), (7200, 2, 3), (8 * 3600, 5, 7), (day, 11, 13), (3 * day, 25, 28)]
    for seconds, p99, p999 in pairs:
        assert advise_spares(1024, 0.005, seconds) == p99
        assert advise_spares(1024, 0.005, seconds, 0.999) == p999
    assert advise_spares(1024, 0.005, 1800, largest_group=8) == 8
    with pytest.raises(ValueError, match="quantile"):
        advise_spares(8, 0.1, 1, 1.0)


def test_losses_are_told_by_cause_and_phase() -> None:
    many = [("hang", {"detect": 10.0, "start": 5.0})] * 99 + [("hang", {"detect": 100.0})]
    found = lose_by_cause([*many, ("node", {"stop": 3.0})])
    assert list(found) == ["hang", "node"] and found["hang"].count == 100
    assert found["hang"].p99 == 15.0 and found["hang"].phases == {"detect": 1090.0, "start": 495.0}
    assert lose_by_cause([("a", {"x": 1.0}), ("a", {"x": 9.0})])["a"].p99 == 9.0


def test_spares_are_advised_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["nodes", "spares", "--nodes", "1024", "--rate", "0.005", "--replace", "2h"]
    assert dispatch(words) == 0 and capsys.readouterr().out.startswith("2 spares last in 99 % of cases, 3 in")
    assert dispatch([*words, "--group", "8", "--json"]) == 0
    assert '"0.99": 8' in capsys.readouterr().out
