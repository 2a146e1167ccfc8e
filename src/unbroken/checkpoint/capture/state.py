"""What a training's objects hold: tensors with their place in the global one, and plain values. apply.py is the way back.

`capture` looks at the state without copying a byte. Needs torch.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from ...errors import UnsaveableState
from ..format.layout import TensorSpec, spec
from ..format.manifest import Sharding, stored_name
from ..format.sharding import describe, local_of
from ..format.values import MAPPINGS, flatten
from .adapters import refuse_hidden


@dataclass(frozen=True)
class Captured:
    """A state at one moment: its live memory by stored name, where each tensor belongs, and all the rest as JSON.

    `protected` are the stored names that only optimizers change, so that a copy may run on until the next update.
    """

    pieces: Mapping[str, torch.Tensor]
    tensors: Mapping[str, tuple[str, Sharding]]
    """Of each tensor its torch type and how it is spread."""
    aliases: Mapping[str, str]
    tree: Any
    notes: Mapping[str, Any]
    """What the names alone do not tell: which tensors were numpy arrays, which lay on another device."""
    protected: frozenset[str]
    live: Mapping[str, torch.Tensor]
    """The tensors as the state has them, aliases included."""

    def specs(self) -> list[TensorSpec]:
        """What the arena must have room for."""
        return [spec(n, str(t.dtype), t.shape) for n, t in self.pieces.items()]

    def signature(self) -> tuple[Any, ...]:
        """Equal for two captures whose bytes lie in the same places."""
        shapes = tuple((n, t.dtype, t.shape) for n, t in self.pieces.items())
        return shapes, tuple(self.tensors.items()), tuple(self.aliases.items())


def capture(state: Mapping[str, Any]) -> Captured:
    """The state as it is now, without copying it.

    Raises UnsaveableState, naming the key, for what could not come back exactly.
    """
    optimized: set[int] = set()
    found, skeleton = flatten(expand(state, optimized), _is_leaf)
    arrays: dict[str, str] = {}
    pieces: dict[str, torch.Tensor] = {}
    tensors: dict[str, tuple[str, Sharding]] = {}
    aliases: dict[str, str] = {}
    protected: set[str] = set()
    devices: dict[str, str] = {}
    at: dict[int, list[tuple[str, list[torch.Tensor], Sharding]]] = {}
    for name, value in list(found.items()):
        if not is_tensor(value):
            arrays[name] = value.dtype.str
            value = found[name] = torch.from_numpy(value)
        device = value.device.type
        if device == "meta":
            raise UnsaveableState(
                name, "it is on the meta device: it has no values", hint="Materialise it first"
            )
        sharding, parts = describe(value, key=name)
        if (address := _address(parts)) is not None:
            # Few begin at one address: only those are compared in full.
            if others := at.get(address):
                twin = next((n for n, p, s in others if _same_place(p, s, parts, sharding)), None)
                if twin is not None:
                    aliases[name] = twin
                    continue
                others.append((name, parts, sharding))
            else:
                at[address] = [(name, parts, sharding)]
        tensors[name] = (_type_name(value.dtype), sharding)
        is_protected = id(value) in optimized
        for i, part in enumerate(parts):
            stored = stored_name(name, i)
            pieces[stored] = part
            if is_protected:
                protected.add(stored)
        if device != "cpu":
            devices[name] = device
    return Captured(
        pieces,
        tensors,
        aliases,
        skeleton,
        {"arrays": arrays, "devices": devices},
        frozenset(protected),
        found,
    )


def _is_leaf(v: Any) -> bool:
    """Whether it is stored as a tensor."""
    return is_tensor(v) or _large_array(v)


def optimizers_in(state: Any) -> list[torch.optim.Optimizer]:
    """The optimizers of a state, wherever they are in it."""
    if isinstance(state, torch.optim.Optimizer):
        return [state]
    inner = state.values() if isinstance(state, Mapping) else state if isinstance(state, list | tuple) else ()
    return [o for x in inner for o in optimizers_in(x)]


def cuda_device(state: Any) -> torch.device | None:
    """The GPU that a state lies on, None if all of it is on the CPU."""
    if isinstance(state, torch.Tensor):
        return local_of(state).device if state.device.type == "cuda" else None
    if isinstance(state, torch.nn.Module):
        state = [*state.parameters(), *state.buffers()]
    elif isinstance(state, torch.optim.Optimizer):
        state = [p for g in state.param_groups for p in g["params"]]
    inner = state.values() if isinstance(state, Mapping) else state if isinstance(state, list | tuple) else ()
    return next((d for x in inner if (d := cuda_device(x)) is not None), None)


_PLAIN = frozenset({type(None), bool, int, float, str})


_TENSOR_TYPES: dict[type, bool] = {}


def is_tensor(v: Any) -> bool:
    """What isinstance says; its check takes a microsecond for torch's classes, and a save makes thousands."""
    kind: type = type(v)
    known = _TENSOR_TYPES.get(kind)
    if known is None:
        known = _TENSOR_TYPES[kind] = issubclass(kind, torch.Tensor)
    return known


