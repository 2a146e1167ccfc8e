"""`unbroken logs compress`: drop the chatter, keep the evidence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ...errors import InputError


def compress(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Files, folders, globs, or - for stdin.")
    ],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Where the compressed log goes (default: stdout).")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            "--task", help="Learn filter rules for this task and reuse them (a model's or script's name)."
        ),
    ] = None,
    numbers: Annotated[
        bool, typer.Option("--numbers", help="Put file and line number before each line.")
    ] = False,
    no_learn: Annotated[bool, typer.Option("--no-learn", help="Use stored rules only.")] = False,
    store: Annotated[
        Path | None, typer.Option("--store", help="The store that holds the task's rules.")
    ] = None,
    model_url: Annotated[
        str | None, typer.Option("--model-url", help="Also ask a language model for filter rules.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="The model's name at that address.")] = None,
    show_rules: Annotated[
        bool, typer.Option("--rules", help="Print the rules with their expressions.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Compress one log while it is written, until Ctrl-C.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print bytes and lines in and out and the rules used, as JSON.")
    ] = False,
) -> None:
    """Write PATH without its chatter and say what was dropped, by which rule."""
    from ...diagnose.assist.incident_store import IncidentStore
    from ...diagnose.compress import compress as run
    from ...diagnose.compress import expand_or_fail

    if follow:
        given = {
            "--out": out, "--task": task, "--store": store, "--model-url": model_url, "--model": model, "--no-learn": no_learn,
            "--rules": show_rules, "--json": as_json,
        }  # fmt: skip
        unused = [name for name, value in given.items() if value]
        if unused:
            raise InputError(
                f"--follow writes to stdout as the log grows and takes no {', '.join(unused)}",
                hint="Leave them out, or compress the whole log without --follow once it is written",
            )
    sources = expand_or_fail(paths)
    if follow:
        _follow(sources.logs, numbers)
        return
    memory = IncidentStore(store) if task else None
    rules = memory.filters(task) if memory and task else []
    notes: list[str] = list(sources.notes)
    if model_url:
        rules, said = _ask_model(sources.logs, rules, model_url, model)
        notes += said
    known = {r.name for r in rules}
    if out is None and as_json:
        report = run(sources.logs, lambda s, n, raw: None, rules, learn=not no_learn)
    elif out is None:
        sink = sys.stdout.buffer
        report = run(
            sources.logs, lambda s, n, raw: _put(sink, s, n, raw, numbers), rules, learn=not no_learn
        )
        sink.flush()
    else:
        aside = out.with_name(f".{out.name}.part")
        try:
            with aside.open("wb") as f:
                report = run(
                    sources.logs, lambda s, n, raw: _put(f, s, n, raw, numbers), rules, learn=not no_learn
                )
            aside.replace(out)
        except OSError as e:
            aside.unlink(missing_ok=True)
            raise InputError(f"cannot write the compressed log: {e.strerror or e}", where=str(out)) from None
    if memory and task:
        memory.keep_filters(task, [*report.learnt, *(r for r in rules if r.name not in known)])
    every = {r.name: r for r in (*rules, *report.learnt)}
    if as_json:
        value = report.as_json() | {"notes": notes, "task": task}
        for row in value["rules"]:
            r = every.get(row["name"])
            row |= {"kind": r.kind, "origin": r.origin, "regex": r.regex} if r else {"kind": "events"}
        typer.echo(json.dumps(value))
        return
    to = sys.stderr if out is None else sys.stdout
    ratio = f"{report.bytes_in / report.bytes_out:,.0f}:1" if report.bytes_out else "nothing kept"
    typer.echo(
        f"{report.bytes_in:,} bytes in {report.lines_in:,} lines -> {report.bytes_out:,} bytes in {report.lines_out:,} lines ({ratio})",
        file=to,
    )
    typer.echo(f"  {report.folded:>12,}  folded", file=to)
    for name, count in sorted(report.dropped.items(), key=lambda x: -x[1])[: None if show_rules else 8]:
        typer.echo(
            f"  {count:>12,}  {name}" + (f"  /{every[name].regex}/" if show_rules and name in every else ""),
            file=to,
        )
    for n in notes:
        typer.echo(f"Note: {n}", file=to)


def _follow(logs: Any, numbers: bool) -> None:
    from ...diagnose.compress import compress_live

    if len(logs) != 1 or logs[0].path is None:
        raise InputError(
            "--follow reads one log file", hint="Name one file; a pipe is compressed as it comes without it"
        )

    def put(number: int, raw: bytes) -> None:
        _put(sys.stdout.buffer, logs[0], number, raw, numbers)
        sys.stdout.buffer.flush()

    report = compress_live(logs[0].path, put)
    typer.echo(f"{report.lines_in:,} lines -> {report.lines_out:,}", file=sys.stderr)


def _put(sink: Any, source: Any, number: int, raw: bytes, numbers: bool) -> None:
    if numbers:
        sink.write(f"{source.name}:{number}: ".encode())
    sink.write(raw)
    sink.write(b"\n")


def _ask_model(logs: Any, rules: list[Any], url: str, name: str | None) -> tuple[list[Any], list[str]]:
    from ...diagnose.assist.assistants import ask_filters
    from ...diagnose.assist.model import HttpModel, configured
    from ...diagnose.match.rules import builtin_set
    from ...diagnose.read.sources import head

    config = configured(url, name)
    assert config is not None
    segment = head(logs[0], 256 << 10).splitlines()[:400] if logs else []
    found, notes = ask_filters(
        HttpModel(config), segment, builtin_set(), samples=config.samples, budget=config.budget_chars
    )
    return [*rules, *found], notes
