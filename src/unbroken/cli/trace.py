"""`unbroken trace`: characterise a cluster from its scheduler records and hardware metrics.

Long because a command states every option that it takes: no command holds more than the call of what does the work.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError, UsageError, unreadable
from ..units import Bytes, Duration

if TYPE_CHECKING:
    from ..trace.figures.reference import Reference
    from ..trace.readers import Options
    from ..trace.settings import Settings
    from ..trace.store import Store

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Characterise a cluster from its scheduler records: every figure of the published study, for your own.",
)

Files = Annotated[
    list[Path], typer.Argument(help="Trace files or folders: CSV, JSON, sacct -P, Parquet; .gz and .zst too.")
]
Format = Annotated[
    str | None, typer.Option("--format", help="Format instead of detection (see `unbroken trace formats`).")
]
Map = Annotated[list[str] | None, typer.Option("--map", help="Columns of any table: submit=timestamp,gpus=num_gpus (may repeat), or a TOML file.")]  # fmt: skip
Fields = Annotated[
    str | None, typer.Option("--fields", help="Column names of a file without a header, separated by commas.")
]
Zone = Annotated[str, typer.Option("--timezone", help="Zone of times that carry none, e.g. Europe/Berlin.")]
Cluster = Annotated[str | None, typer.Option("--cluster", help="Name of the cluster.")]
Memory = Annotated[
    str | None, typer.Option("--memory", help="Memory to use, e.g. 4GiB (default: half of the machine's).")
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Threads to use (default: all).")]
Scratch = Annotated[
    Path | None, typer.Option("--scratch", help="Folder for temporary files (default: the system's).")
]
Types = Annotated[Path | None, typer.Option("--types", help="TOML with your own rules for workload types.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def options_of(
    fmt: str | None, maps: list[str] | None, fields: str | None, zone: str, cluster: str | None
) -> Options:
    """The reader's options from the command line; raises UsageError."""
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

    from ..trace.readers import Options

    try:
        ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError) as e:
        raise UsageError(
            f"there is no time zone '{zone}'", hint="Give an IANA name such as Asia/Shanghai or UTC"
        ) from e
    names = tuple(f.strip() for f in fields.split(",")) if fields else ()
    return Options(fmt, zone, cluster, mapping_of(maps or []), names)


def mapping_of(maps: list[str]) -> dict[str, str]:
    """key -> column from `a=b,c=d` texts and TOML files; raises UsageError."""
    import tomllib

    out: dict[str, str] = {}
    for text in maps:
        if text.endswith(".toml"):
            try:
                data = tomllib.loads(Path(text).read_text("utf-8"))
            except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
                raise UsageError(
                    f"the mapping file cannot be read: {unreadable(e)}",
                    where=text,
                    hint='Write lines: submit = "column"',
                ) from e
            data = data.get("map", data)
            out |= {str(k): str(v) for k, v in data.items()}
            continue
        for pair in text.split(","):
            key, equals, column = pair.partition("=")
            if not equals or not key.strip() or not column.strip():
                raise UsageError(
                    f"--map '{pair}' is no pair", hint="Write --map submit=timestamp,gpus=num_gpus"
                )
            out[key.strip()] = column.strip()
    return out


def opened(files: list[Path], options: Options, memory: str | None, threads: int | None, scratch: Path | None) -> tuple[Store, list[tuple[str, str]]]:  # fmt: skip
    """A store with the files in it, and (name, format) of each."""
    from ..trace.output.destination import may_write
    from ..trace.readers import files_of, load_into
    from ..trace.store import Store

    found = files_of(files)
    size = sum(f.stat().st_size * (6 if f.suffix == ".gz" else 1) for f in found if f.suffix != ".parquet")
    if scratch and not scratch.is_dir():
        raise UsageError(
            "the scratch folder does not exist", where=str(scratch), hint="Create it, or leave --scratch out"
        )
    if scratch:
        may_write(scratch)
    store = Store(
        memory=Bytes(memory) if memory else None, threads=threads, input_bytes=size, scratch=scratch
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
        f"no row can be used: all {count:,} are set aside",
        where=where,
        hint="`unbroken trace convert FILES -o DIR` writes each with its reason to set_aside.csv",
    )


