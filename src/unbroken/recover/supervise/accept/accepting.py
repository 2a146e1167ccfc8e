"""What counts of the attempts so far: their seals, what came into them late, and what the next attempt may start from.

A snapshot counts if the seal of its attempt lists it: the committed ones by name, those that were whole in memory by
step (`memory`). So does one that was offered to a later attempt. Written later, by whichever keeper still holds it,
it is the same snapshot byte for byte, and the next start takes it into the seal. One that no seal lists (its nodes were cut off
as its attempt was sealed, and are back) counts as long as no later attempt has anything that does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ....checkpoint.catalogue.candidates import candidates
from ....checkpoint.catalogue.contents import Found
from ....errors import RunInterrupted, StorageError, UnbrokenError
from ....progress import RunSpec
from ....progress.records.candidate import CandidateMessage, folder_name, parse_folder_name
from ....progress.records.state import Brought, RunState
from ..attempt.farewell import Last
from ..nodes.fleet import Fleet
from ..nodes.keepers import Inventories, Keepers
from ..record.recorder import Recorder
from .placing import CheckpointPlace

_INVENTORY_S = 5.0
_LAST_S = 60.0


class Accepting:
    """Seals attempts, and lists what they left.

    What keepers hold is put together in threads: it grows with the ranks, and the loop has leases to renew.
    """

    def __init__(
        self,
        spec: RunSpec,
        fleet: Fleet,
        keepers: Keepers,
        recorder: Recorder,
        place: CheckpointPlace,
        say: Callable[[str], None],
        elsewhere: str,
    ) -> None:
        """`elsewhere` is where keepers write what its own place refuses; "" for nowhere."""
        self._spec, self._fleet, self._keepers = spec, fleet, keepers
        self._recorder, self._place, self._say, self._elsewhere = recorder, place, say, elsewhere

    @property
    def _state(self) -> RunState:
        return self._recorder.state

    def _of_size(self, nodes: int, held: Inventories) -> Inventories:
        """Without snapshots of attempts that had another number of ranks: of those every rank would have a part only."""
        state = self._state
        after = state.attempt if state.slots and len(state.slots) != nodes else state.resized_after
        return (
            {n: [m for m in found if int(m["attempt"]) > after] for n, found in held.items()}
            if after
            else held
        )

    def map_ranks(self, slots: Sequence[str]) -> dict[int, str]:
        """The node of each rank."""
        nproc = self._spec.nproc
        return {slot * nproc + i: node for slot, node in enumerate(slots) for i in range(nproc)}

    # --- seals

    async def seal_before(self) -> None:
        """Before the next attempt: seals the last one, and takes in what became durable since."""
        attempt = self._state.attempt
        if attempt and attempt not in self._state.seals:
            await self._place.accept_elsewhere(self._spec.room_elsewhere)
            await self._seal(attempt)
        await self.accept_late()

    async def _seal(self, attempt: int) -> None:
        """Settles the keepers, then lists what is accepted from an attempt. After this nothing more counts."""
        ranks = self.map_ranks(self._state.slots)
        await self._keepers.settle(attempt, [r for r, n in ranks.items() if n in self._state.lost])
        memory = [[m.attempt, m.step] for m in await self.list_in_memory() if m.attempt == attempt]
        accepted = await self._place.committed(attempt)
        await self._note_restored(attempt, accepted, in_memory=bool(memory))
        await self._recorder.record("seal", attempt=attempt, checkpoints=accepted, memory=memory)

    async def _note_restored(self, attempt: int, accepted: Sequence[str], *, in_memory: bool = False) -> None:
        """What an attempt went on from that told nobody: its nodes were cut off until they were lost. Its keepers know it, and what it
        has saved says it; without it nobody could tell which steps lead to what comes after."""
        saved = [(n, self._place.of(attempt)) for n in accepted]
        saved += [(n, b.place) for b in self._list_elsewhere() if b.number == attempt for n in b.names]
        if attempt in self._state.asked or not (saved or in_memory):
            return
        found = await self._keepers.find_restored(attempt)
        if found is None and saved:
            found = await self._place.read_went_on(attempt, saved)
        if found is not None:
            await self._recorder.record("restored", attempt=attempt, of=found[0], step=found[1], skipped=[])

    async def seal_last(self, attempt: int, memory: list[list[int]]) -> None:
        """Seals the attempt that the run ends with; where its checkpoints cannot be listed the next start does."""
        try:
            accepted = await self._place.committed(attempt, within_s=_LAST_S)
            await self._note_restored(attempt, accepted, in_memory=bool(memory))
        except (StorageError, RunInterrupted) as e:
            self._say(f"{e.message}; what attempt {attempt} saved is listed when the run goes on")
            return
        await self._recorder.record("seal", attempt=attempt, checkpoints=accepted, memory=memory)

    async def accept_late(self) -> None:
        """Takes into the seals what was accepted in memory and has become durable since, also elsewhere. What cannot be read as a stop
        is asked for is left to the next start."""
        late = await self._place.accept_elsewhere(self._spec.room_elsewhere)
        for name in late:
            self._say(f"{name} was written to {self._elsewhere}, because its own place refused it: it counts")
        for attempt in {key[1] for n in late if (key := parse_folder_name(n))} & self._state.seals.keys():
            with contextlib.suppress(RunInterrupted):
                await self._note_restored(attempt, ())
        for attempt, names in widen_seals(await self.list_found(), self._state).items():
            try:
                await self._note_restored(attempt, names)
            except RunInterrupted as e:
                self._say(f"{e.message}; what attempt {attempt} saved late is listed when the run goes on")
                continue
            await self._recorder.record("seal", attempt=attempt, checkpoints=list(names))

    async def count_in_memory(self, last: Last) -> None:
        """A snapshot that is whole in memory counts, also where a keeper was too slow to say so as its attempt was sealed."""
        sealed = self._state.seals.get(last.attempt)
        if sealed is not None and (last.attempt, last.step) not in self._state.accepted:
            memory = [[last.attempt, last.step]]
            await self._recorder.record("seal", attempt=last.attempt, checkpoints=list(sealed), memory=memory)

    async def count_offered(self, offered: Iterable[CandidateMessage]) -> None:
        """What is whole in memory and about to be offered counts, also where no seal lists it."""
        late: dict[int, list[list[int]]] = {}
        for c in offered:
            key = (c["attempt"], c["step"])
            if c["name"] is None and key[0] in self._state.seals and key not in self._state.accepted:
                late.setdefault(key[0], []).append([*key])
        for attempt, memory in late.items():
            sealed = list(self._state.seals[attempt])
            await self._recorder.record("seal", attempt=attempt, checkpoints=sealed, memory=memory)

    # --- what there is

    def _list_elsewhere(self) -> list[Brought]:
        """What keepers wrote elsewhere because its own place refused it."""
        return [b for b in self._state.brought if self._elsewhere and b.place == self._elsewhere]

    def is_on_disk(self, last: Last) -> bool:
        """Whether a snapshot is among the checkpoints that count, in its own place or elsewhere."""
        name = folder_name(last.step, last.attempt)
        elsewhere = any(name in b.names for b in self._list_elsewhere())
        return elsewhere or name in self._state.seals.get(last.attempt, ())

    async def is_in_memory(self, last: Last, inventories: Inventories) -> bool:
        """Whether the keepers of the last attempt's nodes, or their peers, hold all of a snapshot."""
        ranks = self.map_ranks(self._state.slots)
        whole = await asyncio.to_thread(find_whole, self._of_size(len(self._state.slots), inventories), ranks)
        return any((m.attempt, m.step) == (last.attempt, last.step) for m in whole)

    async def list_found(self) -> list[Found]:
        """What lies where the run keeps its checkpoints; nothing where it cannot be read."""
        try:
            return await self._place.found()
        except (OSError, UnbrokenError) as e:
            self._say(f"the checkpoints cannot be listed: {e}")
            return []

    async def list_in_memory(self) -> list[Last]:
        """The snapshots that are whole in the keepers' memory and may still count, the newest first."""
        held = await self._keepers.list_snapshots(self._fleet.up(), _INVENTORY_S)
        ranks = self.map_ranks(self._state.slots)
        whole = await asyncio.to_thread(find_whole, self._of_size(len(self._state.slots), held), ranks)
        return keep_counting(whole, self._state)

    async def find_left_behind(self, slots: Sequence[str], inventories: Inventories) -> Last | None:
        """What goes with the nodes that are left, where these go on: see the function of that name. Where they are more or
        fewer than before that is all that is in memory."""
        ranks = self.map_ranks(self._state.slots)
        held = self._of_size(len(self._state.slots), inventories)
        staying = slots if len(slots) == len(self._state.slots) else ()
        if not held.keys() - {*staying}:
            return None  # nobody is left
        return await asyncio.to_thread(find_left_behind, held, ranks, staying, self._state)

    async def list_candidates(self, slots: Sequence[str], inventories: Inventories) -> list[CandidateMessage]:
        """What an attempt on these nodes may restore from, newest first."""
        places = {n: self._place.of(n) for n in self._state.places}
        found = await asyncio.to_thread(
            candidates,
            dict(self._state.seals),
            self._of_size(len(slots), inventories),
            self.map_ranks(slots),
            brought=self._place.brought(),
            places=places,
        )
        state = self._state
        there = {
            (c["attempt"], c["step"]) for c in found if not c["brought"] and c["memory"]
        } & state.accepted
        return [
            c
            for c in found
            if c["brought"]
            or (
                not state.is_rolled_back(c["attempt"], c["step"])
                and (c["name"] is not None or not is_superseded(c["attempt"], c["step"], state, there))
            )
        ]


