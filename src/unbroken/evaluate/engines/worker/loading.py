"""A worker's model: loaded from this node's copy, or from where its files lie, which are then watched."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....errors import ModelChanged, ModelDoesNotLoad
from ....journal.codec import decode
from ....link.bounds import Message
from ...contracts import Conditions, Model, ModelSpec
from ...model.cache import Places, take_reference
from ...model.sources import FileInfo, ModelManifest, ModelSource, hash_model, memo_folder, open_source
from ...suite.registry import get_backend
from .warming import get_ready


class FilesInPlace:
    """The files of a model that is read where they lie: others may write there, and weights may be mapped."""

    def __init__(
        self, source: ModelSource, there: Sequence[Sequence[Any]], hashed: str, halt: threading.Event
    ) -> None:
        """Notes the files as they are. Raises ModelChanged if they are not those with this hash; `there`: their names,
        sizes and stamps when they were hashed. `halt` ends the reading of their content."""
        self.source = source
        self.hashed = hashed
        self._halt = halt
        self._files: tuple[FileInfo, ...] = tuple(source.files())
        if [[f.name, f.size, f.stamp] for f in self._files] != [list(f) for f in there]:
            # Another node's own copy, or others' files in the place of ours.
            found = hash_model(source, memo_folder(), halt=halt)
            if found.hash != hashed:
                raise ModelChanged("the files are not those that the evaluation began with", where=source.address,
                                   hint="Put them back, or evaluate these in another --out")  # fmt: skip
            self.check()

    def check(self) -> None:
        """Raises ModelChanged if they were written to since: that would change answers too.

        Files that are gone are none of ours: what is mapped stays. One that was touched, linked or had its rights changed
        has other times: its content is what counts.
        """
        try:
            now = {f.name: f for f in self.source.files()}
        except ModelDoesNotLoad:
            return
        if all(now.get(f.name, f) == f for f in self._files):
            return
        same = all(f.name in now and now[f.name].size == f.size for f in self._files)
        if not same or hash_model(self.source, memo_folder(), halt=self._halt).hash != self.hashed:
            raise ModelChanged("the model's files were changed while they were evaluated", where=self.source.address,
                               hint="Put them back, or evaluate these in another --out")  # fmt: skip
        self._files = tuple(now.values())


@dataclass(frozen=True)
class LoadedModel:
    """A model that can answer."""

    model: Model
    files: FilesInPlace | None
    """None where nobody can write to them: a copy of ours, or no files at all."""
    conditions: Conditions
    """As it runs at first."""
    cached: bool
    """Whether it was loaded from this node's copy."""
    fetch_s: float
    load_s: float
    """Without the fetch."""

    def check_files(self) -> None:
        """Raises ModelChanged if the model's files were written to since it was loaded."""
        if self.files is not None:
            self.files.check()


def load(
    spec: ModelSpec, given: Message, gpus: Sequence[int], held: ExitStack, halt: threading.Event, *, warm: bool
) -> LoadedModel:  # fmt: skip
    """Loads the model as the coordinator describes it; `held` keeps what must be released at the end.

    `warm`: import what the backend needs beside the fetch; not where that has been done, or may have hung. Raises
    UnbrokenError, whatever the model library raises, and RunInterrupted once `halt` is set while it fetches.
    """
    began = time.time()
    backend = get_backend(spec.backend)
    ready = threading.Thread(target=get_ready, args=(spec.backend, gpus), daemon=True)
    if warm:
        ready.start()
    folder: Path | None = None
    files: FilesInPlace | None = None
    cached, fetch_s = False, 0.0
    if backend.needs_weights and given["cache"]:
        memory, disks = given["memory"], given["disks"]
        places = Places(Path(memory) if memory else None, tuple(Path(d) for d in disks))
        reference = take_reference(
            open_source(given["address"]), decode(ModelManifest, given["manifest"]), places, halt=halt
        )
        held.callback(reference.release)
        cached, folder, fetch_s = True, reference.path, reference.fetched_s
    elif backend.needs_weights:
        folder = Path(given["address"])
        files = FilesInPlace(open_source(given["address"]), given["files"], given["hash"], halt)
    if ready.ident is not None:
        ready.join()
    model = backend.load(spec, folder, gpus)
    if files is not None:
        files.check()
    return LoadedModel(model, files, model.conditions, cached, fetch_s, time.time() - began - fetch_s)
