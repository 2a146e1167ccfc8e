"""A rank's part in saving and restoring: its keeper, the other ranks and the place, found when it is first needed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...errors import UsageError
from ..catalogue.placement import same_place
from ..options import Options
from ..ranks.agreement import VOTE_TIMEOUT_S, Agreement, agreement, vote
from ..ranks.environment import Place
from ..storage import open_storage
from ..storage.base import Storage
from .discovery import Connect, end_process, own_attempt, own_keeper, settle_place, supervised_keeper
from .nodes import PATIENCE_S, CompletionTracker, gather_nodes, join_ring, peer_addresses
from .rank_memory import RankMemory

logger = logging.getLogger("unbroken.checkpoint")


@dataclass(frozen=True, eq=False)
class Session:
    """All that a rank is connected to. `directory` is the place of the checkpoints, `storage` the way to it."""

    place: Place
    directory: str
    agreement: Agreement
    storage: Storage
    attempt: int
    memory: RankMemory
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Of every node's keeper, where snapshots are copied to other nodes."""
    completion: CompletionTracker | None = None
    """With several nodes."""

    @property
    def has_peers(self) -> bool:
        """Whether snapshots are copied to other nodes."""
        return bool(self.addresses)

    def close(self) -> None:
        """Says goodbye to the keeper and lets go of its buffers."""
        if self.completion is not None:
            self.completion.close()
        self.memory.close()

    def abandon(self) -> None:
        """Goes without a goodbye, as a process does that ends by an exception: the keeper goes on by itself."""
        if self.completion is not None:
            self.completion.close()
        self.memory.abandon()


def open_session(options: Options, place: Place, directory: str, name: str) -> Session:
    """Finds or starts the keeper, and the other ranks; `name` keeps several Checkpointers of a process apart.

    Raises UsageError where the ranks name different folders or the place may not be used, StorageError, KeeperGone.
    """
    ranks = agreement(place.rank, place.world_size, name)
    _agree_on_place(ranks, directory)
    storage = open_storage(directory)
    connect, attempt = _way_to_keeper(options, place, ranks, storage, directory)
    memory = RankMemory(connect, count=options.memory.buffers, end_mute=end_process)
    try:
        if place.supervised:
            settle_place(memory, directory)
        nodes = gather_nodes(ranks, place, memory) if place.world_size > 1 else {place.node: ""}
        addresses = _ring(ranks, place, memory, nodes) if options.keeper.peer else {}
        completion = None
        if len(nodes) > 1:
            completion = CompletionTracker(
                ranks, memory, asks=place.local_rank == 0 or not place.supervised,
                patience_s=PATIENCE_S if place.supervised else 0.0,
            )  # fmt: skip
    except BaseException:
        memory.abandon()
        raise
    return Session(place, directory, ranks, storage, attempt, memory, addresses, completion)


def _way_to_keeper(
    options: Options, place: Place, ranks: Agreement, storage: Storage, directory: str
) -> tuple[Connect, int]:
    """How this rank comes to its keeper, and the number of this attempt."""
    asked = options.keeper.as_json()
    if place.supervised:
        return supervised_keeper(place, asked), place.attempt or 0
    own = own_keeper(
        place, directory, budget=options.memory.budget, keep=options.keeper.keep, room_s=options.memory.room_s
    )
    attempt = own_attempt(own, ranks, storage)
    return own.connector(attempt, asked), attempt


def _agree_on_place(ranks: Agreement, directory: str) -> None:
    """Raises UsageError, on every rank, where one names another place than rank 0."""
    if ranks.world_size == 1:
        return
    if ranks.rank == 0:
        ranks.publish("place", directory)
    first = str(ranks.read("place", timeout_s=VOTE_TIMEOUT_S))
    why = "" if same_place(first, directory) else f"it has {directory}, rank 0 has {first}"
    if reasons := vote(ranks, "place", why):
        raise UsageError(
            f"the ranks name different folders for checkpoints: {reasons[0]}",
            hint="Give Checkpointer the same folder on every rank (a relative one depends on the current folder)",
        )


def _ring(ranks: Agreement, place: Place, memory: RankMemory, nodes: Mapping[str, str]) -> dict[str, str]:
    """Tells this node's keeper which node holds its copies; the addresses of all, none with a single node."""
    if len(nodes) < 2:
        logger.warning("peer=True, but all ranks are on one node: nothing is copied to another")
        return {}
    join_ring(ranks, place, memory, nodes)
    return peer_addresses(ranks, nodes)
