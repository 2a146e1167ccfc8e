"""Tests of pairs of a run's nodes, made by their agents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from ....detect.pairwise import PairResult
from ....detect.pairwise.probe import ProbeOptions, ProbeResult
from ....detect.pairwise.running import PairwiseRun
from ....link.bounds import Malformed, number, text
from ..nodes.fleet import Fleet
from ..nodes.machines import find_meeting, name_interface, share_machine

_ANSWER_S = 3.0


class PairTests:
    """Runs rounds: both sides of each pair at once, all pairs beside each other."""

    def __init__(self, fleet: Fleet, test_s: float) -> None:
        self._fleet, self.test_s = fleet, test_s

    async def run_round(self, pairs: Sequence[tuple[str, str]]) -> list[PairResult]:
        """What each pair's test says; one that does not end in time, or whose agent does not answer, has failed. As long again is
        allowed for the start of its processes. Two virtual nodes of one machine have no rate: no network lies between them, and what
        they reach says how busy their machine is. Taken for a slow node, that kept healthy ones out."""
        backend = self._choose_backend(pairs)
        size = (
            64.0 if backend == "nccl" else 16.0
        )  # by gloo a test takes the processors of nodes that may share their machine
        run = PairwiseRun(self._start, self._meet, 2 * self.test_s + _ANSWER_S, backend, size)
        found = await run.run_round(pairs)
        return [replace(r, rate=0.0) if share_machine(self._fleet.nodes, r.nodes) else r for r in found]

    def _choose_backend(self, pairs: Sequence[tuple[str, str]]) -> str:
        """NCCL where all of them have GPUs: it is what the training uses."""
        facts = [self._fleet.nodes[n].facts for pair in pairs for n in pair]
        return "nccl" if facts and all(f is not None and f.visible for f in facts) else "gloo"

    async def _meet(self, pair: tuple[str, str]) -> str:
        answer = await self._fleet.ask(pair[0], "pair_port", timeout=_ANSWER_S)
        return f"{find_meeting(self._fleet.nodes, pair)}:{int(answer['port'])}"

    async def _start(self, node: str, options: ProbeOptions) -> ProbeResult:
        within = replace(options, within_s=0.9 * self.test_s)
        interface = name_interface(self._fleet.nodes[node], options.address.rpartition(":")[0])
        return _read(
            await self._fleet.ask(
                node, "pair", timeout=2 * self.test_s + _ANSWER_S, options=asdict(within), interface=interface
            )
        )


def _read(answer: dict[str, object]) -> ProbeResult:
    """What an agent's side says; a side that makes no sense has failed."""
    try:
        rate, why = number(answer.get("rate"), "rate", 0.0, 1e18), text(answer.get("why"), "why", most=1000)
        ready = answer.get("ready_s")
        ready_s = None if ready is None else number(ready, "ready_s", 0.0, 1e6)
    except Malformed as e:
        return ProbeResult(False, why=str(e), answered=False)
    answered = answer.get("answered") is not False
    return ProbeResult(
        answer.get("passed") is True, answer.get("received") is True, rate, why, ready_s, answered
    )
