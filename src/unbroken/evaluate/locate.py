"""Finds the model of an evaluation: its hash, whether it is copied into the node's memory, what workers are told."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelChanged
from .cache import Lease, Places, fetch_unknown
from .codec import encode
from .contracts import Json, ModelSpec, digest
from .registry import get_backend
from .sources import FileInfo, Manifest, Source, hash_model, memo_folder, on_network, open_source, small_files


@dataclass(frozen=True)
class Located:
    """A model that can be asked for by its hash."""

    checkpoint: str
    """The hash of what answers."""
    source: Source | None = None
    """None: an endpoint."""
    manifest: Manifest | None = None
    cached: bool = False
    """Workers lease a copy on their node instead of reading the source."""
    held: Lease | None = None
    """On the copy that was made for the hash; for the caller to release."""
    files: tuple[FileInfo, ...] = ()
    """As they were when they were hashed, where workers read them where they lie."""

    @property
    def model_b(self) -> float:
        """Billions of parameters, from the bytes of the weights at two bytes each; 0 where unknown."""
        if self.manifest is None:
            return 0.0
        return sum(s for n, s, _ in self.manifest.files if n.endswith((".safetensors", ".bin"))) / 2e9

    def told(self, places: Places) -> Json:
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
    held: Lease | None = None

    def fetching(files: Sequence[FileInfo]) -> Manifest:
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
    return Located(manifest.hash, source, manifest, cached, held, files)
