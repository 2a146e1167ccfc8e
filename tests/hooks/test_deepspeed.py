"""DeepSpeed's engine with two lines of ours, ZeRO on two ranks by gloo: killed in both epochs, every loss as undisturbed."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import exact

pytest.importorskip("deepspeed", reason="needs requirements/hooks-components.txt")
pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(900)]
ON_CPU = Path(__file__).parent / "on_cpu" / "zero.py"
SCRIPT = str(exact.EXAMPLES / "deepspeed_zero.py")


@pytest.mark.parametrize(
    ("options", "kill_at"),
    [  # an epoch is five and a half steps
        pytest.param(("--stage", "3"), (8,), id="3"),
        pytest.param(("--stage", "3"), (4, 8), id="3, both epochs", marks=pytest.mark.soak),
        pytest.param(("--stage", "2", "--bf16"), (4, 8), id="2, bf16, both epochs", marks=pytest.mark.soak),
    ],
)
def test_exact_after_kill_nine(tmp_path: Path, options: tuple[str, ...], kill_at: tuple[int, ...]) -> None:
    """Shuffled, dropout, two workers, steps of two batches that go on into the next epoch, noise drawn for each sample; with
    ZeRO 3 both weights that are sharded between steps and some that are not."""
    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    options = (*options, "--epochs", "2")
    undisturbed, _ = exact.torchrun(tmp_path / "one", ON_CPU, SCRIPT, *options)
    made, code = exact.supervised(tmp_path / "two", ON_CPU, SCRIPT, *options, kill_at=kill_at)
    assert code == 0
    exact.check_exact(undisturbed, made, len(kill_at))
