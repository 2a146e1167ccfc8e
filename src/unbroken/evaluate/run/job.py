"""What is evaluated, and what starts the processes that do it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ...journal.codec import encode
from ..contracts import ModelSpec, ScoringPool, Suite, digest
from ..engines import Engine
from ..processes.imports import Imports
from ..result.folder import EvalDir
from ..scoring.pool import open_pool


@dataclass(frozen=True)
class Job:
    """A suite, a model, and the folder where the answers and scores go."""

    suite: Suite
    spec: ModelSpec
    folder: EvalDir
    checkpoint: str = ""
    """The hash of the weights where it is known already (a committed checkpoint's manifest); empty: it is computed."""

    def question(self) -> dict[str, Any]:
        """What the folder is claimed for; another question in the same folder is refused."""
        model = encode(replace(self.spec, batch_size=0))
        # Folders of before there was another way say nothing of it.
        unsaid = {"batch_auto", *(["exact"] if self.spec.exact else [])}
        return {
            "suite": digest(_suite_question(self.suite)),
            "model": {k: v for k, v in model.items() if k not in unsaid},
        }


@dataclass(frozen=True)
class Launchers:
    """What starts workers, scoring processes and preparing processes."""

    engine: Engine
    open_scoring: Callable[[int], ScoringPool] = open_pool
    """Gives a pool of so many scoring processes."""
    imports: Imports | None = None
    """A fork server that has imported the harnesses, for preparing."""


def _suite_question(suite: Suite) -> Any:
    """What a suite asks, as it has been written into folders since before its tasks had a `headline`, which asks nothing."""
    value = encode(replace(suite, folder=""))
    for task in value["tasks"]:
        del task["headline"]
    return value
