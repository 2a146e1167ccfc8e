"""`unbroken nodes`: the nodes of a cluster, and those that are out of use."""

from __future__ import annotations

import asyncio
import getpass
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ...errors import InputError, UsageError
from ...units import Duration

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="List the nodes of a cluster; put one out of use with a reason, an owner and an expiry; give it back.",
)

Cluster = Annotated[str, typer.Option(help="The cluster, as for unbroken run: NAME[,option=value...].")]
Owner = Annotated[
    str, typer.Option(help="Whose cordon it is. Default: your user name; a run's own are of 'unbroken'.")
]


def _open(cluster: str) -> Any:
    """The nodes of a cluster that can list them without a run. Raises UsageError, UnknownKey."""
    from ...cluster.options import make_options, parse_choice
    from ...cluster.registry import find_cluster, names

    choice = parse_choice(cluster)
    kind = find_cluster(choice.name)
    options = make_options(kind.Options, choice.options, where=f"the cluster '{choice.name}'")
    make = getattr(kind, "open_nodes", None)
    if make is None:
        able = [n for n in names() if hasattr(find_cluster(n), "open_nodes")]
        raise UsageError(
            f"the nodes of '{choice.name}' belong to one run each: there is nothing to list",
            hint=f"Clusters with nodes of their own: {', '.join(able)}",
        )
    return make(options)


@app.command("ls")
def list_nodes(
    cluster: Cluster = "slurm",
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Lists nodes with their state, and those out of use with owner, reason and expiry. Cordons that have expired are lifted
    where you may do that."""
    nodes, cordons = asyncio.run(_open(cluster).list())
    if as_json:
        found = [
            {
                "node": n,
                "states": sorted(r.states),
                "gres": r.gres,
                "cordon": asdict(cordons[n]) if n in cordons else None,
            }
            for n, r in nodes.items()
        ]
        print(json.dumps({"nodes": found}, indent=1))
        return
    width = max((len(n) for n in nodes), default=4)
    for name, record in nodes.items():
        state = "+".join(sorted(record.states)).lower()
        print(
            f"{name:<{width}}  {state:<16}  {record.gres or '-':<10}  {_describe(cordons.get(name))}".rstrip()
        )


@app.command()
def history(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The site's node history (`history` of the policy).")
    ],
    lemons: Annotated[
        bool,
        typer.Option(
            "--lemons", help="Only the few nodes that stand for half of all, as a report to their owner."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Shows what is held against each node and GPU over all runs of a site, the worst first; what is old counts for less."""
    from ...recover.site.history import AVOID_AT, find_lemons
    from ...recover.site.store import SiteHistory

    if not folder.is_dir():
        raise InputError("there is no such folder", where=str(folder), hint="Name the policy's `history`")
    scores = SiteHistory(folder, "").score(time.time())
    found = find_lemons(scores) if lemons else sorted(scores.values(), key=lambda s: (-s.score, s.node))
    if as_json:
        print(json.dumps({"nodes": [asdict(s) | {"avoided": s.score >= AVOID_AT} for s in found]}, indent=1))
        return
    if lemons and found:
        share = sum(s.score for s in found) / sum(s.score for s in scores.values())
        print(
            f"{len(found)} of {len(scores)} nodes with a history stand for {share:.0%} of all that is held against any:"
        )
    width = max((len(s.node) for s in found), default=4)
    for s in found:
        reasons = ", ".join(f"{n} x {r}" for r, n in s.reasons.items())
        gpus = "".join(f"; {g} {score:.1f}" for g, score in sorted(s.gpus.items(), key=lambda g: -g[1])[:4])
        last = time.strftime("%d %b %Y", time.localtime(s.last))
        avoided = "  avoided" if s.score >= AVOID_AT else ""
        print(
            f"{s.node:<{width}}  {s.score:5.2f}  {s.incidents} in {s.runs} runs, last {last}: {reasons}{gpus}{avoided}"
        )


@app.command()
def spares(
    nodes: Annotated[int, typer.Option(min=1, help="Nodes that train.")],
    rate: Annotated[
        float, typer.Option(min=0.0, help="Failures of a node a day; published fleets have 0.0012 to 0.0065.")
    ] = 0.005,
    replace: Annotated[str, typer.Option(help="Until a failed node is replaced, such as 30m or 1d.")] = "8h",
    group: Annotated[
        int, typer.Option(min=1, help="The most nodes that may leave at once: a rack, a switch.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Advises how many spares a run should have: the fewest that last until failed nodes are replaced, in 99 and 99.9 of 100 cases."""
    from ...status.effective import advise_spares

    seconds = float(Duration(replace))
    advised = {str(q): advise_spares(nodes, rate, seconds, q, group) for q in (0.99, 0.999)}
    if as_json:
        print(
            json.dumps(
                {"nodes": nodes, "rate": rate, "replace_s": seconds, "group": group, "spares": advised}
            )
        )
        return
    print(
        f"{advised['0.99']} spares last in 99 % of cases, {advised['0.999']} in 99.9 %, for {nodes} nodes of which each fails {rate:g} times a day"
    )
    if group > 1:
        print(
            f"never fewer than the {group} that may leave at once; a larger group needs nodes from the cluster, which takes {replace}"
        )


def _describe(cordon: Any) -> str:
    if cordon is None:
        return ""
    until = (
        "for good"
        if cordon.expires is None
        else time.strftime("until %d %b %H:%M", time.localtime(cordon.expires))
    )
    return f"out of use by {cordon.owner} {until}: {cordon.reason}"


@app.command()
def cordon(
    node: Annotated[str, typer.Argument(help="The node.")],
    reason: Annotated[str, typer.Option(help="Why: somebody will ask.")],
    expires: Annotated[str, typer.Option("--for", help="For how long, such as 12h; 'good' for ever.")] = "1d",
    owner: Owner = "",
    cluster: Cluster = "slurm",
) -> None:
    """Takes a node out of use; what runs there goes on."""
    from ...cluster.contract import Cordon

    if not reason.strip():
        raise UsageError("a cordon needs a reason: somebody will ask", hint="Add --reason TEXT")
    until = None if expires == "good" else time.time() + float(Duration(expires))
    asyncio.run(_open(cluster).cordon(Cordon(node, owner or getpass.getuser(), reason, until)))
    print(f"{node} is out of use {'for good' if until is None else f'for {expires}'}: {reason}")


@app.command()
def release(
    node: Annotated[str, typer.Argument(help="The node.")],
    owner: Owner = "",
    cluster: Cluster = "slurm",
) -> None:
    """Gives a node back that was taken out of use."""
    released = asyncio.run(_open(cluster).release(node, owner or getpass.getuser()))
    print(f"{node} is in use again" if released else f"{node} was not out of use")
