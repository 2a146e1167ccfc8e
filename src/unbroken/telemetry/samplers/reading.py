"""What a sampler yields: readings in the metrics of `unbroken.samples.schema`, without their time and node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Reading(NamedTuple):
    """One value of one metric. `gpu` is an index, `device` a NIC, disk or port; None where neither applies."""

    gpu: int | None
    device: str | None
    metric: str
    value: float


@dataclass(frozen=True)
class Coverage:
    """What a sampler can read here, and what it cannot and why."""

    metrics: tuple[str, ...]
    missing: tuple[tuple[str, str], ...]
    """(metric, reason), once for each metric."""


class Sampler(Protocol):
    """Reads some hardware. Never raises for a value that is absent: it is then not among the readings."""

    def coverage(self) -> Coverage:
        """What can be read here."""

    def read(self, now: float) -> list[Reading]:
        """The readings of this moment; `now` is monotonic, in seconds. Rates are means since the call before."""

    def close(self) -> None:
        """Lets go of the hardware."""
