"""XID events of the NVIDIA driver in the kernel's log that a GPU does not get over by itself."""

from __future__ import annotations

import contextlib
import os
import re
import time

from ...machine import read_kernel_log
from .result import CheckResult, State

_PLACE = "/dev/kmsg"
_WITHIN_S = 2.0
_LATELY_S = 24 * 3600.0
_XID = re.compile(rb"^\d+,\d+,(\d+),.*?NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)", re.S)
FATAL = {
    48: "uncorrected memory error", 62: "internal micro-controller halt", 64: "row remapping failed", 74: "NVLink error",
    79: "the GPU has fallen off the bus", 95: "uncontained memory error", 119: "GSP time-out", 120: "GSP error",
}  # fmt: skip
"""Those after which NVIDIA's XID catalogue asks for a reset or a repair."""


def check_kernel_log(place: str = _PLACE) -> list[CheckResult]:
    """What the log, as far as the ring still holds it, says of the last day."""
    try:
        log = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        return [CheckResult("kernel log", State.NOT_CHECKED, f"{place} cannot be read: {e.strerror}")]
    found: dict[tuple[str, int], float] = {}
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    try:
        for record in read_kernel_log(log, _WITHIN_S):
            for line in (record or b"").splitlines():
                if (m := _XID.match(line)) and int(m[3]) in FATAL:
                    found[m[2].decode(), int(m[3])] = now - int(m[1]) / 1e6
    except TimeoutError as e:
        return [CheckResult("kernel log", State.NOT_CHECKED, str(e))]
    except OSError as e:
        return [CheckResult("kernel log", State.NOT_CHECKED, f"{place} cannot be read: {e.strerror}")]
    finally:
        with contextlib.suppress(OSError):
            os.close(log)
    lately = {key: ago for key, ago in found.items() if ago < _LATELY_S}
    return [
        CheckResult("xid", State.BAD, f"XID {xid}, {max(0, ago) / 60:.0f} minutes ago: {FATAL[xid]}", bus)
        for (bus, xid), ago in sorted(lately.items())
    ] or [CheckResult("kernel log", State.GOOD, "no XID of the last day that needs a reset or a repair")]
