"""Live progress of an evaluation: a redrawn table on a terminal, a line now and then elsewhere, and a file for `status`.

`status` reads that file from another process, maybe on another host, and finds out whether there is still anybody who
writes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from ... import atomic
from ...errors import ContractError, InputError, UnbrokenError, UsageError
from ...journal.codec import decode, encode
from ...page.terminal import own, visible
from ...units import Duration
from ..contracts import Json, ModelSpec
from ..engines.live import EvaluationProgress
from ..result.folder import EvalDir, read_json
from ..result.results import columns

LINE_EVERY_S = 15.0
STALE_S = 60.0
"""A progress file is written every second; one so old has no writer, even if clocks of two hosts differ a little."""


class Screen:
    """Shows `EvaluationProgress` as it comes; use as a context manager."""

    def __init__(
        self, file: Path, *, title: str = "", quiet: bool = False, stream: TextIO | None = None
    ) -> None:
        self.file = file
        self._title = title
        self.quiet = quiet
        self.stream = stream or sys.stderr
        self._live: Any = None
        self._last_line = -math.inf
        self._last_file = -math.inf
        self._latest: EvaluationProgress | None = None

    def __enter__(self) -> Screen:
        if not self.quiet and self.stream.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=own(self.stream)), refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._latest is not None:
            self._write(self._latest)
        if self._live is not None:
            self._live.stop()

    @property
    def title(self) -> str:
        """What is evaluated, for people; the model alone as long as nothing more is known."""
        if not self._title:
            self._title = _said_in(EvalDir(self.file.parent))
        return self._title

    def _write(self, p: EvaluationProgress) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end what may yet fit
            atomic.write_json(self.file, {**encode(p), "title": self.title}, durable=False)

    def __call__(self, p: EvaluationProgress) -> None:
        """One more look."""
        now = time.monotonic()
        self._latest = p
        if now - self._last_file > 1.0:
            self._last_file = now
            self._write(p)
        if self._live is not None:
            from rich.text import Text

            # As it is: brackets in an error are no markup.
            self._live.update(Text(visible(text(p, title=self.title, limit=24))))
        elif not self.quiet and now - self._last_line > LINE_EVERY_S:
            if not math.isfinite(self._last_line) and self.title:
                print(self.title, file=self.stream)
            self._last_line = now
            print(line(p), file=self.stream, flush=True)


def read_progress(file: Path) -> EvaluationProgress:
    """What the last look saw. Raises FileNotFoundError, ContractError."""
    found = dict(read_json(file))
    found.pop("title", None)
    try:
        p = decode(EvaluationProgress, found, where=str(file))
        text(p)  # tasks and workers are plain tables: whether they hold what is shown, showing them says
    except (InputError, UsageError, LookupError, TypeError, ValueError, ArithmeticError) as e:
        raise ContractError("the file does not say where the evaluation stands", where=str(file),
                            hint="The same `unbroken eval run` writes it again") from e  # fmt: skip
    return p


def read_title(folder: EvalDir) -> str:
    """Suite and model, as far as the folder says them."""
    try:
        title = str(read_json(folder.root / "progress.json").get("title", ""))
    except (FileNotFoundError, UnbrokenError):
        title = ""
    return title or _said_in(folder)


def _said_in(folder: EvalDir) -> str:
    """From what was asked, which holds no suite's name, and from a report, which is there in the end."""
    try:
        model = decode(ModelSpec, read_json(folder.asked)["model"], where=str(folder.asked)).title
    except (FileNotFoundError, KeyError, UnbrokenError):
        return ""
    report = folder.last_report()
    return f"{report.suite} of {model}" if report else model


def is_running(folder: EvalDir) -> bool:
    """Whether a coordinator is at work in the folder now, on this host or another one.

    The coordinator holds the folder's lock, which the kernel takes back however it ends: a lock that is held says yes,
    from any host. A free one says no where the last holder was on this host. Not every shared file system carries
    locks to other hosts (Lustre with `localflock`, for one): there a coordinator of another host counts as running while
    its address is there, which it removes when it ends, and its progress is fresh.
    """
    try:
        with open(folder.root / "lock") as f:
            holder = f.read().strip()
            # Held for microseconds, and shared: looks do not disturb each other.
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if holder.endswith(f" on {os.uname().nodename}"):
                return False
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        pass  # this file system has no locks, or the lock is another user's
    return folder.cluster.exists() and _age_s(folder.root / "progress.json") < STALE_S


def _age_s(file: Path) -> float:
    try:
        return time.time() - file.stat().st_mtime
    except FileNotFoundError:
        return math.inf


def seen(folder: EvalDir) -> tuple[EvaluationProgress, bool]:
    """Where an evaluation stands, and whether it runs now. Raises FileNotFoundError where none was ever seen."""
    live = is_running(folder)
    file, lock = folder.root / "progress.json", folder.root / "lock"
    if not live:
        p = read_progress(file)
        return replace(p, phase=p.phase if p.phase == "finished" else "stopped", workers={}), False
    if not file.exists() or file.stat().st_mtime < lock.stat().st_mtime:
        # The coordinator says nothing while it checks the data and the model: what is there is an earlier one's.
        old = (
            read_progress(file)
            if file.exists()
            else EvaluationProgress("", time.time(), 0.0, {}, {}, 0.0, 0.0, {})
        )
        return replace(old, phase="preparing", started=0.0, workers={}), True
    return read_progress(file), True


