"""From our checkpoints to other people's: DCP, Hugging Face safetensors, one torch file. Needs torch.

Tensors are read whole (global, not sharded), verified, one at a time, so that a checkpoint larger than the host's
memory can be exported; only `to_torch` needs room for all of it. Everything appears at its destination complete or
not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ... import atomic
from ...errors import CheckpointError, LayoutMismatch, UnbrokenError, UsageError
from ...machine import available_memory
from ...units import Bytes
from ..capture.direct import chunked, plain_bytes
from ..catalogue.contents import read_committed
from ..format import layout as arena
from ..format.dtypes import FROM_TORCH
from ..format.manifest import Manifest
from ..format.shards import Box, TensorShard
from ..format.values import unflatten
from ..restore.reshard import Pieces
from ..storage.base import Storage
from ..storage.posix import PosixStorage

MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Exported:
    """What was written: where, how many tensors and bytes, the names of the files, and remarks for the user."""

    path: Path
    tensors: int
    bytes: int
    files: tuple[str, ...]
    notes: tuple[str, ...] = ()


class Whole:
    """The global tensors of a checkpoint, each read when it is asked for."""

    def __init__(self, storage: Storage, name: str, *, verify: bool = True) -> None:
        self.manifest = read_committed(storage, name)
        self.pieces = Pieces(storage, self.manifest, verify=verify)

    def read(self, name: str) -> torch.Tensor:
        """Tensor `name` on the CPU. Raises CheckpointCorrupt, StorageError."""
        record = self.manifest.tensors[name]
        full = torch.empty(record.shape, dtype=getattr(torch, record.dtype))

        def place(box: Box) -> torch.Tensor:
            into = full
            for d, (o, n) in enumerate(zip(*box, strict=True)):
                into = into.narrow(d, o, n)
            return into

        self.pieces.read(
            (name, s, _all_of(s), place(box)) for box, (s, *_) in self.pieces.boxes(name).items()
        )
        return full


def to_dcp(storage: Storage, name: str, out: Path) -> Exported:
    """Writes the checkpoint as `torch.distributed.checkpoint.save` of the same state would.

    `dcp.load` of the state's dict reads it. Raises UsageError if `out` exists, CheckpointCorrupt, StorageError.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.state_dict_saver import save

    whole = Whole(storage, name)
    manifest = whole.manifest

    class Planner(DefaultSavePlanner):
        """Plans from tensors without memory; reads each when it is written."""

        def lookup_object(self, index: MetadataIndex) -> Any:
            found = super().lookup_object(index)
            return whole.read(found.unbroken_name) if isinstance(found, _Promise) else found

    state = _state(manifest, {n: _Promise.of(manifest, n) for n in manifest.tensors})
    with _appears_whole(out) as aside, dcp_alone(name):
        writer = FileSystemWriter(aside, thread_count=1)
        save(state, storage_writer=writer, planner=Planner(), no_dist=True)
    return _exported(out, len(manifest.tensors), ())


