"""Counters of errors that NVLinks, InfiniBand ports and interfaces have kept since their driver was loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...telemetry.samplers.links import link_counters
from .result import CheckResult, State

_PORT = ("link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors", "local_link_integrity_errors")  # fmt: skip
_INTERFACE = ("rx_errors", "tx_errors", "rx_crc_errors")
_LOST_LINK = ("recoveries", "link_downed", "link_error_recovery")
"""A link that lost its partner and was trained again: rare on sound hardware. The others are repaired by the link itself, and some are
expected: their number says nothing."""

Counts = Mapping[str, int]
Counters = Mapping[tuple[str, str], Counts]
"""By (name of the check, device), each error's count."""


def count_port_errors(folder: Path) -> Counts:
    """Of an InfiniBand port's folder in /sys, what is there."""
    return _read_all(folder / "counters", _PORT)


def count_interface_errors(folder: Path) -> Counts:
    """Of an interface's folder in /sys, what is there."""
    return _read_all(folder / "statistics", _INTERFACE)


def count_link_errors(nvml: Any, handle: Any) -> Counts:
    """Of one GPU's NVLinks together; empty where the driver says nothing."""
    read = link_counters(nvml, handle)
    found = read() if read is not None else []
    return {n.removeprefix("nvlink_").removesuffix("_total"): int(v) for n, v in found}


def read_counters(nvml: Any | None, root: Path = Path("/"), *, up: bool = False) -> Counters:
    """All of this node; with `up` without ports that carry nothing now: what those count says nothing of the node."""
    found: dict[tuple[str, str], Counts] = {}
    for index in range(nvml.nvmlDeviceGetCount() if nvml is not None else 0):
        try:
            found["nvlink", f"gpu {index}"] = count_link_errors(nvml, nvml.nvmlDeviceGetHandleByIndex(index))  # type: ignore[union-attr]
        except (nvml.NVMLError, AttributeError):  # type: ignore[union-attr]
            continue
    for p in sorted(root.glob("sys/class/net/*")):
        if (p / "device").exists():
            found["network", p.name] = count_interface_errors(p)
    for p in sorted(root.glob("sys/class/infiniband/*/ports/*")):
        if not up or _is_active(p):
            found["network", f"{p.parent.parent.name}/{p.name}"] = count_port_errors(p)
    return found


def describe_counts(counts: Counts) -> str:
    """What is to be said of them behind something else; "" where nothing was counted."""
    seen = [f"{n} {name.replace('_', ' ')}" for name, n in counts.items() if n]
    return f"; {', '.join(seen)} since the driver was loaded" if seen else ""


def compare_counters(before: Counters, after: Counters) -> list[CheckResult]:
    """What rose while the devices were made to work: bad where a link was lost, else said. One result a device that was read."""
    found = []
    for (name, device), mine in before.items():
        now = after.get((name, device), {})
        risen = {k: now[k] - v for k, v in mine.items() if now.get(k, v) > v}
        if not mine:
            continue
        bad = any(k in _LOST_LINK for k in risen)
        text = ", ".join(f"{n} {k.replace('_', ' ')}" for k, n in risen.items())
        state = State.BAD if bad else State.GOOD
        text = f"while it was tested: {text}" if risen else "no error was counted while it was tested"
        found.append(CheckResult(f"{name} errors", state, text, device))
    return found


def _is_active(port: Path) -> bool:
    try:
        return "ACTIVE" in (port / "state").read_text()
    except OSError:
        return False


def _read_all(folder: Path, names: tuple[str, ...]) -> Counts:
    found = {}
    for name in names:
        try:
            found[name] = int((folder / name).read_text())
        except (OSError, ValueError):
            continue
    return found
