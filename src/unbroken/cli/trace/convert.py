"""`unbroken trace convert` and `anonymise`: a trace written again, in the one schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ...units import Duration
from .._shared_options import takes
from .options import Files, Json, ReadingOptions
from .reading import opened
from .show import print_notes


@takes(ReadingOptions)
def convert(
    files: Files,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder for jobs.parquet and the other tables.")
    ],
    csv: Annotated[bool, typer.Option("--csv", help="Write CSV instead of Parquet.")] = False,
    as_json: Json = False,
    *,
    asked: ReadingOptions,
) -> None:
    """Convert any trace into the one schema, as Parquet; rows that cannot be read go to set_aside.csv."""
    from ...trace.output.convert import write_tables
    from ...trace.output.destination import folder_for, writing

    folder_for(output)
    store, names = opened(files, asked)
    with store:
        with writing(output):
            rows = write_tables(store, output, csv=csv)
        notes, count = list(store.notes), store.rejected_count()
    if as_json:
        print(json.dumps({"files": [{"name": n, "format": f} for n, f in names], "written": rows, "set_aside": count, "notes": [n.as_json() for n in notes]}))  # fmt: skip
        return
    print_notes(notes, count)
    for name, n in rows.items():
        print(f"{output / name}: {n:,} rows")


@takes(ReadingOptions)
def anonymise(
    files: Files,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the tables.")],
    keep_names: Annotated[
        bool,
        typer.Option("--keep-names", help="Keep job names (they often hold people's and models' names)."),
    ] = False,
    keep_clusters: Annotated[
        bool,
        typer.Option("--keep-clusters", help="Keep the clusters' names (virtual clusters are often teams)."),
    ] = False,
    shift: Annotated[
        str | None,
        typer.Option(
            "--shift", help="Move all times by a secret number of whole weeks up to this, e.g. 520d."
        ),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option("--key-file", help="Keep the secret key here, to map later traces alike (mode 0600)."),
    ] = None,
    as_json: Json = False,
    *,
    asked: ReadingOptions,
) -> None:
    """Write a trace that can be published: people, teams, clusters, partitions, jobs and nodes by keyed pseudonyms,
    free text removed. It says what was kept."""
    from ...trace.output.convert import anonymise_tables
    from ...trace.output.destination import folder_for, writing

    shift_s = float(Duration(shift)) if shift else 0.0
    folder_for(output)
    store, names = opened(files, asked)
    with store:
        with writing(output):
            said = anonymise_tables(
                store,
                output,
                keep_names=keep_names,
                shift_s=shift_s,
                key_file=key_file,
                keep_clusters=keep_clusters,
            )
        notes, count = list(store.notes), store.rejected_count()
    if as_json:
        print(json.dumps({"files": [{"name": n, "format": f} for n, f in names], **said, "set_aside": count, "notes": [n.as_json() for n in notes]}))  # fmt: skip
        return
    print_notes(notes, count)
    for name, n in said["written"].items():
        print(f"{output / name}: {n:,} rows")
    for line in said["did"]:
        print(f"- {line}")
