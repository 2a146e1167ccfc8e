"""Lines of a source around a given one, for reports and bundles."""

from __future__ import annotations

from collections.abc import Sequence

from ...progress.records.verdict import Root
from .prefixes import clean
from .sources import Source, blocks


def around(source: Source, line: int, before: int = 3, after: int = 4) -> list[tuple[int, str]]:
    """(number, text) of the lines around `line`; empty where the source cannot be read again (stdin)."""
    if source.path is None or source.kind == "pipe":
        return []
    first, last = max(1, line - before), line + after
    number = 0
    out: list[tuple[int, str]] = []
    for block in blocks(source, []):
        count = block.count(b"\n") + (0 if block.endswith(b"\n") else 1)
        if number + count >= first:
            for i, raw in enumerate(block.split(b"\n")[:count], number + 1):
                if first <= i <= last and not (out and out[-1][0] == i):  # a long line comes in pieces
                    out.append((i, clean(raw)))
        number += block.count(b"\n")
        if number >= last:
            break
    return out


def of_root(
    root: Root | None, logs: Sequence[Source], before: int = 3, after: int = 4
) -> list[tuple[int, str]]:
    """The lines around a verdict's root."""
    if root is None or root.file is None or root.line is None:
        return []
    source = next((s for s in logs if s.name == root.file), None)
    return around(source, root.line, before, after) if source else []
