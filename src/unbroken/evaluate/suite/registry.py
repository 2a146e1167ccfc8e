"""Names of harnesses and model backends, and where their classes are; imported only when used.

A user's own class is named 'package.module:Class' in the suite, or with --backend.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

from ...errors import UnknownKey, UsageError
from ..contracts import Backend, Harness, ModelSpec, ScoresInParts

HARNESSES: dict[str, str] = {
    "lm_eval": "unbroken.evaluate.harness.lm_eval:LmEvalHarness",
    "plain": "unbroken.evaluate.harness.plain:PlainHarness",
}
BACKENDS: dict[str, str] = {
    "transformers": "unbroken.evaluate.harness.transformers:TransformersBackend",
    "vllm": "unbroken.evaluate.harness.vllm:VllmBackend",
    "sglang": "unbroken.evaluate.harness.sglang:SglangBackend",
    "openai": "unbroken.evaluate.harness.openai:OpenAIBackend",
}


def get_harness(name: str) -> Harness:
    """A harness by its name. Raises UnknownKey, UsageError."""
    return cast(Harness, _make(name, HARNESSES, "harness"))


def get_backend(name: str) -> Backend:
    """A model backend by its name. Raises UnknownKey, UsageError."""
    return cast(Backend, _make(name, BACKENDS, "backend"))


def check_options(spec: ModelSpec) -> None:
    """Raises UnknownKey for an option that the backend does not know, if it says which ones it does."""
    known = getattr(get_backend(spec.backend), "options", None)
    for key in spec.options:
        if known is not None and key not in known:
            raise UnknownKey(key, known, where=f"options of the {spec.backend} backend", what="option")


def in_parts(harness: Harness) -> ScoresInParts | None:
    """The harness, if it can score samples apart: a class that inherits that and has a `score` of its own is asked for
    the whole."""
    owner = next((c for c in type(harness).__mro__ if "score" in vars(c)), None)
    if owner is None or not {"score_part", "score_of_parts"} <= set(vars(owner)):
        return None
    return cast(ScoresInParts, harness)


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
        raise UsageError(f"there is no {what} '{place}': {e}", hint="Write it as package.module:Class") from e
