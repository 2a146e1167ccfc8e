"""`unbroken trace stats` and `accounts`: the tables as text or JSON."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ...errors import UsageError
from .._shared_options import takes
from .options import Files, Json, ReadingOptions, Top, Types
from .reading import opened, with_rows
from .show import print_notes, print_result


@takes(ReadingOptions)
def stats(
    files: Files,
    only: Annotated[
        str | None, typer.Option("--only", help="Names of tables, separated by commas (default: all).")
    ] = None,
    as_json: Json = False,
    types: Types = None,
    top: Top = 20,
    *,
    asked: ReadingOptions,
) -> None:
    """Print the statistics as tables, or as one JSON object."""
    import difflib

    from ...trace.inference import rules_from, shipped_rules
    from ...trace.settings import ReportSettings
    from ...trace.statistics import compute

    rules = (*rules_from(types), *shipped_rules()) if types else None
    store, names = opened(files, asked)
    with with_rows(store, files):
        found = compute(store, ReportSettings(top_users=top), rules)
        rejected, count = store.rejected(200), store.rejected_count()
    wanted = [w.strip() for w in only.split(",")] if only else list(found.results)
    for w in wanted:
        if w not in found.results:
            near = difflib.get_close_matches(w, found.results, 1)
            raise UsageError(
                f"there is no table '{w}'",
                hint=f"Did you mean '{near[0]}'?" if near else f"Tables: {', '.join(found.results)}",
            )
    if as_json:
        print(
            json.dumps(
                {
                    "files": [{"name": n, "format": f} for n, f in names],
                    "tables": {w: found[w].as_json() for w in wanted},
                    "notes": [n.as_json() for n in found.notes],
                    "set_aside": {
                        "rows": count,
                        "first": [{"source": r.source, "reason": r.reason, "text": r.text} for r in rejected],
                    },
                }
            )
        )
        return
    print_notes(found.notes, count)
    for w in wanted:
        print_result(found[w], full=only is not None)


@takes(ReadingOptions)
def accounts(
    files: Files,
    as_json: Json = False,
    *,
    asked: ReadingOptions,
) -> None:
    """Print GPU hours per team and week."""
    from ...trace.statistics import compute

    store, _ = opened(files, asked)
    with with_rows(store, files):
        found = compute(store)
        count = store.rejected_count()
    table = found.get("accounts")
    if as_json:
        print(
            json.dumps({**table.as_json(), "set_aside": count, "notes": [n.as_json() for n in found.notes]})
        )
        return
    print_notes(found.notes, count)
    if not table:
        print("No job has a team, account or virtual cluster.")
    else:
        print_result(table, full=True)
