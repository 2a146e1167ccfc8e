"""Verdict to action: what stops a run, what is restarted, and that budgets are refilled by progress alone."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.diagnose.report import _ACTIONS
from unbroken.progress import Budgets
from unbroken.progress.records.decision import Decision, PastIncident
from unbroken.progress.records.verdict import REASONS, Action, Category, Outcome, Root, Verdict
from unbroken.recover.decide import policy
from unbroken.recover.decide.policy import (
    AGENT,
    DECIDED,
    as_carried_out,
    cause_of,
    decide,
    decide_agent_lost,
    decide_lease_expired,
    fingerprint,
)
from unbroken.recover.supervise.incident import recovering
from unbroken.status.page import ACTION_TEXT

B = Budgets(failure=3, hang=2, node_loss=4, killed=3, framework=3, unknown=3)


def verdict(reason: str | None, text: str = "it broke", **change: object) -> Verdict:
    v = Verdict(
        Outcome.HUNG if reason == "Hang" else Outcome.FAILED, REASONS.get(reason or ""), reason, Root(text=text),
        recoverable=True, action=Action.RESTART, confidence=0.9, decided_by="test",
    )  # fmt: skip
    return replace(v, **change)  # type: ignore[arg-type]


CUDA = verdict("CUDAError")
HANG = verdict("Hang")
LOST = verdict("NodeFailure")
OOM = verdict("OutOfMemoryError")
UNKNOWN = verdict("Unknown")
BUG = verdict("KeyError", recoverable=False, action=Action.STOP, mitigation="Mend the script.")


class Run:
    """Follows decisions as the supervisor does: each incident is charged after it was decided."""

    def __init__(self, budgets: Budgets = B) -> None:
        self.budgets = budgets
        self.history: list[PastIncident] = []

    def meets(self, v: Verdict, step: int, *, killed: bool = False) -> Decision:
        d = decide(v, step, self.history, self.budgets, killed=killed)
        self.history.append(PastIncident(cause_of(v, killed=killed), fingerprint(v), step))
        return d


@pytest.mark.parametrize(
    ("v", "killed", "cause"),
    [
        (CUDA, False, "failure"), (HANG, False, "hang"), (LOST, False, "node_loss"), (OOM, False, "framework"),
        (BUG, False, "script"), (UNKNOWN, False, "unknown"), (UNKNOWN, True, "killed"), (CUDA, True, "failure"),
        (verdict(None, outcome=Outcome.PREEMPTED), False, "free"),
        (verdict(None, outcome=Outcome.TIME_LIMIT), True, "free"),
        (verdict("Hang", outcome=Outcome.FAILED), False, "hang"),
    ],
)  # fmt: skip
def test_which_budget_is_charged(v: Verdict, killed: bool, cause: str) -> None:
    assert cause_of(v, killed=killed) == cause


def test_every_budget_is_charged_by_something() -> None:
    causes = {cause_of(verdict(r)) for r in (*REASONS, "Hang", "Unknown")} | {cause_of(UNKNOWN, killed=True)}
    assert {f.name for f in fields(Budgets)} <= causes


def test_a_bug_in_the_script_stops_at_once_and_says_what_to_do() -> None:
    d = Run().meets(BUG, 40)
    assert d.action is Action.STOP
    assert d.why == "KeyError: a restart cannot help. Mend the script."


def test_a_script_failure_that_may_recover_gets_one_restart() -> None:
    run = Run()
    flaky = verdict("OSError")
    assert run.meets(flaky, 10).action is Action.RESTART
    assert run.meets(verdict("OSError", "another"), 10).action is Action.STOP


def test_the_same_root_at_the_same_step_twice_stops() -> None:
    run = Run()
    assert run.meets(OOM, 99).action is Action.RESTART
    d = run.meets(OOM, 99)
    assert d.action is Action.STOP
    assert "the same failure came twice at step 99 without progress between" in d.why
    run = Run()
    run.meets(OOM, -1)
    assert "twice before the first step" in run.meets(OOM, -1).why


def test_numbers_addresses_and_times_do_not_make_another_root() -> None:
    run = Run()
    run.meets(verdict("OutOfMemoryError", "tried to allocate 2.10 GiB at 0x7fa0, rank 3"), 50)
    assert (
        run.meets(verdict("OutOfMemoryError", "tried to allocate 2.30 GiB at 0x7fb7, rank 1"), 50).action
        is Action.STOP
    )
    run = Run()
    run.meets(verdict("OutOfMemoryError", "in forward"), 50)
    assert run.meets(verdict("OutOfMemoryError", "in optimizer"), 50).action is Action.RESTART


def test_the_same_root_later_is_progress() -> None:
    run = Run()
    for step in range(0, 1000, 10):
        assert run.meets(OOM, step).action is Action.RESTART


def test_kills_and_lost_nodes_may_repeat_at_the_same_step_within_their_budget() -> None:
    run = Run()
    assert [run.meets(LOST, 7).action for _ in range(5)] == [Action.RESTART] * 4 + [Action.STOP]
    run = Run()
    assert [run.meets(UNKNOWN, 7, killed=True).action for _ in range(4)] == [Action.RESTART] * 3 + [
        Action.STOP
    ]


def test_budgets_are_apart() -> None:
    run = Run()
    other, third = (verdict("CUDAError", f"in kernel {w}") for w in ("gemm", "softmax"))
    for v in (LOST, LOST, LOST, LOST, CUDA, other, third, HANG, HANG):
        assert run.meets(v, 5).action is Action.RESTART
    assert "3 incidents of kind hang without progress between; the budget is 2" in run.meets(HANG, 5).why


@pytest.mark.parametrize("reason", [r for r in REASONS if r != "NodeFailure"])
def test_the_same_failure_twice_at_the_same_step_stops_whatever_its_cause(reason: str) -> None:
    run = Run()
    first = run.meets(verdict(reason, "it broke at 0x7f2a after 12 s"), 60)
    d = run.meets(verdict(reason, "it broke at 0x1111 after 99 s"), 60)
    assert first.action is Action.RESTART
    assert d.action is Action.STOP
    assert "the same failure came twice at step 60 without progress between" in d.why


def test_infrastructure_that_is_away_before_the_first_step_of_an_attempt_is_waited_for() -> None:
    net = verdict("NCCLRemoteError", "connect() timed out")
    past = [PastIncident("failure", fingerprint(net), 60, reached=False)]
    assert decide(net, 60, past, B, reached=False).action is Action.RESTART
    assert decide(net, 60, past * 2, B, reached=False).delay_s == 4, "with longer and longer waits"
    assert decide(net, 60, [replace(past[0], reached=True)], B).action is Action.STOP


def test_two_nodes_that_are_convicted_one_after_the_other_are_two_failures() -> None:
    run = Run()
    assert run.meets(verdict("ECCError", cordon=("node-003",)), 60).action is Action.RESTART_ELSEWHERE
    assert run.meets(verdict("ECCError", cordon=("node-004",)), 60).action is Action.RESTART_ELSEWHERE
    assert run.meets(verdict("ECCError", cordon=("node-004",)), 60).action is Action.STOP


def test_a_hang_in_the_same_place_stops_and_one_in_another_place_is_counted() -> None:
    past = [PastIncident("hang", fingerprint(HANG, "0:all_reduce 1:read"), 60)]
    assert decide(HANG, 60, past, B, stacks="0:all_reduce 1:read").action is Action.STOP
    assert decide(HANG, 60, past, B, stacks="0:all_reduce 1:write").action is Action.RESTART
    assert decide(HANG, 61, past, B, stacks="0:all_reduce 1:read").action is Action.RESTART, (
        "that is progress"
    )
    unseen = [PastIncident("hang", fingerprint(HANG), 60)]
    assert decide(HANG, 60, unseen, B).action is Action.RESTART, "nobody knows whether it is the same one"


def test_the_failure_is_named_by_its_root_where_it_has_no_reason() -> None:
    run = Run()
    early = verdict("Unknown", "rank 1 ended with exit code 0 while others went on after step 59")
    run.meets(early, 59)
    assert "rank 1 ended with exit code 0 while others went on" in run.meets(early, 59).why


def test_agents_that_are_lost_again_and_again_wait_and_end_unless_training_gets_on() -> None:
    history: list[PastIncident] = []
    delays = []
    while (d := decide_agent_lost(7, history, B)).action is Action.RESTART:
        delays.append(d.delay_s)
        history.append(PastIncident(AGENT, "x", 7))
    assert delays == [0, 2, 4] and "agents were lost 4 times" in d.why
    assert decide_agent_lost(8, history, B).action is Action.RESTART


def test_progress_refills() -> None:
    run = Run()
    for _ in range(4):
        run.meets(LOST, 5)
    assert run.meets(LOST, 6).why == "node_loss: restart 1 of 4 without progress"
    assert [run.meets(LOST, 6).action for _ in range(4)] == [Action.RESTART] * 3 + [Action.STOP]


def test_a_budget_of_nothing_stops_at_the_first() -> None:
    assert decide(HANG, 5, [], Budgets(hang=0)).action is Action.STOP


@pytest.mark.parametrize("outcome", [Outcome.COMPLETED, Outcome.CANCELLED])
def test_ends_that_the_logs_take_for_no_failures(outcome: Outcome) -> None:
    """Ranks that ended without finishing are restarted, whatever they print; and it is bounded as anything unknown."""
    run = Run()
    first = run.meets(verdict(None, outcome=outcome), 5)
    assert first.action is Action.RESTART and f"the logs say {outcome}" in first.why
    assert run.meets(verdict(None, outcome=outcome), 5).action is Action.STOP


def _all_verdicts() -> list[Verdict]:
    return [
        verdict(
            reason, outcome=outcome, category=category, action=action, recoverable=recoverable, cordon=cordon
        )
        for reason in (None, "Unknown", "Hang", "LossSpike", "NodeFailure", "KeyError", "CUDAError")
        for outcome in Outcome
        for category in (None, *Category)
        for action in Action
        for recoverable in (True, False)
        for cordon in ((), ("node-000",))
    ]


def test_nothing_is_decided_that_nobody_carries_out() -> None:
    """Every action is one that the supervisor does, the takeover's `none`, or an advice that no policy decides."""
    text = Path(recovering.__file__).read_text()
    for action in DECIDED - {Action.RESTART}:  # that is what happens where nothing else is said
        assert f"Action.{action.name}" in text + Path(policy.__file__).read_text()
    assert set(Action) - DECIDED == {Action.NONE, Action.ROLLBACK_SKIP}
    for v in _all_verdicts():
        for killed in (False, True):
            for history in ([], [PastIncident(cause_of(v, killed=killed), fingerprint(v), 5)]):
                d = decide(v, 5, history, B, killed=killed)
                assert d.action in DECIDED, v
                for spares in (0, 1):
                    done = as_carried_out(d, spares)
                    assert done.action in DECIDED
                    assert done.action is not Action.RESTART_ELSEWHERE or (spares and done.exclude)
                if v.action is Action.ROLLBACK_SKIP and d.action is not Action.STOP:
                    assert "not built yet" in d.why


