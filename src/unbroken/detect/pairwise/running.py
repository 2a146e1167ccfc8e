"""A pairwise test on real nodes: round after round, both sides of each pair at once; then suspects in the background.

How a side is started on a node (an agent, ssh, a scheduler's step) is the caller's: `Start`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace

from ...errors import UnbrokenError
from ...waiting import wait_within
from .model import Judgement, Pair, PairResult
from .probe import ProbeOptions, ProbeResult
from .rounds import PairwiseTest

Start = Callable[[str, ProbeOptions], Awaitable[ProbeResult]]
"""Runs one side on a node; is cancelled at the round's deadline, and then ends what it has started."""
Meet = Callable[[Pair], Awaitable[str]]
"""HOST:PORT at which a pair meets on its first node; another port each time. May raise what `Start` may."""


@dataclass(frozen=True)
class PairwiseRun:
    """`test_s` is for one round, of which a probe has all but a tenth."""

    start: Start
    meet: Meet
    test_s: float = 30.0
    backend: str = "gloo"
    megabytes: float = 64.0

    async def run_test(self, test: PairwiseTest) -> Judgement:
        """The first move: rounds until the test's deadline; always an answer."""
        began = time.monotonic()
        while pairs := test.next_round(time.monotonic() - began):
            test.take(await self.run_round(pairs))
        return test.judge()

    async def settle_suspects(
        self, test: PairwiseTest, suspects: Collection[str], partners: Sequence[str], seconds: float
    ) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
        """The second move: suspects are tested on, each with a partner that is known to be good. (convicted, returned, not
        settled in time). Without a partner nobody is settled."""
        waiting, convicted, returned = set(suspects), set[str](), set[str]()
        began = time.monotonic()
        while waiting and partners:
            test.go_on_with(waiting, partners, seconds)
            pairs = test.next_round(time.monotonic() - began)
            if not pairs:
                break
            test.take(await self.run_round(pairs))
            now = test.judge()
            convicted |= waiting & now.convicted_nodes
            returned |= waiting - now.kept_off
            waiting &= now.suspects
        return frozenset(convicted), frozenset(returned), frozenset(waiting)

    async def run_round(self, pairs: Sequence[Pair]) -> list[PairResult]:
        """All pairs at once; one that does not end in time has failed. Missing are those of which a side did not start in time, or so
        late that the other may have given up: a busy machine is no fault."""
        made = await asyncio.gather(*(self._run_pair(p) for p in pairs))
        return [r for r in made if r is not None]

    async def _run_pair(self, pair: Pair) -> PairResult | None:
        within = 0.9 * self.test_s
        try:
            address = await self.meet(pair)
        except (OSError, UnbrokenError) as e:
            silent = ProbeResult(False, why=str(e), answered=False)
            return combine(pair, silent, replace(silent, why="nobody to meet"))
        sides = await asyncio.gather(
            *(
                self._run_side(
                    node, ProbeOptions(rank, address, self.backend, self.megabytes, within_s=within)
                )
                for rank, node in enumerate(pair)
            )
        )
        first, second = (s.ready_s for s in sides)
        if first is None or second is None or abs(first - second) > within / 2:
            return None
        return combine(pair, sides[0], sides[1])

    async def _run_side(self, node: str, options: ProbeOptions) -> ProbeResult:
        try:
            return await wait_within(self.start(node, options), self.test_s)
        except TimeoutError:
            return ProbeResult(False, why=f"no answer within {self.test_s:g} s", answered=False)
        except (OSError, UnbrokenError) as e:
            return ProbeResult(False, why=str(e), answered=False)


def combine(pair: Pair, first: ProbeResult, second: ProbeResult) -> PairResult:
    """Both sides of a test. A sender is lost where the other side lives, has answered, and did not receive, while its own data came."""
    passed = first.passed and second.passed
    lost = []
    if not passed and first.answered and second.answered and first.received != second.received:
        lost = [pair[0]] if first.received else [pair[1]]
    rate = min(first.rate, second.rate) if passed else 0.0
    return PairResult(pair, passed, rate, tuple(lost))
