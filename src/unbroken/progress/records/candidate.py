"""What an attempt may restore: a checkpoint of an attempt and a step, by the name of its folder, or what keepers hold of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_FOLDER = re.compile(r"step-(\d{8,18})\.a(\d{4,9})")


def folder_name(step: int, attempt: int) -> str:
    """The name of the folder that an attempt writes a step's checkpoint to."""
    return f"step-{step:08d}.a{attempt:04d}"


def parse_folder_name(name: str) -> tuple[int, int] | None:
    """(step, attempt) of a checkpoint's folder, or None for any other name."""
    m = _FOLDER.fullmatch(name)
    return (int(m[1]), int(m[2])) if m and folder_name(int(m[1]), int(m[2])) == name else None


CandidateMessage = dict[str, Any]
"""A candidate as it is written down and travels: `Candidate.from_json` reads it."""


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that a restore may use, as ranks see it: on disk under `name`, in memory of these nodes {rank: node}.

    `world_size` is 0 where it is not known.
    """

    attempt: int
    step: int
    name: str
    memory: Mapping[int, str] = field(default_factory=dict)
    on_disk: bool = True
    place: str = ""
    """Where it lies, if not where the attempt's own checkpoints go."""
    brought: bool = False
    """It was not written by this run, and is in no keeper's memory whatever its numbers."""
    world_size: int = 0

    def as_json(self) -> dict[str, Any]:
        """As it travels to the keeper and the ranks."""
        return {
            "attempt": self.attempt, "step": self.step, "name": self.name, "on_disk": self.on_disk,
            "memory": {str(r): n for r, n in self.memory.items()}, "place": self.place,
            "brought": self.brought,
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Candidate:
        """Reads `as_json`; without a `name` it is in memory only."""
        memory = {int(r): str(n) for r, n in dict(value.get("memory") or {}).items()}
        attempt, step, name = int(value["attempt"]), int(value["step"]), value.get("name")
        on_disk = name is not None and bool(value.get("on_disk", True))
        return cls(
            attempt,
            step,
            str(name or folder_name(step, attempt)),
            memory,
            on_disk,
            str(value.get("place") or ""),
            bool(value.get("brought", False)),
        )