def references_of(compare: str | None, options: Options) -> list[Reference]:
    """What to compare with: acme, seren, kalos, or another trace."""
    if not compare:
        return []
    from ..trace.figures.reference import Reference
    from ..trace.published.study import acme

    names = {"acme": ("Seren", "Kalos"), "seren": ("Seren",), "kalos": ("Kalos",), "philly": ("Philly",), "helios": ("Helios",), "pai": ("PAI",)}  # fmt: skip
    if compare.lower() in names:
        return acme(names[compare.lower()])
    path = Path(compare)
    if not path.exists():
        raise InputError(
            f"there is nothing to compare with at '{compare}'",
            hint=f"Give a trace file, or one of: {', '.join(names)}",
        )
    from dataclasses import replace

    from ..trace.statistics import compute

    store, _ = opened([path], replace(options, format=None, mapping={}, fields=()), None, None, None)
    with with_rows(store, [path]):
        found = compute(store)
        count = store.rejected_count()
    if count:
        print(f"set aside in {compare}, with which the report compares: {count:,} rows", file=sys.stderr)
    label = found.get("summary").rows[0][0] if found.get("summary") else path.stem
    return [Reference(str(label), found)]


def settings_of(
    pue: float, carbon: float, interval: str, restart: str, stall: str, top: int, retype: bool
) -> Settings:
    """The declared numbers."""
    from ..trace.settings import Settings

    return Settings(
        pue=pue,
        carbon_kg_per_kwh=carbon,
        checkpoint_interval_s=float(Duration(interval)),
        restart_s=float(Duration(restart)),
        stall_s=float(Duration(stall)),
        top_users=top,
        retype=retype,
    )


@app.command()
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
    fmt: Format = None,
    maps: Map = None,
    fields: Fields = None,
    timezone: Zone = "UTC",
    cluster: Cluster = None,
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
    top: Annotated[int, typer.Option(min=1, help="Users and teams listed by name.")] = 20,
    memory: Memory = None,
    threads: Threads = None,
    scratch: Scratch = None,
) -> None:
    """Write the report: every figure and table that the files allow, in one HTML file."""
    from .. import atomic
    from ..page.shell import require
    from ..trace.inference import rules_from, shipped_rules
    from ..trace.output.destination import file_for, folder_for, writing
    from ..trace.report import build_report, page, write_images

    require()
    options = options_of(fmt, maps, fields, timezone, cluster)
    settings = settings_of(pue, carbon, checkpoint_interval, restart, stall, top, retype)
    rules = (*rules_from(types), *shipped_rules()) if types else None
    for file in (output, json_file):
        if file:
            file_for(file)
    for folder in (svg, png):
        if folder:
            folder_for(folder)
    references = references_of(compare, options)
    store, names = opened(files, options, memory, threads, scratch)
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


@app.command()
def stats(
    files: Files,
    only: Annotated[
        str | None, typer.Option("--only", help="Names of tables, separated by commas (default: all).")
    ] = None,
    as_json: Json = False,
    fmt: Format = None,
    maps: Map = None,
    fields: Fields = None,
    timezone: Zone = "UTC",
    cluster: Cluster = None,
    types: Types = None,
    top: Annotated[int, typer.Option(min=1, help="Users and teams listed by name.")] = 20,
    memory: Memory = None,
    threads: Threads = None,
    scratch: Scratch = None,
) -> None:
    """Print the statistics as tables, or as one JSON object."""
    import difflib

    from ..trace.inference import rules_from, shipped_rules
    from ..trace.settings import Settings
    from ..trace.statistics import compute

    options = options_of(fmt, maps, fields, timezone, cluster)
    rules = (*rules_from(types), *shipped_rules()) if types else None
    store, names = opened(files, options, memory, threads, scratch)
    with with_rows(store, files):
        found = compute(store, Settings(top_users=top), rules)
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


@app.command()
def convert(
    files: Files,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder for jobs.parquet and the other tables.")
    ],
    fmt: Format = None,
    maps: Map = None,
    fields: Fields = None,
    timezone: Zone = "UTC",
    cluster: Cluster = None,
    csv: Annotated[bool, typer.Option("--csv", help="Write CSV instead of Parquet.")] = False,
    as_json: Json = False,
    memory: Memory = None,
    threads: Threads = None,
    scratch: Scratch = None,
) -> None:
    """Convert any trace into the one schema, as Parquet; rows that cannot be read go to set_aside.csv."""
    from ..trace.output.convert import write_tables
    from ..trace.output.destination import folder_for, writing

    folder_for(output)
    store, names = opened(files, options_of(fmt, maps, fields, timezone, cluster), memory, threads, scratch)
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


