"""The fault-injection test, short; the long one is `python -m tests.support.fault_injection --rounds 500`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fault_injection import FaultInjection


@pytest.mark.integration
@pytest.mark.parametrize(
    ("rounds", "megabytes"),
    [
        (2, 0.16),
        pytest.param(20, 0.16, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
        pytest.param(5, 40.0, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),  # several chunks a file
    ],
)
def test_nothing_torn_passes_nothing_announced_is_lost_all_ranks_agree(
    tmp_path: Path, rounds: int, megabytes: float
) -> None:
    fault_injection = FaultInjection(tmp_path, seed=rounds, megabytes=megabytes)
    try:
        for _ in range(rounds):
            fault_injection.round()
    finally:
        fault_injection.close()
    assert sum(fault_injection.strikes.values()) >= rounds
