"""A suspicious step of the reference trainer is computed again before it counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from unbroken.detect.corruption import SuspicionSettings
from unbroken.errors import SilentCorruption
from unbroken.train.checks.recheck import Recheck
from unbroken.train.corpus.tokens import Tokens
from unbroken.train.trainer import Trainer

from .test_trainer import steps, tokens, trainer  # noqa: F401  a fixture among them

Wrong = Callable[[torch.Tensor], None]


def break_steps(t: Trainer, when: Callable[[int, int], bool], wrong: Wrong) -> list[int]:
    """Makes gradients wrong as a card would: `when` is asked with the step and how often it was computed; what was computed."""
    make, made = t._make_gradients, []

    def broken(*args: object) -> torch.Tensor:
        norm = make(*args)  # type: ignore[arg-type]
        made.append(t.step + 1)
        return norm

    take = t.buckets.before_reduce

    def corrupt(i: int, gradients: torch.Tensor) -> None:
        if i == 0 and when(t.step + 1, made.count(t.step + 1)):
            wrong(gradients)
        take(i, gradients)

    t._make_gradients = broken  # type: ignore[method-assign]
    t.buckets.before_reduce = corrupt
    return made


def to_nan(gradients: torch.Tensor) -> None:
    gradients[3] = float("nan")


def flip(gradients: torch.Tensor) -> None:
    gradients.view(torch.int32)[5] ^= 1 << 30  # the highest bit of the exponent


@pytest.mark.parametrize("wrong", [to_nan, flip])
@pytest.mark.parametrize("count", [0, 1])
def test_a_card_that_does_not_agree_with_itself_leaves_before_anything_is_applied(
    tokens: Tokens,  # noqa: F811
    wrong: Wrong,
    count: int,
) -> None:
    t = trainer(tokens, "--steps", "60", "--clip", "0")

    def when(step: int, made: int) -> bool:
        return (step == 40 and made == count) or (count == 1 and step == 40 and made == 0)

    if count == 1:  # wrong each time, and otherwise wrong
        real = wrong

        def wrong(gradients: torch.Tensor) -> None:
            real(gradients)
            gradients[7] += torch.rand(())

    break_steps(t, when, wrong)
    steps(t, 39)
    before = {n: w.clone() for n, w in t.buckets.parameters().items()}
    with pytest.raises(SilentCorruption, match="does not agree with itself"):
        steps(t, 1)
    assert t.step == 39
    assert all(torch.equal(w, before[n]) for n, w in t.buckets.parameters().items())


def test_bad_data_gives_the_same_twice_and_the_training_goes_on(
    tokens: Tokens,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    t = trainer(tokens, "--steps", "60", "--dropout", "0.1")
    made = break_steps(t, lambda step, made: step == 40, to_nan)
    steps(t, 40)
    assert made.count(40) == 3 and made.count(39) == 1
    assert "computed 2 times again it is the same: the data or the model" in capsys.readouterr().out


def test_prints_of_every_step_find_the_same_as_prints_when_asked_for(tokens: Tokens) -> None:  # noqa: F811
    """Several ranks take them at once, since the reduction overwrites the gradients; clipping does in any case."""
    t = trainer(tokens, "--steps", "60", "--clip", "0.01")
    t.recheck = Recheck(t.world, t.buckets, exact=True, say=print, at_once=True)
    break_steps(t, lambda step, made: step == 30 and made == 0, flip)
    with pytest.raises(SilentCorruption, match="the first time differs"):
        steps(t, 30)
    lazy = trainer(tokens, "--steps", "60", "--clip", "0.01")
    break_steps(lazy, lambda step, made: step == 30 and made == 0, flip)
    with pytest.raises(SilentCorruption, match="the first time differs"):
        steps(lazy, 30)


@pytest.mark.parametrize(("audited", "found"), [(40, True), (7, False)])
def test_several_ranks_find_a_small_flip_where_it_meets_an_audit(
    tokens: Tokens,  # noqa: F811
    audited: int,
    found: bool,
) -> None:
    """Digests of all bits are taken of audits and repeats; other steps are asked for their norms alone."""
    t = trainer(tokens, "--steps", "60", "--clip", "0")
    t.recheck = Recheck(t.world, t.buckets, exact=True, say=print, at_once=True)
    t.recheck.suspicion.settings = SuspicionSettings(audit_every=audited, budget=1.0)

    def flip_low(gradients: torch.Tensor) -> None:
        gradients.view(torch.int32)[5] ^= 1

    break_steps(t, lambda step, made: step == 40 and made == 0, flip_low)
    steps(t, 39)
    if found:
        with pytest.raises(SilentCorruption, match="bit for bit: the first time differs"):
            steps(t, 1)
    else:
        steps(t, 1)


def test_watching_changes_no_bit(tokens: Tokens) -> None:  # noqa: F811
    more = ["--steps", "40", "--dropout", "0.1"]
    assert steps(trainer(tokens, *more), 30) == steps(trainer(tokens, *more, "--no-recheck"), 30)


def test_a_fast_mode_is_compared_within_its_noise(tokens: Tokens) -> None:  # noqa: F811
    t = trainer(tokens, "--steps", "60", "--mode", "fast", "--clip", "0")
    break_steps(t, lambda step, made: step == 40 and made == 0, flip)
    steps(t, 39)
    with pytest.raises(SilentCorruption, match=r"times the noise|bit for bit"):
        steps(t, 1)
