"""How fast a GPU's own memory is: a copy of a few gigabytes, bytes read and written together."""

from __future__ import annotations

import torch

from ..result import CheckResult, State

_BYTES = 2 << 30
_TIMES = 10
LEAST_SHARE = 0.6
"""A healthy card reaches 80 to 92 % of its datasheet's bandwidth with a plain copy."""
DATASHEET = {
    "H200": 4.8e12, "H100 80GB HBM3": 3.35e12, "H100 PCIe": 2.0e12, "H100 NVL": 3.9e12, "H800": 3.35e12, "A100-SXM4-80GB": 2.039e12,
    "A100-SXM4-40GB": 1.555e12, "A100 80GB PCIe": 1.935e12, "B200": 8.0e12, "L40S": 0.864e12, "V100-SXM2": 0.9e12,
}  # fmt: skip
"""Bytes per second by NVIDIA's datasheets; the first name that is part of the card's counts."""


def check_bandwidth(device: torch.device) -> CheckResult:
    """The median of several copies, against the datasheet of that card."""
    place, size = f"gpu {device.index or 0}", min(_BYTES, int(torch.cuda.mem_get_info(device)[0] * 0.3))
    a = torch.ones(size // 4, dtype=torch.float32, device=device)
    b = torch.empty_like(a)
    seconds = sorted(time_copies(lambda: b.copy_(a), device, _TIMES))[_TIMES // 2]
    return judge_rate(
        "memory bandwidth", 2 * size / seconds, find_expected(torch.cuda.get_device_name(device)), place
    )


def find_expected(name: str) -> float | None:
    """What a card of this name should reach; None where no figure is known."""
    return next((rate for known, rate in DATASHEET.items() if known in name), None)


def judge_rate(
    name: str, rate: float, expected: float | None, place: str, least: float = LEAST_SHARE
) -> CheckResult:
    """A rate in bytes per second, against what there should be."""
    text = f"{rate / 1e9:,.1f} GB/s"
    if expected is None:
        return CheckResult(
            name, State.NOT_CHECKED, f"{text}; what it should be is not known for this device", place
        )
    state = State.GOOD if rate >= least * expected else State.BAD
    return CheckResult(
        name,
        state,
        f"{text}, {rate / expected:.0%} of {expected / 1e9:,.0f}; {least:.0%} is the least",
        place,
    )


def time_copies(copy: object, device: torch.device, times: int) -> list[float]:
    """Seconds of each of so many copies, by the device's own events; two before them do not count."""
    found = []
    with torch.cuda.device(device):
        for i in range(times + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            copy()  # type: ignore[operator]
            end.record()
            end.synchronize()
            if i >= 2:
                found.append(begin.elapsed_time(end) / 1e3)
    return found
