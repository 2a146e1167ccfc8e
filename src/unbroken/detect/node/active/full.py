"""All active checks of a node: its GPUs at once, then host memory and disks, with the cards' settings before and after."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..counters import compare_counters, read_counters
from ..result import GPU_CHECK, CheckResult, State
from .bandwidth import check_bandwidth
from .bus import check_bus
from .disk import check_disk
from .memory import check_memory
from .products import check_products
from .settings import compare_settings, read_settings

_WHOLE = 1 << 62


@dataclass(frozen=True)
class FullCheck:
    """`folders` are written to. `seconds` is for everything; `host_bytes` of memory are tested. `meddle` are tests' own: called
    with what a check has written, by its name."""

    nvml: Any | None = None
    folders: Sequence[Path] = ()
    seconds: float = 55.0
    host_bytes: int = 1 << 30
    devices: Sequence[torch.device] | None = None
    meddle: Callable[[str, Any], object] = lambda check, written: None


def check_fully(c: FullCheck) -> list[CheckResult]:
    """What each check found, within about `seconds`; of those for which no time was left that they were not made."""
    began = time.monotonic()
    before, counted = read_settings(c.nvml), read_counters(c.nvml, up=True)
    devices = list(c.devices) if c.devices is not None else _find_devices()
    gpus = [d for d in devices if d.type == "cuda"]
    found: dict[int, list[CheckResult]] = {}
    threads = [
        threading.Thread(
            target=_check_into, args=(found, i, d, c, c.seconds * 0.55), daemon=True, name=GPU_CHECK
        )
        for i, d in enumerate(gpus)
    ]
    for t in threads:
        t.start()
    # Meanwhile what is not the GPUs'.
    host, rest = torch.device("cpu"), list[CheckResult]()
    for folder in c.folders:
        share = 0.3 / len(c.folders)
        rest.append(check_disk(folder, seconds=_left(c, began, share), after=lambda fd: c.meddle("disk", fd)))
    rest += _guard(
        "products",
        "cpu",
        lambda: check_products(host, _left(c, began, 0.2), lambda p: c.meddle("products", p)),
    )
    rest += _guard(
        "memory",
        "cpu",
        lambda: [check_memory(host, c.host_bytes, _left(c, began, 0.4), lambda b: c.meddle("memory", b))],
    )
    for t in threads:
        t.join(max(0.1, c.seconds - (time.monotonic() - began)))
    out: list[CheckResult] = []
    for i, (d, t) in enumerate(zip(gpus, threads, strict=True)):
        out += list(found.get(i, ()))
        if t.is_alive():
            out.append(_late(f"gpu {d.index or 0}", c.seconds))
    if not gpus:
        out.append(CheckResult("gpus", State.NOT_CHECKED, "torch sees no GPU here"))
    out += rest
    out += compare_settings(before, read_settings(c.nvml))
    return out + compare_counters(counted, read_counters(c.nvml))


def _check_into(
    found: dict[int, list[CheckResult]], i: int, device: torch.device, c: FullCheck, seconds: float
) -> None:
    """All of one GPU."""
    place, out = f"gpu {device.index or 0}", found.setdefault(i, [])
    with torch.cuda.device(device):
        for name, check in (
            ("bus", lambda: check_bus(device, c.nvml)),
            ("memory bandwidth", lambda: [check_bandwidth(device)]),
            (
                "memory",
                lambda: [check_memory(device, _WHOLE, seconds * 0.4, lambda b: c.meddle("gpu memory", b))],
            ),
            (
                "products",
                lambda: check_products(device, seconds * 0.5, lambda p: c.meddle("gpu products", p)),
            ),
        ):
            out += _guard(name, place, check)


def _guard(name: str, place: str, check: Callable[[], list[CheckResult]]) -> list[CheckResult]:
    """A check that cannot be made says so, and is never good; a driver's error while one is made is explicit."""
    try:
        return check()
    except torch.OutOfMemoryError as e:
        return [
            CheckResult(
                name, State.NOT_CHECKED, f"not enough memory is free: {str(e).splitlines()[0]}", place
            )
        ]
    except RuntimeError as e:
        bad = "CUDA error" in str(e) or "cuBLAS" in str(e) or "CUBLAS" in str(e)
        return [
            CheckResult(name, State.BAD if bad else State.NOT_CHECKED, str(e).splitlines()[0][:300], place)
        ]


def _find_devices() -> list[torch.device]:
    return [
        torch.device("cuda", i) for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    ]


def _left(c: FullCheck, began: float, share: float) -> float:
    return max(0.5, share * (c.seconds - (time.monotonic() - began)))


def _late(place: str, seconds: float) -> CheckResult:
    return CheckResult("full check", State.NOT_CHECKED, f"not at its end within {seconds:.0f} s", place)
