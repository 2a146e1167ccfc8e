"""Checkpoints that a script writes by itself: the newest whole one is found, and the script is told of it when it is started again.

What is whole is judged by what the usual libraries write last, and by the files themselves: torch's are zip archives, whose
directory stands at the end; safetensors say how long they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shlex
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path

from ....progress import RunDir, RunSpec
from ....progress.records.own_checkpoint import describe_own
from ....waiting import wait_within
from ..record.recorder import Recorder

USUAL = ("checkpoint-*", "*.ckpt", "*.pt", "*.pth", "global_step*", "iter_*", "step*", "step-*")
"""What is looked for below an attempt's output folder, at any depth, where no pattern was given."""
_LAST_NUMBER = re.compile(r"(\d+)(?!.*\d)")
_TORCH = (".pt", ".pth", ".bin", ".ckpt", ".distcp")
_UNFINISHED = (".tmp", ".partial", ".incomplete", ".part")
_END_S = 5.0


class OwnCheckpoints:
    """Those of one run's script."""

    def __init__(self, run_dir: RunDir, spec: RunSpec, cwd: str, recorder: Recorder) -> None:
        self._run_dir, self._spec, self._cwd, self._recorder = run_dir, spec, cwd, recorder

    @property
    def asked(self) -> str:
        """Where they are looked for, in words; "" where the user asked for nothing of the kind."""
        if not (self._spec.resume_arg or self._spec.resume_from):
            return ""
        return self._spec.resume_from or "the output folders of the attempts before (UNBROKEN_OUTPUT)"

    async def find(self, attempt: int) -> Path | None:
        """The newest whole one that was written in the attempts before `attempt`; written down where there is one."""
        began = self._recorder.state.started
        if attempt == 1 or began is None:
            return None
        outputs = [
            p for n in range(1, attempt) if (p := self._run_dir.output(n)).is_dir() and any(p.iterdir())
        ]
        found = None
        if outputs or self._spec.resume_from:  # a large folder on a shared file system takes a while
            found = await asyncio.to_thread(
                find_newest, self._spec.resume_from, Path(self._cwd), outputs, began
            )
        if found is not None:
            await self._recorder.record_soft("own_checkpoint", attempt=attempt, path=str(found))
        return found

    def describe(self, attempt: int, found: Path | None) -> str:
        """'from ...': what this attempt's script goes on from by itself; "" where it begins, or asks our Checkpointer."""
        if found is None and (attempt == 1 or self.asked or self._recorder.state.asked):
            return ""
        return describe_own(str(found or ""), bool(self.asked))

    async def describe_last(self) -> str:
        """The same for the next time that the command is given; a file system that hangs holds no end up."""
        if self._recorder.state.asked:
            return ""
        attempt, found = self._recorder.state.attempt + 1, None
        with contextlib.suppress(TimeoutError, OSError):
            found = await wait_within(self.find(attempt), _END_S)
        return self.describe(attempt, found)


def find_newest(pattern: str, cwd: Path, outputs: Iterable[Path], since: float) -> Path | None:
    """The newest whole checkpoint of the script, None where there is none.

    `pattern` is below `cwd` ("" for what usually lies in the `outputs` of the attempts before). Only what was written after
    `since` (seconds since the epoch) counts: an older one is of another run. Newest is the highest number in the name,
    then the time at which it was written.
    """
    found: set[Path] = set()
    if pattern:
        place = Path(pattern)
        top = Path(place.anchor) if place.is_absolute() else cwd
        found.update(top.glob(str(place.relative_to(place.anchor) if place.is_absolute() else place)))
    else:
        for folder in outputs:
            for usual in USUAL:
                found.update(folder.rglob(usual))
    dated = [(_number(path), when, path) for path in found if (when := _written(path)) >= since]
    return next((path for _, _, path in sorted(dated, reverse=True) if is_whole(path)), None)


def add_argument(command: tuple[str, ...], argument: str, path: Path | None) -> tuple[str, ...]:
    """The command with `argument` after it, in which `{}` is the checkpoint's path; without `{}` the path follows it."""
    if path is None or not argument:
        return command
    words = shlex.split(argument)
    if any("{}" in word for word in words):
        return (*command, *(word.replace("{}", str(path)) for word in words))
    return (*command, *words, str(path))


def is_whole(path: Path) -> bool:
    """Whether nothing of a checkpoint (a file, or a folder) is missing or cut off, as far as its files tell."""
    try:
        return _is_whole(path)
    except (OSError, ValueError):
        return False


def _is_whole(path: Path) -> bool:
    if path.name.startswith((".", "tmp")) or path.suffix in _UNFINISHED:
        return False
    if path.is_file():
        return _is_whole_file(path)
    files = [p for p in path.rglob("*") if p.is_file()]
    names = {p.name for p in files}
    if not files or any(p.suffix in _UNFINISHED for p in files):
        return False
    if any(p.suffix == ".distcp" for p in files) and ".metadata" not in names:
        return False  # torch.distributed.checkpoint writes it last
    if path.name.startswith("checkpoint-") and "trainer_state.json" not in names and "optimizer.pt" in names:
        return False  # as Hugging Face's Trainer does
    if not _is_named_by_parent(path) or not all(map(_is_whole_file, files)):
        return False
    return all(_has_all_shards(index, names) for index in files if index.name.endswith(".index.json"))


def _is_whole_file(path: Path) -> bool:
    size = path.stat().st_size
    if size == 0:
        return path.name == "__init__.py"
    if path.suffix == ".safetensors":
        return _safetensors_bytes(path) == size
    if path.suffix in _TORCH:
        with open(path, "rb") as f:
            if f.read(2) != b"PK":
                return True  # an older format, which does not say where it ends
        return zipfile.is_zipfile(path)
    if path.suffix == ".json":
        json.loads(path.read_bytes())
    return True


def _safetensors_bytes(path: Path) -> int:
    """How long the file says that it is."""
    with open(path, "rb") as f:
        first = f.read(8)
        if len(first) < 8:
            return -1
        (length,) = struct.unpack("<Q", first)
        if length > path.stat().st_size:
            return -1
        header = json.loads(f.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return 8 + int(length) + max(ends, default=0)


def _has_all_shards(index: Path, names: set[str]) -> bool:
    shards = json.loads(index.read_bytes()).get("weight_map", {})
    return set(shards.values()) <= names


def _is_named_by_parent(path: Path) -> bool:
    """DeepSpeed and Megatron write into a file beside it which checkpoint was the last that is whole."""
    for name in ("latest", "latest_checkpointed_iteration.txt"):
        beside = path.parent / name
        if beside.is_file() and path.name.startswith(("global_step", "iter_")):
            last, mine = _LAST_NUMBER.search(beside.read_text()), _LAST_NUMBER.search(path.name)
            return bool(last and mine and int(mine[1]) <= int(last[1]))
    return not path.name.startswith(("global_step", "iter_"))


def _number(path: Path) -> int:
    found = _LAST_NUMBER.search(path.name.removesuffix(path.suffix) if path.suffix in _TORCH else path.name)
    return int(found[1]) if found else 0


def _written(path: Path) -> float:
    try:
        inside = path.rglob("*") if path.is_dir() else ()
        return max((p.stat().st_mtime for p in [path, *inside]), default=0.0)
    except OSError:
        return 0.0
