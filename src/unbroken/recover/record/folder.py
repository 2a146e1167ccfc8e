"""The record in the run directory itself: in a folder that other hosts share, or on the supervisor's own disk."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from ...progress import JournalText, JournalWriter, RunDir, Term, claim, newest_term, read_journal, read_terms
from ...progress.journal import sealable

_SHARED = (
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "glusterfs", "afs", "pvfs2", "wekafs", "9p",
    "virtiofs", "panfs", "fuse",
)  # fmt: skip
"""Kinds of file systems that other hosts have too; "fuse" with whatever stands behind it."""


class FolderRecord:
    """`shared`: other hosts have this folder too, so that one of them can take over."""

    slow = False

    def __init__(self, run_dir: RunDir, *, shared: bool) -> None:
        self._run_dir, self.shared = run_dir, shared
        self.where = str(run_dir.path)

    def check(self) -> None:
        """The run directory is checked anyway, before anything starts."""

    def describe(self) -> str:
        if self.shared:
            return "its record lies in the run directory, from which another host can take over"
        return (
            f"its record lies on the own disk of {socket.gethostname()}: losing this host ends the run, its checkpoints "
            "stay where they are"
        )

    def fetch_spec(self) -> None:
        """It is there."""

    def share_spec(self, run_id: str) -> None:
        """It is there."""

    def keep_spec(self) -> None:
        """It is there."""

    def newest(self) -> int:
        return newest_term(self._run_dir)

    def terms(self) -> list[Term]:
        return read_terms(self._run_dir)

    def seal(self, terms: list[Term]) -> dict[str, int]:
        return sealable(self._run_dir, terms)

    def claim(self, number: int, *, run_id: str, address: str, sealed: dict[str, int]) -> Term | None:
        return claim(self._run_dir, number, run_id=run_id, address=address, sealed=sealed)

    def read(self) -> JournalText:
        return read_journal(self._run_dir)

    def open(self, term: Term, clock: Callable[[], float]) -> JournalWriter:
        return JournalWriter(self._run_dir, term.number, clock)


def is_shared(path: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Whether the path lies on a kind of file system that other hosts have too, as far as its kind says."""
    best, kind = -1, ""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    for line in lines:
        words = line.split(" ")
        if len(words) < 3:
            continue
        at = Path(words[1].replace("\\040", " "))
        if path.is_relative_to(at) and len(at.parts) > best:
            best, kind = len(at.parts), words[2]
    return kind.split(".")[0] in _SHARED
