"""torchtitan's Trainer with our checkpoint manager in its config, FSDP on two ranks by gloo: killed twice, every loss as undisturbed."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import exact

pytest.importorskip("torchtitan", reason="needs requirements/hooks-components.txt")
pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(900)]
ON_CPU = Path(__file__).parent / "on_cpu" / "titan.py"
SCRIPT = str(exact.EXAMPLES / "torchtitan_train.py")


@pytest.mark.parametrize("kill_at", exact.KILLS)
def test_exact_after_kill_nine(tmp_path: Path, kill_at: tuple[int, ...]) -> None:
    """Its own Trainer, loader, optimizers and schedule; two batches a step, dropout of its activations' checkpointing aside."""
    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    undisturbed, _ = exact.torchrun(tmp_path / "one", ON_CPU, SCRIPT, "--steps", "14")
    made, code = exact.supervised(tmp_path / "two", ON_CPU, SCRIPT, "--steps", "14", kill_at=kill_at)
    assert code == 0
    exact.check_exact(undisturbed, made, len(kill_at))
