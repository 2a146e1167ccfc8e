"""Every error that a user can meet, and its exit code.

    UnbrokenError                      1   anything below
    ├── UsageError                     2   the command line or a config is wrong
    │   └── UnknownKey                 2   a key nobody knows; names the nearest one
    ├── InputError                     3   a file, folder or table that cannot be read or understood
    ├── MissingExtra                   4   an optional library is needed; names the extra to install
    ├── UnsafeFile                     5   a key file or private folder that others may use, or that others made
    ├── RunError                      10   `unbroken run`
    │   ├── RunStopped                10   the run ended by a verdict that a restart cannot help
    │   ├── RunInterrupted            11   stopped on request; the same command goes on
    │   ├── RunDirMismatch            12   the run directory belongs to another command line
    │   ├── RunInUse                  13   a live supervisor holds the run directory
    │   ├── DoesNotFit                14   more ranks, memory or disk than the machine has
    │   ├── LeaseExpired              15   this process lost its supervisor and must stop
    │   ├── ContractError             16   a file or message from a newer version of unbroken
    │   ├── RunDirLost                17   the run directory was deleted or moved while its run went on
    │   └── SilentCorruption          18   of a rank: its card does not agree with itself
    ├── CheckpointError               30   checkpoints
    │   ├── NoCheckpoint              30   nothing that verifies was found
    │   ├── CheckpointCorrupt         31   bytes differ from what the manifest promises
    │   ├── CheckpointTooNew          32   written by a newer version
    │   ├── UnsaveableState           33   a value in the state cannot be saved; names its key
    │   ├── StorageError              34   the disk or object store refused (full, read-only, unreachable)
    │   ├── NotDurable                35   closed before the last checkpoint was durable
    │   └── LayoutMismatch            36   the state asked for has other names, shapes or types
    ├── DiagnoseError                 25   `unbroken diagnose` (its verdicts use 20-23, see Exit)
    ├── TraceError                    40   `unbroken trace`, `unbroken telemetry`
    └── EvaluationError               50   `unbroken eval`
        ├── UnknownTask               51   a task that the harness does not have; names the nearest ones
        ├── DatasetMissing            52   a dataset that is not on this machine; said before a GPU is taken
        ├── ModelDoesNotLoad          53   the weights or the endpoint refused
        ├── NoRoomForModel            54   neither shared memory nor disk can hold the model
        ├── EvaluationInUse           55   a live coordinator holds the folder
        ├── EvaluationIncomplete      56   finished, but some tasks or samples have no score
        ├── ModelChanged              57   the bytes of the model differ from those hashed before
        └── OutOfMemory               58   a batch did not fit on the device, even with one sequence

A bug of ours ends with 70 and asks for a report. 130 is Ctrl-C before anything had started.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class UnbrokenError(Exception):
    """What happened, where, and what to do next, in one paragraph.

    `where` names the node, rank, path or step; `hint` is the next action, as an imperative sentence.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        parts = [self.message.rstrip(".")]
        if self.where:
            # A name with a line end in it must not write a line of its own.
            parts[0] += f" ({' '.join(self.where.splitlines())})"
        if self.hint:
            parts.append(self.hint.rstrip("."))
        text = ". ".join(parts)
        return text if text.endswith(("?", "!")) else text + "."

    def as_json(self) -> dict[str, object]:
        """The one error envelope of every `--json`: {"error": {...}}."""
        return {
            "error": {
                "kind": type(self).__name__,
                "what": self.message,
                "where": self.where,
                "todo": self.hint,
                "exit_code": self.exit_code,
            }
        }


class UsageError(UnbrokenError):
    """The command line or a configuration is wrong."""

    exit_code = 2


class UnknownKey(UsageError):
    """A key, or a name given as a value (`message` says of what), that nobody knows; the nearest is named."""

    def __init__(
        self, key: str, known: Iterable[str], *, where: str | None = None, what: str = "key"
    ) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
        hint = f"Did you mean '{near[0]}'?" if near else f"Known: {', '.join(names)}"
        super().__init__(f"unknown {what} '{key}'", where=where, hint=hint)
        self.key = key
        self.nearest = near[0] if near else None


class InputError(UnbrokenError):
    """A file, folder or table that cannot be read or understood."""

    exit_code = 3


class MissingExtra(UnbrokenError):
    """An optional library is not installed."""

    exit_code = 4

    def __init__(self, library: str, extra: str, *, what: str) -> None:
        from .extras import install_command

        super().__init__(
            f"{what} needs {library}, which is not installed",
            hint=f"Install it with: {install_command(extra)}",
        )


class UnsafeFile(UnbrokenError):
    """A key file or private folder that others may use, or that others made."""

    exit_code = 5


