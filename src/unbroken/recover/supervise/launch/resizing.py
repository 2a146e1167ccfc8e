"""A run goes on with fewer nodes where none is left (`--min-nodes`), and with all again once there are.

Smaller by whole data-parallel replicas: the ranks are told their number by WORLD_SIZE, as torchrun does, the checkpoint is
resharded as it is restored, and the script keeps its global batch (`unbroken.data.wrap(global_batch=...)`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....progress import RunSpec
from ....progress.records.state import RunState
from ....units import plural
from ...decide.resizing import Growth, choose_slots, decide_growth
from ..attempt.attempt import Attempt
from ..nodes.fleet import Fleet
from ..record.clock import Clock
from ..record.recorder import Recorder
from .amending import RESIZED
from .replacing import Replacing

_POLL_S = 1.0


class Resizing:
    """Decides with how many nodes the next attempt runs, and when this one stops for more."""

    def __init__(
        self, spec: RunSpec, fleet: Fleet, replacing: Replacing, recorder: Recorder, clock: Clock, say: Callable[[str], None]
    ) -> None:  # fmt: skip
        self._spec, self._fleet, self._replacing = spec, fleet, replacing
        self._recorder, self._clock, self._say = recorder, clock, say
        self._without: tuple[str, ...] = ()
        self._since: dict[str, float] = {}
        """When each node that could come in was first seen to answer (monotonic)."""
        self._poll_at = 0.0
        self._said = ""

    @property
    def _state(self) -> RunState:
        return self._recorder.state

    def describe(self) -> str:
        """What is asked for, in words; "" where nothing is."""
        if not self._spec.min_nodes or self._spec.min_nodes >= self._spec.nodes:
            return ""
        each = self._spec.nodes_per_replica
        by = f", {each} at a time" if each > 1 else ""
        return (
            f"where no node takes a lost one's place within {self._spec.policy.shrink_after} it goes on with fewer, down to "
            f"{self._spec.min_nodes} of {self._spec.nodes}{by}: {RESIZED}; each step has as many samples as before where the script "
            "gives unbroken.data.wrap its global_batch"
        )

    # --- the next attempt

    def choose(
        self, before: Sequence[str], found: Sequence[str | None], free: Sequence[str]
    ) -> tuple[str, ...]:
        """The nodes of the next attempt: `found` are those for the places of `before` (None: nobody), `free` could come in too."""
        size, now = sum(n is not None for n in found), self._clock.monotonic()
        if len(found) < self._spec.nodes:
            grown = self._decide_growth(size, dict.fromkeys(free, now), restarts=True)
            found = [*found, *grown.nodes]
        slots = choose_slots(found, self._spec.node_counts, self._spec.nodes_per_replica)
        left = [n for n in (*self._state.without, *self._list_left(before, found, slots)) if n not in slots]
        self._without = tuple(dict.fromkeys(left))[: self._spec.nodes - len(slots)]
        return slots

    @staticmethod
    def _list_left(before: Sequence[str], found: Sequence[str | None], slots: Sequence[str]) -> list[str]:
        """Those of whom nobody took the place, and those that are over because only whole replicas train."""
        nobody = [old for old, new in zip(before, found, strict=False) if new is None]
        return [*nobody, *(n for n in found if n is not None and n not in slots)]

    async def settle(self, slots: Sequence[str]) -> str:
        """Writes down that the next attempt has other nodes in number than the one before; returns it in words, "" where it has
        as many."""
        state, size, full = self._state, len(slots), self._spec.nodes
        had = len(state.slots) or full
        if size == had and self._without == state.without:
            return ""
        await self._recorder.record(
            "resized", before=state.attempt + 1, nodes=size, had=had, without=list(self._without), step=state.step
        )  # fmt: skip
        self._said, self._since = "", {}
        if size == full:
            words = f"with all {full} nodes again"
        else:
            policy, times = self._spec.policy, len(state.grown)
            so_far = f", {times} so far" if times else ""
            grows = (
                f"it takes a node in once that has answered for {policy.grow_after}, at most {plural(policy.grows_per_hour, 'time')} within "
                f"an hour{so_far}"
                if policy.grows_per_hour
                else "it takes none in by itself (grows_per_hour = 0): stop it, and give the same command again, for all"
            )
            words = f"with {size} of {full} nodes, without {', '.join(self._without)}; {grows}"
        self._say(f"the run goes on {words}")
        return words

    # --- while a smaller one runs

    def find_growth(self, attempt: Attempt) -> str:
        """Why this attempt is to stop for nodes that can come in, in words; "" where none can, or not yet."""
        now, size = self._clock.monotonic(), len(attempt.slots)
        if size >= self._spec.nodes or now < self._poll_at:
            return ""
        self._poll_at = now + _POLL_S
        self._replacing.seek()
        state = self._state
        free = self._fleet.find_free(attempt.slots, {*state.lost, *state.cordoned})
        self._since = {n: self._since.get(n, now) for n in free}
        growth = self._decide_growth(size, self._since)
        why = growth.why
        if growth.nodes:
            if attempt.tracker.host_step >= 0:
                return f"{', '.join(growth.nodes)} can come in: {size + len(growth.nodes)} nodes instead of {size}"
            # Where nothing was saved by us, to stop could cost all since the script's own last checkpoint.
            why = "a node is back; it comes in after the next snapshot, or at the next restart"
        if why and why.partition(":")[0] != self._said:
            self._said = why.partition(":")[0]  # the minutes behind it pass
            self._say(why)
        return ""

    def _decide_growth(self, size: int, since: dict[str, float], *, restarts: bool = False) -> Growth:
        now = self._clock.monotonic()
        ago = self._clock.wall() - now
        # The stop that this start follows was allowed when it was counted.
        before = self._state.grown[:-1] if self._state.growing else self._state.grown
        return decide_growth(
            size, self._spec.node_counts, since, [t - ago for t in before], now, self._spec.policy, restarts=restarts,
            by_hand=self._state.by_hand,
        )  # fmt: skip
