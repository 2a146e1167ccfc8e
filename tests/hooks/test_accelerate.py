"""A loop with accelerate and two lines of ours: killed in both epochs, stopped and started again, every loss as undisturbed."""

from __future__ import annotations

from pathlib import Path

import pytest

from unbroken.errors import RunInterrupted, UsageError

from . import exact

pytest.importorskip("accelerate", reason="needs requirements/hooks.txt")
pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(900)]
SCRIPT = exact.EXAMPLES / "accelerate_loop.py"


@pytest.mark.parametrize("kill_at", exact.KILLS)
def test_exact_after_kill_nine_and_a_stop(tmp_path: Path, kill_at: tuple[int, ...]) -> None:
    """Shuffled, dropout, two workers, accumulation, noise drawn for each sample; an evaluation that draws between the epochs."""
    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    undisturbed, _ = exact.torchrun(tmp_path / "one", SCRIPT)
    made, code = exact.supervised(tmp_path / "two", SCRIPT, kill_at=kill_at, stop_at=11)
    if code == RunInterrupted.exit_code:  # else it was over before it was asked
        made, code = exact.supervised(tmp_path / "two", SCRIPT)
        assert len(made) == len(kill_at) + 2
    assert code == 0
    exact.check_exact(undisturbed, made, len(made) - 1)


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    import torch
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin
    from torch.utils.data import DataLoader

    from unbroken.hooks.accelerate import attach

    loader = DataLoader(torch.arange(4), batch_size=2)
    with pytest.raises(UsageError, match="has prepared no model"):
        attach(Accelerator(cpu=True), loader, tmp_path)
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model = torch.nn.Linear(1, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(UsageError, match="sync_with_dataloader=False"):
        attach(accelerator, loader, tmp_path)
