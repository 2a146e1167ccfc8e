"""Checkpoints of other tools as a starting point: DCP folders, Hugging Face safetensors, one torch file. Needs torch.

What comes out is a committed checkpoint of ours on one rank, which `restore()` takes and reshards. Tensors are read
one at a time. Nothing that is pickled is executed unless `trust` says so.
"""

from __future__ import annotations

import io
import json
import pickle
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointCorrupt, CheckpointError, InputError, UnsaveableState, UsageError
from ..capture.direct import Stamp, commit, write_pieces
from ..catalogue.contents import read_header
from ..format import layout as arena
from ..format.dtypes import TO_TORCH
from ..format.manifest import COMMITTED, Manifest, Sharding
from ..format.values import flatten, tensor_names
from ..restore.apply import STEP_NAMES
from ..storage.base import Storage
from ..storage.posix import PosixStorage
from .export import dcp_alone

RUN_ID = "imported"
WEIGHTS_ID = "imported-weights"
"""Of what holds a model and nothing else: a restore leaves optimizer and scheduler as they are."""


@dataclass(frozen=True)
class ExternalCheckpoint:
    """A checkpoint of somebody else's: its tensors by name, its other values as a tree with holes, and a reader.

    `read(name)` gives the tensor on the CPU. `values` is a skeleton as of `values.flatten`.
    """

    kind: str
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    aliases: Mapping[str, str]
    values: Any
    read: Callable[[str], torch.Tensor]
    step: int | None = None


def import_checkpoint(
    source: Path,
    storage: Storage,
    *,
    step: int | None = None,
    rename: Sequence[tuple[str, str]] = (),
    drop: Sequence[str] = (),
    trust: bool = False,
    attempt: int = 0,
) -> Manifest:
    """Writes the checkpoint at `source` as one of ours, committed, and returns its manifest.

    `step` is taken from a value "step" of it if not given. `rename` [(old prefix, new prefix)] maps names, the
    first that fits counts. `drop` [prefix] leaves out what the run's own state does not have. `trust` allows pickled objects of any kind. Raises InputError for what is no
    checkpoint, UsageError if the step is not known, UnsaveableState, StorageError.
    """
    external = open_external(source, trust=trust)
    known = step if step is not None else external.step
    if known is None:
        raise UsageError(
            "the checkpoint does not say which step it is of", where=str(source), hint="Give it with --step N"
        )
    if known < 0:
        raise UsageError(f"step {known} cannot be", hint="Give it with --step N")
    external = _without(external, drop)
    new = {n: _renamed(n, rename) for n in [*external.tensors, *external.aliases]}
    if doubled := [n for n, times in Counter(new.values()).items() if times > 1]:
        raise UsageError(f"two tensors would be called '{doubled[0]}'", hint="Correct the renaming")
    old = {new[n]: n for n in external.tensors}
    stamp = Stamp(WEIGHTS_ID if external.kind == "huggingface" else RUN_ID, attempt, known)
    if COMMITTED in storage.list(stamp.folder):
        raise UsageError(
            f"{stamp.folder} is there already",
            where=storage.url,
            hint="Give another step, or remove it first",
        )
    part = write_pieces(
        storage,
        {new[n]: (dtype, Sharding.whole(shape)) for n, (dtype, shape) in external.tensors.items()},
        lambda name: external.read(old[name]),
        _renamed_tree(external.values, rename, new),
        stamp,
        aliases={new[a]: new[n] for a, n in external.aliases.items()},
    )
    return commit(storage, [part])


def open_external(source: Path, *, trust: bool = False) -> ExternalCheckpoint:
    """The checkpoint at `source`, whatever kind it is. Raises InputError if it is none that is known."""
    if source.is_dir():
        if (source / COMMITTED).exists():
            raise InputError(
                "this is a checkpoint of unbroken's already",
                where=str(source),
                hint="Point the run at its folder",
            )
        if (source / ".metadata").exists():
            return _dcp(source, trust)
        if any(source.glob("*.safetensors")):
            return _huggingface(source)
    elif source.is_file():
        if source.suffix == ".safetensors":
            return _safetensors([source], source.parent)
        return _torch_file(source, trust)
    else:
        raise InputError("there is no such file or folder", where=str(source))
    raise InputError(
        "it holds no checkpoint that is known",
        where=str(source),
        hint="Known are: a DCP folder (with .metadata), a folder with *.safetensors, one file of torch.save",
    )


