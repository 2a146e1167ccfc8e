"""A rank that ends with code 0 while others train is the root; one that is simply done is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unbroken.diagnose.judge.facts import Facts, HangFact, RankExit, RankPlace
from unbroken.diagnose.observed.early_exit import blame_early_exit
from unbroken.progress.records.verdict import REASONS, Action, Faulty, Outcome, Root, Verdict
from unbroken.recover.decide.policy import fingerprint

NODES = ((0, "node-000"), (1, "node-001"))


def end(
    rank: int, code: int | None = 0, *, sig: int | None = None, at: float = 100.0, ours: bool = False
) -> RankExit:
    return RankExit(rank, f"node-{rank:03d}", code, sig, at, ours)


def failed(reason: str | None, text: str) -> Verdict:
    return Verdict(
        Outcome.FAILED, REASONS.get(reason or ""), reason, Root("rank-0.log", 9, text, 0, "node-000"), recoverable=True,
        faulty=Faulty("node-000", 0), action=Action.RESTART, confidence=0.81, decided_by="a-rule",
    )  # fmt: skip


PEER = failed("NCCLRemoteError", "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:4242")
HUNG = replace(failed("Hang", "no step for 60 s"), outcome=Outcome.HUNG)
AT_59 = {0: RankPlace(59), 1: RankPlace(59)}
WAITING = (
    "all_reduce (torch/distributed/distributed_c10d.py:2810)",
    "wrapper (torch/distributed/c10d_logger.py:81)",
)


@pytest.mark.parametrize(
    "verdict",
    [
        PEER,
        failed("NCCLTimeoutError", "Watchdog caught collective operation timeout"),
        failed("RuntimeError", "RuntimeError: Connection reset by peer"),
        failed("ConnectionError", "ConnectionResetError: [Errno 104] Connection reset by peer"),
        failed("Unknown", "torch.distributed.DistNetworkError: failed to recv, got 0 bytes"),
    ],
)
@pytest.mark.parametrize("bad", [end(0, 1, at=100.2), end(0, None, sig=6, at=130.0), end(0, 1, at=99.95)])
def test_the_others_lost_connections_are_blamed_on_the_rank_that_left(
    verdict: Verdict, bad: RankExit
) -> None:
    v = blame_early_exit(verdict, Facts(exits=(end(1), bad), nodes=NODES, places=AT_59))
    assert v.root is not None and v.faulty == Faulty("node-001", 1)
    assert v.root.text == "rank 1 ended with exit code 0 while others went on after step 59"
    assert (v.decided_by, v.outcome, v.action, v.recoverable) == (
        "early-exit",
        Outcome.FAILED,
        Action.RESTART,
        True,
    )
    assert v.evidence[0] == verdict.root, "what the others said is kept"


def test_it_compares_equal_when_it_happens_again() -> None:
    facts = Facts(exits=(end(1), end(0, 1, at=100.2)), nodes=NODES, places=AT_59)
    again = Facts(exits=(end(1, at=300.0), end(0, None, sig=6, at=301.0)), nodes=NODES, places=AT_59)
    other = failed("NCCLTimeoutError", "Watchdog caught collective operation timeout")
    assert fingerprint(blame_early_exit(PEER, facts)) == fingerprint(blame_early_exit(other, again))


@pytest.mark.parametrize(
    ("verdict", "exits"),
    [
        (failed("KeyError", "KeyError: 'loss'"), (end(1), end(0, 1, at=104.0))),
        (failed("OutOfMemoryError", "CUDA out of memory"), (end(1), end(0, 1, at=100.3))),
        (failed("Unknown", "step 59 loss 0.1"), (end(1), end(0, None, sig=9, at=100.3))),
        (failed("Unknown", "step 59 loss 0.1"), (end(1), end(0, 3, at=100.3))),
        (PEER, (end(0, 1, at=100.0), end(1, at=110.0))),
        (PEER, (end(0, 1), end(1, 1))),
        (PEER, (end(0), end(1))),
        (PEER, (end(1, ours=True), end(0, 1, at=101.0))),
    ],
    ids=["own bug", "own memory", "killed", "own exit code", "left after the failure", "none left", "all well", "ended by us"],
)  # fmt: skip
def test_a_failure_of_another_kind_stays(verdict: Verdict, exits: tuple[RankExit, ...]) -> None:
    assert blame_early_exit(verdict, Facts(exits=exits, nodes=NODES, places=AT_59)) is verdict


def test_a_lost_node_stays_lost() -> None:
    facts = Facts(exits=(end(1), end(0, 1, at=101.0)), nodes=NODES, lost_nodes=("node-000",), places=AT_59)
    assert blame_early_exit(PEER, facts) is PEER


@pytest.mark.parametrize(
    ("places", "total", "blamed"),
    [
        ({0: RankPlace(59, WAITING), 1: RankPlace(59)}, None, True),
        ({0: RankPlace(60), 1: RankPlace(59)}, None, True),
        ({0: RankPlace(59), 1: RankPlace(59)}, 200, True),
        ({0: RankPlace(199, ("upload (s3.py:9)",)), 1: RankPlace(199)}, 200, False),
        ({0: RankPlace(59, ("read (loader.py:3)",)), 1: RankPlace(59)}, None, False),
    ],
    ids=[
        "it waits for it",
        "it is further",
        "steps are missing",
        "its last step is made",
        "it hangs by itself",
    ],
)
def test_a_hang_is_blamed_on_it_where_others_wait_for_it(
    places: dict[int, RankPlace], total: int | None, blamed: bool
) -> None:
    facts = Facts(
        exits=(end(1),), nodes=NODES, hang=HangFact(59, "training", 60.0), places=places, total=total
    )
    v = blame_early_exit(HUNG, facts)
    assert (v is not HUNG) == blamed


def test_before_the_first_step() -> None:
    places = {0: RankPlace(), 1: RankPlace()}
    v = blame_early_exit(PEER, Facts(exits=(end(1), end(0, 1, at=100.2)), nodes=NODES, places=places))
    assert v.root is not None and v.root.text.endswith("while others went on before its first step")
