"""What this machine offers to the virtual nodes of a run: names, a volatile folder each, memory."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

from ..errors import DoesNotFit
from ..machine import available_memory, usable_memory
from ..units import Bytes, plural

_RANK_NEEDS = Bytes("300MiB")
"""What a rank takes before it has allocated anything: an interpreter with torch."""

_SCRATCH_NEEDS = Bytes("16MiB")


def name_node(number: int) -> str:
    """`node-000`, `node-001`, ..."""
    return f"node-{number:03d}"


def find_root(run_id: str) -> Path:
    """The run's volatile folder, in memory where that can be written; each node has one below it, by its name."""
    shm = Path("/dev/shm")
    return (shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())) / f"unbroken-{run_id}"


def check_fits(nodes: int, nproc: int, spares: int) -> None:
    """Raises DoesNotFit when the ranks alone would fill the memory that is free now, or could hardly run."""
    ranks = nodes * nproc
    free = Bytes(_free())
    need = Bytes(ranks * _RANK_NEEDS)
    if need > free:
        raise DoesNotFit(
            f"{plural(ranks, 'rank')} on {plural(nodes, 'node')} need at least {need} of memory before training starts, {free} is free",
            hint="Use fewer --nodes or --nproc",
        )
    cores = os.cpu_count() or 1
    if ranks > 64 * cores:
        raise DoesNotFit(
            f"{plural(ranks, 'rank')} on a machine with {plural(cores, 'core')} would not train but wait",
            hint="Use fewer --nodes or --nproc",
        )


def check_scratch(root: Path) -> None:
    """Raises DoesNotFit unless the place of a run's volatile folder can take progress pages and sockets."""
    place = root.parent if root.parent.is_dir() else Path(tempfile.gettempdir())
    if (free := shutil.disk_usage(place).free) < _SCRATCH_NEEDS:
        raise DoesNotFit(
            f"{place} has {Bytes(free)} free; progress pages and sockets need {_SCRATCH_NEEDS}",
            where=str(place),
            hint="Make it larger (in a container: --shm-size=1g)",
        )


def open_log(log: Path | None) -> IO[bytes]:
    """The log of a node's agent, to be appended to; nowhere without a path, and where a full disk has no room for a file: an agent
    without a log is better than none. Raises OSError."""
    if log is not None:
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            return open(log, "ab")
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
    return open(os.devnull, "ab")


def share_memory(nodes: int) -> int:
    """Bytes for each node's keeper where the user did not say: half of what is free now, shared by all."""
    return int(_free() * 0.5 / max(1, nodes))


def _free() -> int:
    """Bytes of memory that are free now, for this container."""
    free = available_memory()
    return usable_memory() if free is None else free
