"""Back to before a loss that does not come back: which step, which samples, how often, and what a restart makes of it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from unbroken.data.position import Position, normalize
from unbroken.diagnose import Facts, LossFact, diagnose
from unbroken.progress import Budgets, RunDir
from unbroken.progress.attach import read_skips
from unbroken.progress.records.decision import PastIncident, Rollback
from unbroken.progress.records.state import RunState
from unbroken.progress.records.steps import Step
from unbroken.progress.records.verdict import Action, Outcome
from unbroken.recover.decide.policy import LOSS, decide
from unbroken.recover.decide.rollback import MARGIN, find_number, find_samples_per_step, plan_rollback
from unbroken.recover.supervise.attempt.loss import LossFollower, read_losses


def at(step: int, per_step: int = 8, skips: tuple[tuple[int, int], ...] = ()) -> tuple[int, Position]:
    return step, Position(0, ((0, step * per_step),) if step else (), skips)


def spike(
    *anchors: tuple[int, Position], kind: str = "divergence", skips: tuple[tuple[int, int], ...] = ()
) -> LossFact:
    return LossFact(kind, 512, 500, "the loss left its band at step 500", anchors, skips)


def test_the_range_is_what_the_steps_around_the_spike_would_use() -> None:
    found = plan_rollback(spike(at(450), at(400)), 0)
    assert found == Rollback(500 - MARGIN - 1, (((500 - MARGIN - 1) * 8, (512 + MARGIN) * 8),))


def test_it_grows_with_each_rollback_and_goes_back_further() -> None:
    ranges = [plan_rollback(spike(at(490), at(450), at(300)), k) for k in range(3)]
    assert [r.before for r in ranges if r] == [479, 459, 419]
    sizes = [r.skip[0][1] - r.skip[0][0] for r in ranges if r]
    assert sizes == sorted(sizes) and sizes[2] > 2 * sizes[0]


def test_of_checkpoints_that_are_all_too_near_the_oldest_is_taken() -> None:
    found = plan_rollback(spike(at(498), at(496)), 0)
    assert found == Rollback(496, ((496 * 8, 532 * 8),)), "what that one has used stays used"


def test_without_a_checkpoint_from_before_there_is_no_way_back() -> None:
    assert plan_rollback(spike(), 0) is None
    assert plan_rollback(spike(at(505)), 0) is None


def test_samples_that_are_skipped_already_are_counted_neither_twice_nor_as_used() -> None:
    known = ((3850, 3890),)
    found = plan_rollback(spike(at(450), at(400), skips=known), 1)
    assert found is not None
    begin, end = found.skip[0][0], found.skip[-1][1]
    assert begin == 459 * 8 and end == (512 + 2 * MARGIN) * 8 + 40
    assert not any(a < 3890 and b > 3850 for a, b in found.skip)
    assert normalize([*found.skip, *known]) == ((begin, end),)


def test_a_nan_meets_the_same_data_once_more_and_only_then_skips_it() -> None:
    first, second = (plan_rollback(spike(at(450), at(400), kind="nan"), k) for k in (0, 1))
    assert first is not None and first.skip == ()
    assert second is not None and second.skip


def test_where_the_steps_do_not_take_whole_numbers_of_samples_nothing_is_skipped() -> None:
    uneven = (450, Position(0, ((0, 3601),)))
    assert find_samples_per_step([uneven]) == 0
    found = plan_rollback(spike(uneven), 0)
    assert found is not None and found.skip == ()


def test_numbers_are_found_past_skips() -> None:
    p = Position(0, ((0, 100),))
    assert find_number(p, (), 50) == 150
    assert find_number(p, ((120, 130), (140, 145), (152, 200)), 50) == 213
    assert find_number(Position(), (), 0) == 0


def test_a_rollback_is_decided_counted_and_given_up() -> None:
    fact = spike(at(450), at(300))
    facts = Facts(loss=fact, step=512, run_step=512)
    verdict = diagnose([], facts=facts)
    assert (verdict.outcome, verdict.action, verdict.decided_by) == (
        Outcome.LOSS_SPIKE,
        Action.ROLLBACK_SKIP,
        "loss-watch",
    )
    history: list[PastIncident] = []
    for k in range(3):
        d = decide(verdict, facts, history, Budgets(), 0)
        assert (
            d.action is Action.ROLLBACK_SKIP
            and d.rollback == plan_rollback(fact, k)
            and d.rollback is not None
        )
        assert f"rollback {k + 1} of 3" in d.why and "samples [" in d.why
        history.append(d.charged)
    d = decide(verdict, facts, history, Budgets(), 0)
    assert d.action is Action.STOP and "did not help" in d.why
    far = Facts(loss=fact, step=9000, run_step=9000)
    assert decide(verdict, far, history, Budgets(), 0).action is Action.ROLLBACK_SKIP, (
        "far from the others it is another trouble"
    )
    assert history[0].cause == LOSS


def test_the_journal_keeps_skips_once_and_what_is_rolled_back_does_not_count() -> None:
    record = {
        "kind": "rollback",
        "attempt": 2,
        "before": 479,
        "skip": [[3832, 4256]],
        "incident": 1,
        "t": 1.0,
    }
    state = RunState.of([record, record])
    assert state.skips == [(3832, 4256)]
    assert state.is_rolled_back(2, 480) and state.is_rolled_back(1, 500)
    assert not state.is_rolled_back(2, 479) and not state.is_rolled_back(3, 600)


def test_what_is_skipped_travels_in_the_environment() -> None:
    assert read_skips("") == ()
    assert read_skips("120:160,300:420") == ((120, 160), (300, 420))
    with pytest.raises(Exception, match="no ranges of samples"):
        read_skips("12-16")


def follow(losses: list[float], first: int = 0) -> LossFollower:
    follower = LossFollower()
    for i, x in enumerate(losses):
        follower.take(Step(first + i, x, 0, float(i)))
    return follower


def test_a_script_that_reports_its_loss_now_and_then_has_no_nan() -> None:
    every_tenth = [3.0 if i % 10 == 0 else math.nan for i in range(200)]
    assert follow(every_tenth).finding is None
    assert follow([math.nan] * 200).finding is None


def test_a_script_that_reports_each_step_has_a_nan_when_it_comes() -> None:
    finding = follow([3.0] * 20 + [math.nan] * 3).finding
    assert finding is not None and finding.since == 20


def test_what_was_usual_before_a_restart_is_usual_after_it(tmp_path: Path) -> None:
    import json

    from unbroken.progress.records.steps import step_record

    path = RunDir(tmp_path).steps(1)
    path.parent.mkdir(parents=True)
    lines = [json.dumps(step_record(Step(i, 3.0 + 0.01 * (i % 3), 0, 1.0))) for i in range(200)]
    path.write_text("\n".join(lines) + '\n{"step": 2')
    before = read_losses([tmp_path / "none", path], 150)
    assert len(before) == 150
    follower = LossFollower(lambda step: read_losses([path], step))
    for i in range(150, 180):
        follower.take(Step(i, 7.0, 0, 1.0))
    assert follower.finding is not None and follower.finding.since == 150, (
        "also where it begins with the first step"
    )
