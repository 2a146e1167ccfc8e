"""`unbroken train profile`: what plans do with the GPUs of this machine, side by side: a page, JSON, a table."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ... import atomic
from ...errors import InputError, UsageError
from ...page.shell import write_beside
from ..config import parse
from ..planning.layout import check

_USAGE = "unbroken train profile --out FOLDER [OPTIONS] [OPTIONS OF THE TRAINING]"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint="`unbroken train profile --help` lists the options")


def main(argv: Sequence[str]) -> int:
    """Runs each plan for some steps on all ranks; returns 0. Raises UsageError for plans that do not fit, before the first
    one starts, and InputError with the end of a rank's log for one that failed."""
    args, training = _parser().parse_known_args([a for a in argv if a != "--"])
    if args.rank_of:
        from .measure import run_rank

        config = parse(shlex.split(args.rank_of))
        run_rank(config, args.out, warm=args.warm, steps=args.measure)
        return 0
    ranks = args.ranks or _gpus() or 2
    plans = dict(_named(p) for p in args.plan) if args.plan else usual_plans(ranks)
    for options in plans.values():
        check(parse(_options(training, options)), ranks)
    args.out.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, options in plans.items():
        print(f"{name}: {options}", flush=True)
        found[name] = _run(name, _options(training, options), ranks, args)
    result = {"schema": 1, "training": training, "profiles": found}
    atomic.write_text(args.out / "profile.json", json.dumps(result, indent=1) + "\n")
    from .page import render_profile, table

    write_beside(args.out / "profile.html", lambda: render_profile(result))
    print(table(result))
    print(f"{args.out}/profile.html, profile.json")
    return 0


def usual_plans(ranks: int) -> dict[str, str]:
    """The two published versions on so many ranks: V1 with pipeline and tensor parallelism, V2 with hierarchical ZeRO."""
    tensor, pipeline = (2 if ranks % 4 == 0 else 1), (2 if ranks % 2 == 0 else 1)
    first = f"--pipeline {pipeline} --tensor {tensor} --optimizer -1"
    group = 8 if ranks % 8 == 0 else ranks
    return {"V1": first, "V2": f"--parameters {group} --gradients {group} --optimizer -1"}


def _options(training: list[str], plan: str) -> list[str]:
    return [*training, "--engine", "plan", *shlex.split(plan)]


def _named(text: str) -> tuple[str, str]:
    name, sep, options = text.partition("=")
    if not sep or not name:
        raise UsageError(
            f"--plan {text!r} has no name", hint='Write it as --plan "V1=--pipeline 2 --tensor 2"'
        )
    return name, options


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _run(name: str, options: list[str], ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    out = args.out / f"{name.replace('/', '-')}.json"
    out.unlink(missing_ok=True)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "unbroken.train", "profile", "--out", str(out), "--warm", str(args.warm),
               "--measure", str(args.measure), "--rank-of", shlex.join(options)]  # fmt: skip
    processes, logs = [], [out.with_suffix(f".rank-{r}.log") for r in range(ranks)]
    for rank, log in enumerate(logs):
        env = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
                            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
        with open(log, "wb") as f:
            processes.append(subprocess.Popen(command, env=env, stdout=f, stderr=f, start_new_session=True))
    until = time.monotonic() + args.timeout
    try:
        # One that fails leaves the others waiting for it.
        while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
            if time.monotonic() > until:
                break
            time.sleep(0.05)
    finally:
        for p in processes:
            if p.poll() is None:
                os.killpg(p.pid, signal.SIGKILL)
    codes = [p.wait() for p in processes]
    if any(codes) or not out.exists():
        worst = next((i for i, c in enumerate(codes) if c > 0), 0)
        end = logs[worst].read_text(errors="replace").strip().splitlines()[-1:] or ["it printed nothing"]
        raise InputError(
            f"plan {name} came to no end: rank {worst} ended with {codes[worst]}: {end[0][:300]}",
            where=str(logs[worst]),
            hint="Its log says more; --timeout gives it more time",
        )
    for log in logs:
        log.unlink()
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def _parser() -> argparse.ArgumentParser:
    p = _Parser(prog="unbroken train profile", usage=_USAGE, allow_abbrev=False, description=__doc__)
    p.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where page and figures go")
    p.add_argument("--ranks", type=int, default=0, metavar="N", help="processes [default: one for each GPU; without GPUs 2]")  # fmt: skip
    p.add_argument("--plan", action="append", metavar="NAME=OPTIONS", help="a plan to show; may be given again [default: the published V1 and V2]")  # fmt: skip
    p.add_argument(
        "--warm", type=int, default=4, metavar="N", help="steps before it is measured [default: 4]"
    )
    p.add_argument(
        "--measure", type=int, default=10, metavar="N", help="steps that are measured [default: 10]"
    )
    p.add_argument("--timeout", type=float, default=600, metavar="S", help="seconds of a plan [default: 600]")
    p.add_argument("--rank-of", help=argparse.SUPPRESS)
    return p
