"""A loader in the state gives the position, or is refused at the first call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import unbroken
from unbroken.checkpoint.capture.loaders import check_loaders, position_in
from unbroken.data import wrap
from unbroken.errors import UnsaveableState


def plain(size: int = 12) -> DataLoader[Any]:
    return DataLoader(list(range(size)), batch_size=4, shuffle=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("state", [{"loader": plain()}, {"data": {"train": [plain()]}}])
def test_a_plain_loader_is_refused_with_what_to_write(state: dict[str, Any]) -> None:
    with pytest.raises(UnsaveableState, match=r"unbroken\.data\.wrap\(loader\)"):
        check_loaders(state)


def test_torchdatas_loader_gets_a_generator_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    loader = stateful.StatefulDataLoader(list(range(12)), batch_size=4)
    before = torch.get_rng_state()
    check_loaders({"loader": loader})
    assert "wrap" in caplog.text
    next(iter(loader))
    assert torch.equal(before, torch.get_rng_state())
    mine = loader.generator
    check_loaders({"loader": loader})
    assert loader.generator is mine


def test_only_a_loader_has_a_position() -> None:
    class Camera:
        position = (1, 2)

        def state_dict(self) -> dict[str, Any]:
            return {}

        load_state_dict = state_dict

    loader = wrap(plain())
    next(iter(loader))
    assert position_in({"camera": Camera(), "x": torch.zeros(1)}) is None
    assert position_in({"camera": Camera(), "data": {"loader": loader}}).samples == ((0, 4),)


@pytest.mark.integration
def test_a_checkpointer_refuses_restores_and_saves_by_the_loader(tmp_path: Path) -> None:
    weight = torch.zeros(3)
    with unbroken.Checkpointer(tmp_path / "c", snapshot_every=1, persist_every=1) as checkpoints:
        with pytest.raises(UnsaveableState, match="wrap"):
            checkpoints.restore({"weight": weight, "loader": plain()})
        with pytest.raises(UnsaveableState, match="wrap"):
            checkpoints.save(1, {"weight": weight, "loader": plain()})
        loader = wrap(plain())
        assert checkpoints.restore({"weight": weight, "loader": loader}) is None
        next(iter(loader))
        saved = checkpoints.save(loader.step, {"weight": weight, "loader": loader})
        saved.wait("disk", 60)
    loader = wrap(plain())
    with unbroken.Checkpointer(tmp_path / "c") as checkpoints:
        restored = checkpoints.restore({"weight": weight, "loader": loader})
        assert restored is not None and restored.position.samples == ((0, 4),)
        assert restored.position.fingerprint and loader.step == 1
        assert len(list(loader)) == 2
