"""The files of a command line, read into a store; what to compare them with."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import InputError, UsageError
from ...units import Bytes
from .options import ReadingOptions
from .show import print_notes

if TYPE_CHECKING:
    from ...trace.figures.reference import Reference
    from ...trace.store import Store


def opened(files: list[Path], asked: ReadingOptions) -> tuple[Store, list[tuple[str, str]]]:
    """A store with the files in it, and (name, format) of each."""
    from ...trace.output.destination import may_write
    from ...trace.readers import files_of, load_into
    from ...trace.store import Store

    options, scratch = asked.options(), asked.scratch
    found = files_of(files)
    size = sum(f.stat().st_size * (6 if f.suffix == ".gz" else 1) for f in found if f.suffix != ".parquet")
    if scratch and not scratch.is_dir():
        raise UsageError(
            "the scratch folder does not exist", where=str(scratch), hint="Create it, or leave --scratch out"
        )
    if scratch:
        may_write(scratch)
    store = Store(
        memory=Bytes(asked.memory) if asked.memory else None,
        threads=asked.threads,
        input_bytes=size,
        scratch=scratch,
    )
    try:
        read = load_into(store, files, options)
    except BaseException:
        store.close()
        raise
    return store, [(p.name, f) for p, f in read]


def with_rows(store: Store, files: list[Path]) -> Store:
    """The store itself, where there is something in it to count. Raises InputError otherwise."""
    tables = ("jobs", "nodes", "samples", "incidents")
    if store.counted or any(store.query(f"SELECT 1 FROM {t} LIMIT 1") for t in tables):
        return store
    notes, count = store.notes, store.rejected_count()
    store.close()
    where = ", ".join(map(str, files[:3])) + (", ..." if len(files) > 3 else "")
    if not count:
        raise InputError("there are no rows, only headers", where=where, hint="Export the trace again")
    print_notes(notes, count)
    raise InputError(
        f"no row can be used: all {count:,} are rejected",
        where=where,
        hint="`unbroken trace convert FILES -o DIR` writes each with its reason to set_aside.csv",
    )


def references_of(compare: str | None, asked: ReadingOptions) -> list[Reference]:
    """What to compare with: acme, seren, kalos, or another trace."""
    if not compare:
        return []
    from ...trace.figures.reference import Reference
    from ...trace.published.study import acme

    names = {"acme": ("Seren", "Kalos"), "seren": ("Seren",), "kalos": ("Kalos",), "philly": ("Philly",), "helios": ("Helios",), "pai": ("PAI",)}  # fmt: skip
    if compare.lower() in names:
        return acme(names[compare.lower()])
    path = Path(compare)
    if not path.exists():
        raise InputError(
            f"there is nothing to compare with at '{compare}'",
            hint=f"Give a trace file, or one of: {', '.join(names)}",
        )
    from ...trace.statistics import compute

    store, _ = opened([path], replace(asked, fmt=None, maps=None, fields=None))
    with with_rows(store, [path]):
        found = compute(store)
        count = store.rejected_count()
    if count:
        print(f"rejected in {compare}, with which the report compares: {count:,} rows", file=sys.stderr)
    label = found.get("summary").rows[0][0] if found.get("summary") else path.stem
    return [Reference(str(label), found)]
