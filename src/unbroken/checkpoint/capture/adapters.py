"""Wrappers of other frameworks around optimizers: what of them is saved in their place, and those that are refused.

A hook registers, by the wrapper's full name, a function that gives the parts which hold its state: optimizers of torch,
tensors, dictionaries and lists of them. Names, not classes: nothing is imported, and subclasses count too. An
optimizer-like object without an adapter whose `state_dict` shows no tensor, while an optimizer in it has some, is
refused: it would be saved empty. Needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ...errors import UnsaveableState

Parts = Callable[[Any], Any]
_registered: dict[str, Parts] = {}


def register(name: str, parts: Parts) -> None:
    """Makes `parts(wrapper)` stand for each wrapper of the class with this full name, such as "accelerate.optimizer.X".

    It is called at each save and each restore, and gives the live objects: what is restored is written into them.
    """
    _registered[name] = parts


def take_apart(state: Any) -> Any:
    """The state with the parts of each registered wrapper in its place; the state itself where there is none."""
    if not _registered:
        return state
    return _apart(state, 0)


def put_together(state: Any, apart: Any) -> None:
    """Puts into a state what a restore replaced in `take_apart(state)`: plain values are not changed in place."""
    if state is apart or type(state) is not type(apart):
        return
    pairs = list(state.items()) if isinstance(state, dict) else list(enumerate(state))
    for key, value in pairs:
        if parts_of(value) is not None:
            continue
        if isinstance(value, dict | list) and value is not apart[key]:
            put_together(value, apart[key])
        elif isinstance(state, dict | list):
            state[key] = apart[key]


def parts_of(value: Any) -> Parts | None:
    """The adapter of this object, None where it has none."""
    for kind in type(value).__mro__:
        found = _registered.get(f"{kind.__module__}.{kind.__qualname__}")
        if found is not None:
            return found
    return None


def _apart(value: Any, depth: int) -> Any:
    if isinstance(value, torch.Tensor | torch.nn.Module) or depth > 20:
        return value
    if parts := parts_of(value):
        return _apart(parts(value), depth + 1)  # a wrapper may hold wrappers
    if type(value) is dict:
        inside = {k: _apart(x, depth + 1) for k, x in value.items()}
        return inside if any(inside[k] is not x for k, x in value.items()) else value
    if type(value) in (list, tuple):
        items = [_apart(x, depth + 1) for x in value]
        return type(value)(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
    return value


def refuse_hidden(value: Any, shown: Any, path: str) -> None:
    """Raises UnsaveableState for an optimizer-like object that shows no tensor although it has stepped."""
    if not all(callable(getattr(value, n, None)) for n in ("step", "zero_grad", "load_state_dict")):
        return
    if isinstance(value, torch.nn.Module) or _has_tensor(shown):
        return
    for inner in _optimizers_inside(value):
        if any(_has_tensor(entry) for entry in list(inner.state.values())):
            kind = type(value)
            raise UnsaveableState(
                path,
                f"a {kind.__module__}.{kind.__qualname__} has stepped, and its state_dict shows no tensor: it would be saved "
                f"empty (the {type(inner).__qualname__} in it has tensors)",
                hint="Import the hook of its framework (unbroken.hooks, docs/trainers.md), or give the parts that hold its "
                "state: unbroken.checkpoint.capture.adapters.register",
            )


def _has_tensor(value: Any, depth: int = 0) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return depth < 20 and any(_has_tensor(x, depth + 1) for x in inner)


def _optimizers_inside(value: Any, depth: int = 0) -> Iterator[torch.optim.Optimizer]:
    """The optimizer itself where it is torch's, and those that its attributes hold, some levels deep."""
    # A wrapper may look like an optimizer of torch and never have been made one.
    if isinstance(value, torch.optim.Optimizer) and isinstance(getattr(value, "state", None), Mapping):
        yield value
    if depth > 3 or isinstance(value, torch.nn.Module | torch.Tensor):
        return
    if isinstance(value, list | tuple | set):
        held: Any = value
    elif isinstance(value, Mapping):
        held = value.values()
    elif depth == 0 or callable(getattr(value, "zero_grad", None)):
        held = vars(value).values() if hasattr(value, "__dict__") else ()
    else:
        return
    for x in list(held):
        if isinstance(x, list | tuple | set | dict) or callable(getattr(x, "zero_grad", None)):
            yield from _optimizers_inside(x, depth + 1)
