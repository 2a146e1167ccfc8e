"""The keepers of virtual nodes as the supervisor asks them, and the storage that they write to.

What is saved at an end lies in the run's folder as a checkpoint that counts, with files that are empty: the supervisor finds it there
and offers it to the next attempt, as it does with real ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ...checkpoint.format.manifest import (
    COMMITTED,
    MANIFEST,
    Committed,
    Manifest,
    PartRecord,
    data_name,
    part_name,
)
from ...checkpoint.format.position import Position
from ...cluster.contract import AgentCommand
from ...link.bounds import Message
from ...link.runs import pack
from ...progress import RunDir

Snapshots = dict[tuple[int, int], set[int]]


@dataclass
class FakeStorage:
    """Takes shares of snapshots; a checkpoint counts once that of each rank is there. `refuses` is why it takes none just now."""

    refuses: str = ""
    shares: Snapshots = field(default_factory=dict)

    def write(self, folder: Path, attempt: int, step: int, ranks: set[int], world_size: int) -> None:
        """Takes these ranks' shares."""
        there = self.shares.setdefault((attempt, step), set())
        there |= ranks
        if len(there) == world_size:
            _commit(folder, attempt, step)


def _commit(folder: Path, attempt: int, step: int) -> None:
    parts = (PartRecord("", 0),)
    manifest = Manifest("simulated", attempt, step, 1, {}, {}, parts, Position(0, ()), {}, {}, 0.0)
    place = folder / manifest.name
    place.mkdir(parents=True, exist_ok=True)
    files = {
        part_name(0): b"",
        data_name(0): b"",
        MANIFEST: manifest.encoded,
        COMMITTED: Committed.of(manifest).encoded,
    }
    for name, content in files.items():
        (place / name).write_bytes(content)


def list_snapshots(snapshots: Snapshots, world_size: int) -> Message:
    """The inventory of a keeper that holds these."""
    return {
        "runs": [
            [a, s, world_size, False, False, len(ranks) << 30, pack(ranks)]
            for (a, s), ranks in sorted(snapshots.items())
        ]
    }


def flush(
    snapshots: Snapshots, request: Message, command: AgentCommand, world_size: int, storage: FakeStorage
) -> Message:
    """Writes what such a keeper has of a snapshot to where the run keeps its checkpoints whose agent was started so."""
    attempt, step = request["mark"]
    ranks = snapshots.get((attempt, step), set()) & set(request["ranks"])
    if not ranks:
        return {"step": None}
    if storage.refuses:
        return {"ok": False, "what": f"step {step} could not be made durable: {storage.refuses}"}
    arguments = dict(zip(command.arguments[::2], command.arguments[1::2], strict=False))
    storage.write(RunDir(Path(arguments["--run-dir"])).checkpoints, attempt, step, ranks, world_size)
    return {"step": step, "attempt": attempt}
