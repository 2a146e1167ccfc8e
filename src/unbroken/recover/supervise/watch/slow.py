"""From what makes a training slow to words, and to leaving a slow node once it has cost as much as that would."""

from __future__ import annotations

from collections.abc import Callable

from ....detect.stragglers import SlowCost, SlowFinding, SlowKind
from ....progress import Policy
from ....units import Duration
from ..attempt.attempt import Attempt
from ..fence.fencing import Fencing
from ..nodes.fleet import Fleet
from ..nodes.machines import share_machine
from ..record.clock import Clock
from ..record.recorder import Recorder

_LEAST_PRICE_S = 10.0
_SURE = 0.9
_HOUR_S = 3600.0
_DAY_S = 86400.0


class SlowJudge:
    """Says each thing once an attempt. Leaves one node an hour at most, and only where a spare can take its place. Where all
    are slow and nobody works longer it has all nodes tested in pairs, once a day: a network card at half its rate slows them all."""

    def __init__(
        self,
        fleet: Fleet,
        fencing: Fencing,
        recorder: Recorder,
        say: Callable[[str], None],
        clock: Clock,
        policy: Policy,
        pairs_s: float,
    ) -> None:
        """`pairs_s` is what a test of all nodes takes at most."""
        self._fleet, self._fencing, self._recorder = fleet, fencing, recorder
        self._say, self._clock = say, clock
        self._policy, self._pairs_s = policy, pairs_s
        self._told: set[tuple[int, SlowKind, tuple[str, ...]]] = set()
        self._cost: dict[tuple[int, SlowKind], SlowCost] = {}
        self._left: float | None = None
        self._tested: float | None = None

    async def judge(self, attempt: Attempt) -> str:
        """Why the attempt is to be ended at a step, in words; "" where the training goes on as it is."""
        if attempt.work.finding is None:
            return ""
        (finding, steps), attempt.work.finding = attempt.work.finding, None
        price = _find_price(attempt) + (self._pairs_s if finding.kind is SlowKind.FABRIC else 0.0)
        cost = self._cost.setdefault((attempt.number, finding.kind), SlowCost(price))
        worth = cost.add(finding, steps)
        key = (attempt.number, finding.kind, finding.nodes)
        if key not in self._told:
            self._told.add(key)
            self._say(f"step {finding.step}: slowed by {finding.kind}: {finding.why}")
            await self._recorder.record_soft(
                "slow", attempt=attempt.number, step=finding.step, what=str(finding.kind), ranks=list(finding.ranks),
                nodes=list(finding.nodes), excess_s=round(finding.excess, 6), why=finding.why,
            )  # fmt: skip
        if not worth:
            return ""
        act = self._test_all if finding.kind is SlowKind.FABRIC else self._leave
        return await act(attempt, finding, cost)

    async def _leave(self, attempt: Attempt, finding: SlowFinding, cost: SlowCost) -> str:
        now = self._clock.monotonic()
        if not self._has_spare(attempt) or (self._left is not None and now - self._left < _HOUR_S):
            return ""
        self._left = now
        (node,) = finding.nodes
        why = f"{finding.why}; it has cost {Duration(cost.lost_s)} so far, and leaving it costs about {Duration(cost.price_s)}"
        await self._fencing.cordon(node, "slow", _SURE)
        return why

    async def _test_all(self, attempt: Attempt, finding: SlowFinding, cost: SlowCost) -> str:
        now = self._clock.monotonic()
        nodes = self._fleet.nodes
        known = [name for name, node in nodes.items() if node.facts is not None]
        if self._policy.on_doubt == "keep" or (
            self._policy.on_doubt == "auto" and share_machine(nodes, known)
        ):
            return ""
        if not self._has_spare(attempt) or (self._tested is not None and now - self._tested < _DAY_S):
            return ""
        self._tested = now
        await self._recorder.record("pairs_due", attempt=attempt.number, why=finding.why)
        return (
            f"{finding.why}; it has cost {Duration(cost.lost_s)} so far, and to test all nodes in pairs costs about"
            f" {Duration(cost.price_s)}: a node whose link is slow slows them all"
        )

    def _has_spare(self, attempt: Attempt) -> bool:
        state = self._recorder.state
        return bool(self._fleet.find_free(attempt.nodes, {*state.lost, *state.cordoned}))


def _find_price(attempt: Attempt) -> float:
    """What a restart costs, as this attempt's own start has shown it."""
    if attempt.first_step is None:
        return _LEAST_PRICE_S
    return max(_LEAST_PRICE_S, attempt.first_step.time - attempt.started)
