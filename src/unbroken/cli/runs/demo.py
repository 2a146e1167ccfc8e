"""`unbroken demo`: a run that survives real faults, on this machine."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import RunError, RunInterrupted, StorageError, UsageError
from ...units import Duration, plural

if TYPE_CHECKING:
    from ...testing.scenario import Scenario

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_MARK = ".unbroken-demo"


@app.command()
def demo(
    folder: Annotated[
        Path, typer.Option("--dir", help="Where the runs lie; emptied first if it was a demo's.")
    ] = Path("demo-run"),
    seed: Annotated[int, typer.Option(help="Chooses where and when the faults strike.")] = 1,
    steps: Annotated[int, typer.Option(min=60, help="Steps of the training.")] = 160,
    nodes: Annotated[int, typer.Option(min=2, help="Virtual nodes that train; one spare is added.")] = 2,
    nproc: Annotated[int, typer.Option(min=1, help="Ranks per node.")] = 2,
    train: Annotated[
        str, typer.Option(help="More options for `unbroken train`, such as '--device cuda'.")
    ] = "",
    limit: Annotated[str, typer.Option(help="Give up after this long.")] = "280s",
    json_out: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end, what happens on stderr.")
    ] = False,
) -> None:
    """Watch a real pretraining run get killed, hung and robbed of a node, and come back each time by itself.

    First a run of four ranks on two virtual nodes without faults; then the same run with kill -9 of a rank, SIGSTOP
    of a rank, kill -9 of a whole node and kill -9 of the supervisor, at random steps; then a copy with a bug in the
    script. Exit code 0 only if the final loss is bit-identical, the run came back each time, the bug stopped it at
    once, and nothing is left behind; 11 stopped on request.
    """
    from ...progress import RunDir
    from ...status import write_report
    from ...testing.scenario import ScenarioSize, tell

    out = sys.stderr if json_out else sys.stdout

    def say(line: str) -> None:
        print(line, file=out, flush=True)

    # What was asked is read first: a mistake in it must not cost the scenario that lies in the folder.
    shape = ScenarioSize(steps=steps, nodes=nodes, nproc=nproc, train=_words(train))
    limit_s = Duration(limit)
    _empty(folder)
    # As Ctrl-C, so that the runs are ended too.
    for sig in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(sig) is signal.SIG_DFL:
            signal.signal(sig, signal.default_int_handler)
    try:
        scenario = tell(folder.absolute(), seed=seed, shape=shape, say=say, limit_s=limit_s)
    except KeyboardInterrupt:
        raise RunInterrupted(
            "the demo was stopped on request, and its runs with it",
            where=str(folder),
            hint="The same command starts it again",
        ) from None
    report = write_report(RunDir(folder / "run"))
    scenario.report = str(report)
    (folder / "story.json").write_text(json.dumps(scenario.as_json(), indent=1) + "\n")
    say("")
    _table(scenario, out)
    if json_out:
        print(json.dumps(scenario.as_json()))
    if not scenario.held:
        raise RunError(f"the scenario did not hold: {'; '.join(scenario.problems)}", where=str(folder))


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as e:
        raise UsageError(f"--train cannot be split into words: {e}", hint="Close the quotation") from e


def _empty(folder: Path) -> None:
    try:
        if folder.exists() and any(folder.iterdir()):
            if not (folder / _MARK).exists():
                raise UsageError(
                    "the folder is not empty and was not made by a demo",
                    where=str(folder),
                    hint="Choose another --dir",
                )
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _MARK).touch()
    except OSError as e:
        raise StorageError(
            f"the demo's folder cannot be written: {e.strerror}",
            where=str(e.filename or folder),
            hint="Choose another --dir",
        ) from e


def _name(verdict: dict[str, Any]) -> str:
    """What the run's own page calls it; "?" where there is none."""
    from ...progress.records.verdict import Verdict

    return Verdict.from_json(verdict).title if verdict else "?"


def _table(scenario: Scenario, out: object) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(file=out)  # type: ignore[arg-type]
    if not console.is_terminal:
        console = Console(file=out, width=130)  # type: ignore[arg-type]
    table = Table(title="What happened", box=SIMPLE_HEAD)
    table.add_column("what")
    for column in ("at step", "detected after", "verdict", "action", "resumed after", "steps lost"):
        table.add_column(column, no_wrap=True)
    for t in scenario.incidents:
        verdict = _name(t.verdict)
        if t.verdict.get("confidence"):
            verdict += f" ({t.verdict['confidence']:.0%})"
        table.add_row(
            t.what, str(t.at_step), "-" if t.detected_s is None else str(Duration(round(t.detected_s, 2))), verdict,
            t.action, "-" if t.resumed_s is None else str(Duration(round(t.resumed_s, 2))),
            "-" if t.steps_lost is None else str(t.steps_lost),
        )  # fmt: skip
    bug = scenario.script_bug
    if bug:
        table.add_row(
            "a bug in the script", "12", "-", _name(bug["verdict"]), bug["verdict"].get("action", "?"),
            "never" if bug["stopped"] else "?", "-",
        )  # fmt: skip
    console.print(table)
    console.print(
        "Measured from outside: both times run from the moment of the fault. The report's begin with the last sign of progress "
        "and with the detection.\n"
    )
    same = "bit-identical" if scenario.identical else "NOT identical"
    console.print(
        f"final loss {_loss(scenario.final_loss)}, the reference's {_loss(scenario.reference_loss)}: {same} "
        f"(every step's loss, every batch, parameters and optimizer state on every rank)"
    )
    console.print(
        f"{plural(scenario.attempts, 'attempt')}, cold start {Duration(round(scenario.cold_start_s, 2))}, "
        f"ETTR {scenario.ettr:.0%} (a fault every few seconds), {Duration(round(scenario.seconds))} in all"
    )
    console.print(f"report: {scenario.report}", soft_wrap=True)


def _loss(text: str) -> str:
    return f"{float.fromhex(text):.6f}" if text else "?"
