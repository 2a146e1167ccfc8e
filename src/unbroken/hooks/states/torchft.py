"""How a replica group whose checkpoint is behind the others' joins them. Needs torch.

Groups save at the same steps, but not at the same moment: killed together, one may have a snapshot that another has not. torchft then
gives that one the weights of those ahead. What it does not give is the place in the group's own data, and its generators. Where nobody
has trained on, both follow from the step: the place is as many batches further on, and generators are seeded for each step.
"""

from __future__ import annotations

from typing import Any

import torch

from ...data.generators import Generators
from ...data.ordering.permutation import key_of, mix

_KEY = "unbroken"


class Joining:
    """The first quorum of a manager. torchft's own first call of `start_quorum` finds it made."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._begun_at: int = manager.current_step()
        self._nobody_trained = False
        self.joined: bool = False
        manager.register_state_dict_fn(_KEY, self._receive, self._give)

    def join(self) -> int:
        """How many steps this group's checkpoint was behind those of others that have not trained on since they began; else 0."""
        manager, before = self._manager, self._begun_at
        manager.start_quorum()
        manager.wait_quorum()
        manager.start_quorum = self._once_more
        self.joined = True
        self._begun_at = manager.current_step()
        return self._begun_at - before if self._nobody_trained else 0

    def _once_more(self, *_: Any, **__: Any) -> None:
        del self._manager.start_quorum  # the next one is the class's again

    def _give(self) -> dict[str, int]:
        return {"trained": self._manager.current_step() - self._begun_at}

    def _receive(self, saved: dict[str, int]) -> None:
        self._nobody_trained = not self.joined and saved["trained"] == 0


class StepGenerators:
    """The global generators of a rank, for each step the same whatever was drawn before."""

    def __init__(self, seed: int, rank: int) -> None:
        self._key = mix(key_of(seed, rank) ^ 0x7374657073)  # of its own: samples have others
        self._generators = Generators()

    def begin(self, step: int) -> None:
        """Seeds those of Python, numpy, torch and this process's GPU for a step."""
        seed = mix(self._key ^ step)
        self._generators.seed(seed)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.manual_seed(seed & (1 << 63) - 1)
