"""Live progress of an evaluation: a redrawn table on a terminal, a line now and then elsewhere, and a file for `status`."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from .. import atomic
from ..units import Duration
from .codec import decode, encode
from .folder import read_json
from .live import Progress
from .results import columns

LINE_EVERY_S = 15.0


class Screen:
    """Shows `Progress` as it comes; use as a context manager."""

    def __init__(self, file: Path, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self.file = file
        self.quiet = quiet
        self.stream = stream or sys.stderr
        self._live: Any = None
        self._last_line = -math.inf
        self._last_file = -math.inf
        self._latest: Progress | None = None

    def __enter__(self) -> Screen:
        if not self.quiet and self.stream.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self.stream), refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._latest is not None:
            atomic.write_json(self.file, encode(self._latest), durable=False)
        if self._live is not None:
            self._live.stop()

    def __call__(self, p: Progress) -> None:
        """One more look."""
        now = time.monotonic()
        self._latest = p
        if now - self._last_file > 1.0:
            self._last_file = now
            atomic.write_json(self.file, encode(p), durable=False)
        if self._live is not None:
            self._live.update(text(p, limit=24))
        elif not self.quiet and now - self._last_line > LINE_EVERY_S:
            self._last_line = now
            print(line(p), file=self.stream, flush=True)


def read_progress(file: Path) -> Progress:
    """What the last look saw. Raises FileNotFoundError, ContractError."""
    return decode(Progress, read_json(file), where=str(file))


def line(p: Progress) -> str:
    """One line."""
    scored = sum(1 for t in p.tasks.values() if t["state"] == "scored")
    partly = sum(1 for t in p.tasks.values() if _missing(t))
    busy = sum(1 for w in p.workers.values() if w["state"] == "busy")
    return (
        f"{p.phase}: {scored}/{len(p.tasks)} tasks scored{f' ({partly} in part)' if partly else ''}, {done(p):.0%} of blocks answered, "
        f"{busy}/{len(p.workers)} workers busy"
        + (f", about {Duration(max(0.0, p.finish_s))} left" if p.workers else "")
        + (f", {len(p.errors)} errors" if p.errors else "")
    )


def _missing(task: dict[str, object]) -> int:
    return int(str(task.get("missing", 0)))


def done(p: Progress) -> float:
    """Share of blocks answered."""
    blocks = sum(int(str(t["blocks"])) for t in p.tasks.values())
    return sum(int(str(t["done"])) for t in p.tasks.values()) / blocks if blocks else 0.0


def text(p: Progress, *, limit: int = 0) -> str:
    """The full picture: workers, then tasks; with `limit`, tasks that are under way first and the rest counted."""
    rows = [("worker", "node", "gpus", "state", "task", "busy")]
    for name, w in p.workers.items():
        gpus = ",".join(str(g) for g in w["gpus"]) or "cpu"  # type: ignore[attr-defined]
        rows.append(
            (name, str(w["node"]), gpus, str(w["state"]), str(w["task"]), f"{float(str(w['busy'])):.0%}")
        )
    lines = [line(p), "", *columns(rows), ""]
    rank = {"running": 0, "failed": 1, "landed": 2, "waiting": 3, "scored": 4}
    tasks = sorted(p.tasks.items(), key=lambda kv: (rank.get(str(kv[1]["state"]), 5), kv[0]))
    shown = tasks[:limit] if limit else tasks
    table = [("task", "state", "blocks", "")]
    for name, t in shown:
        have, total = int(str(t["done"])), int(str(t["blocks"]))
        bar = "#" * round(20 * have / total) if total else ""
        state = f"{t['state']}, {_missing(t)} missing" if _missing(t) else str(t["state"])
        table.append((name, state, f"{have}/{total}", bar.ljust(20, ".")))
    lines += columns(table)
    if len(tasks) > len(shown):
        lines.append(f"... and {len(tasks) - len(shown)} more")
    lines += [f"{task}: {why}" for task, why in p.errors.items()]
    return "\n".join(lines)
