"""Hugging Face's Trainer with two lines of ours: killed in the first and in the second epoch, every loss as undisturbed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from . import exact

pytest.importorskip("transformers", reason="needs requirements/hooks.txt")
pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(900)]
SCRIPT = exact.EXAMPLES / "transformers_trainer.py"


@pytest.mark.parametrize("kill_at", exact.KILLS)
def test_exact_after_kill_nine(tmp_path: Path, kill_at: tuple[int, ...]) -> None:
    """Shuffled, dropout, two workers, accumulation, random replacements, an evaluation that draws between the epochs."""
    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    undisturbed, text = exact.torchrun(tmp_path / "one", SCRIPT)
    made, code = exact.supervised(tmp_path / "two", SCRIPT, kill_at=kill_at)
    assert code == 0
    exact.check_exact(undisturbed, made, len(kill_at))
    # What the Trainer sums up between its logs goes on too.
    logs = "\n".join(f.read_text() for f in (tmp_path / "two").rglob("rank-0.log"))
    means = re.findall(r"'loss': '([\d.]+)'.*'epoch': '([\d.]+)'", text)
    assert len(means) == 6 and set(re.findall(r"'loss': '([\d.]+)'.*'epoch': '([\d.]+)'", logs)) == set(means)
