"""What a worker imports and makes ready before it is needed, beside the fetch of the model."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence

from ...suite.registry import get_backend


def stand_by(backend: str, gpus: Sequence[int]) -> None:
    """Imports what this backend needs, makes the devices ready beside that when asked to ("device"), and waits for "go".

    Ends the process if nobody will send it.
    """
    orders = os.dup(0)  # whatever is imported may do with the standard input as it likes
    devices = threading.Thread(target=_warm, args=(backend, "warm_devices", gpus), daemon=True)
    go = threading.Event()

    def listen() -> None:
        with os.fdopen(orders) as lines:
            for line in lines:
                if line == "device\n":
                    devices.start()
                elif line == "go\n":
                    go.set()
                    return
        os._exit(0)  # the coordinator is gone, and what is being imported may hang

    threading.Thread(target=listen, daemon=True).start()
    _warm(backend, "warm")
    go.wait()
    if devices.ident is not None:
        devices.join()


def get_ready(backend: str, gpus: Sequence[int]) -> None:
    """Imports what this backend needs, then makes the devices ready."""
    _warm(backend, "warm")
    _warm(backend, "warm_devices", gpus)


def count_uncompiled() -> int:
    """Imported modules whose bytecode is kept nowhere, so that every start compiles them.

    0 where `compileall` as it is advised would not help: it writes beside the sources, and for no -O.
    """
    if sys.flags.optimize or sys.pycache_prefix:
        return 0
    specs = [getattr(m, "__spec__", None) for m in list(sys.modules.values())]
    return sum(
        1
        for s in specs
        if s is not None and s.has_location and (s.origin or "").endswith(".py")
        and s.cached and not os.path.exists(s.cached)
    )  # fmt: skip


def log(text: str) -> None:
    """Writes a line to the worker's log; one write, so that the lines of two threads stay apart."""
    sys.stderr.write(f"unbroken eval worker: {text}\n")


def short(e: BaseException) -> str:
    """The error's text in one line of at most 600 characters."""
    text = " ".join(str(e).split())
    return text if len(text) <= 600 else text[:600] + " ..."


def _warm(backend: str, what: str, *arguments: object) -> None:
    began = time.monotonic()
    try:
        method = getattr(get_backend(backend), what, None)
        if method is not None:
            method(*arguments)
    except (Exception, SystemExit) as e:  # noqa: BLE001  whatever is missing is reported when the model is loaded
        log(f"{what}: {type(e).__name__}: {short(e)}")
    log(f"{what} took {time.monotonic() - began:.1f} s")
