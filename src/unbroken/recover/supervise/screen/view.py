"""What a run shows on the terminal: plain readable lines, and a progress bar where it is a terminal."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ....detect import Hang
from ....page.terminal import own, plain
from ....progress import RunDir
from ....progress.records.incident import Incident
from ....progress.records.steps import Step, is_number
from ....units import Duration, plural
from ..attempt.attempt import Attempt
from ..attempt.farewell import Farewell, Last
from ..attempt.ledger import SnapshotTracker
from .headline import headline

_LINE_EVERY_S = 2.0


class View(Protocol):
    """What the supervisor shows."""

    def say(self, text: str) -> None: ...
    def attempt(
        self, number: int, ranks: int, slots: Sequence[str], best: dict[str, Any] | None, durable: int = -1,
        own: str = "",
    ) -> None: ...  # fmt: skip
    def restored(self, event: Mapping[str, Any]) -> None: ...
    def steps(self, attempt: Attempt, steps: Sequence[Step]) -> None: ...
    def progress(self, attempt: Attempt, tracker: SnapshotTracker) -> None: ...
    def suspect(self, hang: Hang) -> None: ...
    def incident(self, incident: Incident, seconds: float) -> None: ...
    def resumed(self, incident: Incident) -> None: ...
    def stopped(self, incident: Incident, run_dir: RunDir) -> None: ...
    def kept(self, farewell: Farewell, last: Last | None, room_s: float) -> None: ...
    def finished(self, kind: str, step: int, checkpoints: Sequence[str], goes_on: str = "") -> None: ...


class Lines:
    """Plain lines on a stream; the last line is a bar where the stream is a terminal."""

    def __init__(self, out: Any = None, *, every_s: float = _LINE_EVERY_S, prefix: str = "") -> None:
        self._out = own(out or sys.stdout)  # what is shown is cleaned here: the bar moves the cursor
        self._every_s = every_s
        self._prefix = prefix
        self._tty = bool(getattr(self._out, "isatty", lambda: False)())
        self._last_line = -math.inf
        self._bar = ""
        self._durable = -1
        self._host = -1

    def say(self, text: str) -> None:
        """One line with the time of day; of a text of several lines, each."""
        clock = time.strftime("%H:%M:%S")
        for line in text.splitlines() or [""]:
            self._print(f"{clock}  {self._prefix}{line}")

    def _print(self, line: str) -> None:
        clear = "\r\x1b[K" if self._bar else ""
        self._write(f"{clear}{plain(line)}\n{self._bar}")

    def _write(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, ValueError):
            return  # the terminal is gone; the run goes on

    def attempt(
        self, number: int, ranks: int, slots: Sequence[str], best: dict[str, Any] | None, durable: int = -1,
        own: str = "",
    ) -> None:  # fmt: skip
        """An attempt that starts from `best`; `durable` is the newest step on disk that counts (-1: none), `own` ('from ...')
        what the script goes on from by itself where `best` is None ("": it begins)."""
        where = ", ".join(slots)
        # What the attempt before held in memory, and is not offered to this one, is gone.
        self._host = best["step"] if best is not None and len(best["memory"]) == ranks else -1
        self._durable = durable
        if best is None:
            origin = own or "from the beginning"
        else:
            memory = len(best["memory"])
            source = "disk" if not memory else "memory" if memory == ranks else "memory and disk"
            origin = f"from step {best['step']} ({source})"
        self.say(f"attempt {number}: {plural(ranks, 'rank')} on {where}, {origin}")

    def restored(self, event: Mapping[str, Any]) -> None:
        """What the ranks passed over, and what they go on from instead."""
        for name, why in event.get("skipped") or ():
            self.say(f"{name} is passed over, it cannot be used: {why}")
        step = event.get("step")
        if event.get("skipped") and step is not None:
            self.say(f"training goes on from step {step}")
            self._host = step if self._host > step else self._host

    def steps(self, attempt: Attempt, steps: Sequence[Step]) -> None:
        now = time.monotonic()
        if now - self._last_line < self._every_s:
            return
        self._last_line = now
        self.say(self._describe(attempt, steps[-1]))

    def _describe(self, attempt: Attempt, step: Step) -> str:
        of = f"/{attempt.total}" if attempt.total else ""
        parts = [f"step {step.step}{of}"]
        if is_number(step.loss):
            parts.append(f"loss {step.loss:.4f}")
        if attempt.step_time:
            parts.append(f"{Duration(attempt.step_time)}/step")
        if step.tokens and attempt.step_time:
            parts.append(f"{step.tokens / attempt.step_time:,.0f} tokens/s")
        saved = []
        if self._host >= 0:
            saved.append(f"{self._host} in memory")
        if self._durable >= 0:
            saved.append(f"{self._durable} on disk")
        if saved:
            parts.append("saved: " + ", ".join(saved))
        return "  ".join(parts)

    def progress(self, attempt: Attempt, tracker: SnapshotTracker) -> None:
        if tracker.attempt == attempt.number:
            self._host = max(tracker.host_step, -1) if tracker.host_step >= 0 else self._host
            self._durable = tracker.durable_step if tracker.durable_step >= 0 else self._durable
        if self._tty and attempt.last is not None:
            done = attempt.last.step
            if attempt.total:
                width = 30
                full = min(width, int(width * (done + 1) / attempt.total))
                bar = f"[{'#' * full}{'.' * (width - full)}] "
            else:
                bar = ""
            # A line that wraps could not be cleared again.
            text = plain(f"{bar}{self._describe(attempt, attempt.last)}")[
                : shutil.get_terminal_size().columns - 1
            ]
            if text != self._bar:
                self._write(f"\r\x1b[K{text}")
                self._bar = text

    def suspect(self, hang: Hang) -> None:
        self.say(
            f"no progress for {Duration(hang.idle_s)}: suspected to hang, collecting stacks "
            f"(declared after {Duration(hang.declare_s)})"
        )

    def incident(self, incident: Incident, seconds: float) -> None:
        v = incident.verdict
        if v is None:
            return
        where = ""
        if v.faulty is not None:
            named = [
                f"{k} {x}" for k, x in (("rank", v.faulty.rank), ("node", v.faulty.node)) if x is not None
            ]
            where = f" ({', '.join(named)})" if named else ""
        after = f"after step {incident.step}" if incident.step >= 0 else "before the first step"
        self.say(
            f"incident {incident.number}: {headline(v)}{where}, confidence {v.confidence:.0%}, "
            f"{after} -> {incident.action} [{incident.why}]"
        )
        if v.root is not None and v.root.text and v.root.text not in (incident.why, headline(v)):
            self.say(f"    {v.root.text.strip()[:200]}")
        if v.last_words:
            self.say(f"    {v.last_words}")

    def resumed(self, incident: Incident) -> None:
        took = Duration((incident.resumed or 0.0) - incident.detected)
        past = f"past step {incident.step}" if incident.step >= 0 else "past the first step"
        replayed = (
            f", {plural(incident.steps_lost, 'step')} replayed" if incident.steps_lost is not None else ""
        )
        self.say(f"incident {incident.number} is over: {past} after {took}{replayed}")

    def stopped(self, incident: Incident, run_dir: RunDir) -> None:
        v = incident.verdict
        self.say(f"the run is stopped: {incident.why}")
        if v is not None and v.root is not None and v.root.file:
            self.say(f"    see {run_dir.path / v.root.file}{f', line {v.root.line}' if v.root.line else ''}")

    def kept(self, farewell: Farewell, last: Last | None, room_s: float) -> None:
        """Says what was not saved at the end: given up, or still held by keepers that go on trying."""
        what = f"step {last.step}" if last is not None else "its last snapshot"
        for node, why in farewell.unsaved.items():
            self.say(f"{node}: its keeper ended without saving {what}: {why}")
        if farewell.holding:
            self.say(
                f"{what} is in memory only: the keepers of {', '.join(farewell.holding)} hold it and go on trying for "
                f"{Duration(room_s)}. Free space, or give the same command again within that time: it goes on from there"
            )

    def finished(self, kind: str, step: int, checkpoints: Sequence[str], goes_on: str = "") -> None:
        """The last line; `goes_on` ('from ...') is what the same command goes on from where nothing of ours was saved."""
        newest = f", newest checkpoint {checkpoints[0]}" if checkpoints else ""
        if self._bar:
            self._write("\r\x1b[K")
        self._bar = ""
        at = f" at step {step}" if step >= 0 else ""
        self.say(f"the run is {kind}{at}{newest}")
        if goes_on:
            self.say(f"the same command goes on {goes_on}")
