"""What a `Checkpointer` is told, checked and grouped by who needs it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..errors import UsageError
from ..units import Bytes, Duration

AUTO = "auto"


@dataclass(frozen=True)
class IntervalOptions:
    """Steps from one snapshot to the next, and from one checkpoint on disk to the next; or "auto"."""

    snapshot: int | str = AUTO
    persist: int | str = AUTO

    def __post_init__(self) -> None:
        for name, value in (("snapshot_every", self.snapshot), ("persist_every", self.persist)):
            if value != AUTO:
                check_count(name, value)

    @property
    def automatic(self) -> bool:
        """Whether one of them follows from measurements."""
        return AUTO in (self.snapshot, self.persist)


@dataclass(frozen=True)
class KeeperOptions:
    """What the keeper is asked for: which checkpoints stay, and where copies go."""

    keep: int = 3
    keep_every: int = 0
    remote: str | None = None
    peer: bool = False

    def __post_init__(self) -> None:
        check_count("keep", self.keep)

    def as_json(self) -> dict[str, Any]:
        """As the keeper reads them."""
        return asdict(self)


@dataclass(frozen=True)
class MemoryOptions:
    """The buffers of a rank, and a keeper that it starts itself. `budget` is in bytes; None: a share of the machine."""

    budget: int | None = None
    buffers: int = 3
    when_busy: str = "wait"
    room_s: float = 600.0
    """How long the last save waits for a storage that refuses it."""

    def __post_init__(self) -> None:
        if self.when_busy not in ("wait", "skip"):
            raise UsageError(f"when_busy must be 'wait' or 'skip', not {self.when_busy!r}")


@dataclass(frozen=True)
class CopyOptions:
    """Copies from the live state. `throttle` is in bytes per second."""

    fenced: bool = False
    throttle: float | None = None
    device_copy: bool | str = AUTO


@dataclass(frozen=True)
class RestoreOptions:
    """Whether checksums are compared, and whether all names must be there."""

    verify: bool = True
    strict: bool = True


@dataclass(frozen=True)
class Options:
    """All of them."""

    intervals: IntervalOptions
    keeper: KeeperOptions
    memory: MemoryOptions
    copies: CopyOptions
    restore: RestoreOptions


def check_count(name: str, value: object) -> None:
    """Raises UsageError unless this is a whole number from 1 up."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{name} must be a whole number from 1 up, not {value!r}")


def budget_of(memory: str | int | None) -> int | None:
    """Such as "64GiB" in bytes. Raises UsageError."""
    return None if memory is None else int(Bytes(memory))


def rate_of(throttle: str | int | None) -> float | None:
    """Such as "20GB" in bytes per second. Raises UsageError."""
    return None if throttle is None else float(Bytes(throttle))


def seconds_of(duration: str | float) -> float:
    """Such as "10m" in seconds. Raises UsageError."""
    return float(Duration(duration))
