"""Bringing back a checkpoint of another world size or sharding into live objects, through the planner. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import CheckpointCorrupt
from . import catalogue
from .manifest import Manifest
from .reshard import load
from .state import expand, optimizers_in, same_memory
from .storage import Storage


def verify_share(storage: Storage, name: str, rank: int, world_size: int) -> Manifest:
    """Reads and checks this rank's part of the checkpoint's files, of whichever world size they are.

    Raises CheckpointCorrupt, NoCheckpoint, StorageError. Together the ranks check every byte, each byte once.
    """
    manifest = catalogue.read_committed(storage, name)
    result = catalogue.verify_in(storage, name, ranks=range(rank, manifest.world_size, world_size))
    if not result.ok:
        raise CheckpointCorrupt(str(result.problems[0]), where=name)
    return manifest


def load_elsewhere(storage: Storage, name: str, state: dict[str, Any]) -> Manifest:
    """Fills the live state in place from checkpoint `name`; its generators are not touched (they are per rank).

    Raises LayoutMismatch, CheckpointCorrupt, StorageError.
    """
    for optimizer in optimizers_in(state):
        if not optimizer.state:
            from torch.distributed.checkpoint.state_dict import _init_optim_state

            _init_optim_state(optimizer)
    tree = expand(state, set())
    manifest = load(storage, name, tree)
    _take_over(state, tree)
    return manifest


def _take_over(live: Any, loaded: Any) -> Any:
    """Brings what is no tensor into the live objects; tensors are loaded already, where they lie."""
    if isinstance(live, torch.Tensor):
        return live
    if isinstance(live, torch.optim.Optimizer):
        for group, saved in zip(live.param_groups, loaded["param_groups"], strict=True):
            group.update({k: v for k, v in saved.items() if k != "params"})
        return live
    if isinstance(live, torch.nn.Module):
        own: dict[str, Any] = dict(live.named_parameters(remove_duplicate=False))
        own.update(live.named_buffers(remove_duplicate=False))
        if any(n not in own or not same_memory(own[n], v) for n, v in loaded.items()):
            live.load_state_dict(loaded)
        return live
    if callable(getattr(live, "load_state_dict", None)) and not isinstance(live, type):
        live.load_state_dict(loaded)
        return live
    if isinstance(live, dict) and isinstance(loaded, Mapping):
        for k in live:
            if k in loaded:
                live[k] = _take_over(live[k], loaded[k])
        return live
    if type(live) is list and isinstance(loaded, list) and len(live) == len(loaded):
        live[:] = [_take_over(x, y) for x, y in zip(live, loaded, strict=True)]
        return live
    return loaded