def as_json(p: EvaluationProgress, live: bool, title: str) -> Json:
    """For `status --json`; `remaining_s` is what the screen says is left, and None where that says nothing."""
    found = encode(replace(p, tasks={n: {**t, "state": state} for n, t, state in _by_state(p)}))
    found["remaining_worker_s"] = found.pop("remaining_s")
    finish = found.pop("finish_s")
    found["remaining_s"] = max(0.0, finish) if p.workers else None
    found["elapsed_s"] = _elapsed_s(p)
    return {"live": live, "title": title, "progress": found}


def status_text(p: EvaluationProgress, live: bool, title: str) -> str:
    """For people who ask from another process."""
    first = []
    if not live:
        goes_on = "shows the scores, and tries again what is missing" if p.phase == "finished" else "goes on"
        first = [f"not running now; the same command {goes_on}. This is the last that was seen:"]
    elif (silent := time.time() - p.at) > STALE_S and p.phase != "preparing":
        first = [f"it runs, but has said nothing for {Duration(round(silent))}"]
    return "\n".join([*first, text(p, title=title)])


def line(p: EvaluationProgress) -> str:
    """One line; where no task is known yet, only what is being done."""
    if not p.tasks and not p.workers and not p.errors:
        return p.phase
    scored = sum(1 for t in p.tasks.values() if t["state"] == "scored")
    partly = sum(1 for t in p.tasks.values() if _missing(t))
    busy = sum(1 for w in p.workers.values() if w["state"] == "busy")
    went = _elapsed_s(p)
    over = p.phase in ("stopped", "finished")
    parts = [
        f"{scored}/{len(p.tasks)} tasks scored" + (f" ({partly} in part)" if partly else ""),
        f"{done(p):.0%} of blocks answered",
    ]
    if p.workers or not over:
        parts.append(f"{busy}/{len(p.workers)} worker{'s' * (len(p.workers) != 1)} busy")
    if p.workers:
        parts.append(f"about {Duration(max(0.0, p.finish_s))} left")
    if p.errors:
        parts.append(f"{len(p.errors)} error{'s' * (len(p.errors) != 1)}")
    since = f" {'after' if over else 'for'} {Duration(round(went))}" if went else ""
    return f"{p.phase}{since}: {', '.join(parts)}"


def _elapsed_s(p: EvaluationProgress) -> float:
    """Since the first worker was started; 0 where none was."""
    return max(0.0, p.at - p.started) if p.started else 0.0


def _missing(task: dict[str, object]) -> int:
    return int(str(task.get("missing", 0)))


def done(p: EvaluationProgress) -> float:
    """Share of blocks answered."""
    blocks = sum(int(str(t["blocks"])) for t in p.tasks.values())
    return sum(int(str(t["done"])) for t in p.tasks.values()) / blocks if blocks else 0.0


STATES = ("running", "to score", "begun", "waiting", "failed", "scored")
"""A task's states in the order in which they are shown: what is being worked on first."""


def _by_state(p: EvaluationProgress) -> list[tuple[str, dict[str, object], str]]:
    """(name, task, state for people), what is being worked on now first."""
    now = {str(w.get("task", "")) for w in p.workers.values() if w["state"] == "busy"}
    found = []
    for name, t in p.tasks.items():
        state = str(t["state"])
        if state == "landed":
            state = "to score"
        elif state == "running" and name not in now:  # planned; its turn may be over for now, or yet to come
            state = "begun" if int(str(t["done"])) else "waiting"
        found.append((name, t, state))
    rank = {s: i for i, s in enumerate(STATES)}
    return sorted(found, key=lambda x: (rank.get(x[2], len(rank)), x[0]))


def text(p: EvaluationProgress, *, title: str = "", limit: int = 0) -> str:
    """The full picture: workers, then tasks; with `limit`, only the first so many of these and the rest counted."""
    lines = [*([title] if title else []), line(p), ""]
    if p.workers:
        rows = [("worker", "node", "gpus", "state", "task", "busy")]
        for name, w in p.workers.items():
            gpus = ",".join(str(g) for g in w["gpus"]) or "cpu"  # type: ignore[attr-defined]
            rows.append(
                (name, str(w["node"]), gpus, str(w["state"]), str(w["task"]), f"{float(str(w['busy'])):.0%}")
            )
        lines += [*columns(rows), ""]
    tasks = _by_state(p)
    shown = tasks[:limit] if limit else tasks
    table = [("task", "state", "blocks", "")]
    for name, t, state in shown:
        have, total = int(str(t["done"])), int(str(t["blocks"]))
        bar = "#" * round(20 * have / total) if total else ""
        state = f"{state}, {_missing(t)} missing" if _missing(t) else state
        table.append((name, state, f"{have}/{total}" if total else "-", bar.ljust(20, ".")))
    lines += columns(table)
    if len(tasks) > len(shown):
        rest = [state for _, _, state in tasks[len(shown) :]]
        kinds = ", ".join(f"{rest.count(s)} {s}" for s in STATES if s in rest)
        lines.append(f"... and {len(rest)} more: {kinds}")
    lines += [f"{task}: {why}" for task, why in p.errors.items()]
    return "\n".join(lines)
