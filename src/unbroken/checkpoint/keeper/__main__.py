"""The keeper: the process on each node that owns the snapshots in memory, makes them durable, outlives the trainer.

    python -m unbroken.checkpoint.keeper --socket PATH --node NAME --run-id ID --checkpoints DIR --budget BYTES

No torch, no CUDA, no collective: it starts in a fraction of a second and nothing that the trainer does can hang
it. Ranks and the agent talk to it over a Unix socket (docs/architecture.md, "The keeper's interface"); each
connection has a thread, and one condition guards all state. Long requests (settle, flush, close) are answered from
threads of their own, so that leases are renewed meanwhile.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path

from ...link.address import listen_unix
from ...link.secret import take_from_input
from ...private import private_folder
from ...units import Bytes, Duration
from ..device.host_memory import give_large_pieces_back
from .clients import ORPHAN_GRACE_S, ROOM_S, TERM_GRACE_S, KeeperSettings, log
from .durability.writing import be_nice
from .flushing import flush
from .keeping import Keeper
from .operations import OPERATIONS


def parse(argv: list[str]) -> KeeperSettings:
    """The settings of a command line."""
    p = argparse.ArgumentParser(prog="unbroken.checkpoint.keeper", description=__doc__.splitlines()[0])
    p.add_argument("--socket", type=Path, required=True)
    p.add_argument("--node", required=True)
    p.add_argument("--run-id", required=True)
    p.add_argument("--checkpoints", required=True, help="folder or address")
    p.add_argument("--budget", type=Bytes, required=True, help="memory for snapshots, such as 64GiB")
    p.add_argument("--keep", type=int, default=3)
    p.add_argument("--keep-every", type=int, default=0)
    p.add_argument("--orphan-grace", type=Duration, default=Duration(ORPHAN_GRACE_S))
    p.add_argument("--lease", type=Duration, default=None)
    p.add_argument("--writers", type=int, default=2)
    p.add_argument("--term-grace", type=Duration, default=Duration(TERM_GRACE_S))
    p.add_argument("--wait-for-room", type=Duration, default=Duration(ROOM_S))
    p.add_argument("--room-elsewhere", default="", help="folder or address for the last snapshot after that")
    p.add_argument(
        "--secret-on-input", action="store_true", help="the run's certificate comes on standard input"
    )
    a = p.parse_args(argv)
    secret = take_from_input() if a.secret_on_input else None
    return KeeperSettings(
        a.socket, a.node, a.run_id, a.checkpoints, int(a.budget), a.keep, a.keep_every, float(a.orphan_grace),
        None if a.lease is None else float(a.lease), a.writers, float(a.term_grace),
        float(a.wait_for_room), a.room_elsewhere, None if secret is None else secret.identity,
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Runs a keeper until it is told to close, or nobody needs it any more."""
    settings = parse(sys.argv[1:] if argv is None else argv)
    # Meant for the training or its supervisor; the keeper has to outlive both.
    for sig in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(sig, signal.SIG_IGN)
    private_folder(settings.socket.parent)
    listener = listen_unix(settings.socket)
    keeper = Keeper(settings, OPERATIONS, flush)

    def on_term(*_: object) -> None:
        threading.Thread(target=keeper.finish, args=(True, settings.term_grace_s), daemon=True).start()

    signal.signal(signal.SIGTERM, on_term)
    be_nice()
    give_large_pieces_back()
    log(f"node {settings.node}, budget {Bytes(settings.budget)}, checkpoints {settings.checkpoints}")
    try:
        keeper.serve(listener)
        time.sleep(0.05)  # the last answers leave
    finally:
        settings.socket.unlink(missing_ok=True)
        keeper.peers.leave()
    return keeper.exit_code


if __name__ == "__main__":
    os._exit(main())
