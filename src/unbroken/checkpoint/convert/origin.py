"""What a new run starts from (`unbroken run --from`): found and checked before anything starts, then copied into the run.

It may be one of our checkpoints, a folder of them or another run's directory (its newest good one), a DCP folder,
safetensors, or one file of torch.save. The copy lies in the run's own folder, so the run never needs the source again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError, InputError, UnbrokenError
from ...progress import RunDir, newest_place, read_journal
from ...progress.records.candidate import parse_folder_name
from ...progress.records.state import RunState
from ..catalogue import contents as catalogue
from ..catalogue.mirror import mirror
from ..format.manifest import COMMITTED
from ..storage import open_storage
from ..storage.base import Storage


@dataclass(frozen=True)
class Origin:
    """`place` and `name` of one of our checkpoints; of anybody else's, `name` is empty and `place` its path."""

    place: str
    name: str
    step: int

    @property
    def text(self) -> str:
        return f"{self.place}/{self.name}" if self.name else self.place


def find_origin(text: str, *, trust: bool = False) -> Origin:
    """The checkpoint that is meant. Raises InputError, NoCheckpoint, CheckpointCorrupt, where it is not good."""
    above, _, last = text.rstrip("/").rpartition("/")
    if parse_folder_name(last):
        return _ours(open_storage(above or ("/" if text.startswith("/") else Path.cwd())), last)
    if "://" in text and not text.startswith("file://"):
        return _newest(open_storage(text), {})
    path = Path(text.removeprefix("file://")).absolute()
    if (path / "run.toml").is_file():
        run_dir = RunDir(path)
        state = RunState.of(read_journal(run_dir).records)
        seals = {
            attempt: {
                n for n in names if not state.is_rolled_back(attempt, (parse_folder_name(n) or (0, 0))[0])
            }
            for attempt, names in state.seals.items()
        }
        return _newest(open_storage(newest_place(run_dir)), seals)
    for folder in (path, path / "checkpoints"):
        if folder.is_dir() and any(parse_folder_name(p.name) for p in folder.iterdir()):
            return _newest(open_storage(folder), {})
    from .imports import open_external  # needs torch

    step = open_external(path, trust=trust).step
    return Origin(str(path), "", 0 if step is None else step)


def bring(origin: Origin, target: Storage, *, trust: bool = False) -> str:
    """Copies the checkpoint into `target`, verified, and returns its name there; again: goes on with that."""
    if origin.name:
        source = open_storage(origin.place)
        if not mirror(source, origin.name, target).committed:
            raise CheckpointError("the checkpoint could not be copied whole", where=origin.text)
        return origin.name
    from ..capture.direct import Stamp
    from .imports import import_checkpoint

    name = Stamp("", 0, origin.step).folder
    if COMMITTED not in target.list(name):
        import_checkpoint(Path(origin.place), target, step=origin.step, trust=trust)
    return name


def _ours(storage: Storage, name: str) -> Origin:
    manifest = catalogue.read_committed(storage, name)
    result = catalogue.verify_in(storage, name, deep=False)
    if not result.ok:
        raise CheckpointError(f"it is damaged: {result.problems[0]}", where=f"{storage.url}/{name}")
    return Origin(storage.url, name, manifest.step)


def _newest(storage: Storage, seals: dict[int, set[str]]) -> Origin:
    """The newest good one; of a run only what it accepted."""
    passed = []
    for f in catalogue.listing(storage):
        if not f.committed or f.name not in seals.get(f.attempt, {f.name}):
            continue
        try:
            return _ours(storage, f.name)
        except UnbrokenError as e:
            passed.append(f"{f.name}: {e.message}")
    raise InputError(
        "there is no good checkpoint" + (f": {'; '.join(passed[:3])}" if passed else ""), where=storage.url,
        hint="Name a checkpoint, a folder of them, a run directory, a DCP folder, safetensors or a file of torch.save",
    )  # fmt: skip