def test_every_action_has_words_that_say_what_was_done() -> None:
    assert set(ACTION_TEXT) == {a.value for a in Action} == set(_ACTIONS)
    assert "skipped" not in ACTION_TEXT["rollback_skip"].replace("nothing skipped", "")
    assert "by hand" in _ACTIONS["rollback_skip"]


def test_preemption_is_free_for_ever() -> None:
    run = Run()
    away = verdict(None, outcome=Outcome.PREEMPTED)
    decisions = [run.meets(away, 5) for _ in range(3000)]
    assert {d.action for d in decisions} == {Action.RESTART}
    assert "free of charge" in decisions[-1].why


def test_waits_grow_without_progress_and_are_bounded() -> None:
    run = Run(Budgets(node_loss=10))
    assert [run.meets(LOST, 5).delay_s for _ in range(8)] == [0, 2, 4, 8, 16, 32, 60, 60]
    assert run.meets(LOST, 6).delay_s == 0


def test_convicted_nodes_are_left_out() -> None:
    d = decide(verdict("ECCError", cordon=("node-003",)), 5, [], B)
    assert (d.action, d.exclude) == (Action.RESTART_ELSEWHERE, ("node-003",))
    assert (
        decide(verdict("ECCError", action=Action.RESTART_ELSEWHERE), 5, [], B).action
        is Action.RESTART_ELSEWHERE
    )


