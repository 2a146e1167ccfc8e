"""`unbroken check`: whether nodes are fit to train; for a Slurm prolog, an init container, or by hand."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import Exit

if TYPE_CHECKING:
    from ...detect.node import CheckResult
    from ...detect.node.whole import NodeReport

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def check(
    full: Annotated[
        bool,
        typer.Option(
            "--full/--quick", help="Also make the devices work: products, memory, bandwidths, disks."
        ),
    ] = False,
    interface: Annotated[
        list[str] | None,
        typer.Option(help="A network interface, or a port such as mlx5_0/1, that has to be up."),
    ] = None,
    folder: Annotated[list[Path] | None, typer.Option(help="A folder that has to take bytes.")] = None,
    within: Annotated[float, typer.Option(min=0.1, help="Seconds for the quick checks.")] = 5.0,
    nodes: Annotated[
        int, typer.Option(min=0, help="Check so many nodes of --cluster, and compare their versions.")
    ] = 0,
    cluster: Annotated[
        str, typer.Option(help="The cluster, as for unbroken run: NAME[,option=value...].")
    ] = "local",
    json_out: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check whether this node, or nodes of a cluster, are fit to train. --quick needs no torch and ends within five seconds, --full
    takes a minute.

    Exit code 0: nothing bad was found, which is not the same as healthy: what could not be read is told as not checked. 26: something
    is bad. As root it runs nothing that others can write, and refuses a PYTHONPATH.
    """
    from ...detect.node.trusted import refuse_as_root
    from ...detect.node.whole import check_this_node, leave

    if nodes:
        _check_nodes(nodes, cluster, full, interface or (), folder or (), within, json_out)
        return
    refuse_as_root()
    report = check_this_node(full=full, interfaces=interface or (), folders=folder or (), within_s=within)
    if json_out:
        print(json.dumps(report.as_json()))
    else:
        _show(report.checks)
    leave(Exit.OK if report.fit else Exit.CHECK_FOUND_FAULT)
    if not report.fit:
        raise typer.Exit(Exit.CHECK_FOUND_FAULT)


def _check_nodes(
    count: int,
    cluster: str,
    full: bool,
    interfaces: Sequence[str],
    folders: Sequence[Path],
    within: float,
    json_out: bool,
) -> None:
    """Each node says of itself what it finds; what differs from the other nodes is added."""
    from ...detect.node import CheckResult, State, compare_versions

    reports = asyncio.run(_ask_nodes(count, cluster, full, interfaces, folders, within))
    versions = {n: r.versions for n, r in reports.items() if not isinstance(r, str)}
    differing = compare_versions(versions)
    found: dict[str, list[CheckResult]] = {}
    for node, report in reports.items():
        if isinstance(report, str):
            found[node] = [CheckResult("node", State.BAD, report)]
        else:
            found[node] = [*report.checks, *differing[node]]
    bad = {n for n, checks in found.items() if any(c.state is State.BAD for c in checks)}
    if json_out:
        from dataclasses import asdict

        print(
            json.dumps(
                {
                    "fit": not bad,
                    "nodes": {
                        n: {
                            "fit": n not in bad,
                            "checks": [asdict(c) for c in checks],
                            "versions": versions.get(n, {}),
                        }
                        for n, checks in found.items()
                    },
                }
            )
        )
    else:
        for node, checks in found.items():
            print(f"{node}: {'something is bad' if node in bad else 'nothing bad was found'}")
            _show([c for c in checks if c.state is not State.GOOD])
    if bad:
        raise typer.Exit(Exit.CHECK_FOUND_FAULT)


async def _ask_nodes(
    count: int, cluster: str, full: bool, interfaces: Sequence[str], folders: Sequence[Path], within: float
) -> dict[str, NodeReport | str]:
    """By node its report, or why there is none."""
    from ...cluster.contract import AgentCommand, Request
    from ...cluster.once import run_once
    from ...cluster.options import parse_choice
    from ...cluster.registry import make_cluster

    choice = parse_choice(cluster)
    arguments = [
        "--within",
        str(within),
        *(["--full"] if full else []),
        *(["--trusted"] if choice.name != "local" else []),
    ]
    for name, values in (("--interface", interfaces), ("--folder", folders)):
        arguments += [word for v in values for word in (name, str(v))]
    with tempfile.TemporaryDirectory(prefix="unbroken-check-") as place:

        def log_of(node: str) -> Path:
            return Path(place) / f"{node.replace(os.sep, '-')}.log"

        made = make_cluster(choice.name, f"check-{secrets.token_hex(4)}", choice.options, log_of=log_of)
        request = Request(count)
        made.check(request)
        command = AgentCommand("unbroken.detect.node", tuple(arguments))
        outputs = await run_once(made, request, command, log_of, (90.0 if full else 30.0) + within)
    return {
        n: _read(o.text) or (o.why or f"it ended with exit code {o.code}: {_last(o.text)}")
        for n, o in outputs.items()
    }


def _read(text: str) -> NodeReport | str:
    """The report in what a node printed, or its error; "" where there is neither."""
    from ...detect.node.__main__ import MARK
    from ...detect.node.whole import NodeReport

    for line in reversed(text.splitlines()):
        if MARK not in line:
            continue
        try:
            value: dict[str, Any] = json.loads(line.partition(MARK)[2])
            return str(value["error"]["what"]) if "error" in value else NodeReport.from_json(value)
        except (ValueError, KeyError, TypeError):
            continue
    return ""


def _last(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")[
        :300
    ]


def _show(checks: Sequence[CheckResult]) -> None:
    width = max((len(f"{c.name} {c.device}") for c in checks), default=0)
    for c in checks:
        print(f"{c.state:<11}  {f'{c.name} {c.device}'.strip():<{width}}  {c.text}")
