"""The pairwise test with real processes that exchange real data over gloo, on nodes of which some are at fault."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

from unbroken.detect.pairwise import NodeFault, PairwiseTest
from unbroken.detect.pairwise.probe import ProbeOptions, ProbeResult, make_arguments, probe, read_probe
from unbroken.detect.pairwise.running import PairwiseRun, combine

DEAD, HANGING, SLOW, HALF = "dead", "hanging", "slow", "half"


async def meet(pair: tuple[str, str]) -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"


def side(options: ProbeOptions, sender: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sender.send(probe(options))


class Nodes:
    """Nodes of this machine, each side of a test a process of its own; some are at fault."""

    def __init__(self, faults: Mapping[str, str]) -> None:
        self.faults, self.random = faults, Random(3)
        self.context = multiprocessing.get_context("fork")

    async def start(self, node: str, options: ProbeOptions) -> ProbeResult:
        from dataclasses import replace

        fault = self.faults.get(node)
        if fault == DEAD or (fault == HALF and self.random.random() < 0.5):
            raise ConnectionError("the node does not answer")
        # On a busy machine rates are dominated by who gets a processor: a pause that all have makes them alike.
        options = replace(options, times=4, pause_s=0.4 if fault == SLOW else 0.1)
        ours, theirs = self.context.Pipe(duplex=False)
        process = self.context.Process(target=side, args=(options, theirs), daemon=True)
        process.start()
        if fault == HANGING:
            os.kill(process.pid or 0, signal.SIGSTOP)
        try:
            while not ours.poll():
                if not process.is_alive():
                    return ProbeResult(False, why="it died")
                await asyncio.sleep(0.02)
            return ours.recv()  # type: ignore[no-any-return]
        finally:
            process.kill()
            process.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [pytest.param({"n02": DEAD, "n05": SLOW}, marks=pytest.mark.soak), {"n04": HANGING, "n07": HALF}],
)
def test_real_nodes_at_fault_are_convicted_or_kept_off_and_no_other_is_convicted(
    faults: dict[str, str],
) -> None:
    import torch.distributed  # noqa: F401  once, before the processes are forked

    names = [f"n{i:02d}" for i in range(10)]
    nodes = Nodes(faults)
    run = PairwiseRun(nodes.start, meet, test_s=3.0, megabytes=0.2)
    test = PairwiseTest(names, seconds=21.0, test_s=3.0, seed=1)

    async def both_moves() -> tuple[Any, ...]:
        answer = await run.run_test(test)
        good = [n for n in names if n not in answer.kept_off]
        return answer, await run.settle_suspects(test, answer.suspects, good, 12.0)

    answer, (later, returned, _) = asyncio.run(both_moves())
    found = {c.node: c.fault for c in answer.convicted}
    assert {n for n, f in faults.items() if f != HALF} <= found.keys() and {*faults} <= answer.kept_off
    assert "n05" not in found or found["n05"] is NodeFault.SLOW
    assert found.keys() | later <= faults.keys() and not returned & faults.keys()


def test_which_direction_was_lost_is_told_where_one_side_received() -> None:
    good, deaf, silent = ProbeResult(True, True, 5.0), ProbeResult(False, False), ProbeResult(False, True)
    assert combine(("a", "b"), good, ProbeResult(True, True, 3.0)).rate == 3.0
    assert combine(("a", "b"), silent, deaf).lost == ("a",)
    assert combine(("a", "b"), deaf, silent).lost == ("b",) and not combine(("a", "b"), deaf, deaf).lost
    # Whoever hangs in the middle may have received all.
    assert not combine(("a", "b"), silent, read_probe("")).lost


def test_what_a_side_prints_comes_back() -> None:
    assert read_probe("noise\nunbroken-pair {}\n").why == "no answer"
    line = 'unbroken-pair {"passed": true, "received": true, "rate": 2.0, "why": ""}'
    assert read_probe(f"x\n{line}\ny") == ProbeResult(True, True, 2.0)
    assert "--rank 1" in " ".join(make_arguments(ProbeOptions(1, "h:1")))