def find_whole(
    inventories: Mapping[str, Sequence[Mapping[str, Any]]], rank_nodes: Mapping[int, str]
) -> list[Last]:
    """The snapshots that these keepers hold for every rank, the newest first: by attempt, then by step."""
    found = [
        c
        for c in candidates({}, inventories, dict(rank_nodes))
        if len(c["memory"]) == len(rank_nodes) and rank_nodes
    ]
    last = []
    for c in sorted(found, key=lambda c: (c["attempt"], c["step"]), reverse=True):
        shares: dict[str, list[int]] = {}
        for rank, node in c["memory"].items():
            shares.setdefault(node, []).append(int(rank))
        last.append(Last(c["attempt"], c["step"], {n: tuple(r) for n, r in shares.items()}))
    return last


def find_left_behind(
    inventories: Mapping[str, Sequence[Mapping[str, Any]]],
    rank_nodes: Mapping[int, str],
    slots: Sequence[str],
    state: RunState,
) -> Last | None:
    """The newest snapshot that counts and is whole in memory, where a part of it is in that of none of these nodes and it is on no
    disk. None where all of it stays, or nothing is whole."""

    def find_newest(held: Mapping[str, Sequence[Mapping[str, Any]]]) -> Last | None:
        return next(iter(keep_counting(find_whole(held, rank_nodes), state)), None)

    best = find_newest(inventories)
    if best is None or (best.step, best.attempt) in state.durable:
        return None
    staying = set(slots)
    near = find_newest({n: held for n, held in inventories.items() if n in staying})
    return None if near is not None and (near.attempt, near.step) == (best.attempt, best.step) else best


