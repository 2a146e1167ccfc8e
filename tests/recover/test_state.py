"""Where a run stands, from its journal alone."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.progress.records.decision import PastIncident
from unbroken.progress.records.doubt import Doubt
from unbroken.progress.records.state import RunState


def fold(*records: dict[str, Any], now: float = 100.0) -> RunState:
    return RunState.of([{"t": float(i), **r} for i, r in enumerate(records)], now=now)


RUN = {"kind": "run"}
EPOCH = {"kind": "epoch"}
ATTEMPT = {"kind": "attempt", "attempt": 1, "slots": ["node-000", "node-001"]}
INCIDENT = {"kind": "incident", "incident": 1, "cause": "hang", "fingerprint": "f", "step": 40}
ENDED = {"kind": "ended", "attempt": 1, "step": 41}


def test_nothing_yet() -> None:
    s = fold()
    assert (s.status, s.attempt, s.step, s.started, s.attempt_open) == ("new", 0, -1, None, False)


def test_a_run_on_its_way() -> None:
    s = fold(RUN, EPOCH, ATTEMPT)
    assert (s.status, s.attempt, s.attempt_open, s.slots) == ("running", 1, True, ("node-000", "node-001"))
    assert s.started == 0.0 and s.restarts == 0


def test_incident_and_recovery() -> None:
    s = fold(RUN, EPOCH, ATTEMPT, ENDED, INCIDENT)
    assert (s.attempt_open, s.step, s.incident, s.unresumed) == (False, 41, 1, 1)
    assert s.history == [PastIncident("hang", "f", 40)]
    again = fold(
        RUN, EPOCH, ATTEMPT, ENDED, INCIDENT, {**ATTEMPT, "attempt": 2}, {"kind": "resumed", "step": 55},
    )  # fmt: skip
    assert (again.attempt, again.restarts, again.unresumed, again.step) == (2, 1, None, 55)


def test_the_step_never_goes_back() -> None:
    s = fold(RUN, EPOCH, ENDED, {"kind": "ended", "attempt": 2, "step": 7}, {"kind": "ended", "attempt": 3})
    assert s.step == 41


def test_taking_over_keeps_history_and_a_command_given_again_does_not() -> None:
    assert fold(RUN, EPOCH, INCIDENT, EPOCH).history != []
    for status in ("stopped", "interrupted"):
        s = fold(RUN, EPOCH, INCIDENT, {"kind": "status", "status": status, "why": "w"}, EPOCH)
        assert s.history == [] and (s.status, s.why) == ("running", "")
        assert s.incident == 1, "incidents keep their numbers"


def test_completed_stays_completed() -> None:
    s = fold(RUN, EPOCH, {"kind": "status", "status": "completed"}, EPOCH)
    assert s.status == "completed"


def test_seals_lost_nodes_and_unknown_kinds() -> None:
    s = fold(
        RUN, {"kind": "seal", "attempt": 1, "checkpoints": ["a"]}, {"kind": "lost", "node": "n1"},
        {"kind": "lost", "node": "n2"}, {"kind": "returned", "node": "n1"}, {"kind": "from the future", "x": 1},
        {"kind": "durable", "step": 20, "attempt": 1},
    )  # fmt: skip
    assert s.seals == {1: ("a",)} and s.lost == {"n2"} and s.durable == [(20, 1)]


def test_cordons_expire() -> None:
    cordon = {"kind": "cordon", "node": "n", "reason": "ECCError", "expires_s": 86400}
    assert fold(cordon, now=86399.0).cordoned == {"n": "ECCError"}
    assert fold(cordon, now=86401.0).cordoned == {}
    assert fold(cordon, cordon, now=86400.5).cordoned == {"n": "ECCError"}, "cordoned again a second later"
    assert fold({"kind": "cordon", "node": "n", "reason": "by hand"}, now=1e12).cordoned == {"n": "by hand"}


@given(
    st.lists(
        st.sampled_from([RUN, EPOCH, ATTEMPT, INCIDENT, ENDED, {"kind": "status", "status": "stopped"}]),
        max_size=30,
    ),
    st.integers(0, 30),
)
@settings(max_examples=60, deadline=None)
def test_folding_in_two_parts_is_folding_at_once(records: list[dict[str, Any]], cut: int) -> None:
    """A supervisor folds what it finds and then applies its own records one by one."""
    timed = [{"t": float(i), **r} for i, r in enumerate(records)]
    state = RunState.of(timed[:cut])
    for r in timed[cut:]:
        state.apply(r)
    assert state == RunState.of(timed)


def test_a_successor_knows_which_nodes_are_unproven() -> None:
    doubt = {"kind": "unproven", "node": "n", "attempt": 2, "why": "w", "held": "marks"}
    s = fold(
        RUN, EPOCH, {**ATTEMPT, "held": "marks"}, doubt, {"kind": "status", "status": "interrupted"}, EPOCH
    )
    assert s.unproven == {"n": Doubt(2, "w", "marks")} and s.held == "marks"
    assert fold(doubt, {"kind": "proven", "node": "n"}).unproven == {}
    assert fold(doubt, {"kind": "made_sure", "node": "n"}).unproven == {}
    assert fold({**doubt, "held": None}, {"kind": "proven", "node": "m"}).unproven.keys() == {"n"}


def test_a_run_that_is_done_ended_where_its_last_attempt_did() -> None:
    amended = [
        {"kind": "attempt", "attempt": 1, "slots": ["a"], "t": 1.0},
        {"kind": "ended", "attempt": 1, "how": "amended", "step": 62},
        {"kind": "attempt", "attempt": 2, "slots": ["a"], "t": 2.0},
    ]
    assert fold(*amended).step == 62
    assert fold(*amended, {"kind": "ended", "attempt": 2, "how": "failed", "step": 60}).step == 62
    assert fold(*amended, {"kind": "ended", "attempt": 2, "how": "completed", "step": 60}).step == 60
    assert fold(*amended, {"kind": "ended", "attempt": 2, "how": "completed", "step": -1}).step == 62, (
        "it had nothing left to do"
    )