# DCP ------------------------------------------------------------------------------------------------------------


def _dcp(source: Path, trust: bool) -> ExternalCheckpoint:
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

    class Reader(FileSystemReader):
        """Reads the metadata once, and with an unpickler that knows torch's own classes only."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            found: Metadata = metadata
            return found

    metadata = _dcp_metadata(source, trust)
    reader = Reader(source)
    flat: dict[str, Any] = {}
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            flat[name] = torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
        elif isinstance(stored, BytesStorageMetadata):
            flat[name] = _dcp_object(reader, name, trust, source)
    # The paths of the original state; a DCP checkpoint that was saved flat has none.
    mappings = {n: metadata.planner_data[n] for n in flat if n in (metadata.planner_data or {})}
    state: Any = flat
    if len(mappings) == len(flat):
        state = _with_numbered_parameters(unflatten_state_dict(flat, mappings))
    tensors, skeleton = flatten(state, lambda v: isinstance(v, torch.Tensor))
    fqn = {id(t): n for n, t in flat.items() if isinstance(t, torch.Tensor)}
    names = {name: fqn[id(t)] for name, t in tensors.items()}

    def read(name: str) -> torch.Tensor:
        full = torch.zeros(flat[names[name]].shape, dtype=flat[names[name]].dtype)
        _dcp_load({names[name]: full}, reader, source)
        return full

    shapes = {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()}
    return ExternalCheckpoint("dcp", shapes, {}, skeleton, read, _step_in(state))


def _with_numbered_parameters(state: Any) -> Any:
    """DCP turns every key into text; an optimizer's own state dict numbers its parameters."""
    if not isinstance(state, dict):
        return state
    found = {k: _with_numbered_parameters(v) for k, v in state.items()}
    inner = found.get("state")
    if (
        "param_groups" in found
        and isinstance(inner, dict)
        and inner
        and all(str(k).isdecimal() for k in inner)
    ):
        found["state"] = {int(k): v for k, v in inner.items()}
    return found


def _dcp_metadata(source: Path, trust: bool) -> Any:
    data = (source / ".metadata").read_bytes()
    try:
        return pickle.loads(data) if trust else _TorchOnly(io.BytesIO(data)).load()
    except (
        pickle.UnpicklingError,
        EOFError,
        AttributeError,
        ImportError,
        IndexError,
        TypeError,
        ValueError,
        KeyError,
    ) as e:
        raise InputError(f"its .metadata cannot be read: {e}", where=str(source)) from None


class _TorchOnly(pickle.Unpickler):
    """Unpickles what DCP's own metadata consists of, and nothing that could run code."""

    _METADATA = frozenset(
        {"Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"}
        | {"TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING"}
    )
    _CLASSES: Mapping[str, frozenset[str]] = {
        "torch.distributed.checkpoint.metadata": _METADATA,
        "torch.distributed._shard.sharded_tensor.metadata": _METADATA,  # up to torch 2.2
        "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo", "_StoragePrefix"}),
        "torch": frozenset({"Size"}),
        "torch.serialization": frozenset({"_get_layout"}),
        "builtins": frozenset({"dict", "list", "set", "tuple", "int", "str", "frozenset"}),
        "collections": frozenset({"OrderedDict"}),
        "pathlib": frozenset({"PosixPath"}),
    }

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        allowed = dtype or name in self._CLASSES.get(module, ())
        if not allowed:
            raise pickle.UnpicklingError(
                f"it holds a {module}.{name}, which is not read from what is not trusted"
            )
        return super().find_class(module, name)


