"""A training begins from a checkpoint that its framework wrote, and leaves one that the framework reads without us."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from . import exact

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    "framework", ["transformers", "lightning", pytest.param("accelerate", marks=pytest.mark.soak)]
)
def test_from_the_frameworks_own_checkpoint_and_back(tmp_path: Path, framework: str) -> None:
    pytest.importorskip(framework, reason="needs requirements/hooks.txt")
    done = subprocess.run(
        [sys.executable, "-m", "tests.hooks.adopting", framework, str(tmp_path)], cwd=exact.ROOT, env=exact.environment(),
        capture_output=True, text=True, timeout=exact.DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    phases = [exact.losses(text) for text in done.stdout.split("phase ")[1:]]
    steps = [sorted(step for _, step in phase) for phase in phases]
    assert steps == [list(range(1, 7)), list(range(5, 23)), list(range(17, 23))]
    printed = 1 if framework == "accelerate" else 2  # of a step's two batches
    assert all(len(found) == printed for phase in phases for found in phase.values())
    assert any((tmp_path / "out" / "unbroken").glob("step-*/COMMITTED")), "ours are there too"
