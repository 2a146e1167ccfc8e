"""Hugging Face's Trainer and trl's with two lines of ours: killed in the first and in the second epoch, every loss as undisturbed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from . import exact

pytest.importorskip("transformers", reason="needs requirements/hooks.txt")
pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(900)]
SCRIPTS = ["transformers_trainer.py", pytest.param("trl_sft.py", marks=pytest.mark.soak)]


@pytest.mark.parametrize("kill_at", exact.KILLS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_exact_after_kill_nine(tmp_path: Path, name: str, kill_at: tuple[int, ...]) -> None:
    """Shuffled, dropout, two workers, accumulation, an evaluation between the epochs; Trainer's samples and evaluation draw, too."""
    script = exact.EXAMPLES / name
    if name.startswith("trl"):
        pytest.importorskip("trl", reason="needs requirements/hooks.txt")
    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    undisturbed, text = exact.torchrun(tmp_path / "one", script)
    made, code = exact.supervised(tmp_path / "two", script, kill_at=kill_at)
    assert code == 0
    exact.check_exact(undisturbed, made, len(kill_at))
    # What is summed up between two logs goes on too: means of the loss, trl's tokens and accuracy.
    logs = "\n".join(f.read_text() for f in (tmp_path / "two").rglob("rank-0.log"))
    means = re.findall(r"\{'loss': .*\}", text)
    assert len(means) == 6 and set(re.findall(r"\{'loss': .*\}", logs)) == set(means)
