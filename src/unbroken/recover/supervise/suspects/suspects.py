"""Two moves: the smallest group that surely holds the culprit leaves at once; its members are tested aside, and innocents return.

The first move costs a restart on spares, which an incident costs anyway. The second goes on while the run trains. What is known lies in
the journal, so that a successor goes on with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from ....detect.pairwise import Judgement, PairwiseTest, sort_pair
from ....errors import RunError
from ....progress import Policy, Timeouts
from ....progress.records.state import RunState
from ....units import plural
from ..fence.fencing import Fencing
from ..nodes.fleet import Fleet
from ..record.clock import Clock
from ..record.recorder import Recorder
from ..record.stop_request import StopRequest
from ..record.term import Superseded
from .pairing import PairTests

_log = logging.getLogger("unbroken.supervisor")
_ROUNDS = 10
"""As many as were validated: docs/pairwise.md."""
CLEAN = 10
"""So many clean tests return a suspect: it fails less than 30 % of its tests (3 / 10), with 95 % confidence."""
_PAUSE_S = 2.0
_LONGEST_S = 1800.0
"""Who is not cleared within so much stays out of use."""
_HOUR_S = 3600.0


class Suspects:
    """Takes suspects out, tests them, and returns them or puts them out of use."""

    def __init__(
        self,
        fleet: Fleet,
        fencing: Fencing,
        recorder: Recorder,
        stop: StopRequest,
        say: Callable[[str], None],
        clock: Clock,
        policy: Policy,
        timeouts: Timeouts,
    ) -> None:
        self._fleet, self._fencing, self._recorder, self._stop = fleet, fencing, recorder, stop
        self._say, self._clock, self._policy = say, clock, policy
        self._tests, self._all_s = PairTests(fleet, float(timeouts.pair)), float(timeouts.pairs)
        self._came, self._round = asyncio.Event(), 0

    @property
    def _state(self) -> RunState:
        return self._recorder.state

    # --- the first move

    async def leave(self, names: Sequence[str], incident: int, why: str) -> None:
        """These nodes are not used until they were tested."""
        for name in names:
            await self._recorder.record("suspect", node=name, incident=incident, why=why)
        if names:
            self._came.set()
            self._say(f"{', '.join(names)}: out at once, tested aside, back where nothing is found ({why})")

    async def test_all(self, slots: Sequence[str]) -> bool:
        """Tests all nodes of the run with each other where an incident has asked for it; True where one of `slots` left."""
        if not self._state.pairs_due:
            return False
        free = self._find_partners(slots)
        nodes = [n for n in slots if n in self._fleet.up()] + free
        test = self._plan(nodes, _ring(slots)) if len(nodes) > 2 else None
        answer = (
            await self._run(test)
            if test is not None
            else Judgement(undecided="two nodes cannot be told apart")
        )
        await self._recorder.record(
            "pairs", incident=self._state.incident, nodes=len(nodes), tests=len(test.results) if test else 0,
            convicted=sorted(answer.convicted_nodes), suspects=sorted(answer.suspects), links=[str(x) for x in answer.links],
            undecided=answer.undecided,
        )  # fmt: skip
        return await self._take_answer(answer, slots, len(free))

    async def _run(self, test: PairwiseTest) -> Judgement:
        """Rounds until the deadline, or until a stop is asked for."""
        self._say(f"which node it was is not known: all are tested in pairs, for {self._all_s:.0f} s at most")
        until, test_s = self._clock.monotonic() + self._all_s, self._tests.test_s
        for number in range(_ROUNDS):
            # Most rounds end long before their time, so that they are counted as the plan has them, beside the deadline.
            pairs = test.next_round(number * test_s)
            if self._stop or not pairs or self._clock.monotonic() + 2 * test_s > until:
                break
            task = asyncio.create_task(self._tests.run_round(pairs))
            try:
                await self._stop.wait_for(task)
                if task.done():
                    test.take(task.result())
            finally:
                task.cancel()
        return test.judge()

    def _plan(self, nodes: Sequence[str], routes: Sequence[tuple[str, str]]) -> PairwiseTest:
        test_s = self._tests.test_s
        return PairwiseTest(nodes, routes, seconds=_ROUNDS * test_s, test_s=test_s)

    async def _take_answer(self, answer: Judgement, slots: Sequence[str], room: int) -> bool:
        gone = 0
        for link in answer.links:
            self._say(str(link))
        if answer.undecided:
            self._say(f"the test of pairs names nobody: {answer.undecided}")
            return False
        for c in sorted(answer.convicted, key=lambda c: -c.confidence):
            needed = c.node in slots
            if (needed and room <= gone) or not self._may_go(1):
                self._say(
                    f"{c}; it stays in use: {'no spare is left' if needed and room <= gone else self._limit()}"
                )
                continue
            gone += int(needed)
            await self._fencing.cordon(c.node, f"a test of pairs: {c}", c.confidence)
        for group in sorted(answer.groups, key=len):
            of_slots = len({*group} & {*slots})
            if room - gone < of_slots or not self._may_go(len(group)):
                self._say(
                    f"{', '.join(group)}: one of them is at fault, and they stay in use: no spares, or {self._limit()}"
                )
                continue
            gone += of_slots
            await self.leave(group, self._state.incident, "bad tests with each other")
        return bool(gone)

    def _may_go(self, count: int) -> bool:
        now = self._clock.wall()
        return (
            sum(now - at < _HOUR_S for at, _ in self._state.cordons) + count <= self._policy.cordons_per_hour
        )

    def _limit(self) -> str:
        return f"{plural(self._policy.cordons_per_hour, 'node')} may leave within an hour"

    # --- the second move

    async def settle(self) -> None:
        """Tests suspects for as long as the term lasts, whenever there are any."""
        while True:
            self._came.clear()
            if not self._state.suspects:
                await self._came.wait()
            test: PairwiseTest | None = None
            while self._state.suspects:
                try:
                    test = await self._test_once(test)
                except Superseded:
                    return  # its successor goes on with them
                except RunError as e:
                    _log.warning("suspects are tested later: %s", e)
                    await asyncio.sleep(_PAUSE_S)

    async def _test_once(self, test: PairwiseTest | None) -> PairwiseTest | None:
        """One round: each suspect with a node that is free, or with another suspect where there is none; every other round of a
        suspect in doubt is its partners' with each other, so that they are known to be well."""
        waiting, partners = sorted(self._state.suspects), self._find_partners(self._state.slots)
        if len(waiting) + len(partners) > 1:
            test = test or self._plan([*waiting, *partners], ())
            self._round += 1
            if len(partners) > 1 and self._round % 2 and any(test.judge().probability.values()):
                turn = self._round // 2 % len(partners)
                pairs = _pair([*partners[turn:], *partners[:turn]])
            elif partners:
                test.go_on_with(waiting, partners, float("inf"))
                pairs = test.next_round(0.0)
            else:
                pairs = _pair(waiting)
            test.take(await self._tests.run_round(pairs))
            await self._settle(test.judge(), waiting)
        for name in [n for n in waiting if self._clock.wall() - self._since(n) > _LONGEST_S]:
            if name in self._state.suspects:
                clean = test.judge().repeats.get(name, 0) if test else 0
                await self._fencing.cordon(
                    name, f"not cleared in time, after {clean} clean tests of pairs", 0.5
                )
        if self._state.suspects:
            await asyncio.sleep(_PAUSE_S)
        return test

    async def _settle(self, found: Judgement, waiting: Sequence[str]) -> None:
        for name in [n for n in waiting if n in self._state.suspects]:
            if name in found.convicted_nodes:
                (c,) = (c for c in found.convicted if c.node == name)
                await self._fencing.cordon(name, f"a test of pairs: {c}", c.confidence)
            elif name not in found.kept_off and (clean := found.repeats.get(name, 0)) >= CLEAN:
                seconds = self._clock.wall() - self._since(name)
                await self._recorder.record(
                    "cleared", node=name, seconds=round(seconds, 3), repeats=clean, innocent=True
                )
                state = self._state
                self._say(
                    f"{found.describe(name)}: it is a spare again, {seconds:.0f} s after it left "
                    f"({state.innocent_s / 3600:.3g} innocent node-hours for {state.faults} real faults so far)"
                )

    def _since(self, name: str) -> float:
        return self._state.suspects.get(name, self._clock.wall())

    def _find_partners(self, slots: Sequence[str]) -> list[str]:
        """Nodes that are free and that nobody suspects."""
        state = self._state
        return self._fleet.find_free(tuple(slots), {*state.lost, *state.cordoned})

    async def give_one_back(self) -> str | None:
        """A suspect that answers, where the run has no other node left: it has waited longest. None where there is none."""
        up = self._fleet.up()
        for name in sorted((n for n in self._state.suspects if n in up), key=self._since):
            await self._recorder.record("cleared", node=name, seconds=0.0, repeats=0, innocent=False)
            self._say(f"{name} is used again before it was cleared: no other node is left")
            return name
        return None


def _pair(nodes: Sequence[str]) -> list[tuple[str, str]]:
    """Each with the next one; the last of an odd number has none."""
    return [sort_pair(a, b) for a, b in zip(nodes[::2], nodes[1::2], strict=False)]


def _ring(slots: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs of neighbours, between which a ring sends."""
    return list(zip(slots, [*slots[1:], *slots[:1]], strict=True)) if len(slots) > 2 else []
