"""Imported by Python processes that a task's preparation starts: what they open is told to it. See ../reads.py.

Whatever `sitecustomize` the machine has is imported after it.
"""

import importlib
import os
import sys


def _watch(spool: str) -> None:
    def on_event(event: str, args: tuple) -> None:
        if event not in ("open", "sqlite3.connect"):
            return
        try:
            path = args[0]
            mode, flags = args[1:3] if event == "open" else ("r", 0)
            writes = mode is None and flags & (os.O_WRONLY | os.O_RDWR)
            if isinstance(path, int) or writes or (mode and set(mode) & set("wxa")):
                return
            full = os.path.abspath(os.fsencode(path))
            if full != os.fsencode(spool):
                fd = os.open(spool, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                os.write(fd, full + b"\0")
                os.close(fd)
        except Exception:  # noqa: BLE001  the open itself must not fail for this
            pass

    sys.addaudithook(on_event)


if os.environ.get("UNBROKEN_READS"):
    _watch(os.environ["UNBROKEN_READS"])
_here = os.path.dirname(os.path.abspath(__file__))
_before = list(sys.path)
sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != _here]
_own = sys.modules.pop("sitecustomize", None)
try:
    importlib.import_module("sitecustomize")
except ImportError:
    pass
finally:
    sys.path[:] = _before
    if _own is not None:
        sys.modules.setdefault("sitecustomize", _own)
