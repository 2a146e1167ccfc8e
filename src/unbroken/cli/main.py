"""Finds the command, imports its file alone, and turns errors into one paragraph and an exit code.

Each file or folder of a command holds `app`, a `typer.Typer`. A command that needs torch, DuckDB or a harness
imports it inside the function that uses it, so that `unbroken --help` answers at once.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import os
import sys
import traceback

from ..errors import Exit, MissingExtra, UnbrokenError, UsageError
from ..extras import REQUIRED
from ..page.terminal import filtered
from ..version import __version__

COMMANDS: dict[str, str] = {
    "run": "Run a training script under supervision: it survives failures and goes on",
    "rehearse": "Kill a training on purpose and resume it: exact, or the first thing that differs",
    "status": "Show where a run stands",
    "ls": "List runs: which, where, and their state",
    "logs": "Show what the ranks of a run print; compress logs",
    "nodes": "List the nodes of a cluster; put one out of use, and give it back",
    "agent": "Let this host take part in runs: wait for supervisors, where nobody may log in",
    "report": "Write a run's report.html: loss, timeline, incidents",
    "demo": "Watch a real run get killed, hung and robbed of a node, and come back each time",
    "train": "The reference trainer: a small Llama-style model, bit-identical after a resume",
    "checkpoint": "List, verify, export, import and prune checkpoints",
    "diagnose": "Say what failed first in a job's logs, where, and whether a restart can help",
    "trace": "Characterise a cluster from its scheduler records",
    "telemetry": "Record what the hardware of a node does",
    "eval": "Evaluate a checkpoint on many datasets in a fraction of the GPU time",
    "check": "Check whether this node is fit to train, for a prolog or an init container",
    "doctor": "Check what this machine can do for unbroken, and what is missing",
}

FOLDERS = {
    "runs": ("run", "rehearse", "status", "ls", "report", "demo"),
    "cluster": ("nodes", "agent", "check", "doctor"),
}
"""Commands of one kind lie together; the others beside this file."""


def name_module(command: str) -> str:
    """Where a command lies."""
    folder = next((f"{f}." for f, names in FOLDERS.items() if command in names), "")
    return f"unbroken.cli.{folder}{command}"


def available() -> dict[str, str]:
    """The commands whose file is there, with their one-line help."""
    return {n: h for n, h in COMMANDS.items() if importlib.util.find_spec(name_module(n))}


def main(argv: list[str] | None = None) -> None:
    """Entry point of the console script; never returns normally, exits with a documented code."""
    args = list(sys.argv[1:] if argv is None else argv)
    sys.exit(dispatch(args))


def dispatch(args: list[str]) -> int:
    """Runs one command line and returns its exit code; what it prints cannot act on the terminal."""
    with filtered():
        return _dispatch(args)


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(_help())
        return Exit.OK if args else 2
    if args[0] in ("-V", "--version"):
        print(f"unbroken {__version__}")
        return Exit.OK
    name, rest = args[0], args[1:]
    as_json = "--json" in (rest[: rest.index("--")] if "--" in rest else rest)
    known = available()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        text = f"there is no command '{name}'.{hint} `unbroken --help` lists them."
        if as_json:
            print(json.dumps(UsageError(text).as_json()))
        print(f"unbroken: {text}", file=sys.stderr)
        return UsageError.exit_code
    try:
        module = importlib.import_module(name_module(name))
        code = module.app(args=rest, prog_name=f"unbroken {name}", standalone_mode=True)
        return code if isinstance(code, int) else Exit.OK
    except SystemExit as e:
        wrong = getattr(e.__context__, "format_message", None)  # what Typer has just shown, on its way out
        if as_json and wrong is not None:
            print(json.dumps(UsageError(wrong()).as_json()))
        return e.code if isinstance(e.code, int) else (Exit.OK if e.code is None else 1)
    except UnbrokenError as e:
        if as_json:
            print(json.dumps(e.as_json()))
        print(f"unbroken {name}: {e}", file=sys.stderr)
        return e.exit_code
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output (head, less) has gone: not an error, and nothing more can be printed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK
    except ModuleNotFoundError as e:
        if (library := (e.name or "").split(".")[0]) not in REQUIRED:
            return _report_defect(name, e)
        missing = MissingExtra(library, "", what="this command")
        if as_json:
            print(json.dumps(missing.as_json()))
        print(f"unbroken {name}: {missing}", file=sys.stderr)
        return missing.exit_code
    except Exception as e:  # noqa: BLE001  the last line of defence: a bug of ours, said as such
        return _report_defect(name, e)


def _report_defect(name: str, error: Exception) -> int:
    """Shows the traceback, and says whose fault it is."""
    traceback.print_exception(error)
    print(
        f"unbroken {name}: this is a defect of unbroken {__version__}, not of your input: "
        f"{type(error).__name__}: {error}. Please report it with the lines above.",
        file=sys.stderr,
    )
    return Exit.INTERNAL


def _help() -> str:
    lines = [
        "Usage: unbroken COMMAND [OPTIONS]",
        "",
        "Keeps the development of large language models running.",
        "",
    ]
    known = available()
    width = max(map(len, known), default=0)
    lines += [f"  {n:<{width}}  {h}" for n, h in known.items()]
    lines += ["", "`unbroken COMMAND --help` explains a command; `unbroken --version` prints the version."]
    return "\n".join(lines)
