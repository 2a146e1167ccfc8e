"""How a script's progress is followed, and what is said of it: by its page, by what it prints, or by idleness alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ....units import Duration
from .attempt import Attempt

_SAID_AFTER_S = 60.0
"""Importing takes long on a busy machine: before this nothing is concluded from silence."""
_SAID_AFTER_ATTACH_S = 600.0
"""The same for a script whose text calls attach()."""
_SOURCE_MAX = 4 << 20


def will_attach(command: Sequence[str], cwd: Path) -> bool:
    """Whether the script's own text calls `attach()`; False where it is no readable script, or leaves it to a library."""
    script = next((word for word in command if word.endswith(".py")), None)
    if script is None:
        return False
    try:
        with open(cwd / script, "rb") as f:
            text = f.read(_SOURCE_MAX)
    except OSError:
        return False
    return b"unbroken" in text and b"attach(" in text


class Following:
    """Says once an attempt how a script is followed that does not tell its steps."""

    def __init__(self, command: Callable[[], Sequence[str]], cwd: Path, idle: Duration) -> None:
        """`command` gives what the newest attempt runs."""
        self._command, self._cwd, self._idle = command, cwd, idle
        self._said = 0
        self._looked_at, self._after_s = 0, 0.0

    def news(self, attempt: Attempt, now: float) -> str:
        """What there is to say now (seconds since the epoch), or nothing."""
        ranks = attempt.ranks.values()
        if self._looked_at != attempt.number:
            will = will_attach(self._command(), self._cwd)
            self._looked_at, self._after_s = attempt.number, _SAID_AFTER_ATTACH_S if will else _SAID_AFTER_S
        if self._said == attempt.number or attempt.attached_at is not None:
            return ""
        if any(s.source == "page" and s.count for s in ranks):
            return ""
        if any(s.source == "log" and s.step >= 0 for s in ranks):
            self._said = attempt.number
            return "the script does not call unbroken.attach(): its steps are read from what it prints"
        if now - attempt.started > self._after_s and all(s.source == "idle" for s in ranks):
            self._said = attempt.number
            return (
                "no step is known of this script so far (it neither calls unbroken.attach() nor prints steps): only idle "
                f"processors for {self._idle} count as a hang (--idle-after)"
            )
        return ""


def ends_normally(attempt: Attempt) -> bool:
    """Whether the attempt looks like one that is just ending: its last step is made, or some ranks have ended well and
    the others are as far. Ranks of a good run end seconds apart, after saving, uploading, or waiting for each other."""
    if attempt.failures():
        return False
    if attempt.total is not None and attempt.step >= attempt.total - 1:
        return True
    done = [s for s in attempt.ranks.values() if s.finished]
    return bool(done) and all(s.step <= min(d.step for d in done) for s in attempt.ranks.values())
