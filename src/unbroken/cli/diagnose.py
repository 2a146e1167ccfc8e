"""`unbroken diagnose`: what failed first in a job's logs, where, whether a restart can help, what to do."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ..errors import DiagnoseError, Exit, InputError, UsageError

if TYPE_CHECKING:
    from ..diagnose import Diagnosis, Verdict
    from ..diagnose.assist.incident_store import IncidentStore
    from ..diagnose.assist.incident_store_shape import Similar
    from ..diagnose.assist.model import AssistantConfig

_HIDDEN = "paths"


class _PathsOrCommand(TyperGroup):
    """A group whose first argument may also be a path: then the hidden command for paths runs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts the hidden command in front where no other is named."""
        if not args:
            args = ["--help"]
        if args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = [_HIDDEN, *args]
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Shows both ways to call."""
        formatter.write_usage(ctx.command_path, "PATH... [OPTIONS]")
        formatter.write_usage(ctx.command_path, "explain | correct | incidents | rules ...")


app = typer.Typer(
    cls=_PathsOrCommand, add_completion=False, pretty_exceptions_enable=False, no_args_is_help=False,
    help="Say what failed first in a job's logs, where, and whether a restart can help. "
    "PATH is a file, a folder, a glob or - for stdin; `unbroken diagnose PATH --help` shows the options. "
    "Exit codes: 0 no failure, 20 a restart can help, 21 it cannot, 22 unknown, 23 still running.",
)  # fmt: skip
rules_app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Rules: those that ship, and candidates that a model proposed.",
)
app.add_typer(rules_app, name="rules")

