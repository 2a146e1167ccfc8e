"""What exit codes and signals say by themselves: little, and with the confidence that it deserves."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import replace

from ...progress.records.verdict import UNKNOWN, Action, Faulty, Outcome, Verdict
from ..match.events import FileScan, Topology
from ..match.rules import defaults
from .chronology import Timeline
from .fault_location import find_reported
from .roots import root_of

_SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
_EXITED = re.compile(
    r"exitcode: (-?\d+)|exit(?:ed with exit)? code:? (-?\d+)|Signal (\d+) \(SIG|return code = (-?\d+)"
    r"|: (Killed|Segmentation fault|Bus error|Aborted)|(?:with signal|<Signals\.)\s?(SIG[A-Z]+)"
)
_WORDS = {
    "Killed": -9, "Segmentation fault": -11, "Bus error": -7, "Aborted": -6,
    "SIGKILL": -9, "SIGSEGV": -11, "SIGBUS": -7, "SIGABRT": -6, "SIGILL": -4, "SIGFPE": -8, "SIGTERM": -15,
}  # fmt: skip


def from_report(chron: Timeline, scans: Sequence[FileScan], topology: Topology) -> Verdict | None:
    """A verdict from exit codes that launchers report, where no other line says more."""
    for e in chron.cascades:
        m = _EXITED.search(e.text)
        if not m:
            continue
        said = m.group(5) or m.group(6)
        code = _WORDS.get(said or "") or (
            -int(m.group(3)) if m.group(3) else int(m.group(1) or m.group(2) or m.group(4) or 0)
        )
        if code in (0, -15, 143):
            continue
        rank, node, _gpu = (
            (e.rank, e.node, e.gpu) if e.rank is not None else find_reported(topology, e.node, None)
        )
        verdict = by_exit_code(code, rank, node)
        return replace(verdict, root=root_of(e, scans))
    return None


def by_exit_code(code: int, rank: int | None, node: str | None) -> Verdict:
    """What an exit code (negative: a signal) says by itself: little, and with the confidence that it deserves."""
    number = -code if code < 0 else code - 128 if 128 < code < 160 else 0
    faulty = Faulty(node, rank) if rank is not None or node is not None else None
    name = _SIGNALS.get(number) or (
        signal.Signals(number).name if number in {s.value for s in signal.Signals} else f"signal {number}"
    )
    if number in (11, 7, 4, 8, 6):
        return Verdict(
            Outcome.FAILED, None, UNKNOWN, faulty=faulty, recoverable=True, action=Action.RESTART, confidence=0.4,
            mitigation=f"The process crashed in native code ({name}). Restart; if it returns, look at its core dump, /dev/shm (SIGBUS) and library versions.",
            decided_by="exit-code", notes=(f"ended by {name}, without a word in the logs",),
        )  # fmt: skip
    if code == 2:
        return Verdict(
            Outcome.FAILED, None, UNKNOWN, faulty=faulty, recoverable=False, action=Action.STOP, confidence=0.4, decided_by="exit-code",
            mitigation="Exit code 2 mostly means a wrong command line.", notes=("exit code 2, without a word in the logs",),
        )  # fmt: skip
    what = f"ended by {name}" if number else f"ended with exit code {code}"
    return Verdict(
        Outcome.FAILED, None, UNKNOWN, faulty=faulty, recoverable=True, action=Action.RESTART, confidence=0.4 if number else 0.3,
        mitigation=defaults()[UNKNOWN].mitigation, decided_by="exit-code", notes=(f"{what}, without a word in the logs",),
    )  # fmt: skip
