"""`unbroken trace report`: all figures and tables in one HTML file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ...errors import InputError
from .._shared_options import takes
from .options import Files, Json, ReadingOptions, Top, Types, settings_of
from .reading import opened, references_of, with_rows
from .show import print_notes


@takes(ReadingOptions)
def report(
    files: Files,
    output: Annotated[Path, typer.Option("-o", "--output", help="The HTML file to write.")] = Path(
        "report.html"
    ),
    compare: Annotated[
        str | None, typer.Option("--compare", help="acme, seren, kalos, or another trace.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Title of the report.")] = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", help="Also write the figures as SVG into this folder.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", help="Also write the figures as SVG and PNG into this folder.")
    ] = None,
    as_json: Json = False,
    json_file: Annotated[
        Path | None, typer.Option("--json-file", help="Also write everything as JSON to this file.")
    ] = None,
    types: Types = None,
    retype: Annotated[bool, typer.Option(help="Infer workload types also where the trace has them.")] = False,
    pue: Annotated[float, typer.Option(help="Power usage effectiveness of the site.")] = 1.25,
    carbon: Annotated[float, typer.Option(help="Carbon intensity, kg CO2e per kWh.")] = 0.478,
    checkpoint_interval: Annotated[str, typer.Option(help="For the expected ETTR.")] = "30m",
    restart: Annotated[
        str, typer.Option(help="From failure to training again, for the expected ETTR.")
    ] = "10m",
    stall: Annotated[
        str, typer.Option(help="Idle this long before its end, a cancelled job was stalled.")
    ] = "10m",
    top: Top = 20,
    *,
    asked: ReadingOptions,
) -> None:
    """Write the report: every figure and table that the files allow, in one HTML file."""
    from ... import atomic
    from ...page.shell import require
    from ...trace.inference import rules_from, shipped_rules
    from ...trace.output.destination import file_for, folder_for, writing
    from ...trace.report import build_report, page, write_images

    require()
    asked.options()  # what is wrong in them is said before anything is read
    settings = settings_of(pue, carbon, checkpoint_interval, restart, stall, top, retype)
    rules = (*rules_from(types), *shipped_rules()) if types else None
    for file in (output, json_file):
        if file:
            file_for(file)
    for folder in (svg, png):
        if folder:
            folder_for(folder)
    references = references_of(compare, asked)
    store, names = opened(files, asked)
    with with_rows(store, files):
        made = build_report(store, names, settings=settings, rules=rules, references=references, title=title)
    if not made.figures:
        raise InputError(
            "nothing in it can be drawn: neither jobs nor readings of a metric that is known",
            where=", ".join(str(f) for f in files),
            hint="Name a utilisation table after its metric (GPU_UTIL.csv); for jobs say which columns are what (--map); "
            "`unbroken trace formats` lists both",
        )
    html = page(made)
    with writing(output):
        atomic.write_text(output, html, durable=False)
    written = [output]
    if json_file:
        with writing(json_file):
            atomic.write_json(json_file, made.as_json(), durable=False)
        written.append(json_file)
    if svg:
        with writing(svg):
            written += write_images(made, svg, png=False)[:1]
    if png:
        with writing(png):
            written += write_images(made, png, png=True)[:1]
    if as_json:
        print(json.dumps({"report": str(output), **made.as_json()}))
        return
    print_notes(made.notes, made.rejected_count)
    for f in made.figures:
        if f.sentence:
            print(f"{f.number}: {f.sentence}")
    print(f"\nWritten: {output} ({len(html.encode()) / 1e6:.1f} MB, {len(made.figures)} figures and tables)")
    for extra in written[1:]:
        print(f"Written: {extra.parent if extra.suffix in ('.svg', '.png') else extra}")