Store = Annotated[
    Path | None,
    typer.Option(
        "--store", help="The store of incidents (default: $UNBROKEN_INCIDENTS or the user's state folder)."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command(_HIDDEN, hidden=True)
def paths_(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Files, folders, globs, or - for stdin.")
    ],
    as_json: Json = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="Also write the report as one HTML page.")
    ] = None,
    bundle: Annotated[
        Path | None, typer.Option("--bundle", help="Also write redacted evidence as OUT.tar.gz, to hand on.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Keep watching a log that is still written; end with the job.")
    ] = False,
    live: Annotated[
        bool, typer.Option("--live", help="A log whose last time is recent counts as still running.")
    ] = False,
    rules: Annotated[
        list[Path] | None,
        typer.Option("--rules", help="A folder with rules of your own; may be given again."),
    ] = None,
    store: Store = None,
    no_memory: Annotated[
        bool, typer.Option("--no-memory", help="Neither ask nor record past incidents.")
    ] = False,
    model_url: Annotated[
        str | None, typer.Option("--model-url", help="An OpenAI-compatible address, as http://host:8000/v1.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="The model's name at that address.")] = None,
    refine: Annotated[
        bool, typer.Option("--refine", help="Ask the model even where the rules are sure.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print exactly what would be sent to the model, and send nothing."),
    ] = False,
) -> None:
    """Diagnose the job whose logs lie in PATH."""
    if follow:
        _follow(paths, rules or [], as_json)
        return
    if html is not None:
        from ..page.shell import require

        require()
    now = time.time() if live else None
    d, similar, incident = _diagnose(paths, rules or [], store, no_memory, now, record=not dry_run)
    config = None
    if model_url or dry_run or refine or not no_memory:
        from ..diagnose.assist.model import configured

        config = configured(model_url, model)
    if dry_run:
        _dry_run(d, similar, config)
        return
    if config is not None and (
        refine or d.verdict.reason == "Unknown" or (d.verdict.reason and d.verdict.confidence < 0.5)
    ):
        d = _ask(d, similar, config, None if no_memory else store)
    elif refine:
        raise UsageError("--refine needs a model", hint="Give --model-url, or set UNBROKEN_MODEL_URL")
    from ..diagnose import report

    if html is not None:
        _write(html, report.page(d, tuple(similar)))
    if bundle is not None:
        try:
            report.bundle(d, bundle)
        except OSError as e:
            raise InputError(f"cannot write the bundle: {e.strerror or e}", where=str(bundle)) from None
    if as_json:
        value = d.verdict.as_json() | {
            "incident": incident,
            "warnings": list(d.notes),
            "similar": [s.__dict__ for s in similar],
        }
        typer.echo(json.dumps(value))
    else:
        typer.echo(report.text(d, tuple(similar), incident, _style()))
        for name, path in (("Report", html), ("Bundle", bundle)):
            if path is not None:
                typer.echo(f"{name}: {path}")
    raise typer.Exit(exit_code(d.verdict))


def exit_code(v: Verdict) -> int:
    """The documented exit code of a verdict."""
    from ..diagnose import Outcome

    if v.outcome is Outcome.RUNNING:
        return Exit.DIAGNOSED_RUNNING
    if v.outcome in (Outcome.COMPLETED, Outcome.CANCELLED, Outcome.TIME_LIMIT, Outcome.PREEMPTED):
        return Exit.OK
    if v.reason in (None, "Unknown"):
        return Exit.DIAGNOSED_UNKNOWN
    return Exit.DIAGNOSED_RESTARTABLE if v.recoverable else Exit.DIAGNOSED_NOT_RESTARTABLE


def _diagnose(
    paths: Sequence[str], rules: Sequence[Path], store: Path | None, no_memory: bool, now: float | None,
    *, record: bool,
) -> tuple[Diagnosis, list[Similar], str | None]:  # fmt: skip
    """The diagnosis, past incidents like it, and its own id. Without `record` nothing is written, asked or sent."""
    from ..diagnose.engine import examine_paths
    from ..diagnose.match.rules import builtin_set, load

    ruleset = builtin_set().with_rules(load(rules)) if rules else builtin_set()
    memory: IncidentStore | None = None
    warnings: list[str] = []
    if not no_memory:
        from ..diagnose.assist.incident_store import IncidentStore, incident_id, recall, with_candidates

        memory = _memory(store) if record else IncidentStore(store, read_only=True)
        try:
            ruleset = with_candidates(ruleset, memory.accepted_rules())
        except DiagnoseError as e:
            warnings.append(str(e))
            memory = None
    d = examine_paths(paths, ruleset, now=now)
    similar: list[Similar] = []
    incident = None
    if memory is not None and d.verdict.reason is not None:
        try:
            incident = memory.record(d, _evidence(d)) if record else incident_id(d)
            similar = memory.similar(d, but=incident)
            d = replace(d, verdict=recall(d, [*memory.confirmed(incident), *similar]))
        except DiagnoseError as e:
            warnings.append(str(e))
    return replace(d, notes=(*d.notes, *warnings)), similar, incident


def _evidence(d: Diagnosis) -> list[str]:
    """The lines that are stored with an incident: its events, or the compressed log where no rule took any."""
    lines = [e.text for e in d.timeline.candidates[:200]] + [x.text for x in d.verdict.evidence]
    if d.verdict.reason == "Unknown" or d.verdict.confidence < 0.5:
        from ..diagnose.compress import evidence_lines

        lines += [t for s in d.sources.logs[:16] for _, t in evidence_lines(d, s, 200)]
    return lines


def _memory(store: Path | None) -> IncidentStore:
    from ..diagnose.assist.incident_store import IncidentStore
    from ..diagnose.assist.model import HttpModel, configured

    config = configured()
    return IncidentStore(store, HttpModel(config).embed if config is not None and config.embedding else None)


def _ask(d: Diagnosis, similar: list[Similar], config: AssistantConfig, store: Path | None) -> Diagnosis:
    """Asks the model; its verdict counts only as far as `agents` lets it."""
    from ..diagnose.assist.assistants import ask_failure
    from ..diagnose.assist.model import HttpModel
    from ..diagnose.match.rules import builtin_set

    lines = _numbered(d)
    asked = ask_failure(
        HttpModel(config),
        d,
        lines,
        similar,
        samples=config.samples,
        budget=config.budget_chars,
        ruleset=builtin_set(),
    )
    notes = list(asked.notes)
    if asked.rule is not None:
        try:
            from ..diagnose.assist.incident_store import IncidentStore

            IncidentStore(store).propose(
                asked.rule,
                f"proposed for {asked.verdict.root.text.strip()[:80] if asked.verdict.root else 'an incident'}",
            )
            notes.append(f"the model proposed rule {asked.rule.id}: `unbroken diagnose rules list`")
        except DiagnoseError as e:
            notes.append(str(e))
    return replace(d, verdict=asked.verdict, notes=(*d.notes, *notes))


def _numbered(d: Diagnosis) -> list[Any]:
    from ..diagnose.assist.assistants import Numbered
    from ..diagnose.compress import evidence_lines

    return [Numbered(s.name, n, t) for s in d.sources.logs[:64] for n, t in evidence_lines(d, s, 400)]


def _dry_run(d: Diagnosis, similar: list[Similar], config: AssistantConfig | None) -> None:
    from ..diagnose.assist.assistants import failure_messages
    from ..diagnose.redact.credentials import detectors

    if not detectors():
        typer.echo("Note: detect-secrets is not installed; our own patterns redact alone.", err=True)
    budget = config.budget_chars if config else 24_000
    messages = failure_messages(_numbered(d), d, similar, budget)
    typer.echo(
        json.dumps(
            {"to": f"{config.url.rstrip('/')}/chat/completions" if config else None, "messages": messages},
            indent=1,
        )
    )


def _follow(paths: Sequence[str], rules: Sequence[Path], as_json: bool) -> None:
    """Diagnoses again whenever the logs have grown, and ends when the verdict is no longer 'running'."""
    from ..diagnose import Outcome, report
    from ..diagnose.engine import examine
    from ..diagnose.read.sources import expand, total_bytes

    size, said, pause, settled = -1, None, 0.3, 0
    while True:
        now = total_bytes(expand(paths).logs)
        grown, size = now != size, now
        if grown or settled:
            start = time.monotonic()
            d = examine(paths, rules=rules, now=time.time())
            pause = max(0.3, 10 * (time.monotonic() - start))
            v = d.verdict
            running = v.outcome is Outcome.RUNNING
            settled = 0 if running or grown else settled + 1
            if (v.outcome, v.reason) != said:
                said = (v.outcome, v.reason)
                typer.echo(
                    json.dumps(v.as_json())
                    if as_json
                    else f"{time.strftime('%H:%M:%S')}  {report.headline(v)}"
                )
                sys.stdout.flush()
            if not running and settled >= 2:
                if not as_json:
                    typer.echo(report.text(d, style=_style()))
                raise typer.Exit(exit_code(v))
            if not running:
                settled = max(settled, 1)
        else:
            settled = 1
        time.sleep(min(pause, 30.0))


@app.command()
def explain(
    rule: Annotated[
        str, typer.Argument(help="A rule's id, as `decided by` names it; or xid-NN; or a reason.")
    ],
    as_json: Json = False,
) -> None:
    """Show what a rule looks for, what it concludes, and where it comes from."""
    from ..diagnose.match.rules import builtin, defaults, xids

    if rule.startswith("xid-") and rule[4:].isdigit():
        x = xids().get(int(rule[4:]))
        if x is None:
            raise UsageError(
                f"XID {rule[4:]} is in no group of ours",
                hint="See https://docs.nvidia.com/deploy/xid-errors/",
            )
        _fields(x.__dict__ | {"source": "https://docs.nvidia.com/deploy/xid-errors/"}, as_json)
        return
    found = next((r for r in builtin() if r.id == rule), None)
    if found is not None:
        base = defaults().get(found.reason or "")
        value = {k: v for k, v in found.__dict__.items() if v is not None}
        if base:
            value = base.__dict__ | value
        _fields(value, as_json)
        return
    if rule in defaults():
        mine = [r.id for r in builtin() if r.reason == rule]
        _fields(defaults()[rule].__dict__ | {"rules": ", ".join(mine)}, as_json)
        return
    import difflib

    near = difflib.get_close_matches(rule, [r.id for r in builtin()] + list(defaults()), n=1)
    raise UsageError(
        f"there is no rule '{rule}'",
        hint=f"Did you mean '{near[0]}'?" if near else "`unbroken diagnose rules list --all` lists them",
    )


@app.command()
def correct(
    incident: Annotated[str, typer.Argument(help="The incident's id.")],
    reason: Annotated[str, typer.Option("--reason", help="The right reason.")],
    note: Annotated[str, typer.Option("--note", help="What the next reader should know.")] = "",
    store: Store = None,
) -> None:
    """Say what an incident really was; the next one like it is told so."""
    from ..diagnose.assist.incident_store import IncidentStore

    IncidentStore(store).correct(incident, reason, note)
    typer.echo(f"{incident} is {reason} now.")


@app.command()
def incidents(
    store: Store = None, as_json: Json = False, most: Annotated[int, typer.Option("--most", min=1)] = 30
) -> None:
    """List past incidents, newest first."""
    from ..diagnose.assist.incident_store import IncidentStore

    rows = IncidentStore(store).incidents(most)
    if as_json:
        typer.echo(json.dumps({"incidents": [r.__dict__ for r in rows]}))
        return
    if not rows:
        typer.echo("No incident is stored yet.")
    for r in rows:
        when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(r.when))
        typer.echo(
            f"{r.id}  {when}  {(r.reason or r.outcome):<18} {'confirmed ' if r.confirmed else ''}{r.text.strip()[:90]}"
        )


