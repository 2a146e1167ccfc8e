"""Finds the model of an evaluation: its hash, whether it is copied into the node's memory, what workers are told."""

from __future__ import annotations

import concurrent.futures
import json
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ... import atomic
from ...checkpoint.format.manifest import COMMITTED, MANIFEST, Committed
from ...errors import CheckpointError, EvaluationError, ModelChanged
from ...journal.codec import encode
from ..contracts import Json, ModelSpec, digest
from ..preparation import reads
from ..suite.registry import get_backend
from .cache import ModelReference, Places, fetch_unknown
from .sources import (
    PARALLEL,
    FileInfo,
    ModelManifest,
    ModelSource,
    hash_model,
    memo_folder,
    on_network,
    open_source,
    small_files,
)

HEAD_BYTES = 64 * 2**10
"""Read of a safetensors file at once: the header of a shard is seldom longer."""
MAX_HEADER = 100_000_000
"""What the format allows."""
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Located:
    """A model that can be asked for by its hash."""

    checkpoint: str
    """The hash of what answers."""
    source: ModelSource | None = None
    """None: an endpoint."""
    manifest: ModelManifest | None = None
    cached: bool = False
    """Workers refer to a copy on their node instead of reading the source."""
    held: ModelReference | None = None
    """On the copy that was made for the hash; for the caller to release."""
    files: tuple[FileInfo, ...] = ()
    """As they were when they were hashed, where workers read them where they lie."""
    parameters: int | None = None
    """As the files say; None where they do not."""

    @property
    def model_b(self) -> float:
        """Billions of parameters; where the files do not say, their bytes at two each; 0 where unknown."""
        if self.parameters is not None:
            return self.parameters / 1e9
        if self.manifest is None:
            return 0.0
        return sum(s for n, s, _ in self.manifest.files if n.endswith((".safetensors", ".bin"))) / 2e9

    def for_worker(self, places: Places) -> Json:
        """What a worker is told of it."""
        if self.source is None or self.manifest is None:
            return {"cache": False, "address": "", "manifest": None, "memory": None, "disks": []}
        return {
            "cache": self.cached,
            "address": self.source.address,
            "manifest": encode(self.manifest) if self.cached else None,
            "memory": str(places.memory) if places.memory else None,
            "disks": [str(d) for d in places.disks],
            "hash": self.checkpoint,
            "files": [[f.name, f.size, f.stamp] for f in self.files],
        }


def beside(spec: ModelSpec) -> str:
    """A hash of what the local files hold that a model is run with beside its own: a tokenizer's folder, an adapter or a
    file named in its options. Empty where there are none."""
    found: dict[str, reads.Stamp] = {}
    for place in (spec.tokenizer, *reads.texts(dict(spec.options))):
        path = Path(place)
        try:
            files = sorted(path.iterdir()) if place and path.is_dir() else [path] if place else []
        except OSError:
            continue  # loading says what is wrong with it
        found |= {str(f): s for f in files if (s := reads.stamp(str(f)))[:1] == ["file"]}
    return reads.content(found) if found else ""


def model_files(spec: ModelSpec, target: Path) -> Path | None:
    """A folder with tokenizer and configuration, `target` where the model lies in none; None for an endpoint."""
    if not get_backend(spec.backend).needs_weights:
        return None
    return small_files(open_source(spec.source), target)


