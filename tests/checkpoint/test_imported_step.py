"""A state of torch.save that says its step itself, the way most scripts write it, comes back into a state without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from unbroken.checkpoint.convert.imports import import_checkpoint
from unbroken.checkpoint.restore.relayout import load_elsewhere
from unbroken.checkpoint.storage.posix import PosixStorage
from unbroken.errors import LayoutMismatch


def restored(folder: Path, live: dict[str, Any], **state: Any) -> dict[str, Any]:
    torch.save(state, folder / "their.pt")
    storage = PosixStorage(folder / "checkpoints")
    load_elsewhere(storage, import_checkpoint(folder / "their.pt", storage).name, live)
    return live


@pytest.mark.parametrize("key", ["step", "global_step", "iteration"])
@pytest.mark.parametrize("value", [40, 40.0, torch.tensor(40)])
def test_the_step_is_understood_and_need_not_be_in_the_state(tmp_path: Path, key: str, value: Any) -> None:
    got = restored(tmp_path, {"w": torch.zeros(3)}, w=torch.ones(3), **{key: value})
    assert got["w"].tolist() == [1, 1, 1] and list(got) == ["w"]


def test_a_state_that_has_it_gets_it(tmp_path: Path) -> None:
    assert restored(tmp_path, {"w": torch.zeros(3), "step": 0}, w=torch.ones(3), step=40)["step"] == 40


@pytest.mark.parametrize("extra", [{"step": [1, 2]}, {"epoch": 3}, {"deep": {"step": 40}}])
def test_what_says_more_than_the_step_is_refused_as_before(tmp_path: Path, extra: dict[str, Any]) -> None:
    with pytest.raises(LayoutMismatch, match="only in the checkpoint"):
        restored(tmp_path, {"w": torch.zeros(3)}, w=torch.ones(3), global_step=40, **extra)
