"""The durability levels of a saved state, each with a future: staged, host, peer, disk, remote.

staged   copied out of the way of the optimizer: the tensors may be changed without waiting
host     whole in the memory of this node's keeper: survives the death of the trainer
peer     also in the memory of another node: survives the loss of this node
disk     committed and synced on the checkpoint folder, all ranks of it
remote   committed in the object store, all ranks of it
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from ..errors import StorageError, UsageError

LEVELS = ("staged", "host", "peer", "disk", "remote")


@dataclass(eq=False)
class Saved:
    """A call of `save`: a future for each level that it is to reach; its result is the seconds since the call.

    A level that was not asked for has no future: `saved.disk` is None where only a snapshot was due. A failed one
    raises StorageError from its future. `skipped` says why nothing was saved at all.
    """

    step: int
    attempt: int
    began: float = field(default_factory=time.monotonic)
    skipped: str | None = None
    staged: Future[float] | None = None
    host: Future[float] | None = None
    peer: Future[float] | None = None
    disk: Future[float] | None = None
    remote: Future[float] | None = None

    @classmethod
    def with_levels(cls, step: int, attempt: int, levels: Iterable[str]) -> Saved:
        """A save with a future for each of these levels."""
        saved = cls(step, attempt)
        for name in levels:
            setattr(saved, name, Future())
        return saved

    def levels(self) -> dict[str, Future[float]]:
        """The futures that there are, lowest level first."""
        found = {name: getattr(self, name) for name in LEVELS}
        return {name: f for name, f in found.items() if f is not None}

    def reach(self, level: str) -> None:
        """Resolves this level's future, if there is one and it is open."""
        future = self.levels().get(level)
        if future is not None and not future.done():
            future.set_result(time.monotonic() - self.began)

    def fail(self, why: str, *, levels: Iterable[str] = LEVELS) -> None:
        """Fails these levels' futures, those that are open."""
        for name, future in self.levels().items():
            if name in levels and not future.done():
                future.set_exception(StorageError(f"step {self.step} did not reach {name}: {why}"))

    def wait(self, level: str = "disk", timeout_s: float | None = None) -> float:
        """Waits until this level is reached; seconds since the call.

        Raises StorageError if it failed, UsageError if it was not asked for, TimeoutError.
        """
        future = self.levels().get(level)
        if level not in LEVELS or future is None:
            have = ", ".join(self.levels()) or f"none, it was skipped: {self.skipped}"
            raise UsageError(
                f"the save of step {self.step} is not to reach '{level}'", hint=f"It has: {have}"
            )
        return future.result(timeout_s)

    @property
    def done(self) -> bool:
        """Whether nothing is left to happen."""
        return all(f.done() for f in self.levels().values())
