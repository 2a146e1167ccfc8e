"""Verdict to action: what stops a run, what is restarted, and that budgets are refilled by progress alone."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.diagnose import Facts, HangFact, LossFact, RankExit
from unbroken.diagnose.match.rules import builtin
from unbroken.diagnose.report import _ACTIONS
from unbroken.progress import Budgets
from unbroken.progress.records.decision import Decision, PastIncident
from unbroken.progress.records.verdict import (
    KILLED,
    PORT_TAKEN,
    REASONS,
    Action,
    Category,
    Outcome,
    Root,
    Verdict,
)
from unbroken.recover.decide import policy
from unbroken.recover.decide.policy import AGENT, DECIDED, cause_of, decide, decide_failed_start, fingerprint
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
SPIKE = verdict("LossSpike", outcome=Outcome.LOSS_SPIKE, action=Action.ROLLBACK_SKIP)
LOST = verdict("NodeFailure")
OOM = verdict("OutOfMemoryError")
UNKNOWN = verdict("Unknown")
BUG = verdict("KeyError", recoverable=False, action=Action.STOP, mitigation="Fix the script.")


def at(step: int, *, reached: bool = True, where: str = "", **others: object) -> Facts:
    """The facts of an incident at `step`; `reached`: its own attempt came there. `where` the ranks of a hang stood."""
    hang = HangFact(step, "training", 60.0, where=where) if where else None
    own = step if reached and step >= 0 else None
    return Facts(step=own, run_step=step, hang=hang, **others)  # type: ignore[arg-type]


LEASE = RankExit(0, "node-000", None, 9, 1.0, True)


class Run:
    """Follows decisions as the supervisor does: each incident is charged after it was decided."""

    def __init__(self, budgets: Budgets = B) -> None:
        self.budgets = budgets
        self.history: list[PastIncident] = []

    def meets(self, v: Verdict, step: int, *, killed: bool = False) -> Decision:
        v = replace(v, decided_by=KILLED) if killed else v
        d = decide(v, at(step), self.history, self.budgets, 0)
        self.history.append(d.charged)
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
    assert cause_of(replace(v, decided_by=KILLED) if killed else v) == cause


def test_every_budget_is_charged_by_something() -> None:
    causes = {cause_of(verdict(r)) for r in (*REASONS, "Hang", "Unknown")} | {
        cause_of(replace(UNKNOWN, decided_by=KILLED)),
        cause_of(SPIKE, at(5, loss=LossFact("divergence", 5, 3, "it rose"))),
    }
    assert {f.name for f in fields(Budgets)} <= causes


def test_a_bug_in_the_script_stops_at_once_and_says_what_to_do() -> None:
    d = Run().meets(BUG, 40)
    assert d.action is Action.STOP
    assert d.why == "KeyError: a restart cannot help. Fix the script."


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


def test_a_stop_for_a_verdict_that_is_not_sure_says_so() -> None:
    assert decide(BUG, at(5), [], B, 0).why.startswith("KeyError: a restart cannot help")
    unsure = replace(BUG, confidence=0.5)
    assert decide(unsure, at(5), [], B, 0).why.startswith("KeyError (50% sure): a restart cannot help")


def test_two_exit_codes_are_two_failures() -> None:
    run = Run()
    for code in (3, 13):
        text = f"rank 1 on node-001 ended by exit code {code}, without a word in its log"
        assert run.meets(verdict("Unknown", text), 50).action is Action.RESTART
    again = run.meets(verdict("Unknown", text.replace("rank 1", "rank 2")), 50)
    assert again.action is Action.STOP and "the same failure" in again.why


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
    assert decide(net, at(60, reached=False), past, B, 0).action is Action.RESTART
    assert decide(net, at(60, reached=False), past * 2, B, 0).delay_s == 4, "with longer and longer waits"
    assert decide(net, at(60), [replace(past[0], reached=True)], B, 0).action is Action.STOP


def test_two_nodes_that_are_convicted_one_after_the_other_are_two_failures() -> None:
    run = Run()
    assert run.meets(verdict("ECCError", cordon=("node-003",)), 60).action is Action.RESTART
    assert run.meets(verdict("ECCError", cordon=("node-004",)), 60).action is Action.RESTART
    assert run.meets(verdict("ECCError", cordon=("node-004",)), 60).action is Action.STOP


def test_a_hang_in_the_same_place_stops_and_one_in_another_place_is_counted() -> None:
    past = [PastIncident("hang", fingerprint(HANG, "0:all_reduce 1:read"), 60)]
    assert decide(HANG, at(60, where="0:all_reduce 1:read"), past, B, 0).action is Action.STOP
    assert decide(HANG, at(60, where="0:all_reduce 1:write"), past, B, 0).action is Action.RESTART
    assert decide(HANG, at(61, where="0:all_reduce 1:read"), past, B, 0).action is Action.RESTART, (
        "that is progress"
    )
    unseen = [PastIncident("hang", fingerprint(HANG), 60)]
    assert decide(HANG, at(60), unseen, B, 0).action is Action.RESTART, (
        "nobody knows whether it is the same one"
    )


def test_the_failure_is_named_by_its_root_where_it_has_no_reason() -> None:
    run = Run()
    early = verdict("Unknown", "rank 1 ended with exit code 0 while others went on after step 59")
    run.meets(early, 59)
    assert "rank 1 ended with exit code 0 while others went on" in run.meets(early, 59).why


def test_agents_that_are_lost_again_and_again_wait_and_end_unless_training_gets_on() -> None:
    history: list[PastIncident] = []
    delays = []
    while (d := decide(UNKNOWN, at(7, agents_lost=("node-000",)), history, B, 0)).action is Action.RESTART:
        delays.append(d.delay_s)
        assert d.charged.cause == AGENT
        history.append(d.charged)
    assert delays == [0, 2, 4] and "agents were lost 4 times" in d.why
    assert decide(UNKNOWN, at(8, agents_lost=("node-000",)), history, B, 0).action is Action.RESTART


def test_a_taken_port_costs_no_budget_and_is_said_and_bounded() -> None:
    """Each attempt meets at another port: a restart cures it, unless something takes every port."""
    taken = verdict("ConnectionError", decided_by=PORT_TAKEN)
    history: list[PastIncident] = []
    while (d := decide(taken, at(7, reached=False), history, B, 0)).action is Action.RESTART:
        assert d.charged.cause == "port" and "another process took the port" in d.why
        history.append(d.charged)
    assert len(history) == B.failure and "4 times without progress" in d.why and "ss -ltnp" in d.why
    other = decide(verdict("ConnectionError"), at(7, reached=False), history, B, 0)
    assert other.why.startswith("failure: restart 1 of 3"), "taken ports used up what other failures have"
    assert decide(taken, at(7), [], B, 0).charged.cause == "failure", (
        "a port in the middle of training is not the meeting's"
    )
    assert PORT_TAKEN in {rule.id for rule in builtin()}


def test_progress_refills() -> None:
    run = Run()
    for _ in range(4):
        run.meets(LOST, 5)
    assert run.meets(LOST, 6).why == "node_loss: restart 1 of 4 without progress"
    assert [run.meets(LOST, 6).action for _ in range(4)] == [Action.RESTART] * 3 + [Action.STOP]


def test_a_budget_of_nothing_stops_at_the_first() -> None:
    assert decide(HANG, at(5), [], Budgets(hang=0), 0).action is Action.STOP


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
    assert set(Action) - DECIDED == {Action.NONE}
    for v in _all_verdicts():
        for history in ([], [PastIncident(cause_of(v), fingerprint(v), 5)]):
            for spares in (0, 1):
                d = decide(v, at(5), history, B, spares)
                assert d.action in DECIDED, v
                assert d.action is not Action.RESTART_ELSEWHERE or (spares and d.exclude)
                if v.action is Action.ROLLBACK_SKIP and d.action is not Action.STOP:
                    assert "nothing is skipped" in d.why


def test_a_takeover_costs_nothing() -> None:
    d = decide(UNKNOWN, at(5, taken_over=True), [], B, 0)
    assert (d.action, d.charged.cause, d.charged.fingerprint) == (Action.NONE, "free", "takeover")


@pytest.mark.parametrize(
    "what", [{"supervisor_lost": True}, {"launch_error": "no port"}, {"preempted": "node-001 is taken away"}]
)
def test_what_the_training_has_no_part_in_is_free_and_at_once(what: dict[str, object]) -> None:
    d = decide(UNKNOWN, at(5, **what), [PastIncident("free", "x", 5)] * 9, B, 0)
    assert (d.action, d.delay_s, d.charged.cause) == (Action.RESTART, 0.0, "free")
    bug = decide(BUG, at(5, supervisor_lost=True), [], B, 0)
    assert (bug.action, bug.charged.cause) == (Action.STOP, "script"), "the logs say more than that"


def test_nodes_are_left_out_as_far_as_there_are_others_and_lost_ones_first() -> None:
    both = verdict("NodeFailure", cordon=("node-001", "node-002"))
    lost = at(5, lost_nodes=("node-001",))
    assert decide(both, lost, [], B, 2).exclude == ("node-001", "node-002")
    d = decide(both, lost, [], B, 1)
    assert (d.action, d.exclude) == (Action.RESTART_ELSEWHERE, ("node-001",))
    assert "node-002 stays in use: no spare is left" in d.why
    d = decide(both, lost, [], B, 0)
    assert (d.action, d.exclude) == (Action.RESTART, ("node-001",))
    assert "no spare is left for node-001" in d.why and "node-001 stays in use" not in d.why


def test_attempts_that_cannot_be_started_are_tried_again_later_and_later_and_not_for_ever() -> None:
    waits = [decide_failed_start(n, "no port") for n in range(1, 12)]
    assert [w for w, _ in waits[:4]] == [0.0, 2.0, 4.0, 8.0] and max(w for w, _ in waits) == 30.0
    assert [bool(why) for _, why in waits] == [False] * 10 + [True]
    assert waits[-1][1] == "11 attempts in a row could not be started: no port"


def test_every_action_has_words_that_say_what_was_done() -> None:
    assert set(ACTION_TEXT) == {a.value for a in Action} == set(_ACTIONS)
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
    d = decide(verdict("ECCError", cordon=("node-003",)), at(5), [], B, 1)
    assert (d.action, d.exclude) == (Action.RESTART_ELSEWHERE, ("node-003",))
    named = decide(verdict("ECCError", action=Action.RESTART_ELSEWHERE), at(5), [], B, 1)
    assert named.action is Action.RESTART, "no node is named that could be left out"


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
        found = decide(UNKNOWN, at(45, lease_expired=LEASE), history, B, 0)
        assert found.action is Action.RESTART
        delays.append(found.delay_s)
        history.append(found.charged)
    assert delays == [0.0, 2.0, 4.0]
    last = decide(UNKNOWN, at(45, lease_expired=LEASE), history, B, 0)
    assert last.action is Action.STOP
    assert "--lease" in last.why
    assert decide(UNKNOWN, at(46, lease_expired=LEASE), history, B, 0).delay_s == 0.0


@pytest.mark.parametrize("cause", ["lease", "free"])
def test_what_was_free_does_not_use_up_the_budget_of_failures_that_nobody_can_explain(cause: str) -> None:
    history = [PastIncident(cause, "other", 45)] * 10
    assert decide(UNKNOWN, at(45), history, B, 0).action is Action.RESTART
