"""A list that only grows, as text that only grows: what a trainer has logged in a hundred thousand steps is not written again at each save."""

from __future__ import annotations

import json
from typing import Any


class History:
    """Entries of a list as JSON. Written once each; whoever puts another list in its place has it written again."""

    def __init__(self) -> None:
        self._written = 0
        self._last: Any = None
        self._text = ""

    def write(self, entries: list[Any]) -> str:
        """All entries, separated by commas. Raises TypeError for one that JSON does not have."""
        if self._written > len(entries) or (self._written and entries[self._written - 1] is not self._last):
            self._written, self._text = 0, ""
        if new := entries[self._written :]:
            added = json.dumps(new)[1:-1]
            self._text = f"{self._text}, {added}" if self._text else added
            self._written, self._last = len(entries), entries[-1]
        return self._text


def read(text: str) -> list[Any]:
    """The entries again."""
    return list(json.loads(f"[{text}]"))
