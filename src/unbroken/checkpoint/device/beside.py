"""Threads of ours beside a trainer that captures a CUDA graph.

While one thread captures, the driver forbids all others what might be meant for the graph, such as asking for an event
or registering memory, and whoever does it ends the capture with an error (pytorch#104487). A thread may say that it is
not concerned.
"""

from __future__ import annotations

import ctypes

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


def beside_captures() -> None:
    """Says so for the calling thread, for good. Does nothing where there is no driver."""
    mode = ctypes.c_int(_THREAD_LOCAL)
    try:
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    except (OSError, AttributeError):
        return
