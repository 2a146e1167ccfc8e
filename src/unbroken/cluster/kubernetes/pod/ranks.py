"""This package's program in the container of the ranks: starts there what the agent's container asks for, and ends it when
nobody wants it any more.

Where the kernel ends this container for its memory, Kubernetes starts it again, and this program with it: then nothing is left
of what was here, for Kubernetes has ended all of the container before.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import ctypes
import glob
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....private import private_folder
from ...holding.descent import descendants, end_all
from ...holding.processes import read_stat
from ...holding.rank_holder import STEP_NAMES
from ...survey import find_gpus
from .place import ENDED, NODE_VARIABLE, pod_folder, ranks_socket

_CHILD_SUBREAPER = 36
_LOOK_S = 0.5
_PATIENCE_S = 1.0
_END_S = 5.0
_MOST = 1 << 20
_MARK = "UNBROKEN_"


@dataclass
class Wish:
    """A connection from the agent's container, and what it has started: `process` is 0 before. `left` is when its other side
    went."""

    link: socket.socket
    data: bytes = b""
    fds: list[int] = field(default_factory=list)
    process: int = 0
    left: float | None = None


class Ranks:
    """What runs in this container."""

    def __init__(self, folder: Path, path: Path) -> None:
        self._folder, self._path = private_folder(folder), path
        self._selector = selectors.DefaultSelector()
        self._wishes: list[Wish] = []
        self._asked = False

    def run(self) -> int:
        """Serves until it is asked to end, or the other container has ended, and nothing runs."""
        ctypes.CDLL(None, use_errno=True).prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)
        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(sig, self._ask)
        self._path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
            listening.bind(str(self._path))
            listening.listen(16)
            self._selector.register(listening, selectors.EVENT_READ)
            while not self._is_over():
                for key, _ in self._selector.select(_LOOK_S if not self._wishes else 0.1):
                    if key.fileobj is listening:
                        self._accept(listening)
                    else:
                        self._read(key.data)
                self._reap()
                self._end_unwanted()
        self._path.unlink(missing_ok=True)
        return 0

    def _ask(self, *_: object) -> None:
        self._asked = True

    def _is_over(self) -> bool:
        return not self._wishes and (self._asked or (self._folder / ENDED).exists())

    def _accept(self, listening: socket.socket) -> None:
        wish = Wish(listening.accept()[0])
        self._wishes.append(wish)
        self._selector.register(wish.link, selectors.EVENT_READ, wish)

    def _read(self, wish: Wish) -> None:
        try:
            piece, ancillary, _, _ = wish.link.recvmsg(1 << 16, socket.CMSG_SPACE(8 * 4))
        except OSError:
            piece, ancillary = b"", []
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                wish.fds += fds
        if not piece or len(wish.data) > _MOST:
            self._selector.unregister(wish.link)
            wish.left = time.monotonic()
            if not wish.process:
                self._drop(wish)
            return
        wish.data += piece
        if wish.data.endswith(b"\n"):
            order, wish.data = wish.data, b""
            self._carry_out(wish, json.loads(order))

    def _carry_out(self, wish: Wish, order: Mapping[str, Any]) -> None:
        match order.get("op"):
            case "start":
                self._start(wish, order["argv"], order["env"])
            case "left":
                _answer(wish, left=self._count_left())
            case _:
                _answer(wish, visible=find_devices(os.environ), pid=os.getpid())

    def _start(self, wish: Wish, argv: list[str], given: Mapping[str, str]) -> None:
        """What only this container has (its GPUs, what a device plugin has set) its ranks have too; marks are the agent's."""
        only_here = sorted(k for k in os.environ if k not in given and not k.startswith(_MARK))
        env = {**os.environ, **{k: v for k, v in given.items() if k.startswith(_MARK)}}
        try:
            process = subprocess.Popen(
                argv, env={**env, STEP_NAMES: ",".join(only_here)}, cwd="/", stdin=subprocess.DEVNULL,
                stdout=wish.fds[0], stderr=wish.fds[1], start_new_session=True,
            )  # fmt: skip
        except (OSError, IndexError) as e:
            print(f"nothing can be started: {e}", file=sys.stderr)
            _answer(wish, code=71)
            return
        wish.process = process.pid
        process.returncode = 0  # it is waited for here, with all others that come to this process
        for fd in wish.fds:
            os.close(fd)
        wish.fds.clear()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            for wish in [w for w in self._wishes if w.process == pid]:
                self._end_others()
                _answer(wish, code=os.waitstatus_to_exitcode(status))
                self._drop(wish)

    def _end_unwanted(self) -> None:
        """Ends what was started for one that is gone: the holder of ranks ends by itself when its agent is, and has a moment."""
        for wish in [w for w in self._wishes if w.left is not None]:
            assert wish.left is not None
            if time.monotonic() - wish.left > _PATIENCE_S:
                root = (wish.process, _started(wish.process))
                end_all(lambda r=root: descendants({r}) | {r}, _END_S)  # type: ignore[misc]

    def _end_others(self) -> None:
        """Ends whoever was handed to this process: his small parent is gone."""
        wanted = {w.process for w in self._wishes}
        mine = descendants({(os.getpid(), _started(os.getpid()))})
        kept = descendants({p for p in mine if p[0] in wanted}) | {p for p in mine if p[0] in wanted}
        if strays := mine - kept:
            end_all(lambda: strays | descendants(strays), _END_S)

    def _count_left(self) -> int:
        mine = descendants({(os.getpid(), _started(os.getpid()))})
        wanted = {p for p in mine if p[0] in {w.process for w in self._wishes if w.left is None}}
        return len(mine - wanted - descendants(wanted))

    def _drop(self, wish: Wish) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(wish.link)
        wish.link.close()
        for fd in wish.fds:
            os.close(fd)
        self._wishes.remove(wish)


def find_devices(environment: Mapping[str, str], devices: str = "/dev/nvidia[0-9]*") -> list[str]:
    """The GPUs of this container as CUDA_VISIBLE_DEVICES names them: as it was told, by UUID, or else counted."""
    told = [v.strip() for v in environment.get("NVIDIA_VISIBLE_DEVICES", "").split(",")]
    if told and all(v.startswith(("GPU-", "MIG-")) for v in told):
        return told
    if visible := environment.get("CUDA_VISIBLE_DEVICES"):
        return [v.strip() for v in visible.split(",") if v.strip()]
    there, known = len(glob.glob(devices)), find_gpus()
    # The driver shows those of the whole node, CUDA counts those of the container.
    return [g.uuid for g in known] if there == len(known) else [str(i) for i in range(there)]


def _answer(wish: Wish, **fields: Any) -> None:
    with contextlib.suppress(OSError):
        wish.link.sendall(json.dumps(fields).encode() + b"\n")


def _started(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        return read_stat(pid)[1]
    return 0


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("what", choices=("hold",))
    parser.add_argument("--run-id", required=True)
    args = parser.parse_args()
    node = os.environ.get(NODE_VARIABLE, "")
    if not node:
        sys.exit(f"{NODE_VARIABLE} is not set: this program runs in pods that unbroken makes")
    return Ranks(pod_folder(args.run_id, node), ranks_socket(args.run_id, node)).run()


if __name__ == "__main__":
    sys.exit(main())