@rules_app.command("list")
def rules_list(
    everything: Annotated[bool, typer.Option("--all", help="Also those that ship.")] = False, store: Store = None, as_json: Json = False,
) -> None:  # fmt: skip
    """List candidate rules and what stored incidents say of them."""
    from ..diagnose.assist.incident_store import IncidentStore
    from ..diagnose.match.rules import builtin

    memory = IncidentStore(store)
    found = [(c, memory.try_rule(c.rule)) for c in memory.rules()]
    if as_json:
        rows = [
            {
                "id": c.rule.id,
                "state": c.state,
                "why": c.why,
                "confirms": n,
                "breaks": b,
                "reason": c.rule.reason,
                "regex": c.rule.regex,
            }
            for c, (n, b) in found
        ]
        typer.echo(
            json.dumps({"candidates": rows, "shipped": [r.id for r in builtin()] if everything else []})
        )
        return
    for c, (confirms, breaks) in found:
        typer.echo(
            f"{c.rule.id}  {c.state}  {c.rule.reason}: confirms {confirms}, breaks {len(breaks)}  /{c.rule.regex}/"
        )
    if not found:
        typer.echo("No candidate rules.")
    for r in builtin() if everything else ():
        typer.echo(f"{r.id:<28} {r.role:<9} {r.reason or r.outcome or ''}")


