"""Tables and notes of a trace in the terminal."""

from __future__ import annotations

import sys
from typing import Any


def print_notes(notes: Any, rejected: int) -> None:
    """What was assumed, repaired and rejected, on standard error."""
    for n in notes:
        if n.kind != "info":
            count = f"{n.count:,}" + (f" of {n.of:,}" if n.of else "") + " rows: " if n.count else ""
            where = f" [{n.source}]" if n.source else ""
            print(f"{n.label}: {count}{n.text}{where}", file=sys.stderr)
    if rejected:
        print(f"rejected in all: {rejected:,} rows", file=sys.stderr)


def print_result(result: Any, *, full: bool) -> None:
    """A table as text; the first rows of it unless `full`."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ...page.charts.scales import amount
    from ...page.terminal import plain

    if not result:
        print(f"{result.name}: nothing")
        return
    table = Table(title=f"{result.name}: {result.title}", title_justify="left", box=None, pad_edge=False)
    for i, c in enumerate(result.columns):
        number = any(isinstance(r[i], (int, float)) for r in result.rows[:20])
        table.add_column(c, justify="right" if number else "left")
    limit = len(result.rows) if full else 12
    for r in result.rows[:limit]:
        # As they are: brackets in a name are no markup.
        table.add_row(*(Text("" if v is None else f"{v:,}" if isinstance(v, int) else amount(v, 2) if isinstance(v, float) else plain(str(v))) for v in r))  # fmt: skip
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    if len(result.rows) > limit:
        print(f"... {len(result.rows) - limit} more rows (--only {result.name} prints all)")
    print()
