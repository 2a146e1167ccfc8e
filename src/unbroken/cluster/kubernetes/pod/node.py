"""This package's program in the container of agent and keeper.

    hold     the container's own process: stays as long as anything of the run is in the pod, and for a while after it
    serve    takes a supervisor's orders on standard input: it is started by exec, as an ssh server starts one on a host
    leave    the container's preStop: has the supervisor know that the pod ends, and waits until the run has left it

The containers of the pod see each other's processes and share /dev/shm: the ranks are started in theirs, by way of `door`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable

from ....errors import UnbrokenError
from ....machine import usable_cpus
from ....private import private_folder
from ....version import __version__
from ...holding.apart import Apart, Container
from ...holding.choice import every
from ...holding.ownership import Ownership
from ...hosts.program import Message, OneNode, Program, serve
from ...survey import read_boot_id
from . import door
from .place import ENDED, NODE_VARIABLE, pod_folder, ranks_socket

_LOOK_S = 1.0
_NOTICE_S = 0.3
_NEEDED = ("psutil", "safetensors", "torch", "xxhash")
"""What agent, keeper and ranks import. torch is only looked for: importing it takes seconds."""
_LEAVING = "leaving"


class PodNode(OneNode):
    """This pod as the one node that it is; ranks are started in the other container."""

    def __init__(self, run_id: str, node: str) -> None:
        super().__init__(run_id, node, "auto")
        program = (sys.executable, "-I", "-S", door.__file__)
        socket = str(ranks_socket(run_id, node))
        ranks_in = Container((*program, "start", socket), (*program, "gone", socket))
        self._apart = Apart(run_id, self._root, ranks_in)

    @property
    def owner(self) -> Ownership:
        return self._apart

    def describe_holding(self) -> str:
        return self._apart.describe()

    def count_left(self) -> int:
        """How many processes of the run are in this pod."""
        return sum(len(o.left(str(self.only))) for o in (self.owner, *every(self.run_id, self._root)))


class PodProgram(Program):
    """Answers orders for one pod."""

    def __init__(self, run_id: str, node: str, send: Callable[[Message], None]) -> None:
        super().__init__(run_id, node, PodNode(run_id, node), send)
        self._leaving = pod_folder(run_id, node) / _LEAVING
        self._socket = str(ranks_socket(run_id, node))

    async def report(self) -> None:
        await asyncio.gather(super().report(), self._give_notice())

    async def _give_notice(self) -> None:
        """Says that the pod ends, as soon as its preStop has said so."""
        while not self._leaving.exists():
            await asyncio.sleep(_NOTICE_S)
        with contextlib.suppress(OSError, ValueError):
            ends = float(self._leaving.read_text())
            self._send({"event": "Leaving", "in_s": max(0.0, ends - time.monotonic())})

    async def _describe_host(self) -> Message:
        missing = [n for n in _NEEDED if importlib.util.find_spec(n) is None]
        return {
            "unbroken": __version__, "boot": read_boot_id(), "running": self._cluster.launches(),
            "holding": self._cluster.describe_holding(), "cpus": usable_cpus(), "missing": missing,
            "python": sys.executable, "ranks": await self._survey_ranks(),
        }  # fmt: skip

    async def _survey_ranks(self) -> Message:
        """What the program in the other container says. It may start later, and again; that it never will is seen of the pod."""
        while True:
            with contextlib.suppress(OSError):
                return await asyncio.to_thread(door.ask, self._socket, "survey")
            await asyncio.sleep(_LOOK_S)

    async def _do(self, m: Message) -> Message:
        if m.get("op") == "start":
            ranks = await asyncio.to_thread(door.ask, self._socket, "survey")
            # The agent's container has no GPU, and says all the same which its ranks have.
            if visible := ranks.get("visible"):
                m = {**m, "environment": {**m["environment"], "CUDA_VISIBLE_DEVICES": ",".join(visible)}}
        return await super()._do(m)


def hold(run_id: str, node: str, idle_s: float) -> int:
    """Stays until nothing of the run has been in the pod for `idle_s`, or it is asked to end and nothing is left."""
    folder = private_folder(pod_folder(run_id, node))
    for path in (folder / _LEAVING, folder / ENDED):
        path.unlink(missing_ok=True)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    cluster = PodNode(run_id, node)
    since = time.monotonic()
    while True:
        if cluster.count_left():
            since = time.monotonic()
        leaving = bool(asked) or (folder / _LEAVING).exists()
        if time.monotonic() - since > (_LOOK_S if leaving else idle_s):
            break
        time.sleep(_NOTICE_S if leaving else _LOOK_S)
    (folder / ENDED).touch()  # the other container ends too
    shutil.rmtree(cluster._root / node, ignore_errors=True)
    return 0


def leave(run_id: str, node: str, within_s: float) -> int:
    """Notes that the pod ends, and waits until the run has left it, so that nothing is signalled before."""
    deadline = time.monotonic() + within_s
    folder = private_folder(pod_folder(run_id, node))
    aside = folder / f".{_LEAVING}"
    aside.write_text(f"{deadline}\n")
    aside.rename(folder / _LEAVING)
    cluster = PodNode(run_id, node)
    while time.monotonic() < deadline and cluster.count_left():
        time.sleep(_NOTICE_S)
    return 0


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("what", choices=("hold", "serve", "leave"))
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--idle", type=float, default=600.0, help="seconds")
    parser.add_argument("--within", type=float, default=100.0, help="seconds")
    args = parser.parse_args()
    node = os.environ.get(NODE_VARIABLE, "")
    if not node:
        sys.exit(f"{NODE_VARIABLE} is not set: this program runs in pods that unbroken makes")
    if args.what == "hold":
        return hold(args.run_id, node, args.idle)
    if args.what == "leave":
        return leave(args.run_id, node, args.within)
    # What this container only has in order to have no GPU is nothing for ranks.
    os.environ.pop("NVIDIA_VISIBLE_DEVICES", None)
    try:
        asyncio.run(serve(lambda send: PodProgram(args.run_id, node, send)))
    except (UnbrokenError, OSError) as e:
        sys.exit(" ".join(str(e).split()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
