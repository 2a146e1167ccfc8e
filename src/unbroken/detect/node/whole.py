"""One node checked as the command line asks, as plain data: what travels from a node to who compares nodes."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...errors import InputError, MissingExtra
from .quick import CheckedNode, check_node
from .result import GPU_CHECK, CheckResult, State
from .versions import read_versions

FULL_S = 56.0
"""Of the minute that a full check may take: the interpreter starts and ends besides."""
_AFTER_S, _LEAST_S = 2.0, 5.0
"""For the quick checks after it; and what the active ones have at least, however long the start took."""


@dataclass(frozen=True)
class NodeReport:
    """`fit`: nothing was found bad, which is not the same as healthy."""

    checks: tuple[CheckResult, ...]
    versions: dict[str, str]

    @property
    def fit(self) -> bool:
        return not any(c.state is State.BAD for c in self.checks)

    def as_json(self) -> dict[str, Any]:
        """The JSON of `unbroken check --json`."""
        return {"fit": self.fit, "checks": [asdict(c) for c in self.checks], "versions": self.versions}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> NodeReport:
        """Reads `as_json`. Raises KeyError, TypeError or ValueError for anything else."""
        checks = tuple(
            CheckResult(str(c["name"]), State(c["state"]), str(c["text"]), str(c["device"]))
            for c in value["checks"]
        )
        return cls(checks, {str(k): str(v) for k, v in value["versions"].items()})


def check_this_node(
    *,
    full: bool = False,
    interfaces: Sequence[str] = (),
    folders: Sequence[Path] = (),
    within_s: float = 5.0,
    full_s: float = FULL_S,
) -> NodeReport:
    """The quick checks, and the active ones where `full` asks for them: all of it, with the import of torch, within about `full_s`.
    Raises MissingExtra for the active ones without torch."""
    until = time.monotonic() + full_s
    nvml, why = open_nvml()
    found = list(check_node(CheckedNode(nvml, why, interfaces, folders), within_s))
    if full:
        try:
            from .active.full import FullCheck, check_fully
        except ImportError as e:
            raise MissingExtra("torch", "train", what="a full check") from e
        seconds = max(_LEAST_S, until - _AFTER_S - time.monotonic())
        found += check_fully(FullCheck(nvml, folders or (Path.cwd(),), seconds))
        after = check_node(CheckedNode(nvml, why), min(within_s, _AFTER_S))
        found += [c for c in after if c.state is State.BAD and c not in found]
    return NodeReport(tuple(found), read_versions(nvml))


def leave(code: int) -> None:
    """Ends this process where the check of a GPU still hangs in its driver: an ordinary end would abort. Else does nothing."""
    if any(t.name == GPU_CHECK for t in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def open_nvml() -> tuple[Any | None, str]:
    """NVML, or why there is none."""
    from ...telemetry.samplers.gpu import load_nvml

    try:
        return load_nvml(), ""
    except (MissingExtra, InputError) as e:
        return None, e.message
