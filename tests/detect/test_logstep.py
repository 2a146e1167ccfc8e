"""Steps read from the logs of trainers that know nothing of us: their usual lines, and lines that only look like it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.detect import StepPattern

LINES = {
    "plain": "step {s} loss {x}",
    "of total": "step {s}/10000 | loss {x:.4f} | lr 3.00e-04 | 123.4 ms | 85,123 tok/s",
    "nanogpt": "iter {s}: loss {x:.4f}, time 135.27ms, mfu 17.31%",
    "megatron": " iteration {s:8d}/  500000 | consumed samples:     {s} | elapsed time per iteration (ms): 1234.5 | "
    "learning rate: 1.5E-04 | global batch size:   256 | lm loss: {x:.6E} | loss scale: 1.0 | grad norm: 1.2 |",
    "torchtitan": "[rank0]:[titan] 2025-01-01 10:00:00,000 - root - INFO - \x1b[31mstep: {s:2}  \x1b[32mloss: "
    "{x:7.4f}  \x1b[33mmemory: 47.28GiB(59.71%)  \x1b[34mtps: 3,134",
    "deepspeed": "[2025-01-01 10:00:00,123] [INFO] [logging.py:96:log_dist] [Rank 0] step={s}, skipped=0, loss={x}",
    "brackets": "Train Epoch: 1 Step [{s}/938]  Loss: {x:.6f}",
    "json": '{{"global_step": {s}, "train_loss": {x}, "epoch": 0.1}}',
    "fairseq": "2025-01-01 | INFO | train_inner | {{'epoch': 1, 'num_updates': '{s}', 'loss': '{x}'}}",
    "batch size too": "batch 32 | step {s} | train loss {x} | val loss 9.0",
    "batch": "Epoch 3, batch {s}: loss={x}",
}


@pytest.mark.parametrize("form", LINES.values(), ids=LINES)
def test_usual_lines(form: str) -> None:
    pattern = StepPattern()
    got = [pattern.feed(form.format(s=s, x=4.0 - s / 100), now=float(s)) for s in range(10, 110, 10)]
    assert [r.step for r in got if r] == list(range(10, 110, 10))
    assert [r.loss for r in got if r] == pytest.approx([4.0 - s / 100 for s in range(10, 110, 10)])
    assert [r.time for r in got if r] == list(range(10, 110, 10))
    assert pattern.learnt


def bar(at: int, total: int, name: str = "", more: str = "") -> str:
    """A line of tqdm's, as it comes out of its own formatter."""
    rate = 3.12 if at else "?"
    return f"{name}{100 * at // total:3d}%|{'#' * (10 * at // total):10}| {at}/{total} [00:10<00:21, {rate:>5}it/s{more}]"


def test_a_progress_bar_counts_until_it_is_full() -> None:
    pattern = StepPattern()
    told = [pattern.feed(bar(s, 30), now=float(s)) for s in range(31)]
    assert [r.step for r in told if r] == list(range(1, 31))
    assert not pattern.learnt, "what comes now is no step"
    pattern = StepPattern()
    with_loss = [
        pattern.feed(bar(s, 100, "Epoch 1: ", f", loss={4 - s / 50:.3f}"), now=0.0) for s in range(1, 6)
    ]
    assert pattern.learnt and with_loss[-1] is not None and with_loss[-1].loss == pytest.approx(3.9)
    slow = bar(6, 100, "Epoch 1: ", ", loss=3.88").replace("it/s", "s/it")
    assert pattern.feed(slow, now=0.0) is not None