def locate(
    spec: ModelSpec,
    *,
    cache: str,
    places: Places,
    remote: bool,
    checkpoint: str = "",
    halt: threading.Event | None = None,
) -> Located:
    """The model of a spec. A source whose hash is not known is read once, into this node's cache if it is wanted there.

    `cache`: 'auto', 'always' or 'never'; `remote`: workers run elsewhere. Raises ModelDoesNotLoad, and ModelChanged if
    the hash is not `checkpoint`; RunInterrupted once `halt` is set while it reads.
    """
    backend = get_backend(spec.backend)
    if not backend.needs_weights:
        return Located(checkpoint or backend.fingerprint(spec) or digest([spec.source, spec.name]))
    source = open_source(spec.source)
    folder = Path(source.address) if "://" not in source.address else None
    # An object store cannot be mapped, so it is copied whatever was asked.
    cached = folder is None or cache == "always" or (cache == "auto" and on_network(folder))
    held: ModelReference | None = None

    def fetching(files: Sequence[FileInfo]) -> ModelManifest:
        nonlocal held
        manifest, held = fetch_unknown(source, files, places, halt)
        return manifest

    files = () if cached else tuple(source.files())
    manifest = hash_model(source, memo_folder(), fetching if cached and not remote else None, halt)
    if checkpoint and checkpoint != manifest.hash:
        if held is not None:
            held.release()
        raise ModelChanged("the model's files differ from those asked for", where=spec.source)
    if files and tuple(source.files()) != files:
        raise ModelChanged("the model's files changed while they were read", where=spec.source)
    count = parameters_of(source, manifest, memo_folder())
    return Located(manifest.hash, source, manifest, cached, held, files, count)


def parameters_of(source: ModelSource, manifest: ModelManifest, memo: Path) -> int | None:
    """`count_parameters`, remembered under `memo` for this content: a source that is known is not waited for."""
    path = memo / "parameters" / f"{manifest.hash}.json"
    try:
        known = json.loads(path.read_text())["parameters"]
        if known is None or isinstance(known, int):
            return known
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there, or not ours: it is counted again
    try:
        found = count_parameters(source, manifest)
    except (EvaluationError, OSError):
        return None  # the source failed just now, which whoever fetches from it will say
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_json(path, {"parameters": found}, indent=None)
    return found


def count_parameters(source: ModelSource, manifest: ModelManifest) -> int | None:
    """Elements of all tensors, from the headers of safetensors files, or of the model's in a checkpoint of ours.

    The type does not matter: a model has as many parameters in float32 as in bfloat16. None where neither is there, or
    what is there makes no sense: it is a figure for run times, and loading says what is wrong with a file. Raises
    EvaluationError, OSError where the source fails.
    """
    sizes = {name: size for name, size, _ in manifest.files}
    try:
        if {COMMITTED, MANIFEST} <= sizes.keys():
            return _of_checkpoint(source, sizes)
        files = [n for n in sizes if n.endswith(".safetensors")]
        if (
            _INDEX in sizes
        ):  # some folders hold the same weights once more, under the names of another library
            index = json.loads(source.read(_INDEX, 0, sizes[_INDEX]))
            files = sorted(set(index["weight_map"].values()))
        if not files:
            return None
        with concurrent.futures.ThreadPoolExecutor(min(PARALLEL, len(files))) as pool:
            return sum(pool.map(lambda n: _of_header(source, n), files))
    except (CheckpointError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _of_header(source: ModelSource, name: str) -> int:
    """Elements of the tensors of one safetensors file: 8 bytes of length, little-endian, then JSON. Raises ValueError."""
    head = source.read(name, 0, HEAD_BYTES)
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8 or not 0 < length <= MAX_HEADER:
        raise ValueError(f"'{name}' is no safetensors file")
    if len(head) < 8 + length:
        head += source.read(name, len(head), 8 + length - len(head))
    table = json.loads(head[8 : 8 + length])
    return sum(math.prod(t["shape"]) for key, t in table.items() if key != "__metadata__")


def _of_checkpoint(source: ModelSource, sizes: Mapping[str, int]) -> int:
    """Elements of the model's tensors, by the name that exporting looks for; of all where there is none such."""
    marker = Committed.decode(source.read(COMMITTED, 0, sizes[COMMITTED]), where=source.address)
    found = marker.admit(source.read(MANIFEST, 0, sizes[MANIFEST]), where=source.address)
    own = {n: t for n, t in found.tensors.items() if n not in found.aliases}
    model = {n: t for n, t in own.items() if n.startswith("model.")}
    return sum(math.prod(t.shape) for t in (model or own).values())
