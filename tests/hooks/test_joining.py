"""How a torchft group that is behind joins the others, with a manager that is told what it hears."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unbroken.hooks.states.torchft import Joining, StepGenerators


class Manager:
    """One whose quorum finds others at step `others`, that have trained so many steps since they began."""

    def __init__(self, step: int, others: int, trained: int) -> None:
        self.step, self.others, self.trained = step, others, trained
        self.quorums = 0
        self.keys: dict[str, Any] = {}

    def register_state_dict_fn(self, key: str, load: Any, save: Any) -> None:
        self.keys[key] = load, save

    def current_step(self) -> int:
        return self.step

    def start_quorum(self) -> None:
        self.quorums += 1
        if self.others > self.step:
            self.step = self.others
            for load, _ in self.keys.values():
                load({"trained": self.trained})

    def wait_quorum(self) -> None:
        pass


@pytest.mark.parametrize(
    ("own", "others", "trained", "behind"), [(16, 18, 0, 2), (16, 118, 100, 0), (18, 16, 0, 0), (0, 0, 0, 0)]
)
def test_a_group_moves_on_only_where_nobody_has_trained_on(
    own: int, others: int, trained: int, behind: int
) -> None:
    joining = Joining(Manager(own, others, trained))
    assert joining.join() == behind and joining.joined


def test_the_first_quorum_is_made_once_and_tells_later_groups_what_was_trained() -> None:
    manager = Manager(16, 18, 0)
    joining = Joining(manager)
    (_, give) = manager.keys["unbroken"]
    joining.join()
    assert give() == {"trained": 0}, "it stands where the others began"
    manager.start_quorum()  # the optimizer's, for the same step
    assert manager.quorums == 1
    manager.start_quorum()
    assert manager.quorums == 2
    manager.step += 1
    assert give() == {"trained": 1}


def test_a_step_draws_the_same_whatever_was_drawn_before_and_ranks_differ() -> None:
    def draw(generators: StepGenerators, step: int) -> list[float]:
        generators.begin(step)
        found: list[float] = torch.rand(4).tolist()
        return found

    before = torch.get_rng_state()
    one, again, other = StepGenerators(0, 0), StepGenerators(0, 0), StepGenerators(0, 1)
    seventh = draw(one, 7)
    assert draw(one, 8) != seventh == draw(again, 7)
    assert draw(other, 7) != seventh != draw(StepGenerators(1, 0), 7)
    torch.set_rng_state(before)
