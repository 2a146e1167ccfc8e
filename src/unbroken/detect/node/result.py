"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

GPU_CHECK = "the check of a gpu"
"""The name of threads that may hang in a driver."""


class State(StrEnum):
    """Bad is explicit: something was read that says so. What could not be read is not checked, and never good."""

    GOOD = "good"
    BAD = "bad"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class CheckResult:
    """One thing that was looked at. `text` says what was found, or why it was not checked; `device` is the GPU, interface or
    folder, "" for the node."""

    name: str
    state: State
    text: str
    device: str = ""
