"""From what makes a training slow to words, and to leaving a slow node once it has cost as much as that would."""

from __future__ import annotations

from collections.abc import Callable

from ....detect.stragglers import SlowCost, SlowFinding, SlowKind
from ....units import Duration
from ..attempt.attempt import Attempt
from ..fence.fencing import Fencing
from ..nodes.fleet import Fleet
from ..record.clock import Clock
from ..record.recorder import Recorder

_LEAST_PRICE_S = 10.0
_SURE = 0.9
_HOUR_S = 3600.0


class SlowJudge:
    """Says each thing once an attempt; leaves one node an hour at most, and only where a spare can take its place."""

    def __init__(
        self, fleet: Fleet, fencing: Fencing, recorder: Recorder, say: Callable[[str], None], clock: Clock
    ) -> None:
        self._fleet, self._fencing, self._recorder = fleet, fencing, recorder
        self._say, self._clock = say, clock
        self._told: set[tuple[int, SlowKind, tuple[str, ...]]] = set()
        self._cost: dict[int, SlowCost] = {}
        self._left: float | None = None

    async def judge(self, attempt: Attempt) -> str:
        """Why a node is to be left, in words; "" where the training goes on as it is."""
        if attempt.work.finding is None:
            return ""
        (finding, steps), attempt.work.finding = attempt.work.finding, None
        cost = self._cost.setdefault(attempt.number, SlowCost(_find_price(attempt)))
        worth = cost.add(finding, steps)
        key = (attempt.number, finding.kind, finding.nodes)
        if key not in self._told:
            self._told.add(key)
            self._say(f"step {finding.step}: slowed by {finding.kind}: {finding.why}")
            await self._recorder.record_soft(
                "slow", attempt=attempt.number, step=finding.step, what=str(finding.kind), ranks=list(finding.ranks),
                nodes=list(finding.nodes), excess_s=round(finding.excess, 6), why=finding.why,
            )  # fmt: skip
        return await self._leave(attempt, finding, cost) if worth else ""

    async def _leave(self, attempt: Attempt, finding: SlowFinding, cost: SlowCost) -> str:
        state, now = self._recorder.state, self._clock.monotonic()
        free = self._fleet.find_free(attempt.nodes, {*state.lost, *state.cordoned})
        if not free or (self._left is not None and now - self._left < _HOUR_S):
            return ""
        self._left = now
        (node,) = finding.nodes
        why = f"{finding.why}; it has cost {Duration(cost.lost_s)} so far, and leaving it costs about {Duration(cost.price_s)}"
        await self._fencing.cordon(node, "slow", _SURE)
        return why


def _find_price(attempt: Attempt) -> float:
    """What a restart costs, as this attempt's own start has shown it."""
    if attempt.first_step is None:
        return _LEAST_PRICE_S
    return max(_LEAST_PRICE_S, attempt.first_step.time - attempt.started)
