"""Where facts say all that can be known no log is read; where logs cannot be read the facts still count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unbroken.diagnose import Action, Facts, HangFact, Outcome, RankExit, RankPlace, diagnose, judge_unread
from unbroken.journal.codec import decode, encode

MISSING = Path("/there/is/no/such.log")
EXPIRED = RankExit(0, "node-000", None, 9, 5.0, killed_by_agent=True)


@pytest.mark.parametrize(
    ("facts", "decided_by", "says"),
    [
        (Facts(agents_lost=("node-001",)), "lost-agent", "the agent of node-001 ended"),
        (Facts(agents_lost=("node-001", "node-002")), "lost-agent", "the agents of node-001, node-002 ended"),
        (Facts(launch_error="no port"), "launch", "could not be launched: no port"),
        (Facts(preempted="node-001 is taken away in 90 s"), "notice", "taken away in 90 s"),
        (Facts(lease_expired=EXPIRED), "lapsed-lease", "node-000 did not hear from its supervisor"),
        (Facts(supervisor_lost=True, lease_expired=EXPIRED), "lapsed-lease", "node-000 did not hear"),
        (Facts(supervisor_lost=True), "lost-supervisor", "the supervisor was gone, and so are the ranks"),
        (Facts(taken_over=True), "takeover", "every rank was still running"),
    ],
)
def test_an_interruption_needs_no_log(facts: Facts, decided_by: str, says: str) -> None:
    v = diagnose([MISSING], facts=facts)
    assert v.decided_by == decided_by and v.root is not None and says in v.root.text
    assert v.recoverable and v.action is (Action.NONE if facts.taken_over else Action.RESTART)
    assert judge_unread(facts, "it took too long") == v


def test_a_lost_supervisor_explains_no_failure_that_the_logs_show(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("step 1 loss 2.0\nTraceback (most recent call last):\nKeyError: 'labels'\n")
    facts = Facts(supervisor_lost=True, exits=(RankExit(0, "node-000", 1, None, 5.0),))
    assert diagnose([log], facts=facts).reason == "KeyError"


def test_without_any_log_the_facts_still_count() -> None:
    silent = {"node-001": "stopped (SIGSTOP); its processes were ended"}
    lost = diagnose([], facts=Facts(lost_nodes=("node-001",), silent=silent))
    assert lost.reason == "NodeFailure" and lost.cordon == ("node-001",)
    assert lost.root is not None and lost.root.text == f"node-001 did not answer: {silent['node-001']}"
    hung = diagnose([], facts=Facts(hang=HangFact(7, "training", 60.0), step=7))
    assert hung.outcome is Outcome.HUNG and hung.root is not None and "no step for 60 s" in hung.root.text


def test_logs_that_cannot_be_read_leave_what_was_seen() -> None:
    killed = Facts(
        exits=(RankExit(1, "node-001", None, 9, 5.0, oom=False),), nodes=((0, "a"), (1, "node-001"))
    )
    v = judge_unread(killed, "the diagnosis failed")
    assert (v.reason, v.decided_by) == ("Unknown", "signal") and v.notes[0] == "the diagnosis failed"
    assert v.root is not None and v.root.text.startswith("rank 1 on node-001 ended by SIGKILL")
    v = judge_unread(Facts(lost_nodes=("node-001",)), "the diagnosis failed")
    assert v.reason == "NodeFailure" and "the diagnosis failed" in v.notes


def test_all_facts_survive_the_way_to_another_process() -> None:
    facts = Facts(
        silent={"node-001": "stopped"}, agents_lost=("node-000",), lease_expired=EXPIRED, preempted="soon",
        places={0: RankPlace(7, ("all_reduce (x.py:1)",), "process 9: sleeping (state S)")}, total=9, run_step=7, noticed=5.0,
        exits=(RankExit(0, "node-000", 1, None, 12.5, earliest=12.4, latest=12.6, oom=True),),
    )  # fmt: skip
    assert decode(Facts, json.loads(json.dumps(encode(facts)))) == facts


def test_quoted_files_are_named_from_the_folder_on(tmp_path: Path) -> None:
    log = tmp_path / "attempts" / "0001" / "node-000" / "rank-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("step 1 loss 2.0\nTraceback (most recent call last):\nKeyError: 'labels'\n")
    inside, outside = diagnose([log], folder=tmp_path), diagnose([log], folder=tmp_path / "elsewhere")
    assert inside.root is not None and inside.root.file == "attempts/0001/node-000/rank-0.log"
    assert outside.root is not None and outside.root.file == "rank-0.log"
