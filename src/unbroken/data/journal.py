"""A journal of the batches: which samples each step was given, and a digest of them. No torch.

loader = unbroken.data.wrap(loader, on_batch=unbroken.data.Journal())     # into the run's folder
read(folder)[12].digest == read(other_folder)[12].digest                  # step 12 of two runs, at any world sizes
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..journal import lines
from ..journal.checksummed import digest
from ..progress import RunDir, attach
from .position import Ranges, normalize

if TYPE_CHECKING:
    from .loading.loader import BatchRecord


_log = logging.getLogger("unbroken.data")
_KEPT = 65_536
"""Lines that wait for room, of one rank: some 20 MB."""
_AT_ONCE = 100
"""So many are written in one step at most: a millisecond."""


@dataclass(frozen=True)
class GlobalBatch:
    """What all ranks together were given for a step."""

    step: int
    epoch: int
    samples: Ranges
    """Absolute numbers."""
    digest: int
    """The same at any world size and batch size for the same samples."""
    whole: bool
    """Every rank has said what it was given."""


@dataclass(frozen=True)
class _Line:
    """A BatchRecord as it stands in a journal, and the attempt that wrote it."""

    attempt: int
    step: int
    epoch: int
    samples: tuple[tuple[int, int], ...]
    rank: int
    world_size: int
    digest: str
    """16 hex digits."""


class Journal:
    """Appends a line for each batch to a file of this rank: call it with BatchRecords.

    `folder` is by default `data` in the run's folder. Raises UsageError outside of a run without a folder. A line has a
    checksum, as in the run's journal; it is not synced to disk, which would hold the training up. Where a line cannot be
    written (a full disk) the training goes on: that is said once, and the newest 65,536 lines are kept and written with the first
    step that finds room. In a run they are kept in the node's memory, beside the progress page: where this process is killed meanwhile,
    a rank of the next attempt on the node writes them.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        run = attach()
        if folder is None:
            if run.run_dir is None:
                raise UsageError(
                    "there is no run whose folder the journal of the data could be in",
                    hint="Name a folder: Journal('runs/data'), or start with `unbroken run`",
                )
            folder = RunDir(run.run_dir).data
        self._folder = Path(folder)
        self._attempt = self._number = run.attempt
        self._file: lines.Appender | None = None
        self._late: deque[BatchRecord] = deque(maxlen=_KEPT)
        page = os.environ.get("UNBROKEN_PAGE") if run.active else None
        self._left = Leftovers(self._folder, Path(page).parent, run.attempt) if page else None
        self._told = False

    def __call__(self, record: BatchRecord) -> None:
        """Writes one line, and those before it that had no room, if that is possible."""
        self._late.append(record)
        try:
            if self._file is None:
                self._file = self._open(record.rank)
            for _ in range(min(_AT_ONCE, len(self._late))):
                self._file.append({"attempt": self._number, **self._late[0].as_json()})
                self._late.popleft()
            if self._left is not None and not self._late:
                self._left.settle()
        except OSError as e:
            if not self._told:
                _log.warning(
                    "the journal of the data cannot have step %d yet, and others maybe: %s", record.step, e
                )
            self._told = True
        if self._late and self._left is not None:
            self._left.keep({"attempt": self._number, **record.as_json()}, record.rank)

    def _open(self, rank: int) -> lines.Appender:
        self._folder.mkdir(parents=True, exist_ok=True)
        number = self._attempt
        while True:  # outside of a run the attempts are counted by the files
            path = self._folder / f"attempt-{number:04d}-rank-{rank:05d}.jsonl"
            try:
                file = lines.Appender(path, new=True)
            except FileExistsError:
                number += 1
                continue
            self._number = number
            return file


class Leftovers:
    """Lines that wait for room, in files in the node's memory: of this process, and of ranks that were killed before they had room."""

    def __init__(self, folder: Path, memory: Path, attempt: int) -> None:
        self._folder, self._memory, self._attempt = folder, memory, attempt
        # A script may have several journals, with a folder each.
        self._stem = f"data.{digest(str(folder.absolute()).encode())}.a"
        self._kept = 0
        self._file: lines.Appender | None = None
        self._others = True
        """Whether earlier attempts may have left some here."""

    def keep(self, line: Mapping[str, Any], rank: int) -> None:
        """Keeps a line for whoever comes after this process."""
        with contextlib.suppress(OSError):  # memory is full too
            if self._file is None:
                self._file = lines.Appender(
                    self._memory / f"{self._stem}{self._attempt:04d}-{rank:05d}.jsonl"
                )
            if self._kept < _KEPT:
                self._file.append(line)
                self._kept += 1

    def settle(self) -> None:
        """All lines of this process are written: drops what was kept of them, and writes what others have left. Raises OSError."""
        if self._file is not None:
            self._file.close()
            self._file.path.unlink(missing_ok=True)
            self._file, self._kept = None, 0
        if not self._others:
            return
        for path in sorted(self._memory.glob(f"{self._stem}*.jsonl")):
            # attempt, rank, and the attempt whose rank had taken it: killed as well, it may not have come to its end.
            attempt, rank, *taken = (int(x) for x in path.stem.removeprefix(self._stem).split("-"))
            if max([attempt, *taken]) < self._attempt:
                self._write(path, attempt, rank)
        self._others = False

    def _write(self, path: Path, attempt: int, rank: int) -> None:
        taken = path.with_name(f"{self._stem}{attempt:04d}-{rank:05d}-{self._attempt:04d}.jsonl")
        try:
            path.rename(taken)  # the node's other ranks look, too
        except FileNotFoundError:
            return
        try:
            stem = f"attempt-{attempt:04d}-rank-{rank:05d}"
            there = {lines.encode(r) for f in self._folder.glob(f"{stem}*.jsonl") for r in lines.records(f)}
            late = [r for r in lines.records(taken) if lines.encode(r) not in there]
            if late:
                file = lines.Appender(self._folder / f"{stem}-late.jsonl")
                try:
                    for record in late:
                        file.append(record)
                finally:
                    file.close()
        except OSError:
            taken.rename(path)
            raise
        taken.unlink()


def read(folder: str | Path) -> dict[int, GlobalBatch]:
    """Of each step what it was given at last: a step that was made again after a failure counts as made again."""
    newest: dict[int, int] = {}
    given: dict[int, dict[_Line, None]] = {}
    for path in sorted(Path(folder).glob("attempt-*-rank-*.jsonl")):
        for line in lines.read_as(path, _Line):
            if line.attempt > newest.get(line.step, -1):
                newest[line.step], given[line.step] = line.attempt, {}
            if line.attempt == newest[line.step]:
                given[line.step][line] = None  # one that was written late may be there twice
    return {step: _together(step, [*found]) for step, found in sorted(given.items())}


def _together(step: int, found: list[_Line]) -> GlobalBatch:
    samples = normalize(r for f in found for r in f.samples)
    digest = sum(int(f.digest, 16) for f in found) % 2**64
    return GlobalBatch(
        step, found[0].epoch, samples, digest, len({f.rank for f in found}) == found[0].world_size
    )
