"""`unbroken rehearse`: what a failure would do to a training, before one happens."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ...errors import Exit, RunInterrupted, UnbrokenError, UsageError
from ...units import Duration

LAUNCHERS = (
    "unbroken", "torch.distributed.run", "torch.distributed.launch", "torchrun", "accelerate", "accelerate.commands.launch",
    "deepspeed", "deepspeed.launcher.runner",
)  # fmt: skip
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings={"allow_interspersed_args": False})
def rehearse(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="After '--': script.py and its arguments, or '-m module'. {dir} is a folder for its output."
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=4, help="Optimizer steps to compare; of `unbroken.train`, its steps.")
    ] = 20,
    nproc: Annotated[int, typer.Option(min=1, help="Ranks.")] = 1,
    plain: Annotated[
        bool,
        typer.Option("--plain", help="Start the script again by itself instead of under `unbroken run`."),
    ] = False,
    keep: Annotated[Path | None, typer.Option(help="Keep all logs and traces in this new folder.")] = None,
    limit: Annotated[str, typer.Option(help="A training of so many steps takes this long at most.")] = "10m",
    json_out: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Trains undisturbed, then kills the training in the middle and resumes it, twice, and compares every step.

    Says *exact*, or names the first rank, step and piece that differ: the order of the data, a generator, the
    optimizer, the scheduler, a tensor by its name. The script needs no change. Nothing of the present folder is
    written to: where the script is told a folder for its output, write {dir}. Exit codes: 0 exact, 24 not exact.
    """
    from ...rehearse.launch import Plain, Supervised
    from ...rehearse.rehearsal import Rehearsal
    from ...rehearse.report import lines

    words = tuple(command or ())
    if not words or not (words[0] == "-m" or words[0].endswith(".py")):
        raise UsageError(
            "there is no script after '--'", hint="Write it like: unbroken rehearse -- train.py --out {dir}"
        )
    if words[0] == "-m" and "".join(words[1:2]) in LAUNCHERS:
        raise UsageError(
            f"{words[1]} starts the training in other processes, which a rehearsal would neither see nor kill",
            hint="Write the script alone, and how many ranks: unbroken rehearse --nproc 2 -- train.py --out {dir}",
        )
    if keep is not None and keep.exists():
        raise UsageError("the folder is there already", where=str(keep), hint="Choose another --keep")
    folder = keep.absolute() if keep is not None else Path(tempfile.mkdtemp(prefix="unbroken-rehearsal-"))
    folder.mkdir(parents=True, exist_ok=True)
    # As Ctrl-C, so that the training is ended too, and the folder goes.
    for sig in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(sig) is signal.SIG_DFL:
            signal.signal(sig, signal.default_int_handler)
    named = False
    try:
        report = Rehearsal(
            words, folder, steps=steps, nproc=nproc, launcher=Plain() if plain else Supervised(),
            timeout_s=float(Duration(limit)), say=lambda text: print(f"rehearse: {text}", file=sys.stderr, flush=True),
        ).run()  # fmt: skip
    except KeyboardInterrupt:
        raise RunInterrupted(
            "the rehearsal was stopped on request, and its training with it",
            hint="The same command starts it again",
        ) from None
    except UnbrokenError as e:
        named = str(folder) in str(e)  # whoever is sent there to look finds it
        raise
    finally:
        if keep is None and not named:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(report.as_json()) if json_out else "\n".join(lines(report)))
    if not report.exact:
        raise typer.Exit(Exit.REHEARSAL_NOT_EXACT)
