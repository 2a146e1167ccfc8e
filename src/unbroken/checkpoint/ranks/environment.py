"""Which rank this process is, and where its keeper is: from the environment of torchrun and of `unbroken run`."""

from __future__ import annotations

import hashlib
import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import UsageError
from ...private import private_folder
from ..keeper.wire import check_socket


@dataclass(frozen=True)
class Place:
    """This process in its run. `attempt` and `keeper` are None where no supervisor gave them."""

    rank: int
    world_size: int
    local_rank: int
    node: str
    run_id: str
    attempt: int | None
    keeper: Path | None
    run_dir: Path | None

    @property
    def supervised(self) -> bool:
        """Whether this process runs under `unbroken run`."""
        return self.keeper is not None


def place(env: Mapping[str, str] = os.environ) -> Place:
    """The place that the environment describes; a single rank where it says nothing. Raises UsageError."""
    rank, world = _number(env, "RANK", 0), _number(env, "WORLD_SIZE", 1)
    if not 0 <= rank < world:
        raise UsageError(
            f"RANK is {rank} and WORLD_SIZE {world}", hint="Start the script with torchrun or `unbroken run`"
        )
    keeper = env.get("UNBROKEN_KEEPER")
    attempt = env.get("UNBROKEN_ATTEMPT")
    if keeper and attempt is None:
        raise UsageError(
            "UNBROKEN_KEEPER is set without UNBROKEN_ATTEMPT", hint="Start the script with `unbroken run`"
        )
    run_dir = env.get("UNBROKEN_RUN_DIR")
    return Place(
        rank, world, _number(env, "LOCAL_RANK", rank),
        env.get("UNBROKEN_NODE") or env.get("SLURMD_NODENAME") or socket.gethostname(),
        env.get("UNBROKEN_RUN_ID") or env.get("TORCHELASTIC_RUN_ID") or "",
        _number(env, "UNBROKEN_ATTEMPT", 0) if keeper else None,
        Path(keeper) if keeper else None,
        Path(run_dir) if run_dir else None,
    )  # fmt: skip


def scratch(checkpoints: str, node: str) -> Path:
    """The folder of this user's own keeper for these checkpoints on this node: short, private, not in the run folder.

    Raises UsageError where its socket would have a path that is too long.
    """
    key = hashlib.sha256(f"{checkpoints}\0{node}".encode()).hexdigest()[:12]
    setting = next((name for name in ("UNBROKEN_SCRATCH", "XDG_RUNTIME_DIR") if os.environ.get(name)), "")
    base = Path(os.environ[setting] if setting else tempfile.gettempdir())
    # Refused here, at once: whoever waits for a keeper would try again and again.
    check_socket(base / f"unbroken-{os.getuid()}" / key / "keeper.sock", setting or "TMPDIR")
    private_folder(base / f"unbroken-{os.getuid()}")
    return private_folder(base / f"unbroken-{os.getuid()}" / key)


def _number(env: Mapping[str, str], key: str, default: int) -> int:
    text = env.get(key)
    if text is None or text == "":
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{key} is '{text}', not a number") from None
