"""Bringing back a checkpoint of another world size or sharding into live objects, through the planner. Needs torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from ...errors import CheckpointCorrupt
from ..capture.state import expand, optimizers_in, same_memory
from ..catalogue import contents as catalogue
from ..format.manifest import Manifest, Sharding
from ..format.tensors import TensorRecord
from ..format.values import unflatten
from ..storage.base import Storage
from .apply import Applier, Stored, Taken
from .reshard import Pieces, gather, load


def verify_share(storage: Storage, name: str, rank: int, world_size: int) -> Manifest:
    """Reads and checks this rank's part of the checkpoint's files, of whichever world size they are.

    Raises CheckpointCorrupt, NoCheckpoint, StorageError. Together the ranks check every byte, each byte once.
    """
    manifest = catalogue.read_committed(storage, name)
    result = catalogue.verify_in(storage, name, ranks=range(rank, manifest.world_size, world_size))
    if not result.ok:
        raise CheckpointCorrupt(str(result.problems[0]), where=name)
    return manifest


def load_elsewhere(
    storage: Storage, name: str, state: dict[str, Any], *, strict: bool = True
) -> tuple[Manifest, Taken]:
    """Fills the live state in place from checkpoint `name`; its generators are not touched (they are per rank).

    All is compared before anything is changed, and objects that load by themselves come first: if one raises, they get back
    what they had. Raises LayoutMismatch (then the state is as it was, unless it says otherwise), CheckpointCorrupt, StorageError.
    """
    manifest = catalogue.read_committed(storage, name)
    stored = {n: _without_data(n, record) for n, record in manifest.tensors.items()}
    stored.update({alias: stored[target] for alias, target in manifest.aliases.items()})
    weights = manifest.run_id == "imported-weights"
    applier = Applier(
        stored, manifest.values, {}, name, strict, weights_only=weights,
        imported=manifest.run_id.startswith("imported"), elsewhere=True,
    )  # fmt: skip
    saved = unflatten(manifest.values, stored, where=name)
    taken = applier.compare(state, saved)
    theirs = {n for _, part in applier.by_themselves(state, saved) for n in _names_in(part)}
    read = gather(Pieces(storage, manifest), {n: Sharding.whole(manifest.tensors[n].shape) for n in theirs})
    stored.update({n: replace(stored[n], pieces=pieces) for n, pieces in read.items()})
    stored.update({alias: stored[target] for alias, target in manifest.aliases.items()})
    with torch.no_grad():
        loaded = applier.load_by_themselves(state, unflatten(manifest.values, stored, where=name))
    for optimizer in optimizers_in(state):
        if not optimizer.state:
            from torch.distributed.checkpoint.state_dict import _init_optim_state

            _init_optim_state(optimizer)
    tree = expand(state, set())
    load(storage, name, tree, allow_partial=weights or not strict)
    _take_over(state, tree, loaded)
    return manifest, taken


def _without_data(name: str, record: TensorRecord) -> Stored:
    sharding = Sharding(record.shape, record.placements, record.mesh, record.mesh_names, ())
    return Stored(name, record.dtype, sharding, (), local=record.kind == "local")


def _names_in(saved: Any) -> Iterator[str]:
    if isinstance(saved, Stored):
        yield saved.name
    elif isinstance(saved, Mapping):
        for x in saved.values():
            yield from _names_in(x)
    elif isinstance(saved, list | tuple):
        for x in saved:
            yield from _names_in(x)


def _take_over(live: Any, loaded: Any, done: frozenset[int]) -> Any:
    """Brings what is no tensor into the live objects but those `done`; tensors are loaded already, where they lie."""
    if isinstance(live, torch.Tensor) or id(live) in done:
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
                live[k] = _take_over(live[k], loaded[k], done)
        return live
    if type(live) is list and isinstance(loaded, list) and len(live) == len(loaded):
        live[:] = [_take_over(x, y, done) for x, y in zip(live, loaded, strict=True)]
        return live
    return loaded
