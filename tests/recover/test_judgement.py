"""The simulation of `benchmarks/judgement.py` at small size: what it concludes holds there too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from benchmarks import judgement, judgement_inputs

DATA = Path(os.environ.get("UNBROKEN_DATA", judgement_inputs.DATA))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (DATA / "failure_logs").is_dir(), reason=f"there are no labelled logs in {DATA}"),
]


def test_what_a_recovery_may_meet_is_survived_and_told() -> None:
    cases = judgement_inputs.read_cases([DATA / "failure_logs"], judgement.CODE_REASONS)
    found = judgement.try_hardships(judgement_inputs.read_times(), cases, 200)
    assert {name: row["well"] for name, row in found.items()} == dict.fromkeys(found, True)


def test_a_pool_is_the_smallest_that_suffices() -> None:
    assert judgement.advise_spares(1024, 0.0012, judgement_inputs.DAY_S) == 4, "as published"
    assert judgement.advise_spares(1000, 0.0, 3600.0) == 0