verdicts = st.sampled_from(
    [CUDA, HANG, LOST, OOM, UNKNOWN, verdict("OSError"), verdict("NCCLTimeoutError", "other")]
)


@given(st.lists(verdicts, min_size=1, max_size=60))
@settings(max_examples=80, deadline=None)
def test_without_progress_every_run_stops_in_the_end(sequence: list[Verdict]) -> None:
    run = Run()
    whole = sum(getattr(B, f.name) for f in fields(B)) + 2
    actions = [run.meets(v, 10).action for v in sequence]
    going = next((i for i, a in enumerate(actions) if a is Action.STOP), len(actions))
    assert going <= whole


@given(st.lists(st.tuples(verdicts, st.integers(1, 50)), min_size=1, max_size=60))
@settings(max_examples=80, deadline=None)
def test_with_progress_between_no_recoverable_run_ever_stops(sequence: list[tuple[Verdict, int]]) -> None:
    run, step = Run(), 0
    for v, steps in sequence:
        step += steps
        assert run.meets(v, step).action in (Action.RESTART, Action.RESTART_ELSEWHERE)


def test_category_of_every_reason_decides_a_budget() -> None:
    for reason, category in REASONS.items():
        want = {
            Category.INFRASTRUCTURE: {"failure", "node_loss"},
            Category.FRAMEWORK: {"framework"},
            Category.SCRIPT: {"script"},
        }
        assert cause_of(verdict(reason)) in want[category]


def test_a_lease_that_lapses_again_and_again_waits_and_ends_unless_training_gets_on() -> None:
    history: list[PastIncident] = []
    delays = []
    for _ in range(B.unknown):
        found = decide_lease_expired(45, history, B)
        assert found.action is Action.RESTART
        delays.append(found.delay_s)
        history.append(PastIncident("lease", "a lease", 45))
    assert delays == [0.0, 2.0, 4.0]
    last = decide_lease_expired(45, history, B)
    assert last.action is Action.STOP
    assert "--lease" in last.why
    assert decide_lease_expired(46, history, B).delay_s == 0.0


@pytest.mark.parametrize("cause", ["lease", "free"])
def test_what_was_free_does_not_use_up_the_budget_of_failures_that_nobody_can_explain(cause: str) -> None:
    history = [PastIncident(cause, "other", 45)] * 10
    assert decide(UNKNOWN, 45, history, B).action is Action.RESTART
