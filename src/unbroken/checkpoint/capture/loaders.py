"""The loaders of a state: those that know where the training stands in its data, and those that do not. Needs torch.

A loader that knows has `position()` beside `state_dict` and `load_state_dict`; that is all that is asked of it here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from ...errors import UnsaveableState

logger = logging.getLogger("unbroken.checkpoint")

_WRAP = "loader = unbroken.data.wrap(loader)"


def position_in(state: Any) -> Any:
    """The data position that an object of the state knows; None where none does."""
    for _, value in _objects(state):
        position = getattr(value, "position", None)
        if callable(position) and all(
            callable(getattr(value, n, None)) for n in ("state_dict", "load_state_dict")
        ):
            return position()
    return None


def check_loaders(state: Any) -> None:
    """Looks at the loaders of a state before anything is saved or restored with it.

    Raises UnsaveableState, saying what to write, for a loader that does not know where it stands. One of torchdata
    without a generator gets one of its own: its iterator would draw from the training's, which a resume has just set.
    """
    for path, value in _objects(state):
        if not isinstance(value, DataLoader):
            continue
        if not callable(getattr(value, "state_dict", None)):
            raise UnsaveableState(
                path,
                f"a {type(value).__qualname__} does not know where the training stands in its data: a resume would begin "
                "the epoch again",
                hint=f"Write `{_WRAP}` after the loader is made, and put that into the state",
            )
        if value.generator is None:
            value.generator = torch.Generator()
            logger.warning(
                "'%s' got a generator of its own, so that its iterator does not draw from the training's. What its workers "
                "draw is not exact after a resume: write `%s`", path, _WRAP,
            )  # fmt: skip


def _objects(state: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """(path, value) of what is in a state, as deep as people nest it."""
    if depth > 5:
        return
    if isinstance(state, Mapping):
        for k, v in state.items():
            yield from _objects(v, f"{path}.{k}".lstrip("."), depth + 1)
    elif type(state) in (list, tuple):
        for i, v in enumerate(state):
            yield from _objects(v, f"{path}.{i}".lstrip("."), depth + 1)
    elif not isinstance(state, torch.Tensor | torch.nn.Module | bool | int | float | str | type(None)):
        yield path, state
