"""How fast a GPU is reached from the host: copies from and to pinned memory, against the link that both could have."""

from __future__ import annotations

from typing import Any

import torch

from ..result import CheckResult, State
from .bandwidth import judge_rate, time_copies

_BYTES = 256 << 20
_TIMES = 5
_LEAST = 0.5
_PER_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9}
"""Bytes per second and lane by PCIe generation (PCI-SIG), after encoding."""


def check_bus(device: torch.device, nvml: Any | None = None) -> list[CheckResult]:
    """Both directions."""
    host = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True).fill_(1)
    card = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    expected = find_expected(nvml, device.index or 0)
    place, found = f"gpu {device.index or 0}", []
    for name, copy in (
        ("from the host", lambda: card.copy_(host, non_blocking=True)),
        ("to the host", lambda: host.copy_(card, non_blocking=True)),
    ):
        seconds = sorted(time_copies(copy, device, _TIMES))[_TIMES // 2]
        found.append(judge_rate(f"bus {name}", _BYTES / seconds, expected, place, _LEAST))
    if not torch.equal(card.cpu(), host):
        found.append(CheckResult("bus", State.BAD, "what was copied there and back is not the same", place))
    return found


def find_expected(nvml: Any | None, index: int) -> float | None:
    """The bandwidth of the widest and newest link that card and host agree on; None where NVML does not say."""
    if nvml is None:
        return None
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        generation = int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
        return _PER_LANE[generation] * int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
    except (nvml.NVMLError, AttributeError, KeyError):
        return None
