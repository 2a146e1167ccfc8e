"""How a torch tensor is spread over ranks: its global shape, and where its local pieces lie in it. Needs torch."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...errors import UnsaveableState
from .manifest import Sharding

if TYPE_CHECKING:
    import torch


def describe(tensor: torch.Tensor, *, key: str) -> tuple[Sharding, list[torch.Tensor]]:
    """The sharding of a tensor, and its local pieces in the order of `Sharding.boxes` (views, no copies).

    A plain tensor is one whole piece. A DTensor usually has one; a strided sharding (FSDP with tensor parallelism
    on one dimension, unevenly split) may have several; a rank outside of the mesh has none.
    Raises UnsaveableState, naming `key`, for partial sums, for layouts that are not known, and for tensor
    subclasses whose bytes are not plain.
    """
    import torch

    kind = type(tensor)
    plain, dtensor = _types()
    if kind is dtensor or (dtensor is not None and issubclass(kind, dtensor)):
        return _describe_dtensor(tensor, key)
    if kind not in plain and hasattr(tensor, "local_shards") and hasattr(tensor, "metadata"):
        return _describe_sharded(tensor)
    if kind not in plain:
        # A wrapper (fp8, quantised) may hide its scale: saving what it shows would not be exact.
        raise UnsaveableState(
            key,
            f"a {type(tensor).__module__}.{type(tensor).__qualname__} does not say what its bytes are",
            hint="Save its plain tensors (data, scale) under names of their own",
        )
    if tensor.is_sparse or tensor.is_quantized or tensor.is_nested or tensor.layout is not torch.strided:
        raise UnsaveableState(
            key, "sparse, nested and quantised tensors have no plain bytes", hint="Save its parts"
        )
    return _whole(tensor.shape), [tensor.detach()]


def _types() -> tuple[frozenset[type], type | None]:
    """The types of plain tensors, and DTensor: importing that takes a second; where nobody has, no tensor is one."""
    distributed = sys.modules.get("torch.distributed.tensor")
    return _plain_types(), getattr(distributed, "DTensor", None)


def is_plain(tensor: object) -> bool:
    """Whether it is a tensor of torch's own type, whose bytes are all that it is."""
    return type(tensor) in _plain_types()


@functools.cache
def _plain_types() -> frozenset[type]:
    import torch

    return frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


@functools.lru_cache(1 << 16)
def _whole(shape: tuple[int, ...]) -> Sharding:
    return Sharding.whole(shape)


def local_of(tensor: Any) -> torch.Tensor:
    """The local part of a DTensor, of a plain tensor itself; a view without gradient.

    A save asks this of thousands of tensors while the GPU waits for work: `to_local` and `detach` of a DTensor take
    sixty microseconds, and are only needed where the local part is itself more than a tensor (an unfinished collective).
    """
    local: Any = getattr(tensor, "_local_tensor", None)
    if local is not None and type(local) in _plain_types():
        return local.detach()  # type: ignore[no-any-return]
    plain: Any = tensor.detach()
    found: torch.Tensor = plain.to_local() if hasattr(plain, "to_local") else plain
    return found


def _describe_dtensor(tensor: Any, key: str) -> tuple[Sharding, list[torch.Tensor]]:
    local = local_of(tensor)
    sharding, held, places = _layout_of(tensor, key)
    if not places:
        return sharding, []
    if held != tuple(local.shape):
        raise UnsaveableState(key, f"its local shape is {tuple(local.shape)}, its placements give {held}")
    if len(places) == 1:
        return sharding, [local]
    pieces = []
    for place in places:
        piece = local
        for d, (start, n) in enumerate(place):
            piece = piece.narrow(d, start, n)
        pieces.append(piece)
    return sharding, pieces


_KNOWN: dict[int, tuple[Any, Any, Any, Any, Any]] = {}
"""By the id of a DTensor's spec: (spec, placements, mesh, shape, what `_laid_out` gave). A tensor keeps its spec from
save to save, and asking for its mesh's shape and coordinate takes 5 to 8 us: 7 ms of 52 for 1,440 tensors of FSDP2."""
_KNOWN_AT_MOST = 1 << 16


def _layout_of(tensor: Any, key: str) -> Any:
    """`_laid_out` of this DTensor."""
    spec = getattr(tensor, "_spec", None)
    placements, mesh, shape = tensor.placements, tensor.device_mesh, tensor.shape
    known = _KNOWN.get(id(spec))
    # The spec itself is kept, so its id cannot be another's; the rest, in case that somebody changes it.
    if (
        known is not None
        and known[0] is spec
        and known[1] is placements
        and known[2] is mesh
        and known[3] == shape
    ):
        return known[4]
    texts = tuple(_placement_text(p, key) for p in placements)
    coordinate = mesh.get_coordinate()
    found = _laid_out(
        tuple(shape), texts, placements, tuple(mesh.shape), mesh.mesh_dim_names,
        None if coordinate is None else tuple(coordinate),
    )  # fmt: skip
    if spec is not None:
        if len(_KNOWN) >= _KNOWN_AT_MOST:
            _KNOWN.clear()
        _KNOWN[id(spec)] = spec, placements, mesh, shape, found
    return found


