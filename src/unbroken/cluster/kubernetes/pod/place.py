"""Where the two containers of a pod meet: files in /dev/shm, which they share."""

from __future__ import annotations

import zlib
from pathlib import Path

from ...local import find_root

NODE_VARIABLE = "UNBROKEN_POD_NODE"
"""Tells the programs of a pod which node it is on."""
ENDED = "ended"
"""The file that says that the container of agent and keeper has ended itself."""


def pod_folder(run_id: str, node: str) -> Path:
    """The pod's own folder. Names of nodes may be longer than a socket's path has room for."""
    root = find_root(run_id)
    return root.with_name(f"{root.name}.{zlib.crc32(node.encode()):08x}")


def ranks_socket(run_id: str, node: str) -> Path:
    """Where the program in the container of the ranks listens."""
    return pod_folder(run_id, node) / "ranks.sock"
