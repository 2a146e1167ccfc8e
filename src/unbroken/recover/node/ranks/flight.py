"""NCCL's flight recorder in a rank with GPUs: it is asked for a dump from outside, while the rank hangs.

PyTorch makes a named pipe for each rank and writes a dump beside the rank's log whenever anything comes through it, from a thread of its
own: no debugger, no signal, no time-out of NCCL has to pass. Source: "PYTORCH ProcessGroupNCCL Environment Variables", PyTorch
documentation (TORCH_NCCL_DEBUG_INFO_PIPE_FILE, TORCH_NCCL_DEBUG_INFO_TEMP_FILE, TORCH_NCCL_TRACE_BUFFER_SIZE).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_ENTRIES = "2000"
"""Of the newest collectives so many are kept: some hundred bytes each."""


def record_flight(log: Path, pages: Path, attempt: int) -> dict[str, str]:
    """The variables that turn it on, unless the user has said where dumps go or that there be none."""
    env = {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": _ENTRIES,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(log.parent / "flight-rank-"),
        _PIPE: str(pages / f"nccl.a{attempt:04d}-"),
    }
    theirs = ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", *env)
    return {} if any(name in os.environ for name in theirs) else env


def ask_for_dump(env: Mapping[str, str], rank: int) -> bool:
    """Asks a rank with this environment for a dump, and waits for nothing; False where nobody listens."""
    if not (stem := env.get(_PIPE)):
        return False
    try:
        pipe = os.open(f"{stem}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        with contextlib.suppress(OSError):
            return os.write(pipe, b"1\n") > 0
        return False
    finally:
        os.close(pipe)


def remove_pipes(pages: Path, rank: int) -> None:
    """Removes those of a rank's earlier attempts."""
    for old in pages.glob(f"nccl.a*-{rank}.pipe"):
        old.unlink(missing_ok=True)