def test_bars_of_loading_and_of_evaluations_are_no_training() -> None:
    pattern = StepPattern()
    for s in range(292):
        pattern.feed(bar(s, 291, "Loading weights: "), now=0.0)
    assert not pattern.learnt
    for s in range(1, 51):
        pattern.feed(bar(s, 100), now=0.0)
    assert pattern.learnt
    for s in range(9):
        pattern.feed(bar(s, 8, "Evaluating: "), now=0.0)
    assert not pattern.learnt, "as long as it evaluates, the training's bar stands still"
    assert [r.step for s in range(51, 62) if (r := pattern.feed(bar(s, 100), now=0.0))] == list(range(51, 62))
    assert pattern.learnt
    for s in range(9):
        assert pattern.feed(bar(s, 8, "Evaluating: "), now=0.0) is None, "known by now"
    assert pattern.learnt


def test_an_epoch_bar_with_a_loss_counts_again_in_each_epoch() -> None:
    pattern = StepPattern()
    for _ in range(3):
        for s in range(13):
            pattern.feed(bar(s, 12, "train: ", ", loss=1.5"), now=0.0)
            assert pattern.learnt == (4 <= s < 12)


def test_a_line_beside_a_bar_that_counts_changes_nothing() -> None:
    pattern = StepPattern()
    told = []
    for s in range(1, 40):
        told += [
            pattern.feed(bar(s, 100), now=0.0),
            pattern.feed(f"step {s} loss 2.5", now=0.0) if s % 5 == 0 else None,
        ]
    assert pattern.learnt
    assert [r.step for r in told if r and s > 11][-5:] == [35, 36, 37, 38, 39], "each step once"


def test_learnt_after_three_advances_with_a_loss() -> None:
    pattern = StepPattern()
    known = []
    for s in range(5):
        pattern.feed(f"step {s} loss 1.0", now=0.0)
        known.append(pattern.learnt)
    assert known == [False, False, False, True, True]


def test_steps_of_a_set_up_are_not_learnt() -> None:
    """Else a long compilation after 'step 5 of 5' would be taken for a hang."""
    pattern = StepPattern()
    for s in range(1, 8):
        pattern.feed(f"Step {s} of 7: loading shard {s}", now=0.0)
    assert not pattern.learnt


def test_without_a_loss_it_takes_ten() -> None:
    pattern = StepPattern()
    for s in range(11):
        pattern.feed(f"step {s}", now=0.0)
    assert pattern.learnt


@pytest.mark.parametrize(
    "line",
    [
        "", "loss 3.2", "stepping stone 5", "first step of the tour", "steps: many", "loss_scale: 65536",
        "downloading 100%|████| 5/5 [00:01<00:00]", "footstep 3", "version 2.13.0", "step " + "9" * 40,
    ],
)  # fmt: skip
def test_lines_without_a_step(line: str) -> None:
    assert StepPattern().feed(line, now=0.0) is None


def test_the_same_or_the_step_before_is_no_news() -> None:
    pattern = StepPattern()
    told = [pattern.feed(f"step {s} loss 1", now=0.0) for s in (7, 7, 8, 7, 8, 9)]
    assert [r.step if r else None for r in told] == [7, None, 8, None, None, 9]


def test_another_counter_or_a_new_start_is_learnt_anew() -> None:
    pattern = StepPattern()
    for s in range(100, 110):
        pattern.feed(f"step {s} loss 1", now=0.0)
    assert pattern.learnt
    pattern.feed("step 3 loss 1", now=0.0)
    assert not pattern.learnt
    assert pattern.feed("step 4 loss 1", now=0.0) is not None


@pytest.mark.parametrize(
    ("text", "loss"), [("loss nan", math.nan), ("loss: inf", math.inf), ("loss 1e-3", 0.001)]
)
def test_losses(text: str, loss: float) -> None:
    told = StepPattern().feed(f"step 1 {text}", now=0.0)
    assert told is not None and (told.loss == loss or (math.isnan(told.loss) and math.isnan(loss)))


@given(st.text(max_size=300))
def test_any_text_is_survived(text: str) -> None:
    pattern = StepPattern()
    told = pattern.feed(text, now=0.0)
    assert told is None or 0 <= told.step < 10**9
