"""Bringing a training's state back: the newest checkpoint that verifies on every rank, into the live objects. Needs torch."""

from __future__ import annotations

import itertools
import logging
import time
from typing import Any

from ...errors import CheckpointError
from ...progress.records.candidate import Candidate
from ...units import plural
from ..capture.generators import restore_rng
from ..catalogue import contents as catalogue
from ..catalogue.placement import same_place
from ..client.buffers import Buffers
from ..client.links import RankLink
from ..client.session import Session
from ..device.targets import to_device
from ..format.manifest import Manifest
from ..format.position import Position
from ..options import RestoreOptions
from ..storage import open_storage
from ..storage.base import Storage
from .apply import Applier, ShardedOtherwise, Taken
from .selection import (
    Loaded,
    Restored,
    candidates_without_supervisor,
    choose,
    load_from_disk,
    load_from_memory,
    load_from_peer,
    nothing_good,
)

logger = logging.getLogger("unbroken.checkpoint")

IMPORTED_WEIGHTS = "imported-weights"
"""The run id of a checkpoint that holds a model and nothing else."""


class Restorer:
    """Restores on all ranks alike; each call is a round of votes of its own."""

    def __init__(self, options: RestoreOptions, session: Session, buffers: Buffers) -> None:
        self.options, self.session, self.buffers = options, session, buffers
        self._rounds = itertools.count()

    def restore(self, state: dict[str, Any]) -> Restored | None:
        """As `Checkpointer.restore`."""
        began = time.monotonic()
        self.buffers.choose_device(state)
        link = self.session.memory.alive()
        candidates, skipped = self._candidates(link)
        chosen = choose(
            self.session.agreement, candidates, self._obtain, skipped, f"restore/{next(self._rounds)}"
        )
        if chosen is None:
            self.session.memory.went_on = None
            link.request({"op": "release", "restored": None, "skipped": skipped})
            if skipped:
                raise nothing_good(skipped, self.session.directory)
            self.buffers.prepare(state)
            return None
        candidate, got = chosen
        del chosen  # what was loaded goes as soon as it is in the state
        source, position, resharded = self._load(candidate, got, state)
        del got
        self.session.memory.went_on = (candidate.attempt, candidate.step)
        self.session.memory.alive().request(
            {
                "op": "release",
                "restored": {"attempt": candidate.attempt, "step": candidate.step},
                "skipped": skipped,
            }
        )
        self.buffers.prepare(state)
        restored = Restored(
            candidate.step, candidate.attempt, candidate.name, source, position, tuple(skipped), resharded,
            time.monotonic() - began, durable=candidate.on_disk,
        )  # fmt: skip
        if self.session.place.rank == 0:
            logger.info("restored step %d from %s in %.2f s", candidate.step, source, restored.seconds)
        return restored

    def _candidates(self, link: RankLink) -> tuple[list[Candidate], list[tuple[str, str]]]:
        """What may be restored from, newest first, and what was passed over with the reason."""
        answer, _ = link.request({"op": "candidates"})
        if answer["supervised"]:
            return [Candidate.from_json(c) for c in answer["candidates"]], []
        s = self.session
        return candidates_without_supervisor(s.agreement, link, s.storage, s.place.node)

    def _obtain(self, candidate: Candidate) -> Loaded | Manifest:
        """This rank's share of a candidate, verified; of a checkpoint of another world size its manifest."""
        p = self.session.place
        loaded = self._from_memory(candidate)
        if loaded is not None and loaded.part.world_size == p.world_size:
            return loaded
        if not candidate.on_disk:
            if loaded is None:
                raise CheckpointError("its share is in no memory that is left, and not on disk")
            raise CheckpointError(
                f"it is of {plural(loaded.part.world_size, 'rank')}, this run has {p.world_size}"
            )
        storage = self._storage_of(candidate)
        if loaded is not None or catalogue.read_committed(storage, candidate.name).world_size != p.world_size:
            from .relayout import verify_share

            return verify_share(storage, candidate.name, p.rank, p.world_size)
        return load_from_disk(
            storage, candidate.name, p.rank, buffer_for=self.buffers.to_read_into, beside=self.buffers.registering,
            verify=self.options.verify,
        )  # fmt: skip

    def _from_memory(self, candidate: Candidate) -> Loaded | None:
        """This rank's share out of the memory of this node, or else of another one; None if it is in neither."""
        memory, rank = self.session.memory, self.session.place.rank
        beside = self.buffers.registering
        if not candidate.brought and (loaded := load_from_memory(memory, candidate, rank, beside)):
            return loaded
        if address := self.session.addresses.get(candidate.memory.get(rank, "")):
            return load_from_peer(memory, candidate, rank, beside, address)
        return None

    def _storage_of(self, candidate: Candidate) -> Storage:
        """The way to where this candidate lies on disk."""
        if not candidate.place or same_place(candidate.place, self.session.directory):
            return self.session.storage
        return open_storage(candidate.place)

    def _load(
        self, candidate: Candidate, got: Loaded | Manifest, state: dict[str, Any]
    ) -> tuple[str, Position, bool]:
        """Puts it into the live state; where it came from, the data position, whether it lies on other shards there."""
        if isinstance(got, Loaded):
            try:
                self._apply(candidate, got, state)
                return got.source, got.part.position, False
            except ShardedOtherwise:
                if not candidate.on_disk:
                    raise
        # Imported here: torch.distributed.checkpoint takes a second, and most restores never need it.
        from .relayout import load_elsewhere

        manifest, taken = load_elsewhere(
            self._storage_of(candidate), candidate.name, state, strict=self.options.strict
        )
        _warn_of_rest(candidate.name, taken)
        return self.session.storage.level, manifest.position, True

    def _apply(self, candidate: Candidate, loaded: Loaded, state: dict[str, Any]) -> None:
        """Puts this rank's share into the live state. Raises LayoutMismatch; ShardedOtherwise before anything is changed."""
        notes = loaded.part.rng or {}
        base = loaded.data.data_ptr()
        applier = Applier(
            loaded.tensors(), loaded.part.values, notes, candidate.name, self.options.strict,
            weights_only=loaded.part.run_id == IMPORTED_WEIGHTS,
            imported=loaded.part.run_id.startswith("imported"),
            copy=lambda live, stored: to_device(live, stored, base),
        )  # fmt: skip
        taken = applier.into(state)
        _warn_of_rest(candidate.name, taken)
        restore_rng(notes.get("generators") or {})
        if self.buffers.device.pinning is not None:
            self.buffers.device.pinning.wait()
        if loaded.buffer is not None and loaded.buffer.claimed:
            self.session.memory.release(loaded.buffer)


def _warn_of_rest(name: str, taken: Taken) -> None:
    """Says what a restore that is not strict did not load."""
    if taken.left or taken.unused:
        logger.warning(
            "of %s %d names were loaded; not in it, and left as they were: %s; only in it, and not loaded: %s",
            name, len(taken.names), _some(taken.left), _some(taken.unused),
        )  # fmt: skip


def _some(names: tuple[str, ...]) -> str:
    return (
        ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "none"
    )
