"""Whether all of a model came out of its files: transformers fills what is missing with random numbers and only logs it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ...errors import ModelDoesNotLoad

HINT = (
    "Give the tensors the names that the architecture in config.json has (often a prefix is too much, such as 'module.'); "
    "if they may be random, say --option allow_missing=true"
)


def check_weights(info: Mapping[str, Collection[str]], place: str) -> None:
    """Of transformers' loading info. Raises ModelDoesNotLoad if a tensor was missing; what was not used is printed."""
    missing, unused = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if missing:
        other = f", and {_some(unused)} that it does not know" if unused else ""
        raise ModelDoesNotLoad(f"the files lack {_some(missing)} of the model{other}", where=place, hint=HINT)
    if unused:
        print(f"unbroken eval: the files of {place} hold {_some(unused)} that the model does not use", file=sys.stderr)  # fmt: skip


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{len(names)} tensor{'s' * (len(names) != 1)} ({', '.join(names[:3])}{more})"


@contextlib.contextmanager
def weights_checked(place: str) -> Iterator[None]:
    """Inside, whatever loads a model of transformers raises ModelDoesNotLoad where it lacks weights."""
    from transformers import PreTrainedModel

    theirs = PreTrainedModel.__dict__["from_pretrained"]

    def from_pretrained(kind: Any, /, *args: Any, output_loading_info: bool = False, **more: Any) -> Any:
        model, info = theirs.__func__(kind, *args, output_loading_info=True, **more)
        check_weights(info, place)
        return (model, info) if output_loading_info else model

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)
    try:
        yield
    finally:
        PreTrainedModel.from_pretrained = theirs
