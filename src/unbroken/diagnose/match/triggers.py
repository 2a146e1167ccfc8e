"""Which lines are looked at: those with one of a list of words, found at hundreds of megabytes a second.

A line without any of these words can be no event; a test holds that every rule's example has one.
"""

from __future__ import annotations

import bisect
import re
from dataclasses import dataclass
from typing import Any

WORDS = (
    "rror", "ERROR", "xception", "Traceback", "fail", "Fail", "FAIL", "atal", "FATAL", "Xid", "kill", "Kill", "OOM", "oom",
    "ut of memory", "bort", "SIG", "ignal ", "imeout", "imed out", "time-out", "TIME", "CANCEL", "cancel", "ancelled",
    "onnection", "refused", "unreachable", "panic", "egfault", "egmentation", "core dumped", "us error", "No space",
    "No such", "no such", "denied", "quota", "tale ", "% used", "disk full", "ECC", "VLink", "vlink", "NCCL WARN", "nranks",
    "nodelist", "NODELIST", "NodeList", " nodes=", "hosts=", "world size", "world_size", "WORLD_SIZE", "exitcode", "xit code", "ExitCode", "COMPLETED",
    "omplete", "inished", "PREEMPT", "reempt", "estart", "esumed", "unrecognized", "No module", "undefined symbol",
    "not found", "usage:", "hung", "hang", "stuck", "stall", "no step", "no progress", "DOWN", "drain", "reboot",
    "responding", "erminat", "spike", "diverg", "atchdog", "SlowDown", "hrottl", "mce:", "util=0%", "util=", "NaN", ": nan", "=nan", "= nan",
    ": inf", "=inf", "what()", "WARN", "ink down", "ink Down", "ink is Down", "vict", "NotReady", "lost", "Lost", "KeyboardInterrupt", "Bootstrap",
    "per_node", "per-node", "PER_NODE", "ninja", "nvcc", "o such option", "Missing ", "overheat", "hermal", "aking the entire",
    "Input/output", "Read-only", "Too many open", "Transport endpoint", "Address already", "EADDRINUSE", "recvValue", "gloo", "ibv_", "NET/IB",
    "does not", "handled", "recovered", "Detected", "Invalid value", "can't ", "Could not", "not override", "NODE", "Expected", "halted", "Segfault", "shutting down", "shutdown", "norm above", "norm over", "norm exceed", "guard", "xiting", "issing rank", "not entered", "not joined", "low on resource", "ink up", "ink Up", "ink is Up", "marked dead", "roken pipe", "disconnect",
    "^C", "^Z", "^\\", "Quit", "trl", "xits success", "Stopped", "uspended", "nterrupt", "SystemExit", "GeneratorExit", "access fault", "HW Exception", "HSA_", "amdgpu", "EXHAUSTED", "Hccl", "Hcom", "EI00", "Notify register", "DEVICE_LOST", "DEVICE_NOT", "ERROR_UNKNOWN", "ouble free",
    "(): ", "smashing", "corrupted", "file-max", "peermem", "sysrq", "Device not ready", "address already", "nauthorized", "orbidden", "unhealthy", "oken has", "oken is", "oken expired", "oken invalid", "oken revoked", "401 Client", "403 Client", "xpel", "Native API", "Disabling device", "controller is down", "at minimum", "memory space",
    ": UnknownKey", "LayoutMismatch", "MissingExtra", "UnsafeFile", "UnsaveableState", "CheckpointTooNew",
)  # fmt: skip


def _trigger() -> Any:
    """A compiled expression over bytes for the words above: re2 where it is there, otherwise literal search."""
    try:
        import re2
    except ImportError:
        return Literals([t.encode() for t in WORDS])
    options = re2.Options()
    options.max_mem = 64 << 20
    return re2.compile(("(?:" + "|".join(re.escape(t) for t in WORDS) + ")").encode(), options)


@dataclass(frozen=True)
class _Hit:
    at: int

    def start(self) -> int:
        return self.at


class Literals:
    """Where a block's next line with one of many words begins, without re2.

    Whether a line has a word is decided once per template (the line without digits and signs, which no word
    has), so that the millions of metric lines cost one look-up each."""

    _DELETE = b"0123456789.,+-"

    def __init__(self, words: list[bytes]) -> None:
        self._words = words
        self._known: dict[bytes, bool] = {}
        self._block: bytes | None = None
        self._starts: list[int] = []

    def search(self, block: bytes, pos: int = 0) -> _Hit | None:
        """The first such line that begins at `pos` or later."""
        if block is not self._block:
            self._block, self._starts = block, self._lines_with_words(block)
        at = bisect.bisect_left(self._starts, pos)
        return _Hit(self._starts[at]) if at < len(self._starts) else None

    def _lines_with_words(self, block: bytes) -> list[int]:
        known, starts, at = self._known, [], 0
        rows = block.split(b"\n")
        for row, key in zip(rows, block.translate(None, self._DELETE).split(b"\n"), strict=True):
            has = known.get(key)
            if has is None:
                has = any(w in row for w in self._words)
                if len(known) < 200_000:
                    known[key] = has
            if has:
                starts.append(at)
            at += len(row) + 1
        return starts


TRIGGER = _trigger()
