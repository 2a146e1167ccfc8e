"""`unbroken eval tasks`, `stage` and `cache`: what a harness knows, data for machines without a network, copies of models."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from ...errors import InputError
from . import options
from .asked import suite_of


def tasks(
    harness: str = typer.Argument("lm_eval", help="lm_eval, plain, or package.module:Class"),
    find: str = typer.Option("", "--find", help="Only names that contain this"),
    folder: Path = typer.Option(Path(), "--folder", help="Where local tasks lie"),
    as_json: bool = options.JSON,
) -> None:
    """List the tasks that a harness knows."""
    from ...errors import UnknownTask
    from ...evaluate.contracts import Suite
    from ...evaluate.suite.registry import get_harness

    if not folder.is_dir():
        raise InputError("there is no such folder", where=str(folder), hint="Give --folder where tasks lie")
    known = get_harness(harness).list_tasks(Suite("all", (), folder=str(folder.resolve())))
    names = [n for n in known if find in n]
    if not known:
        raise InputError(f"the harness '{harness}' finds no task here", where=str(folder.resolve()),
                         hint="Give --folder where tasks lie")  # fmt: skip
    if not names:
        raise UnknownTask(find, known, where=f"--find: none of the {len(known)} names contains it")
    print(json.dumps({"tasks": names}) if as_json else "\n".join(names))


def stage(
    suite: str = typer.Argument(help="A TOML file, or HARNESS:TASK,TASK,..."),
    into: Path = typer.Option(
        ..., "--into", help="Folder for the data, on a file system that the nodes share"
    ),
    check: bool = typer.Option(False, "--check", help="Only say what is there; fetch nothing"),
    as_json: bool = options.JSON,
) -> None:
    """Fetch a suite's data for machines without a network, and prove that they are found offline."""
    from ...errors import DatasetMissing
    from ...evaluate.harness.lm_eval.staging import offline_environment, stage_suite
    from ...journal.codec import encode

    found = stage_suite(suite_of(suite, "", None), into, only_check=check)
    if as_json:
        print(json.dumps({"tasks": [encode(t) for t in found]}))
    else:
        for t in found:
            print(f"{t.task}: " + (t.problem or f"{t.documents:,} documents, {t.source}"))
    bad = [t.task for t in found if t.problem]
    if bad:
        raise DatasetMissing(
            f"{len(bad)} of {len(found)} tasks have no data: {', '.join(bad[:8])}",
            where=str(into),
            hint="Run it without --check where there is a network"
            if check
            else "See each task's reason above",
        )
    if not as_json:
        print("\nOn machines without a network, before `unbroken eval run`:")
        print("export " + " ".join(f"{k}={v}" for k, v in offline_environment(into.resolve()).items()))


def cache(
    clear: bool = typer.Option(False, "--clear", help="Remove copies that nobody uses"),
    as_json: bool = options.JSON,
) -> None:
    """Show the copies of models in this node's shared memory."""
    from ...evaluate.model.cache import copies, default_places, sweep

    found = []
    for root, _ in default_places().roots():
        if clear and root.exists():
            sweep(root, force=True)
        found += copies(root)
    if as_json:
        print(
            json.dumps(
                {
                    "copies": [
                        {"hash": c.hash, "path": c.path, "bytes": c.bytes, "users": c.users} for c in found
                    ]
                }
            )
        )
    else:
        print(
            "\n".join(f"{c.hash[:12]}  {c.bytes / 2**30:.2f} GiB  {c.users} users  {c.path}" for c in found)
            or "no copy of a model is on this node"
        )
