"""What a training leaves so that two of them can be compared bit for bit.

Each rank appends one JSON line a step, unbuffered: {"attempt", "rank", "step", "loss" (float.hex()), "batch"
(SHA-256 of the tokens)}, and at its end {"attempt", "rank", "final", "parameters", "optimizer"} (SHA-256). Where a
step ran more than once, its last execution counts.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


def step_digest_path(pattern: str, rank: int, world_size: int) -> Path:
    """The file of a rank: `{rank}` replaced, or `.N` put before the suffix where there are several ranks."""
    if "{rank}" in pattern:
        return Path(pattern.replace("{rank}", str(rank)))
    path = Path(pattern)
    return path if world_size == 1 else path.with_name(f"{path.stem}.{rank}{path.suffix}")


class StepDigestWriter:
    """Appends to a rank's file; every line is one write, so a kill tears at most the last."""

    def __init__(self, path: Path, rank: int, attempt: int) -> None:
        self._rank, self._attempt, self._path = rank, attempt, path
        self._full = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._close_torn_line(path)
        except OSError as e:
            raise InputError(f"the trace cannot be written: {e.strerror}", where=str(path)) from e

    def _close_torn_line(self, path: Path) -> None:
        size = os.fstat(self._fd).st_size
        if size:
            with open(path, "rb") as f:
                f.seek(size - 1)
                if f.read(1) != b"\n":
                    os.write(self._fd, b"\n")

    def step(self, step: int, loss: float, batch: bytes) -> None:
        """Records a step that is complete on this rank."""
        self._write({"step": step, "loss": loss.hex(), "batch": hashlib.sha256(batch).hexdigest()})

    def final(self, step: int, parameters: str, optimizer: str) -> None:
        """Records the state at the end."""
        self._write({"final": step, "parameters": parameters, "optimizer": optimizer})

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)

    def _write(self, record: dict[str, Any]) -> None:
        line = json.dumps({"attempt": self._attempt, "rank": self._rank, **record}) + "\n"
        if self._full:
            return
        try:
            os.write(self._fd, line.encode())
        except OSError as e:
            # A trace is a proof, not worth a training: without it nothing can be compared, and that is said.
            self._full = True
            print(f"the trace ends here: {e.strerror} ({self._path})", file=sys.stderr, flush=True)


@dataclass
class StepDigest:
    """What one rank's file says, each step by its last execution."""

    losses: dict[int, str] = field(default_factory=dict)
    batches: dict[int, str] = field(default_factory=dict)
    executions: int = 0
    """Lines of steps, those that were run again counted each time."""
    attempts: set[int] = field(default_factory=set)
    parameters: str | None = None
    optimizer: str | None = None
    torn: int = 0
    """Lines that could not be read: at most one for each kill."""

    def same_as(self, other: StepDigest) -> bool:
        """Whether losses, batches and final state are equal bit for bit."""
        return (self.losses, self.batches, self.parameters, self.optimizer) == (
            other.losses,
            other.batches,
            other.parameters,
            other.optimizer,
        )

    def difference(self, other: StepDigest) -> str | None:
        """The first thing that differs, in words; None if nothing does."""
        for name in ("batches", "losses"):
            a, b = getattr(self, name), getattr(other, name)
            for step in sorted(a.keys() | b.keys()):
                if a.get(step) != b.get(step):
                    return f"{name} differ first at step {step}: {a.get(step)} and {b.get(step)}"
        for name in ("parameters", "optimizer"):
            if getattr(self, name) != getattr(other, name):
                return f"the final {name} differ: {getattr(self, name)} and {getattr(other, name)}"
        return None


def read_step_digests(path: Path) -> StepDigest:
    """Reads a rank's file. Raises InputError where it is absent."""
    w = StepDigest()
    try:
        lines = path.read_bytes().splitlines()
    except OSError as e:
        raise InputError(f"the trace cannot be read: {e.strerror}", where=str(path)) from e
    for line in lines:
        try:
            r = json.loads(line)
            w.attempts.add(r["attempt"])
            if "final" in r:
                w.parameters, w.optimizer = r["parameters"], r["optimizer"]
            else:
                w.losses[r["step"]], w.batches[r["step"]] = r["loss"], r["batch"]
                w.executions += 1
        except (ValueError, KeyError, TypeError):
            w.torn += 1
    return w


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over name, type, shape and bytes of each tensor, in the order of the names."""
    import torch

    h = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name].detach().cpu().contiguous()
        h.update(f"{name}\0{t.dtype}\0{tuple(t.shape)}\0".encode())
        h.update(t.reshape(-1).view(torch.uint8).numpy().data)
    return h.hexdigest()
