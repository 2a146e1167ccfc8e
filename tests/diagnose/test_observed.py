"""Incidents as files, and what the supervisor itself saw where no log line is the root."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from unbroken.diagnose.judge.facts import Facts, HangFact, RankExit, RankPlace
from unbroken.diagnose.observed.interruptions import judge_interruption
from unbroken.diagnose.observed.kills import killed_from_outside, signal_name
from unbroken.diagnose.observed.root import with_root
from unbroken.errors import ContractError
from unbroken.progress import RunDir
from unbroken.progress.records.incident import Incident, read_incidents
from unbroken.progress.records.verdict import Faulty, Outcome, Root, Verdict

UNKNOWN = Verdict(Outcome.FAILED, reason="Unknown")
BLAMES_1 = Verdict(Outcome.FAILED, reason="Unknown", faulty=Faulty("node-001", 1), decided_by="exit-code")


def ended(
    rank: int, *, code: int | None = None, sig: int | None = None, killed_by_agent: bool = False
) -> RankExit:
    return RankExit(
        rank=rank,
        node=f"node-{rank:03d}",
        code=code,
        signal=sig,
        time=5.0 + rank,
        killed_by_agent=killed_by_agent,
    )


def facts(*exits: RankExit, lost: tuple[str, ...] = (), hang: HangFact | None = None) -> Facts:
    return Facts(
        exits=exits,
        lost_nodes=lost,
        hang=hang,
        nodes=((0, "node-000"), (1, "node-001")),
        completed=False,
        step=7,
    )


def test_round_trip(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.create()
    for number in (1, 2):
        verdict = judge_interruption(Facts(agents_lost=("node-000",)))
        Incident(number, 3, "failed", 40, 1.0, 2.0, verdict, phases={"detect": 1 / 3}).write(run_dir)
    told = read_incidents(run_dir)
    assert [i["number"] for i in told] == [1, 2]
    assert told[0]["phases"] == {"detect": 0.333}
    assert Verdict.from_json(told[0]["verdict"]).as_json() == told[0]["verdict"]
    assert Incident.from_json(told[0]).as_json() == told[0]
    with pytest.raises(ContractError, match="not an incident"):
        Incident.from_json({**told[0], "detected": "yesterday"})
    assert json.loads(run_dir.incident(2).read_text())["schema"] == 1


@pytest.mark.parametrize(
    ("exits", "verdict", "killed"),
    [
        ((ended(0, sig=9),), UNKNOWN, True),
        ((ended(0, sig=15),), UNKNOWN, True),
        ((ended(0, sig=9),), Verdict(Outcome.FAILED, reason="OutOfMemoryError"), False),
        ((ended(0, sig=11),), UNKNOWN, False),
        ((ended(0, code=1), ended(1, sig=9)), UNKNOWN, False),
        ((ended(0, code=1), ended(1, sig=9)), BLAMES_1, True),
        ((ended(0, sig=9, killed_by_agent=True),), UNKNOWN, False),
        ((ended(0, code=0), ended(1, sig=9)), UNKNOWN, True),
        ((), UNKNOWN, False),
    ],
)
def test_killed_from_outside(exits: tuple[RankExit, ...], verdict: Verdict, killed: bool) -> None:
    assert killed_from_outside(facts(*exits), verdict) is killed


def test_root_from_what_was_seen() -> None:
    v = with_root(UNKNOWN, facts(ended(1, sig=9), ended(0, sig=9, killed_by_agent=True)))
    assert v.root is not None
    assert (v.root.rank, v.root.node) == (1, "node-001")
    assert v.root.text == "rank 1 on node-001 ended by SIGKILL, without a word in its log"
    assert "exit code 3" in str(with_root(UNKNOWN, facts(ended(0, code=3))).root)
    assert "nothing is left of node-001" in str(with_root(UNKNOWN, facts(lost=("node-001",))).root)
    hang = HangFact(step=7, phase="training", idle_s=61.0, late=(1,), stacks=None)
    places = {1: RankPlace(7, (), "process 9: stopped by a signal (state T)")}
    text = str(with_root(UNKNOWN, replace(facts(hang=hang), places=places)).root)
    assert "no step for 61 s after step 7; rank 1 on node-001: process 9: stopped by a signal" in text
    assert with_root(UNKNOWN, facts()).root is None


def test_a_root_from_a_log_stays() -> None:
    v = Verdict(Outcome.FAILED, reason="Unknown", root=Root(text="Traceback"))
    assert with_root(v, facts(ended(0, sig=9))) is v


def test_the_root_is_the_end_that_the_verdict_blames() -> None:
    v = with_root(BLAMES_1, facts(ended(0, code=1), ended(1, sig=9)))
    assert v.root is not None
    assert v.root.text == "rank 1 on node-001 ended by SIGKILL, without a word in its log"


def test_the_last_line_of_a_killed_rank_is_not_the_root_by_itself() -> None:
    last = Root("rank-1.log", 370, "step 370 loss 0.07", rank=1)
    v = with_root(replace(BLAMES_1, root=last), facts(ended(1, sig=9)))
    said = "rank 1 on node-001 ended by SIGKILL; the last line of its log: step 370 loss 0.07"
    assert v.root == replace(last, text=said)


def test_every_signal_has_a_name() -> None:
    assert signal_name(9) == "SIGKILL"
    assert all(signal_name(n) for n in range(1, signal.NSIG))
