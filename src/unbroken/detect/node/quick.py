"""All quick checks at once, each within the deadline: one that hangs (a file system that is gone) holds up no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .clock import check_clock
from .files import check_folder, check_shared_memory
from .gpus import check_gpus
from .kernel import check_kernel_log
from .network import check_network
from .result import CheckResult, State


@dataclass(frozen=True)
class CheckedNode:
    """What is looked at. `nvml` is the `pynvml` module or its fake, None where it cannot be had, which `no_nvml` explains;
    `interfaces` have to be up; `folders` have to take bytes."""

    nvml: Any | None = None
    no_nvml: str = ""
    interfaces: Sequence[str] = ()
    folders: Sequence[Path] = ()
    kernel_log: str = "/dev/kmsg"
    shared_memory: Path = Path("/dev/shm")
    root: Path = Path("/")


def check_node(around: CheckedNode, within_s: float = 5.0) -> list[CheckResult]:
    """What each check found; of one that does not end in time that it did not."""
    checks: list[tuple[str, str, Callable[[], list[CheckResult]]]] = [
        ("gpus", "", lambda: check_gpus(around.nvml, around.no_nvml)),
        ("kernel log", "", lambda: check_kernel_log(around.kernel_log)),
        ("clock", "", lambda: [check_clock()]),
        ("network", "", lambda: check_network(around.interfaces, around.root)),
        ("shared memory", str(around.shared_memory), lambda: [check_shared_memory(around.shared_memory)]),
    ]
    for folder in around.folders:
        checks.append(("folder", str(folder), lambda f=folder: [check_folder(f)]))  # type: ignore[misc]
    found: dict[int, list[CheckResult]] = {}

    def run(i: int, check: Callable[[], list[CheckResult]]) -> None:
        try:
            found[i] = check()
        except Exception as e:  # noqa: BLE001  a check that cannot be made says so, and is never good
            found[i] = [
                CheckResult(checks[i][0], State.NOT_CHECKED, f"{type(e).__name__}: {e}", checks[i][1])
            ]

    threads = [threading.Thread(target=run, args=(i, c[2]), daemon=True) for i, c in enumerate(checks)]
    for t in threads:
        t.start()
    until = time.monotonic() + within_s
    for t in threads:
        t.join(max(0.0, until - time.monotonic()))
    out = []
    for i, (name, device, _) in enumerate(checks):
        # A file system that does not answer is at fault; a driver that takes long may only be busy.
        state = State.BAD if name == "folder" else State.NOT_CHECKED
        out += found.get(i) or [CheckResult(name, state, f"no answer within {within_s:g} s", device)]
    return out
