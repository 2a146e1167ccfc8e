"""Whether the kernel says that the node's clock is kept right by somebody (adjtimex(2))."""

from __future__ import annotations

import ctypes
import struct

from .result import CheckResult, State

_UNSYNCHRONISED = 0x0040  # STA_UNSYNC, linux/timex.h
_SIZE = 256


def check_clock() -> CheckResult:
    """Read only. One that nobody keeps is no fault of the hardware, so it is told as not checked."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        data = ctypes.create_string_buffer(_SIZE)
        answer = libc.adjtimex(data)
    except (OSError, AttributeError) as e:
        return CheckResult("clock", State.NOT_CHECKED, f"adjtimex cannot be asked: {e}")
    if answer < 0:
        return CheckResult("clock", State.NOT_CHECKED, f"adjtimex refuses (error {ctypes.get_errno()})")
    # struct timex on 64-bit Linux: int modes, then long offset, freq, maxerror, esterror, int status.
    most, _, status = struct.unpack_from("=qqi", data, 24)
    if status & _UNSYNCHRONISED:
        return CheckResult("clock", State.NOT_CHECKED, "the kernel knows of nobody that keeps it right")
    return CheckResult("clock", State.GOOD, f"kept right, within {most / 1e3:,.1f} ms")
