"""What happened in an evaluation: one event a line, appended by the coordinator alone (journal/lines.py).

A coordinator that is killed leaves at most one torn line at the end; the next one starts a new line after it, and
readers skip what does not check. Answers are not here but in answers.py, in such lines too.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ...journal import lines


class EvaluationJournal:
    """The events of one evaluation."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = lines.Appender(path)

    def write(self, event: str, **fields: Any) -> None:
        """Appends one event with its time."""
        self._file.append({"event": event, "at": round(time.time(), 6), **fields})

    def sync(self) -> None:
        """Makes it durable."""
        self._file.sync()

    def close(self) -> None:
        """Syncs and closes."""
        self.sync()
        self._file.close()


def events(path: Path) -> list[dict[str, Any]]:
    """All whole events, oldest first."""
    return [record for record in lines.records(path) if isinstance(record.get("event"), str)]
