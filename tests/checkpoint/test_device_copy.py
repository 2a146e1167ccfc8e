"""When a snapshot is copied on the GPU first; the copies themselves are tested in tests/gpu."""

from __future__ import annotations

import pytest

from unbroken.checkpoint.device.device_copy import Choice


def choice(cost_s: float | None, *stalls: float, wanted: bool | str = "auto") -> Choice:
    made = Choice(wanted)
    made.cost_s = cost_s
    for s in stalls:
        made.stalled(s)
    return made


@pytest.mark.parametrize(
    ("cost_s", "stalls", "due"),
    [
        (0.01, (0.2,), True),
        (0.01, (), False),
        (None, (0.2,), False),  # nobody knows what it would cost
        (0.06, (0.013,), False),  # 41 GB at 49 GB/s, a window that is a little too short
        (0.01, (0.011,), False),  # no better than what it is to replace, within what an estimate is worth
        (0.0001, (0.004,), False),
        (0.01, (0.0, 0.0, 0.2), False),  # once
        (0.01, (0.2, 0.0, 0.2), True),
    ],
)
def test_it_is_chosen_where_it_costs_less_than_the_stall_that_it_spares(
    cost_s: float | None, stalls: tuple[float, ...], due: bool
) -> None:
    assert choice(cost_s, *stalls).decide() is due


def test_what_it_was_measured_to_take_decides_whether_it_goes_on() -> None:
    made = choice(0.01, 0.05, 0.05, 0.05)
    assert made.decide()
    made.cost_s = 0.045
    assert made.decide()  # no estimate any more: less is less
    made.cost_s = 0.06
    assert not made.decide()
    made.cost_s = 0.045
    assert not made.decide()  # and it does not come and go


def test_it_ends_when_the_window_has_grown() -> None:
    made = choice(0.01, 0.05, 0.05, 0.05)
    assert made.decide()
    made.stalled(0.0)
    assert made.decide()
    made.stalled(0.0)
    assert not made.decide()


def test_what_was_asked_for_is_done() -> None:
    assert choice(9.0, wanted=True).decide()
    assert not choice(0.001, 5.0, 5.0, wanted=False).decide()
