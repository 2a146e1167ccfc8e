"""The process on each node of a cluster: starts the node's workers, fills their places, ends when they have ended.

    python -m unbroken.evaluate.engines.cluster.node --name n0 --workers 8 --width 1

What a coordinator's cluster.json says comes on standard input, the token with it: it is in no command, and in one file of this
process's own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from ....private import write_secret
from .. import Slot
from ..local import LocalEngine

_RESTARTS = 3
_LOOK_S = 0.2


def name_worker(slot: str, number: int) -> str:
    """A worker of a node, by the slot that the node has."""
    return f"{slot}-w{number}"


def name_slot(worker: str) -> str:
    """The slot of a worker, or of itself."""
    slot, _, number = worker.rpartition("-w")
    return slot if slot and number.partition(".")[0].isdigit() else worker


def serve(name: str, workers: int, width: int, where: bytes, folder: Path) -> int:
    """Until all workers have ended: 0 where they were asked to, 1 where a place could not be filled any more."""
    cluster = folder / "cluster.json"
    write_secret(cluster, where)
    shared = Path(json.loads(where)["shared"])
    logs = shared.parent / "logs" if shared.is_dir() else folder / "logs"
    engine = LocalEngine(logs)
    tries = dict.fromkeys(range(workers), 0)
    numbers: dict[str, int] = {}

    def start(number: int) -> None:
        again = f".{tries[number] + 1}" if tries[number] else ""
        slot = Slot(
            f"{name_worker(name, number)}{again}", tuple(range(number * width, (number + 1) * width)), width
        )
        numbers[slot.name] = number
        engine.start(slot, cluster)

    for number in tries:
        start(number)
    code = 0
    while engine.running():
        for gone in engine.ended():
            print(f"{gone.name} has ended: {gone.why}", file=sys.stderr, flush=True)
            if gone.why == "exit code 0":
                continue
            number = numbers[gone.name]
            tries[number] += 1
            if tries[number] <= _RESTARTS:
                start(number)
            else:
                code = 1
        time.sleep(_LOOK_S)
    return code


def main() -> int:
    """Entry point. What a cluster adds of how processes are held is not needed: it holds this one and all below it."""
    parser = argparse.ArgumentParser(prog="unbroken.evaluate.engines.cluster.node", description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--width", type=int, default=0, help="GPUs of each; 0: CPU")
    args, _ = parser.parse_known_args()
    where = sys.stdin.buffer.read()
    folder = Path(tempfile.mkdtemp(prefix="unbroken-eval-"))
    try:
        return serve(args.name, args.workers, args.width, where, folder)
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
