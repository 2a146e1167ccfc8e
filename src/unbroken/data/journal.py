"""A journal of the batches: which samples each step was given, and a digest of them. No torch.

loader = unbroken.data.wrap(loader, on_batch=unbroken.data.Journal())     # into the run's folder
read(folder)[12].digest == read(other_folder)[12].digest                  # step 12 of two runs, at any world sizes
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..journal import lines
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
    step that finds room.
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
        except OSError as e:
            if not self._told:
                _log.warning(
                    "the journal of the data cannot have step %d yet, and others maybe: %s", record.step, e
                )
            self._told = True

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


def read(folder: str | Path) -> dict[int, GlobalBatch]:
    """Of each step what it was given at last: a step that was made again after a failure counts as made again."""
    newest: dict[int, int] = {}
    given: dict[int, list[_Line]] = {}
    for path in sorted(Path(folder).glob("attempt-*-rank-*.jsonl")):
        for line in lines.read_as(path, _Line):
            if line.attempt > newest.get(line.step, -1):
                newest[line.step], given[line.step] = line.attempt, []
            if line.attempt == newest[line.step]:
                given[line.step].append(line)
    return {step: _together(step, found) for step, found in sorted(given.items())}


def _together(step: int, found: list[_Line]) -> GlobalBatch:
    samples = normalize(r for f in found for r in f.samples)
    digest = sum(int(f.digest, 16) for f in found) % 2**64
    return GlobalBatch(
        step, found[0].epoch, samples, digest, len({f.rank for f in found}) == found[0].world_size
    )