@rules_app.command("accept")
@rules_app.command("adopt", hidden=True)
def rules_accept(rule: str, store: Store = None) -> None:
    """Accept a candidate that stored incidents confirm and that breaks none."""
    from ..diagnose.assist.incident_store import IncidentStore

    adopted = IncidentStore(store).accept(rule)
    typer.echo(f"{adopted.id} is accepted: it finds {adopted.reason}.")


@rules_app.command("reject")
def rules_reject(rule: str, store: Store = None) -> None:
    """Reject a candidate for good."""
    from ..diagnose.assist.incident_store import IncidentStore

    IncidentStore(store).reject(rule)
    typer.echo(f"{rule} is rejected.")


def _fields(value: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(value))
        return
    width = max(map(len, value))
    for k, v in value.items():
        typer.echo(f"{k:<{width}}  {v}")


def _write(path: Path, text: str) -> None:
    from ..atomic import write_text

    try:
        write_text(path, text)
    except OSError as e:
        raise InputError(f"cannot write the report: {e.strerror or e}", where=str(path)) from None


def _style() -> Any:
    colour = {"bad": typer.colors.RED, "good": typer.colors.GREEN}
    if not sys.stdout.isatty():
        return lambda text, name: text

    def style(text: str, name: str) -> str:
        return typer.style(text, fg=colour.get(name), bold=name == "bold" or None, dim=name == "dim" or None)

    return style