def to_huggingface(
    storage: Storage,
    name: str,
    out: Path,
    *,
    prefix: str | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    beside: Path | None = None,
) -> Exported:
    """Writes the tensors under `prefix` as Hugging Face does: model.safetensors, or several with an index.

    `prefix` is taken off the names; by default "model." if the state has such a part. A checkpoint that says what
    Hugging Face calls it (`huggingface_of`) gets those names, and those files beside it unless `beside` is given. `dtype` ("bfloat16") converts
    floating-point tensors. Of tied weights the first is stored, as transformers does. `beside` is a folder whose
    config and tokenizer files are copied; its tokenizer alone is enough where the checkpoint says the config. Raises UsageError for a prefix without tensors.
    """
    whole = Whole(storage, name)
    prefix = _prefix(whole.manifest, prefix)
    names = {n.removeprefix(prefix): n for n in whole.manifest.tensors if n.startswith(prefix)}
    tied = {n: t for n, t in whole.manifest.aliases.items() if n.startswith(prefix) and t.startswith(prefix)}
    names = {short: n for short, n in names.items() if n not in tied}
    target = _target_dtype(dtype)
    said = huggingface_of(whole.manifest)
    if said is not None:
        names = {said.names.get(short, short): n for short, n in names.items()}
    specs = {s: _hf_spec(s, whole.manifest, n, target) for s, n in names.items()}
    groups = _split(specs, max_shard_bytes)
    with _appears_whole(out) as aside:
        place = PosixStorage(aside.parent)
        weight_map: dict[str, str] = {}
        for i, group in enumerate(groups):
            file = (
                "model.safetensors"
                if len(groups) == 1
                else f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
            )
            plan = arena.plan(group)

            def blocks(plan: arena.Layout = plan) -> Iterator[bytes | memoryview]:
                yield plan.header()
                for slot in plan.slots:
                    tensor = whole.read(names[slot.name])
                    yield plain_bytes(tensor.to(target) if target and tensor.is_floating_point() else tensor)

            place.write(f"{aside.name}/{file}", chunked(blocks()), plan.file_bytes)
            weight_map |= {s.name: file for s in group}
        if len(groups) > 1:
            total = sum(s.bytes for s in specs.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            place.put(
                f"{aside.name}/model.safetensors.index.json", json.dumps(index, indent=2).encode() + b"\n"
            )
        files = said.files if said is not None else {}
        for file in files if beside is None else files.keys() & {"config.json"}:
            place.put(f"{aside.name}/{file}", json.dumps(files[file], indent=2).encode() + b"\n")
        if beside is not None:
            _copy_beside(beside, aside)
            if files and not (beside / "config.json").exists():
                _name_end(aside)
    notes = [
        f"{n.removeprefix(prefix)} is tied to {t.removeprefix(prefix)} and not stored twice"
        for n, t in tied.items()
    ]
    if not (out / "config.json").exists():
        notes.append("put the model's config.json and tokenizer beside it (or name their folder) to load it")
    return _exported(out, len(specs), tuple(notes))


@dataclass(frozen=True)
class HuggingFaceForm:
    """What a trainer says of its model in a checkpoint's values, under "huggingface", at the top or in one of its parts."""

    names: Mapping[str, str]
    """Names of tensors without the prefix -> Hugging Face's."""
    files: Mapping[str, Any]
    """config.json and the like, by file name, as JSON values."""


def huggingface_of(manifest: Manifest) -> HuggingFaceForm | None:
    """What the checkpoint says of its Hugging Face form; None where it says nothing. Raises UsageError if that is damaged."""
    state = _state(manifest, {n: _Promise.of(manifest, n) for n in manifest.tensors})
    parts = [state, *(v for v in state.values() if isinstance(v, dict))]
    said = next((p["huggingface"] for p in parts if isinstance(p.get("huggingface"), dict)), None)
    if said is None:
        return None
    names, files = said.get("names"), said.get("files")
    if not (isinstance(names, dict) and isinstance(files, dict) and all(map(_plain_file, files))) or any(
        not isinstance(n, str) for n in names.values()
    ):
        raise UsageError(
            "what the checkpoint says of its Hugging Face form cannot be used",
            where=manifest.name,
            hint='It is {"names": {ours: theirs}, "files": {"config.json": {...}}}',
        )
    return HuggingFaceForm(names, files)


def _plain_file(name: object) -> bool:
    """Whether it is the name of a JSON file in the folder itself."""
    return isinstance(name, str) and name.endswith(".json") and "/" not in name and not name.startswith(".")


def to_torch(storage: Storage, name: str, out: Path) -> Exported:
    """Writes one file that `torch.load(path, weights_only=True)` gives back as the state that was saved.

    Needs memory for the whole checkpoint; raises CheckpointError if there is not enough, UsageError if `out` exists.
    """
    whole = Whole(storage, name)
    needed = sum(r.total_bytes for n, r in whole.manifest.tensors.items() if n not in whole.manifest.aliases)
    free = available_memory()
    if free is not None and needed * 1.1 > free:
        raise CheckpointError(
            f"one file needs the whole state in memory: {Bytes(needed)}, and {Bytes(free)} are free",
            where=name,
            hint="Export to dcp or huggingface, which need one tensor at a time",
        )
    if out.exists():
        raise UsageError(f"{out} exists", hint="Name a new file")
    tensors = {n: whole.read(n) for n in whole.manifest.tensors if n not in whole.manifest.aliases}
    tensors |= {alias: tensors[n] for alias, n in whole.manifest.aliases.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}.{os.getpid()}.aside")
    try:
        with open(aside, "xb") as f:
            torch.save(_state(whole.manifest, tensors), f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(aside, out)
    finally:
        aside.unlink(missing_ok=True)
    atomic.fsync_folder(out.parent)
    return Exported(out, len(tensors), out.stat().st_size, (out.name,))


@contextmanager
def dcp_alone(where: str) -> Iterator[None]:
    """Runs torch's DCP in this process alone: its errors become ours, its warning about just that is not shown."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except CheckpointException as e:
        cause = next(iter(e.failures.values()))[0]
        if isinstance(cause, UnbrokenError):
            raise cause from None
        raise CheckpointError(f"{type(cause).__name__}: {cause}"[:400], where=where) from e


class _Promise(torch.Tensor):
    """A tensor without memory that knows which of the checkpoint's it stands for."""

    unbroken_name: str

    @classmethod
    def of(cls, manifest: Manifest, name: str) -> _Promise:
        record = manifest.tensors[name]
        made = torch.empty(record.shape, dtype=getattr(torch, record.dtype), device="meta").as_subclass(cls)
        made.unbroken_name = name
        return made


def _state(manifest: Manifest, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The state as it was saved (rank 0's values), with these tensors; flat where it was saved flat."""
    state = unflatten(manifest.values, tensors, where=manifest.name) if manifest.values is not None else None
    return state if isinstance(state, dict) else dict(tensors)


def _all_of(s: TensorShard) -> Box:
    return (0,) * len(s.sizes), s.sizes


def _prefix(manifest: Manifest, wanted: str | None) -> str:
    tops = sorted({n.split(".")[0] for n in manifest.tensors})
    if wanted is None:
        wanted = "model." if "model" in tops and not _is_bare(manifest) else ""
    if wanted and not wanted.endswith("."):
        wanted += "."
    if not any(n.startswith(wanted) for n in manifest.tensors):
        raise UsageError(
            f"no tensor's name begins with '{wanted}'",
            where=manifest.name,
            hint=f"There are: {', '.join(tops[:20])}",
        )
    return wanted


def _is_bare(manifest: Manifest) -> bool:
    """Whether it is a model's own state dict: there "model.layers..." is a name, and no part of a state."""
    return isinstance(manifest.values, dict) and "model" not in manifest.values


def _target_dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    if name not in FROM_TORCH or not getattr(torch, name).is_floating_point:
        raise UsageError(f"'{name}' is no floating-point type", hint="Use float32, bfloat16 or float16")
    found: torch.dtype = getattr(torch, name)
    return found


def _hf_spec(short: str, manifest: Manifest, name: str, target: torch.dtype | None) -> arena.TensorSpec:
    record = manifest.tensors[name]
    if record.kind == "local":
        raise LayoutMismatch(f"tensor '{name}' differs in shape from rank to rank", where=manifest.name)
    own: torch.dtype = getattr(torch, record.dtype)
    return arena.spec(short, str(target if target and own.is_floating_point else own), record.shape)


def _split(specs: Mapping[str, arena.TensorSpec], limit: int) -> list[list[arena.TensorSpec]]:
    """Groups of at most `limit` bytes, in the order of the names; a tensor above the limit has one of its own."""
    groups: list[list[arena.TensorSpec]] = [[]]
    held = 0
    for s in specs.values():
        if groups[-1] and held + s.bytes > limit:
            groups.append([])
            held = 0
        groups[-1].append(s)
        held += s.bytes
    return groups


def _copy_beside(source: Path, into: Path) -> None:
    """Copies config, tokenizer and generation files of a Hugging Face folder: everything but weights."""
    if not any((folder / "config.json").is_file() for folder in (source, into)):
        raise UsageError(f"there is no config.json in {source}", hint="Name a Hugging Face model's folder")
    for file in sorted(source.iterdir()):
        weights = file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") or ".index." in file.name
        if file.is_file() and not weights and file.stat().st_size < 2**30:
            shutil.copyfile(file, into / file.name)


def _name_end(folder: Path) -> None:
    """Tells a configuration that knows of no end which token ends a text, as the tokenizer beside it says: else nothing that is
    generated ever stops."""
    config = json.loads((folder / "config.json").read_text())
    try:
        end = json.loads((folder / "tokenizer_config.json").read_text())["eos_token"]
        end = end["content"] if isinstance(end, dict) else end
        added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        number = next(t["id"] for t in added if t["content"] == end)
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return  # it does not say
    if config.get("eos_token_id") is None:
        config["eos_token_id"] = number
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@contextmanager
def _appears_whole(out: Path) -> Iterator[Path]:
    """A folder aside that becomes `out` at the end; gone if anything fails."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists", hint="Name a new folder, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}.{os.getpid()}.aside")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        for file in aside.iterdir():
            with open(file, "rb") as f:
                os.fsync(f.fileno())
        atomic.fsync_folder(aside)
        if out.exists():
            out.rmdir()
        os.rename(aside, out)
        atomic.fsync_folder(out.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _exported(out: Path, tensors: int, notes: Iterable[str]) -> Exported:
    files = sorted(p for p in out.iterdir() if p.is_file())
    return Exported(
        out, tensors, sum(p.stat().st_size for p in files), tuple(p.name for p in files), tuple(notes)
    )
