"""Names of harnesses and model backends, and where their classes are; imported only when used.

A user's own class is named 'package.module:Class' in the suite, or with --backend.
"""

from __future__ import annotations

import importlib
import math
from typing import Any, cast

from ..errors import UnknownKey, UsageError
from .contracts import Backend, Harness, ScoresInParts, ScoringPool, Task

HARNESSES: dict[str, str] = {
    "lm_eval": "unbroken.evaluate.harness.lm_eval:LmEvalHarness",
    "plain": "unbroken.evaluate.harness.plain:PlainHarness",
}
BACKENDS: dict[str, str] = {
    "transformers": "unbroken.evaluate.harness.transformers:TransformersBackend",
    "openai": "unbroken.evaluate.harness.openai:OpenAIBackend",
}


def get_harness(name: str) -> Harness:
    """A harness by its name. Raises UnknownKey, UsageError."""
    return cast(Harness, _make(name, HARNESSES, "harness"))


def get_backend(name: str) -> Backend:
    """A model backend by its name. Raises UnknownKey, UsageError."""
    return cast(Backend, _make(name, BACKENDS, "backend"))


def score_parts(task: Task, score_s: float, cpu_workers: int) -> int:
    """On how many CPU workers a task whose metric takes so long will be scored at once."""
    try:
        apart = task.metric != "judge" and isinstance(get_harness(task.harness), ScoresInParts)
    except ModuleNotFoundError:  # planned for another machine
        return 1
    return max(1, min(cpu_workers, math.ceil(score_s))) if apart else 1


def open_scoring(workers: int) -> ScoringPool:
    """The pool of CPU scoring workers."""
    module = importlib.import_module("unbroken.evaluate.scoring.pool")
    return cast(ScoringPool, module.open_pool(workers))


def _make(name: str, known: dict[str, str], what: str) -> Any:
    place = name if ":" in name else known.get(name)
    if place is None:
        raise UnknownKey(name, known, what=what)
    module, _, attribute = place.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)()
    except (ModuleNotFoundError, AttributeError) as e:
        if isinstance(e, ModuleNotFoundError) and e.name and not module.startswith(e.name):
            raise  # something that the module needs, not the module itself
        raise UsageError(f"there is no {what} '{place}': {e}", todo="Write it as package.module:Class") from e