def _dcp_object(reader: Any, name: str, trust: bool, source: Path) -> Any:
    """One value that DCP stored with torch.save."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    found: dict[str, Any] = {}

    class Planner(DefaultLoadPlanner):
        """Loads values without running anything that is pickled in them."""

        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            found["value"] = torch.load(value, weights_only=not trust)

    try:
        _dcp_load({name: None}, reader, source, Planner())
    except CheckpointError as e:
        raise UnsaveableState(name, e.message, hint="If you trust who wrote it, say --trust-pickle") from None
    return found["value"]


def _dcp_load(state: dict[str, Any], reader: Any, source: Path, planner: Any = None) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        with dcp_alone(str(source)):
            load(state, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointError as e:
        raise CheckpointCorrupt(
            f"{', '.join(state)} cannot be read: {e.message}"[:400], where=str(source)
        ) from None


# safetensors ----------------------------------------------------------------------------------------------------


def _huggingface(source: Path) -> ExternalCheckpoint:
    index = source / "model.safetensors.index.json"
    if not index.exists():
        return _safetensors(sorted(source.glob("*.safetensors")), source)
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files = sorted({str(f) for f in weight_map.values()})
    except (ValueError, KeyError, AttributeError, TypeError) as e:
        raise InputError(f"its index cannot be read: {e}", where=str(index)) from None
    if outside := [f for f in files if Path(f).name != f]:
        raise InputError(f"its index names a file outside of the folder: {outside[0]}", where=str(index))
    if missing := [f for f in files if not (source / f).is_file()]:
        raise InputError(f"its index names {missing[0]}, which is not there", where=str(index))
    external = _safetensors([source / f for f in files], source)
    if lacking := sorted({f"model.{n}" for n in weight_map} - set(external.tensors)):
        raise InputError(f"its index names {lacking[0]}, which no file holds", where=str(index))
    return external


def _safetensors(files: list[Path], source: Path) -> ExternalCheckpoint:
    """Under "model.", as a training state names it."""
    where: dict[str, tuple[Path, arena.TensorSlot, int]] = {}
    for file in files:
        storage = PosixStorage(file.parent)
        plan = read_header(storage, file.name, storage.size(file.name))
        for slot in plan.slots:
            if f"model.{slot.name}" in where:
                raise InputError(f"tensor '{slot.name}' is in two files", where=str(source))
            where[f"model.{slot.name}"] = (file, slot, plan.data_start)

    def read(name: str) -> torch.Tensor:
        file, slot, start = where[name]
        kind = getattr(torch, TO_TORCH[slot.dtype])
        if not slot.bytes:
            return torch.empty(slot.shape, dtype=kind)
        data = bytearray(slot.bytes)
        PosixStorage(file.parent).read_into(file.name, start + slot.start, memoryview(data))
        return torch.frombuffer(data, dtype=torch.uint8).view(kind).reshape(slot.shape)

    shapes = {n: (TO_TORCH[s.dtype], s.shape) for n, (_, s, _) in where.items()}
    holes = {n.removeprefix("model."): {"$": "tensor", "name": n} for n in shapes}
    return ExternalCheckpoint("huggingface", shapes, {}, {"model": holes}, read)


# one file of torch.save -----------------------------------------------------------------------------------------


def _torch_file(source: Path, trust: bool) -> ExternalCheckpoint:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = torch.load(
                source, map_location="cpu", weights_only=not trust, mmap=zipfile.is_zipfile(source)
            )
    except Exception as e:  # noqa: BLE001  its unpickler lets out whatever a garbled file makes it trip over
        first = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        hint = (
            "If you trust who wrote it, say --trust-pickle"
            if "weights_only" in str(e) or "Weights only" in str(e)
            else None
        )
        raise InputError(f"torch cannot read it: {first[:300]}", where=str(source), hint=hint) from None
    if not isinstance(state, Mapping):
        raise InputError(f"it holds a {type(state).__name__}, not a dict of tensors", where=str(source))
    found, skeleton = flatten(dict(state), lambda v: isinstance(v, torch.Tensor))
    from ..capture.direct import find_tied

    own, aliases = find_tied(found)
    shapes = {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in own.items()}
    return ExternalCheckpoint("torch", shapes, aliases, skeleton, own.__getitem__, _step_in(state))


# names ----------------------------------------------------------------------------------------------------------


def _step_in(state: Any) -> int | None:
    """The step that a state says itself, where the usual trainers write it."""
    if not isinstance(state, Mapping):
        return None
    for key in STEP_NAMES:
        v = state.get(key)
        if isinstance(v, torch.Tensor) and v.numel() == 1 and v.device.type != "meta":
            v = v.item()
        if isinstance(v, int | float) and v >= 0 and int(v) == v:
            return int(v)
    return _step_in(state.get("train_state"))


def _without(external: ExternalCheckpoint, drop: Sequence[str]) -> ExternalCheckpoint:
    """The same without what lies under these prefixes; raises UsageError for one that nothing lies under."""
    values = external.values
    for prefix in (p.rstrip(".") for p in drop):

        def stays(name: str, prefix: str = prefix) -> bool:
            return name != prefix and not name.startswith(prefix + ".")

        paths = list(_leaves(values, ())) if isinstance(values, dict) else []
        if all(stays(".".join(path)) for path, _ in paths):
            raise UsageError(f"nothing is called '{prefix}'", hint="Correct --drop")
        values = _rebuilt([(path, leaf) for path, leaf in paths if stays(".".join(path))])
    kept = tensor_names(values)
    # An alias whose tensor went becomes that tensor.
    aliases = {a: n for a, n in external.aliases.items() if a in kept and n in kept}
    orphans = {a: n for a, n in external.aliases.items() if a in kept and n not in kept}
    tensors = {n: t for n, t in external.tensors.items() if n in kept}
    tensors |= {a: external.tensors[n] for a, n in orphans.items()}
    return replace(
        external,
        tensors=tensors,
        aliases=aliases,
        values=values,
        read=lambda name: external.read(orphans.get(name, name)),
    )


def _rebuilt(leaves: Iterable[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    """The tree with these leaves at these paths."""
    tree: dict[str, Any] = {}
    for (*above, last), leaf in leaves:
        at = tree
        for key in above:
            inner = at.setdefault(key, {})
            if not isinstance(inner, dict):
                raise UsageError(
                    f"'{key}' would be a value and a folder of values", hint="Correct the renaming"
                )
            at = inner
        at[last] = leaf
    return tree


def _renamed(name: str, rename: Sequence[tuple[str, str]]) -> str:
    """The new name: of the first (old prefix, new prefix) that fits. A prefix ends where a part of the name ends."""
    for old, new in rename:
        old, new = old.rstrip("."), new.rstrip(".")
        if name == old:
            return new or name
        if not old or name.startswith(old + "."):
            rest = name[len(old) :].lstrip(".")
            return f"{new}.{rest}" if new else rest
    return name


def _renamed_tree(skeleton: Any, rename: Sequence[tuple[str, str]], new: Mapping[str, str]) -> Any:
    """The tree with the same renaming: what lay under an old prefix lies under the new one."""
    if not rename or not isinstance(skeleton, dict) or "$" in skeleton:
        return skeleton
    return _rebuilt((_moved(path, rename), _with_names(leaf, new)) for path, leaf in _leaves(skeleton, ()))


def _leaves(node: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in node.items():
        if isinstance(value, dict) and "$" not in value and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _moved(path: tuple[str, ...], rename: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """The new path of a leaf. Keys may hold dots themselves ("layers.0.weight"), and keep them."""
    whole = ".".join(path)
    moved = _renamed(whole, rename)
    if moved == whole:
        return path
    kept: list[str] = []
    rest = moved
    for key in reversed(path):  # the keys at the end that are the same before and after
        if rest != key and not rest.endswith("." + key):
            break
        kept.insert(0, key)
        rest = rest[: -len(key)].rstrip(".")
        if not rest:
            return tuple(kept)
    broken = path[len(path) - len(kept) - 1] if len(kept) < len(path) else ""
    # The key that the old prefix ended in: what is left of it stays one key.
    while broken and "." in broken:
        broken = broken.partition(".")[2]
        if rest == broken or rest.endswith("." + broken):
            kept.insert(0, broken)
            rest = rest[: -len(broken)].rstrip(".")
            break
    return (*(rest.split(".") if rest else ()), *kept)


def _with_names(node: Any, new: Mapping[str, str]) -> Any:
    if isinstance(node, list):
        return [_with_names(v, new) for v in node]
    if not isinstance(node, dict):
        return node
    if node.get("$") == "tensor":
        return {"$": "tensor", "name": new[node["name"]]}
    return {k: _with_names(v, new) for k, v in node.items()}