def keep_counting(whole: Sequence[Last], state: RunState) -> list[Last]:
    """Those of these snapshots in memory that may still count."""
    there = {(m.attempt, m.step) for m in whole} & state.accepted
    return [
        m
        for m in whole
        if not state.is_rolled_back(m.attempt, m.step) and not is_superseded(m.attempt, m.step, state, there)
    ]


def is_superseded(attempt: int, step: int, state: RunState, there: Collection[tuple[int, int]]) -> bool:
    """Whether a snapshot in memory, which no seal lists, is of an attempt after which another one has left something that counts: a
    checkpoint, or one of those in memory that are `there`."""
    if (attempt, step) in state.accepted:
        return False
    return any(n > attempt and names for n, names in state.seals.items()) or any(
        a > attempt for a, _ in there
    )


def widen_seals(found: Iterable[Found], state: RunState) -> dict[int, tuple[str, ...]]:
    """{attempt: names} for each seal that a checkpoint belongs to and lacks: it was accepted in memory, and is
    committed now. The names are all that the seal is to list."""
    wider: dict[int, list[str]] = {}
    for f in found:
        sealed = state.seals.get(f.attempt)
        if sealed is None or not f.committed or f.name in sealed or (f.attempt, f.step) not in state.accepted:
            continue
        wider.setdefault(f.attempt, list(sealed)).append(f.name)
    return {attempt: tuple(names) for attempt, names in wider.items()}
