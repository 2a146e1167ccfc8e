"""What a record can do, wherever it lies.

terms      who supervised, in order. A number is claimed by one supervisor only
journal    what happened in a term, in order; only who claimed the term appends. Accepted checkpoints are in it
sealed     what a term counts of those before it, fixed in its claim: what is added there later never counts
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ...errors import RunInUse
from ...progress import JournalText, Term


class Superseded(RunInUse):
    """Another supervisor claimed a higher term, while this one did not run."""


class RunJournal(Protocol):
    """One term's journal. Where it is `slow` an append takes the time of a network, and is called from a thread."""

    slow: bool
    term: int

    def append(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Writes one record and returns it; it is durable then. Raises OSError where it could not be written, which must
        not be acted on; Superseded where a successor has closed this journal."""

    def close(self) -> None: ...


class Record(Protocol):
    """One run's record. Methods of a `slow` one take the time of a network."""

    where: str
    slow: bool

    def check(self) -> None:
        """Raises StorageError unless it is safe to keep a record here."""

    def describe(self) -> str:
        """What the loss of the supervisor's host means with it, in words; said before the start."""

    def fetch_spec(self) -> None:
        """Brings run.toml into a run directory that has none. Raises OSError, StorageError."""

    def share_spec(self, run_id: str) -> None:
        """Keeps run.toml with the record of a run that begins. Raises RunDirMismatch where another run has it, StorageError."""

    def keep_spec(self) -> None:
        """Keeps settings that were changed. Raises StorageError."""

    def newest(self) -> int:
        """The highest term's number, 0 where there is none. Raises OSError, StorageError."""

    def terms(self) -> list[Term]:
        """All terms, oldest first. Raises ContractError, OSError, StorageError."""

    def seal(self, terms: list[Term]) -> dict[str, int]:
        """How much of each term's journal counts from now on, for a claim. Nothing that the last one adds later counts."""

    def claim(self, number: int, *, run_id: str, address: str, sealed: dict[str, int]) -> Term | None:
        """Claims a term; None where somebody else has it."""

    def read(self) -> JournalText:
        """Every record that counts, over all terms, in order."""

    def open(self, term: Term, clock: Callable[[], float]) -> RunJournal:
        """The journal of a term that was claimed."""