def expand(v: Any, optimized: set[int], path: str = "", depth: int = 0) -> Any:
    """A state, or what lies at `path` of it, with every object that has a state_dict replaced by it.

    Its tensors are the live ones; the ids of those that only optimizers change are added to `optimized`.
    """
    kind = type(v)
    if kind in _PLAIN or is_tensor(v) or depth > 100:
        return v
    if kind in MAPPINGS or (depth == 0 and isinstance(v, Mapping)):
        inside = {k: expand(x, optimized, f"{path}.{k}" if path else str(k), depth + 1) for k, x in v.items()}
        return _as_kind(inside, v) if depth else inside
    if kind is deque:
        return deque((expand(x, optimized, f"{path}.{i}", depth + 1) for i, x in enumerate(v)), v.maxlen)
    if kind in (list, tuple):
        return kind(expand(x, optimized, f"{path}.{i}", depth + 1) for i, x in enumerate(v))
    if not callable(getattr(v, "state_dict", None)) or isinstance(v, type):
        return v
    if not callable(getattr(v, "load_state_dict", None)):
        raise UnsaveableState(path, f"a {type(v).__qualname__} has state_dict but no load_state_dict")
    if isinstance(v, torch.nn.Module):
        return expand(dict(_expand_module(v, optimized)), optimized, path, depth + 1)
    if isinstance(v, torch.optim.Optimizer):
        inner = v.state_dict()
        _note_optimized(v, optimized)
    else:
        inner = v.state_dict()
    refuse_hidden(v, inner, path)
    return expand(inner, optimized, path, depth + 1)


def _as_kind(inside: dict[Any, Any], like: Any) -> Any:
    """The same pairs in a mapping of the kind of `like`."""
    if type(like) is defaultdict:
        return defaultdict(like.default_factory, inside)
    if type(like) is OrderedDict:
        return OrderedDict(inside)
    if type(like) is Counter:
        counts: Counter[Any] = Counter()
        dict.update(counts, inside)  # its own adds up
        return counts
    return inside


def _expand_module(v: torch.nn.Module, optimized: set[int]) -> Mapping[str, Any]:
    """A module's state dict with its own tensors, not detached twins of them, so that their ids are those of its
    parameters. A twin of a DTensor takes sixty microseconds too, hence the direct way where nobody would mind."""
    modules = list(v.modules())
    parameters: Iterable[torch.nn.Parameter | None]
    if all(map(_shows_its_own, modules)):
        inner: Mapping[str, Any] = v.state_dict(keep_vars=True)
        parameters = [p for m in modules for p in m._parameters.values()]
    else:
        inner = dict(_with_owners(v, v.state_dict()))
        parameters = v.parameters()
    # Parameters that ask for gradients are changed by optimizers; buffers, frozen copies and averages are not.
    averages = {id(p) for m in modules if isinstance(m, AveragedModel) for p in m.parameters()}
    optimized.update(id(p) for p in parameters if p is not None and p.requires_grad and id(p) not in averages)
    return inner


_OWN = frozenset({
    "state_dict", "parameters", "named_parameters", "_save_to_state_dict", "get_extra_state", "modules", "named_modules",
    "children", "named_children",
})  # fmt: skip


def _shows_its_own(module: torch.nn.Module) -> bool:
    """Whether the state dict of this module is torch's own: nobody there would see its parameters undetached."""
    held = vars(module)  # what was added to this very one
    return (
        not held["_state_dict_hooks"]
        and _OWN.isdisjoint(held)
        and all(getattr(type(module), name, None) is getattr(torch.nn.Module, name) for name in _OWN)
    )


def _with_owners(module: torch.nn.Module, inner: Mapping[str, Any]) -> Any:
    """The state dict of a module with its own parameters in place of their detached twins, so that ids match."""
    own: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    for name, value in inner.items():
        mine = own.get(name)
        yield name, mine if mine is not None and mine is not value and same_memory(mine, value) else value


def same_memory(a: torch.Tensor, b: Any) -> bool:
    """Whether both are the same tensor, looked at in the same way."""
    if not isinstance(b, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    x, y = local_of(a), local_of(b)
    return x.device == y.device and x.data_ptr() == y.data_ptr() and x.stride() == y.stride()


def _note_optimized(optimizer: torch.optim.Optimizer, optimized: set[int]) -> None:
    for group in optimizer.param_groups:
        optimized.update(id(p) for p in group["params"])
    for entry in optimizer.state.values():
        if isinstance(entry, Mapping):
            optimized.update([id(t) for t in entry.values() if is_tensor(t)])


def _address(parts: list[torch.Tensor]) -> int | None:
    """Where the memory of a tensor begins, None if it has none here."""
    for t in parts:
        if t.numel():
            return t.data_ptr()
    return None


def _same_place(a: list[torch.Tensor], a_spread: Sharding, b: list[torch.Tensor], b_spread: Sharding) -> bool:
    """Whether two tensors are the same memory, looked at in the same way, and spread in the same way."""
    return a_spread.placements == b_spread.placements and _identity(a) == _identity(b)


def _identity(parts: list[torch.Tensor]) -> tuple[Any, ...]:
    return tuple((t.device, t.data_ptr(), t.shape, t.stride(), t.dtype) for t in parts if t.numel())


@functools.cache
def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _large_array(v: object) -> bool:
    np = sys.modules.get("numpy")
    # Small ones, and types that torch has not, travel among the values.
    return (
        np is not None
        and isinstance(v, np.ndarray)
        and type(v) is np.ndarray
        and v.nbytes > 64 << 10
        and v.dtype.isnative
        and v.dtype.kind in "biufc"
    )