@functools.lru_cache(1 << 16)
def _laid_out(
    shape: tuple[int, ...],
    texts: tuple[str, ...],
    placements: tuple[Any, ...],
    mesh: tuple[int, ...],
    mesh_names: tuple[str, ...] | None,
    coordinate: tuple[int, ...] | None,
) -> tuple[Sharding, tuple[int, ...], tuple[tuple[tuple[int, int], ...], ...]]:
    """The sharding of a DTensor here, the shape of its local part, and where in that the pieces lie: (start, length)s.

    The same for every save of a run, and for all tensors of one shape. The texts tell apart placements that torch
    calls equal.
    """
    names = tuple(mesh_names or ("",) * len(mesh))
    shape, mesh = tuple(map(int, shape)), tuple(map(int, mesh))
    if coordinate is None:
        return Sharding(shape, texts, mesh, names), (), ()
    runs = [_runs_of(d, shape, placements, mesh, coordinate) for d in range(len(shape))]
    held = tuple(sum(n for _, n in r) for r in runs)
    boxes, places = [], []
    for combination in itertools.product(*(enumerate(r) for r in runs)):
        places.append(tuple((sum(m for _, m in runs[d][:i]), n) for d, (i, (_, n)) in enumerate(combination)))
        boxes.append((tuple(start for _, (start, _) in combination), tuple(n for _, (_, n) in combination)))
    return Sharding(shape, texts, mesh, names, tuple(boxes)), held, tuple(places)


def _runs_of(
    dim: int,
    shape: Sequence[int],
    placements: Sequence[Any],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> list[tuple[int, int]]:
    """The (start, length) runs of global indices along `dim` that this coordinate holds, in local order.

    torch's own splitting is applied to the indices, so that every way of rounding is the same as its own.
    """
    import torch

    here = [(m, p) for m, p in enumerate(placements) if not p.is_replicate() and p.dim % len(shape) == dim]
    if not here:
        return [(0, int(shape[dim]))]
    if all(type(p).__name__ == "Shard" for _, p in here):
        return [_interval(int(shape[dim]), [(int(mesh_shape[m]), coordinate[m]) for m, _ in here])]
    index = torch.arange(int(shape[dim])).reshape([1] * dim + [-1])
    for m, p in here:
        parts, _ = p._split_tensor(index, int(mesh_shape[m]), with_padding=False, contiguous=True)
        index = parts[coordinate[m]]
    flat = index.flatten().tolist()
    if not flat:
        return [(int(shape[dim]), 0)]
    runs: list[tuple[int, int]] = []
    for i in flat:
        if runs and sum(runs[-1]) == i:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((i, 1))
    return runs


def _interval(length: int, splits: list[tuple[int, int]]) -> tuple[int, int]:
    """The (start, length) left of a dimension after splits into `parts`, of which the `i`-th is kept, as torch.chunk."""
    start, rest = 0, length
    for parts, i in splits:
        full = -(-rest // parts)
        start, rest = start + min(rest, i * full), max(0, min(full, rest - i * full))
    return (start, rest) if rest else (length, 0)


def _placement_text(p: Any, key: str) -> str:
    kind = type(p).__name__
    if p.is_replicate():
        return "Replicate()"
    if p.is_partial():
        raise UnsaveableState(
            key, "it is a partial sum over ranks, not yet a value", hint="Reduce it first: redistribute it"
        )
    if kind == "Shard":
        return f"Shard({p.dim})"
    if kind == "_StridedShard":
        return f"StridedShard({p.dim}, {p.split_factor})"
    raise UnsaveableState(
        key, f"the placement {p} is not known", hint="Redistribute it to Shard or Replicate"
    )


def _describe_sharded(tensor: Any) -> tuple[Sharding, list[torch.Tensor]]:
    """The older ShardedTensor, which names the place of each of its shards."""
    shards = tensor.local_shards()
    boxes = tuple((tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes)) for s in shards)
    size = tuple(map(int, tensor.metadata().size))
    world = len({m.placement.rank() for m in tensor.metadata().shards_metadata})
    return Sharding(size, ("ShardedTensor",), (world,), ("",), boxes), [s.tensor for s in shards]
