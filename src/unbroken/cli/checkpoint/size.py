"""`unbroken checkpoint size`: memory and disk that a run will need."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ...errors import UsageError
from ...units import Bytes
from .places import Json, newest


def size(
    parameters: Annotated[str | None, typer.Argument(help="Number of parameters: 7e9, 7B, 350M.")] = None,
    like: Annotated[
        str | None, typer.Option(help="As large as this checkpoint, instead.", metavar="CHECKPOINT")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Type of the parameters.")] = "float32",
    optimizer: Annotated[
        str, typer.Option(help="adamw, adam, sgd, momentum, lion, adagrad, none.")
    ] = "adamw",
    master: Annotated[
        bool, typer.Option("--master", help="fp32 copies of 16-bit parameters are saved too.")
    ] = False,
    ranks: Annotated[int, typer.Option(help="Ranks of the run.")] = 1,
    ranks_per_node: Annotated[int, typer.Option(help="Ranks on one node.")] = 8,
    replicated: Annotated[
        bool,
        typer.Option("--replicated", help="Every rank has all of it (plain data parallel), not a shard."),
    ] = False,
    buffers: Annotated[int, typer.Option(help="Snapshots that the keeper holds for each rank.")] = 3,
    peer: Annotated[
        bool, typer.Option("--peer", help="Each keeper also holds another node's snapshots.")
    ] = False,
    keep_last: Annotated[int, typer.Option(help="Checkpoints kept on disk.")] = 3,
    as_json: Json = False,
) -> None:
    """Say how much host memory and disk a run will need for its checkpoints, before it starts."""
    from ... import machine
    from ...checkpoint.catalogue import sizing

    if (parameters is None) == (like is None):
        raise UsageError("give a number of parameters, or --like CHECKPOINT")
    if like is not None:
        from ...checkpoint.catalogue.contents import read_committed

        storage, name = newest(like)
        manifest = read_committed(storage, name)
        state = sum(t.total_bytes for n, t in manifest.tensors.items() if n not in manifest.aliases)
    else:
        state = sizing.state_bytes(_count(str(parameters)), dtype=dtype, optimizer=optimizer, master=master)
    plan = sizing.SizingPlan(state, ranks, ranks_per_node, not replicated, buffers, peer, keep_last)
    needed, total = sizing.need(plan), machine.usable_memory()
    fits = needed.node_host_bytes <= total * 0.8
    if as_json:
        told = {
            "state_bytes": state,
            "rank_bytes": needed.rank_bytes,
            "node_host_bytes": needed.node_host_bytes,
        }
        print(json.dumps({**told, "checkpoint_bytes": needed.checkpoint_bytes, "folder_bytes": needed.folder_bytes,
                          "this_machine_bytes": total, "fits_here": fits}))  # fmt: skip
        return
    held = f"{min(ranks, ranks_per_node)} ranks x {buffers} snapshots" + (
        ", twice for the peer" if peer else ""
    )
    print(f"state            {Bytes(state)}")
    print(f"per rank         {Bytes(needed.rank_bytes)}")
    print(f"host memory      {Bytes(needed.node_host_bytes)} on each node ({held})")
    print(f"one checkpoint   {Bytes(needed.checkpoint_bytes)}")
    print(f"disk             {Bytes(needed.folder_bytes)} ({keep_last} kept, and the one being written)")
    print(f"this machine     {Bytes(total)} of memory, {Bytes(machine.available_memory() or 0)} free: "
          f"{'enough for a node' if fits else 'NOT enough for a node (at most four fifths should be snapshots)'}")  # fmt: skip


def _count(text: str) -> int:
    scales = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
    scale = scales.get(text[-1:].lower(), 1.0)
    try:
        number = float(text[:-1] if scale != 1.0 else text) * scale
        if not 0 <= number < 1e18:
            raise ValueError
    except ValueError:
        raise UsageError(
            f"'{text}' is no number of parameters", hint="Write it like 7e9, 7B or 350M"
        ) from None
    return int(number)
