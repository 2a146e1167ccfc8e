"""How the ranks of a run agree without a collective: small values in the process group's own key-value store.

A collective would queue behind the trainer's (and hang with them); a store answers in a fraction of a
millisecond, from any thread. Nothing here blocks inside the store: it is polled, so that a thread that waits does
not hold up another one that uses the same client.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any, Protocol

from ...errors import CheckpointError, UsageError

VOTE_TIMEOUT_S = 600.0


class Agreement(Protocol):
    """What the ranks of one attempt share."""

    rank: int
    world_size: int

    def publish(self, key: str, value: Any) -> None:
        """Sets a key, once, to a JSON value."""

    def read(self, key: str, *, timeout_s: float) -> Any:
        """Waits for a key. Raises CheckpointError when it does not come."""

    def peek(self, key: str) -> Any:
        """The value of a key, None if it is not there yet."""

    def decide(self, key: str, proposal: Any) -> Any:
        """What the first rank to ask proposed; the same answer on every rank."""

    def count(self, key: str, by: int = 1) -> int:
        """Adds to a counter; its new value."""


class Alone:
    """The agreement of a single rank."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.counts: dict[str, int] = {}

    def publish(self, key: str, value: Any) -> None:
        self.values[key] = value

    def read(self, key: str, *, timeout_s: float) -> Any:
        return self.values[key]

    def peek(self, key: str) -> Any:
        return self.values.get(key)

    def decide(self, key: str, proposal: Any) -> Any:
        return self.values.setdefault(key, proposal)

    def count(self, key: str, by: int = 1) -> int:
        self.counts[key] = self.counts.get(key, 0) + by
        return self.counts[key]


class ThroughStore:
    """Agreement through a torch.distributed store."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size

    def publish(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def read(self, key: str, *, timeout_s: float) -> Any:
        deadline, pause = time.monotonic() + timeout_s, 0.0005
        while not self.store.check([key]):
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"another rank did not say '{key}' within {timeout_s:.0f} s",
                    where=f"rank {self.rank}",
                    hint="See which rank is missing: every rank must call restore() and save() at the same steps",
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)
        return json.loads(self.store.get(key))

    def peek(self, key: str) -> Any:
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def decide(self, key: str, proposal: Any) -> Any:
        mine = json.dumps(proposal)
        return json.loads(self.store.compare_set(key, "", mine))

    def count(self, key: str, by: int = 1) -> int:
        return int(self.store.add(key, by))


def agreement(rank: int, world_size: int, name: str) -> Agreement:
    """The agreement of this process's ranks; `name` keeps several of them apart.

    Raises UsageError if there are several ranks and no process group yet.
    """
    if world_size == 1:
        return Alone()
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            f"WORLD_SIZE is {world_size}, but there is no process group that the ranks can agree through",
            where=f"rank {rank}",
            hint="Call torch.distributed.init_process_group() before the Checkpointer is first used",
        )
    if dist.get_world_size() != world_size or dist.get_rank() != rank:
        raise UsageError(
            f"the environment says rank {rank} of {world_size}, the process group {dist.get_rank()} of"
            f" {dist.get_world_size()}",
            hint="Start the script with torchrun or `unbroken run`, or set RANK and WORLD_SIZE right",
        )
    store: Any = PrefixStore(f"unbroken/checkpoint/{name}", _get_default_store())
    try:
        store = store.clone()  # a connection of our own: a rank that waits inside the store holds nobody up
        store.set_timeout(timedelta(seconds=60))
    except (AttributeError, NotImplementedError, RuntimeError):
        store = PrefixStore(f"unbroken/checkpoint/{name}", _get_default_store())
    return ThroughStore(store, rank, world_size)


def vote(agreement: Agreement, key: str, why: str) -> list[str]:
    """Tells the others whether this rank is content (an empty `why`), and hears what those say who are not."""
    if why:
        agreement.publish(f"{key}/why/{agreement.rank}", f"rank {agreement.rank}: {why}")
        agreement.count(f"{key}/bad")
    if agreement.count(f"{key}/all") == agreement.world_size:
        bad = agreement.count(f"{key}/bad", 0)
        reasons = []
        if bad:
            found = [agreement.peek(f"{key}/why/{r}") for r in range(agreement.world_size)]
            reasons = [x for x in found if x]
        agreement.publish(f"{key}/result", reasons)
        return reasons
    return list(agreement.read(f"{key}/result", timeout_s=VOTE_TIMEOUT_S))
