"""A card's settings before and after it was tested: a test that changes them would be the cause of a slowdown later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..result import CheckResult, State

_ASKED: dict[str, Callable[[Any, Any], object]] = {
    "persistence mode": lambda n, h: n.nvmlDeviceGetPersistenceMode(h),
    "compute mode": lambda n, h: n.nvmlDeviceGetComputeMode(h),
    "power limit, mW": lambda n, h: n.nvmlDeviceGetPowerManagementLimit(h),
    "application clock, MHz": lambda n, h: n.nvmlDeviceGetApplicationsClock(h, n.NVML_CLOCK_SM),
    "most SM clock, MHz": lambda n, h: n.nvmlDeviceGetMaxClockInfo(h, n.NVML_CLOCK_SM),
    "ECC": lambda n, h: tuple(n.nvmlDeviceGetEccMode(h)),
    "MIG": lambda n, h: tuple(n.nvmlDeviceGetMigMode(h)),
}


def read_settings(nvml: Any | None) -> dict[str, dict[str, str]]:
    """By GPU, whatever of it the driver says: nothing without NVML."""
    if nvml is None:
        return {}
    found: dict[str, dict[str, str]] = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        mine = found[f"gpu {index}"] = {}
        for name, ask in _ASKED.items():
            try:
                mine[name] = str(ask(nvml, handle))
            except (nvml.NVMLError, AttributeError):
                continue
    return found


def compare_settings(
    before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]
) -> list[CheckResult]:
    """One result a GPU."""
    if not before:
        return [CheckResult("settings", State.NOT_CHECKED, "without NVML they cannot be read")]
    found = []
    for gpu, mine in before.items():
        now = after.get(gpu, {})
        changed = [f"{k} was {v} and is {now.get(k)}" for k, v in mine.items() if now.get(k) != v]
        if changed:
            found.append(CheckResult("settings", State.BAD, f"after the test {'; '.join(changed)}", gpu))
        else:
            found.append(CheckResult("settings", State.GOOD, f"{len(mine)} are as before the test", gpu))
    return found
