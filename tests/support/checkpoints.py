"""Small checkpoints on disk, and ways to hurt them, for tests. Needs torch."""

from __future__ import annotations

from pathlib import Path

import torch

from unbroken.checkpoint.capture import direct
from unbroken.checkpoint.format.position import Position
from unbroken.checkpoint.storage.base import Storage
from unbroken.checkpoint.storage.posix import PosixStorage


def save_small(
    root: Path | Storage,
    step: int,
    attempt: int = 1,
    world: int = 2,
    *,
    commit: bool = True,
    elements: int = 300,
) -> str:
    """Writes a checkpoint of a few tensors on each of `world` ranks; returns its name."""
    storage, parts = PosixStorage(root) if isinstance(root, Path) else root, []
    for rank in range(world):
        state = {"w": torch.full((elements,), float(step + rank)), "n": torch.tensor(rank), "lr": 0.1}
        stamp = direct.Stamp("run", attempt, step, rank, world, Position(0, ((0, step),)))
        parts.append(direct.write_rank(storage, state, stamp))
    if commit:
        direct.commit(storage, parts)
    return direct.Stamp("run", attempt, step).folder


def flip_bit(path: Path, at: int) -> None:
    """Flips one bit of the byte at this place of a file (from its end if negative)."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)
