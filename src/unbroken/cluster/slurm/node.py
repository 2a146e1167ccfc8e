"""This package's program on a node of a Slurm cluster: the task of a step.

    start    starts the node's agent with its secret from standard input, says what becomes of it, one JSON object a line, and
             stays as long as anything of the run is on the node: when the task of a step ends, Slurm kills the rest of the step
    end      ends all that the run has on the node; says what that came to
    gone     succeeds where Slurm has heard that nothing is left of the steps of the run's ranks on the node
    survey   says what the node is

What is on a node is held there as on any machine (cluster.holding), whatever the site's Slurm contains besides.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import shutil
import signal
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...errors import RunError
from ...version import __version__
from ..contract import AgentCommand, Cordon, Event, Exited, Lost, Started
from ..holding.apart import Apart, Container
from ..holding.choice import every
from ..holding.ownership import Ownership
from ..local_events import LocalCluster
from ..survey import find_gpus, find_visible, read_boot_id
from .controller.commands import Slurm, clean_environment, is_contained
from .launches import name_other

_LEFT_EVERY_S = 0.5
_ALONE_S = 0.5
_SECRET_MOST = 1 << 16
_NEEDED = ("psutil", "safetensors", "torch", "xxhash")
"""What agent, keeper and ranks import. torch is only looked for: importing it takes seconds."""


class ThisNode(LocalCluster):
    """One node of the run: a local cluster that was given it, and knows nothing of others, which may be on the same machine
    where a site runs several daemons on one."""

    def __init__(self, run_id: str, node: str, ranks_in: Container | None = None) -> None:
        """`ranks_in` are steps for the ranks of an attempt; without them they run in the agent's."""
        super().__init__(run_id, log_of=lambda _: Path("/dev/stderr"))  # srun brings it to the supervisor
        self._node = self.only = node
        self._apart = Apart(run_id, self._root, ranks_in) if ranks_in else None

    @property
    def owner(self) -> Ownership:
        return self._apart or super().owner

    def _given(self) -> list[str]:
        return [self._node]

    def _write(
        self, *, given: Collection[str] | None = None, cordons: Mapping[str, Cordon] | None = None
    ) -> None:
        """Nodes and cordons are the supervisor's."""

    def forget_all(self) -> None:
        """Drops what is remembered here of the run's processes: none is left."""
        self.forget_node(self._node)
        shutil.rmtree(self._root / self._node, ignore_errors=True)

    def count_left(self) -> int:
        """How many processes of the run are on this node."""
        return sum(len(o.left(self._node)) for o in (self.owner, *every(self.run_id, self._root)))


def tell(**fields: Any) -> None:
    """One line for the supervisor. Where nobody reads any more the node goes on."""
    try:
        os.write(1, json.dumps(fields).encode() + b"\n")
    except OSError:
        pass


async def start(
    run_id: str, node: str, command: AgentCommand, ranks_in: Container | None, *, nothing_left: bool
) -> int:
    """Starts the agent, follows it, and stays while anything is left. Returns the task's exit code."""
    cluster = ThisNode(run_id, node, ranks_in)
    if nothing_left:
        cluster.forget_all()
    events = cluster.events()
    try:
        launch = await cluster.start(node, command)
    except RunError as e:
        tell(kind="refused", why=str(e))
        return 1
    code = await _follow(events, launch)
    while await asyncio.to_thread(cluster.count_left):
        await asyncio.sleep(_LEFT_EVERY_S)
    return code


async def _follow(events: Any, launch: str) -> int:
    """Says that the agent started and how it ended; its code as a shell would give it."""
    ended: Event | None = None
    while True:
        try:
            async with asyncio.timeout(None if ended is None else _ALONE_S):
                event = await anext(events)
        except TimeoutError:
            return _code(ended)
        match event:
            case Started(launch=l) if l == launch:
                tell(kind="started", pid=os.getpid())
            case Exited(launch=l, code=code, signal=sig) if l == launch:
                ended = event
                tell(kind="exited", code=code, signal=sig)
            case Lost(why=why, proven=proven):
                tell(kind="lost", why=why, proven=proven)
                return _code(ended)


def _code(ended: Event | None) -> int:
    if not isinstance(ended, Exited):
        return 0
    return ended.code if ended.code is not None else 128 + (ended.signal or 0) if ended.signal else 0


async def end(run_id: str, node: str, within_s: float) -> int:
    """Ends all that the run has on this node."""
    cluster = ThisNode(run_id, node)
    ended = await asyncio.to_thread(cluster.end_node, node, within_s)
    tell(kind="ended", **asdict(ended))
    return 0


async def is_gone(job: str, run_id: str, node: str) -> bool:
    """Whether no step of ranks is left: only where Slurm holds each by a cgroup does it know."""
    slurm = Slurm()
    if not is_contained(await slurm.read_config()):
        return False
    name = name_other(run_id, "ranks")
    return not any(s.name == name and node in s.nodes for s in await slurm.list_steps(job))


def survey(node: str) -> int:
    """Says what the node is."""
    missing = ", ".join(n for n in _NEEDED if importlib.util.find_spec(n) is None)
    tell(
        kind="survey", node=node, version=__version__, gpus=_count_gpus(), boot=read_boot_id(), visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        python=sys.executable, missing=missing,
        srun=shutil.which("srun") is not None,
    )  # fmt: skip
    return 0


def _count_gpus() -> int:
    """How many GPUs this step may use: as Slurm names them, else as many as there are."""
    return len(find_visible(find_gpus()))


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Our own arguments, and those of the agent, which stand after `--`."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _read_secret() -> bytes:
    data = b""
    while len(data) < _SECRET_MOST and (piece := os.read(0, _SECRET_MOST)):
        data += piece
    return data


def main() -> int:
    """Entry point of the task."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("what", choices=("start", "end", "survey", "gone"))
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--node", help="by default the name that Slurm gives it")
    parser.add_argument("--environment", default="{}", help="added to the agent's, as a JSON object")
    parser.add_argument(
        "--ranks-in", default="", help="steps for ranks, as holding.apart.Container writes them"
    )
    parser.add_argument("--job", default="")
    parser.add_argument("--nothing-left", action="store_true", help="nothing of the run is here: forget")
    parser.add_argument("--within", type=float, default=10.0, help="seconds")
    parser.add_argument("--module", default="")
    words, arguments = _split(sys.argv[1:])
    args = parser.parse_args(words)
    node = args.node or os.environ.get("SLURMD_NODENAME", "")
    if args.what == "survey":
        return survey(node)
    if args.what == "gone":
        return 0 if asyncio.run(is_gone(args.job, args.run_id, node)) else 1
    if args.what == "end":
        return asyncio.run(end(args.run_id, node, args.within))
    # What is sent to a whole job before it ends is the supervisor's to answer.
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(sig, _pass_over)
    command = AgentCommand(args.module, tuple(arguments), json.loads(args.environment), _read_secret())
    # What is started from here is no part of this step: its tasks, its memory and its GPUs are not theirs.
    for name in set(os.environ) - set(clean_environment(os.environ)) - {"SLURM_JOB_ID"}:
        del os.environ[name]
    os.environ["SLURMD_NODENAME"] = node
    ranks_in = Container.from_text(args.ranks_in) if args.ranks_in else None
    return asyncio.run(start(args.run_id, node, command, ranks_in, nothing_left=args.nothing_left))


def _pass_over(*_: object) -> None:
    """Not SIG_IGN, which the agent would inherit."""


if __name__ == "__main__":
    sys.exit(main())