@app.command()
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
    fmt: Format = None,
    maps: Map = None,
    fields: Fields = None,
    timezone: Zone = "UTC",
    cluster: Cluster = None,
    as_json: Json = False,
    memory: Memory = None,
    threads: Threads = None,
    scratch: Scratch = None,
) -> None:
    """Write a trace that can be published: people, teams, clusters, partitions, jobs and nodes by keyed pseudonyms,
    free text removed. It says what was kept."""
    from ..trace.output.convert import anonymised_tables
    from ..trace.output.destination import folder_for, writing

    shift_s = float(Duration(shift)) if shift else 0.0
    folder_for(output)
    store, names = opened(files, options_of(fmt, maps, fields, timezone, cluster), memory, threads, scratch)
    with store:
        with writing(output):
            said = anonymised_tables(
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


@app.command()
def accounts(
    files: Files,
    as_json: Json = False,
    fmt: Format = None,
    maps: Map = None,
    fields: Fields = None,
    timezone: Zone = "UTC",
    cluster: Cluster = None,
    memory: Memory = None,
    threads: Threads = None,
    scratch: Scratch = None,
) -> None:
    """Print GPU hours per team and week."""
    from ..trace.statistics import compute

    store, _ = opened(files, options_of(fmt, maps, fields, timezone, cluster), memory, threads, scratch)
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


@app.command()
def synth(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder for jobs.parquet, incidents, nodes, samples.")
    ],
    cluster: Annotated[str, typer.Option("--cluster", help="Seren or Kalos.")] = "Seren",
    jobs: Annotated[int, typer.Option("--jobs", min=0, help="How many jobs.")] = 100_000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same trace.")] = 0,
    gpu_only: Annotated[bool, typer.Option("--gpu-only", help="No CPU jobs.")] = False,
    start: Annotated[str, typer.Option(help="First day.")] = "2023-03-01",
    days: Annotated[int, typer.Option(min=1, help="How many days.")] = 184,
    sample_nodes: Annotated[int, typer.Option(min=0, help="Nodes with hardware samples (0: none).")] = 0,
    sample_hours: Annotated[float, typer.Option(min=0, help="Hours of samples.")] = 24.0,
    sample_every: Annotated[str, typer.Option(help="Interval of samples.")] = "60s",
    as_json: Json = False,
) -> None:
    """Draw a synthetic trace from the published marginals; what depends on what is in docs/trace.md."""
    import datetime as dt

    from ..trace.output.destination import folder_for, writing
    from ..trace.synthetic import generate

    every_s = float(Duration(sample_every))
    if every_s < 1:
        raise UsageError(f"--sample-every {sample_every} is less than a second", hint="Give 1s or more")
    try:
        first = dt.datetime.fromisoformat(start)
    except ValueError as e:
        raise UsageError(f"'{start}' is no day", hint="Write it like 2023-03-01") from e
    plan = generate.Plan(cluster, jobs, seed, not gpu_only, first.replace(tzinfo=None), days)
    folder_for(output)
    with writing(output):
        rows = {
            "jobs.parquet": generate.write_jobs(plan, output / "jobs.parquet"),
            "incidents.parquet": generate.write_incidents(plan, output / "incidents.parquet"),
            "nodes.parquet": generate.write_nodes(plan, output / "nodes.parquet"),
        }
        if sample_nodes:
            rows["samples.parquet"] = generate.write_samples(
                plan, output / "samples.parquet", nodes=sample_nodes, hours=sample_hours, every_s=every_s
            )
    if as_json:
        print(json.dumps({"folder": str(output), "written": rows}))
        return
    for name, n in rows.items():
        print(f"{output / name}: {n:,} rows")


@app.command()
def formats(as_json: Json = False) -> None:
    """List the formats that are read, and the keys of --map."""
    from ..trace.readers import READERS
    from ..trace.readers.table import KEYS

    keys = {k: schema for k, (schema, _) in KEYS.items() if k != "job"}
    if as_json:
        print(json.dumps({"formats": {r.name: r.title for r in READERS}, "map": keys}))
        return
    width = max(len(r.name) for r in READERS)
    for r in READERS:
        print(f"{r.name:<{width}}  {r.title}")
    print("\nKeys of --map KEY=COLUMN: " + ", ".join(keys))


def print_notes(notes: Any, rejected: int) -> None:
    """What was assumed, repaired and set aside, on standard error."""
    for n in notes:
        if n.kind != "info":
            count = f"{n.count:,}" + (f" of {n.of:,}" if n.of else "") + " rows: " if n.count else ""
            where = f" [{n.source}]" if n.source else ""
            print(f"{n.kind}: {count}{n.text}{where}", file=sys.stderr)
    if rejected:
        print(f"set aside in all: {rejected:,} rows", file=sys.stderr)


def print_result(result: Any, *, full: bool) -> None:
    """A table as text; the first rows of it unless `full`."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ..page.charts.scales import amount
    from ..page.terminal import plain

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
