"""What an agent is told when it is started; the rest a supervisor says over their link."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...cluster import Kind
from ...cluster.local import find_root
from ...link.address import Address


def parse_arguments(description: str | None) -> argparse.Namespace:
    """The agent's command line."""
    parser = argparse.ArgumentParser(prog="python -m unbroken.recover.node.agent", description=description)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument(
        "--scratch", type=Path, help="the node's volatile folder; by default one in its memory"
    )
    parser.add_argument("--orphan-grace", type=float, default=120.0)
    parser.add_argument("--ownership", help="how it is held already, with all that it starts")
    parser.add_argument(
        "--hold", choices=["auto", *Kind], default="auto", help="how it is to hold itself, else"
    )
    parser.add_argument(
        "--held-before", action="append", default=[], help="how they may have been held before"
    )
    parser.add_argument(
        "--keeper-memory", type=int, default=0, help="bytes; 0 takes half of what is free, shared as below"
    )
    parser.add_argument("--keeper-share", type=int, default=1, help="nodes of the run on this machine")
    parser.add_argument("--wait-for-room", type=float, default=600.0, help="seconds")
    parser.add_argument("--room-elsewhere", default="", help="where the last checkpoint goes after that")
    parser.add_argument("--record", default="shared", help="where the record of the run lies")
    parser.add_argument(
        "--supervisor", type=Address.parse, help="where the run's first supervisor was met, tls:HOST:PORT"
    )
    args = parser.parse_args()
    args.scratch = args.scratch or find_root(args.run_id) / args.node
    return args
