"""A supervised run on a fake cluster, for every test of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from .simulating import Simulate, simulate_in


@pytest.fixture
def simulate(tmp_path: Path) -> Simulate:
    return simulate_in(tmp_path)