class RunError(UnbrokenError):
    """Something about a run."""

    exit_code = 10


class RunStopped(RunError):
    """The run ended by a verdict that a restart cannot help, or by an exhausted budget."""

    exit_code = 10


class RunInterrupted(RunError):
    """The run was stopped on request; the same command goes on."""

    exit_code = 11


class RunDirMismatch(RunError):
    """The run directory belongs to another command line."""

    exit_code = 12


class RunInUse(RunError):
    """A live supervisor holds the run directory."""

    exit_code = 13


class DoesNotFit(RunError):
    """More ranks, memory or disk was asked for than there is."""

    exit_code = 14


class LeaseExpired(RunError):
    """This process lost its supervisor for longer than its lease and must stop."""

    exit_code = 15


class ContractError(RunError):
    """A file or message written by a newer version, or by something else."""

    exit_code = 16


class RunDirLost(RunError):
    """The run directory was deleted or moved while its run went on; says what was saved where."""

    exit_code = 17


class SilentCorruption(RunError):
    """A step was computed again, and this rank did not get the same: its card, or its host, is suspect."""

    exit_code = 18


class CheckpointError(UnbrokenError):
    """Something about a checkpoint."""

    exit_code = 30


class NoCheckpoint(CheckpointError):
    """No checkpoint that verifies was found."""

    exit_code = 30


class CheckpointCorrupt(CheckpointError):
    """The bytes differ from what the manifest promises."""

    exit_code = 31


class CheckpointTooNew(CheckpointError):
    """The checkpoint was written by a newer version."""

    exit_code = 32


class UnsaveableState(CheckpointError):
    """A value in the state cannot be saved; `key` is its path."""

    exit_code = 33

    def __init__(self, key: str, why: str, *, hint: str | None = None) -> None:
        super().__init__(f"state '{key}' cannot be saved: {why}", hint=hint)
        self.key = key


class StorageError(CheckpointError):
    """The disk or object store refused."""

    exit_code = 34


class NotDurable(CheckpointError):
    """Closed before the last checkpoint was durable."""

    exit_code = 35


class LayoutMismatch(CheckpointError):
    """The state asked for has other names, shapes or types than the checkpoint."""

    exit_code = 36


class DiagnoseError(UnbrokenError):
    """`unbroken diagnose` could not do its work."""

    exit_code = 25


class TraceError(UnbrokenError):
    """`unbroken trace` or `unbroken telemetry` could not do its work."""

    exit_code = 40


class EvaluationError(UnbrokenError):
    """`unbroken eval` could not do its work."""

    exit_code = 50


class UnknownTask(EvaluationError):
    """A task that the harness does not have."""

    exit_code = 51

    def __init__(self, name: str, known: Iterable[str], *, where: str | None = None) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        hint = "Did you mean " + " or ".join(f"'{n}'" for n in near) + "?" if near else None
        if hint is None:
            hint = f"`unbroken eval tasks` lists the {len(names)} tasks of the harness" if names else None
        super().__init__(f"there is no task '{name}'", where=where, hint=hint)
        self.nearest = near


class DatasetMissing(EvaluationError):
    """A dataset that is not on this machine; said before a GPU is taken."""

    exit_code = 52


class ModelDoesNotLoad(EvaluationError):
    """The weights or the endpoint refused."""

    exit_code = 53


class NoRoomForModel(EvaluationError):
    """Neither shared memory nor disk can hold the model."""

    exit_code = 54


class EvaluationInUse(EvaluationError):
    """A live coordinator holds the folder."""

    exit_code = 55


class EvaluationIncomplete(EvaluationError):
    """The evaluation finished, but some tasks or samples have no score."""

    exit_code = 56


class ModelChanged(EvaluationError):
    """The bytes of the model differ from those hashed before."""

    exit_code = 57


class OutOfMemory(EvaluationError):
    """A batch did not fit on the device."""

    exit_code = 58


class Exit:
    """Exit codes that are answers, not errors."""

    OK = 0
    DIAGNOSED_RESTARTABLE = 20
    DIAGNOSED_NOT_RESTARTABLE = 21
    DIAGNOSED_UNKNOWN = 22
    DIAGNOSED_RUNNING = 23
    REHEARSAL_NOT_EXACT = 24
    VERIFY_FOUND_DAMAGE = 31
    CHECK_FOUND_FAULT = 26
    RANK_STOPPED_ON_REQUEST = 75
    INTERNAL = 70
    INTERRUPTED = 130


def unreadable(e: Exception) -> str:
    """Why a file could not be read as text or parsed, in words: not Python's, where those are about codecs."""
    if isinstance(e, UnicodeDecodeError):
        return "it is no text in UTF-8"
    return e.strerror or str(e) if isinstance(e, OSError) else str(e)
