"""A journal of the batches: which samples each step was given, and a digest of them. No torch.

loader = unbroken.data.wrap(loader, on_batch=unbroken.data.Journal())     # into the run's folder
read(folder)[12].digest == read(other_folder)[12].digest                  # step 12 of two runs, at any world sizes
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..progress import RunDir, attach
from ..progress.journal import decode, encode
from .position import Ranges, normalize

if TYPE_CHECKING:
    from .loading.loader import BatchRecord


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


class Journal:
    """Appends a line for each batch to a file of this rank: call it with BatchRecords.

    `folder` is by default `data` in the run's folder. Raises UsageError outside of a run without a folder. A line has a
    checksum, as in the run's journal; it is not synced to disk, which would hold the training up.
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
        self._fd: int | None = None

    def __call__(self, record: BatchRecord) -> None:
        """Writes one line."""
        if self._fd is None:
            self._fd = self._open(record.rank)
        os.write(self._fd, encode({"attempt": self._number, **record.as_json()}))

    def _open(self, rank: int) -> int:
        self._folder.mkdir(parents=True, exist_ok=True)
        number = self._attempt
        while True:  # outside of a run the attempts are counted by the files
            path = self._folder / f"attempt-{number:04d}-rank-{rank:05d}.jsonl"
            try:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
            except FileExistsError:
                number += 1
                continue
            self._number = number
            return fd


def read(folder: str | Path) -> dict[int, GlobalBatch]:
    """Of each step what it was given at last: a step that was made again after a failure counts as made again."""
    newest: dict[int, int] = {}
    lines: dict[int, list[dict[str, object]]] = {}
    for path in sorted(Path(folder).glob("attempt-*-rank-*.jsonl")):
        for line in path.read_bytes().splitlines(keepends=True):
            record = decode(line)
            if record is None:
                continue  # a torn last line
            step, attempt = int(record["step"]), int(record["attempt"])
            if attempt > newest.get(step, -1):
                newest[step], lines[step] = attempt, []
            if attempt == newest[step]:
                lines[step].append(record)
    return {step: _together(step, records) for step, records in sorted(lines.items())}


def _together(step: int, records: Iterable[dict[str, object]]) -> GlobalBatch:
    found = list(records)
    ranks = {r["rank"] for r in found}
    samples = normalize(r for f in found for r in f["samples"])  # type: ignore[attr-defined]
    digest = sum(int(str(f["digest"]), 16) for f in found) % 2**64
    return GlobalBatch(
        step, int(str(found[0]["epoch"])), samples, digest, len(ranks) == found[0]["world_size"]
    )
