"""Between live training objects and what is stored: tensors with their place in the global one, and plain values.

`capture` looks at the state without copying a byte; `Applier` puts a stored state back into the same objects, in
place wherever the object's own tensors can be written. Needs torch.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from ..errors import LayoutMismatch, UnsaveableState
from .layout import TensorSpec, spec
from .manifest import Sharding, stored_name
from .sharding import describe, local_of
from .values import flatten, unflatten


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
    known_signature: tuple[Any, ...] | None = None
    """What `signature()` gives, where that is known already."""

    def specs(self) -> list[TensorSpec]:
        """What the arena must have room for."""
        return [spec(n, str(t.dtype), t.shape) for n, t in self.pieces.items()]

    def signature(self) -> tuple[Any, ...]:
        """Equal for two captures whose bytes lie in the same places."""
        if self.known_signature is not None:
            return self.known_signature
        shapes = tuple((n, t.dtype, t.shape) for n, t in self.pieces.items())
        return shapes, tuple(self.tensors.items()), tuple(self.aliases.items())


def capture(state: Mapping[str, Any]) -> Captured:
    """The state as it is now, without copying it.

    Raises UnsaveableState, naming the key, for what could not come back exactly.
    """
    optimized: set[int] = set()
    return described(expanded_into(state, optimized), optimized)


def expanded_into(state: Any, optimized: set[int], path: str = "", depth: int = 0) -> Any:
    """As `expand`, of a part that lies at `path`; the ids of tensors that only optimizers change are added to `optimized`."""
    return _expand(state, path, optimized, depth)


def shown_by_optimizer(optimizer: torch.optim.Optimizer, optimized: set[int]) -> Any:
    """Its state dict, not expanded; the ids of its tensors are added to `optimized`."""
    inner = optimizer.state_dict()
    _note_optimized(optimizer, optimized)
    return inner


def described(expanded: Any, optimized: set[int]) -> Captured:
    """What `capture` gives of an expanded state."""
    found, skeleton = flatten(expanded, is_leaf)
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
                name, "it is on the meta device: it has no values", todo="Materialise it first"
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


def expand(state: Any) -> Any:
    """The state with every object that has a state_dict replaced by it; its tensors are the live ones."""
    return _expand(state, "", set(), 0)


def is_leaf(v: Any) -> bool:
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


def _expand(v: Any, path: str, optimized: set[int], depth: int) -> Any:
    """The state with every object that has a state_dict replaced by it."""
    kind = type(v)
    if kind in _PLAIN or is_tensor(v) or depth > 100:
        return v
    if kind is dict or isinstance(v, Mapping):
        return {k: _expand(x, f"{path}.{k}" if path else str(k), optimized, depth + 1) for k, x in v.items()}
    if kind in (list, tuple):
        return kind(_expand(x, f"{path}.{i}", optimized, depth + 1) for i, x in enumerate(v))
    if not callable(getattr(v, "state_dict", None)) or isinstance(v, type):
        return v
    if not callable(getattr(v, "load_state_dict", None)):
        raise UnsaveableState(path, f"a {type(v).__qualname__} has state_dict but no load_state_dict")
    if isinstance(v, torch.nn.Module):
        return _expand(_expand_module(v, optimized), path, optimized, depth + 1)
    if isinstance(v, torch.optim.Optimizer):
        inner = shown_by_optimizer(v, optimized)
    else:
        inner = v.state_dict()
    return _expand(inner, path, optimized, depth + 1)


def _expand_module(v: torch.nn.Module, optimized: set[int]) -> Mapping[str, Any]:
    """A module's state dict with its own tensors, not detached twins of them, so that their ids are those of its
    parameters. A twin of a DTensor takes sixty microseconds too, hence the direct way where nobody would mind."""
    modules = list(v.modules())
    parameters: Iterable[torch.nn.Parameter | None]
    if all(map(shows_its_own, modules)):
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


def shows_its_own(module: torch.nn.Module) -> bool:
    """Whether the state dict of this module is torch's own: nobody there would see its parameters undetached."""
    return torchs_own(type(module)) and bare(module)


def bare(module: torch.nn.Module) -> bool:
    """Whether nothing was added to this very module that changes what is in its state dict."""
    held = vars(module)
    return not held["_state_dict_hooks"] and _OWN.isdisjoint(held)


def torchs_own(kind: type) -> bool:
    """Whether this class leaves to torch's Module what is in a state dict."""
    return all(getattr(kind, name, None) is getattr(torch.nn.Module, name) for name in _OWN)


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


def _holds_live(v: Any) -> bool:
    """Whether there is anything in it that is loaded in place: a tensor, or an object with a state."""
    if isinstance(v, torch.Tensor):
        return True
    if isinstance(v, Mapping):
        return any(_holds_live(x) for x in v.values())
    if isinstance(v, list | tuple):
        return any(_holds_live(x) for x in v)
    return callable(getattr(v, "load_state_dict", None)) and not isinstance(v, type)


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


@dataclass(frozen=True)
class Stored:
    """A tensor of the checkpoint, in landed memory that will be given back: copied, never handed out."""

    name: str
    dtype: str
    sharding: Sharding
    pieces: tuple[torch.Tensor, ...]


class ShardedOtherwise(LayoutMismatch):
    """The tensors are the same, their shards are not: it has to be loaded through the planner."""


@dataclass
class Applier:
    """Puts a stored state back into live objects. `tensors` are views of landed memory, by name (an alias has its
    target's); `copy` writes one of them into live memory.

    With `strict` every name of the live state must be stored and the other way round.
    """

    tensors: Mapping[str, Stored]
    tree: Any
    notes: Mapping[str, Any]
    """`Captured.notes` of the rank that saved it."""
    where: str
    strict: bool = True
    copy: Callable[[torch.Tensor, torch.Tensor], object] = field(
        default=lambda live, stored: live.copy_(stored, non_blocking=True)
    )

    def into(self, state: dict[str, Any]) -> None:
        """Loads into the live state, in place. Raises LayoutMismatch before anything is changed, where it can."""
        saved = unflatten(self.tree, self.tensors, where=self.where)
        self._check(state, saved, "")
        with torch.no_grad():
            self._merge(state, saved, "")

    def _check(self, live: Any, saved: Any, path: str) -> None:
        """Compares names, shapes and types of plain containers and tensors before any of them is written."""
        if isinstance(live, torch.Tensor):
            self._fits(live, saved, path)
        elif not _holds_live(live):
            return  # plain data is replaced as a whole
        elif isinstance(live, Mapping) and not callable(getattr(live, "load_state_dict", None)):
            if not isinstance(saved, Mapping):
                raise self._mismatch(path, "is a container now, in the checkpoint it is not")
            if (missing := [k for k in live if k not in saved]) and self.strict:
                raise self._mismatch(f"{path}.{missing[0]}".lstrip("."), "is not in the checkpoint")
            if (extra := [k for k in saved if k not in live]) and self.strict:
                raise self._mismatch(f"{path}.{extra[0]}".lstrip("."), "is only in the checkpoint")
            for k, x in live.items():
                if k in saved:
                    self._check(x, saved[k], f"{path}.{k}".lstrip("."))
        elif type(live) in (list, tuple):
            if not isinstance(saved, list | tuple) or (len(saved) != len(live) and live):
                raise self._mismatch(path, f"has {len(live)} items now, the checkpoint has another number")
            for i, (x, y) in enumerate(zip(live, saved, strict=False)):
                self._check(x, y, f"{path}.{i}")
        elif isinstance(live, torch.nn.Module) and isinstance(saved, Mapping):
            self._check(dict(live.state_dict()), saved, path)

    def _merge(self, live: Any, saved: Any, path: str) -> Any:
        """The loaded value: `live` itself wherever it can be changed in place."""
        if isinstance(live, torch.Tensor):
            self._write(live, saved, path)
            return live
        if callable(getattr(live, "load_state_dict", None)) and not isinstance(live, type):
            self._load_object(live, saved, path)
            return live
        if not _holds_live(live):
            return self._replace(live, saved)
        if isinstance(live, dict):
            for k in list(live):
                if k in saved:
                    live[k] = self._merge(live.get(k), saved[k], f"{path}.{k}".lstrip("."))
            return live
        if type(live) is list and isinstance(saved, list) and len(live) == len(saved):
            live[:] = [
                self._merge(x, y, f"{path}.{i}") for i, (x, y) in enumerate(zip(live, saved, strict=True))
            ]
            return live
        if type(live) is tuple and isinstance(saved, tuple) and len(live) == len(saved):
            return tuple(
                self._merge(x, y, f"{path}.{i}") for i, (x, y) in enumerate(zip(live, saved, strict=True))
            )
        return self._materialise(saved, live)

    def _replace(self, live: Any, saved: Any) -> Any:
        """Plain data: the stored one, in the very container that is there if it is of the same kind."""
        value = self._materialise(saved, live)
        if type(live) is dict and isinstance(value, dict) and live is not value:
            live.clear()
            live.update(value)
            return live
        if type(live) is list and type(value) is list:
            live[:] = value
            return live
        return value

    def _load_object(self, live: Any, saved: Any, path: str) -> None:
        if isinstance(live, torch.nn.Module) and self._module_in_place(live, saved, path):
            return
        standard = torch.optim.Optimizer.load_state_dict
        if isinstance(live, torch.optim.Optimizer) and type(live).load_state_dict is standard:
            self._load_optimizer(live, saved, path)
            return
        live.load_state_dict(self._materialise(saved))

    def _module_in_place(self, module: torch.nn.Module, saved: Mapping[str, Any], path: str) -> bool:
        """Writes the module's own tensors; False if its state dict does not show them directly (hooks, copies)."""
        if type(module).load_state_dict is not torch.nn.Module.load_state_dict:
            return False
        current = module.state_dict()
        own: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
        own.update(module.named_buffers(remove_duplicate=False))
        plain = {n: v for n, v in current.items() if isinstance(v, torch.Tensor)}
        if any(n not in own or not same_memory(own[n], v) for n, v in plain.items()):
            return False
        if missing := [n for n in current if n not in saved]:
            raise self._mismatch(f"{path}.{missing[0]}", "is not in the checkpoint")
        for name, live in plain.items():
            self._fits(live, saved[name], f"{path}.{name}")
        for name, live in plain.items():
            self._write(live, saved[name], f"{path}.{name}")
        rest = {n: self._materialise(v) for n, v in saved.items() if n not in plain and n in current}
        if rest:  # extra state: only the module knows how
            module.load_state_dict(rest, strict=False)
        return True

    def _load_optimizer(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], path: str) -> None:
        """As Optimizer.load_state_dict, but keeps the live tensors, their types and their bits."""
        groups = saved["param_groups"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in optimizer.param_groups]:
            raise self._mismatch(
                f"{path}.param_groups", "has other groups of parameters than the optimizer now"
            )
        numbered = {
            number: p
            for g, live in zip(groups, optimizer.param_groups, strict=True)
            for number, p in zip(g["params"], live["params"], strict=True)
        }
        for number, entry in saved["state"].items():
            p = numbered.get(number)
            if p is None:
                raise self._mismatch(f"{path}.state.{number}", "belongs to no parameter of the optimizer now")
            if not isinstance(entry, Mapping):
                optimizer.state[p] = self._materialise(entry)
                continue
            mine = optimizer.state[p]
            for key, value in entry.items():
                mine[key] = self._state_value(mine.get(key), value, p, f"{path}.state.{number}.{key}")
            for key in [k for k in mine if k not in entry]:
                del mine[key]
        for p in [p for p in optimizer.state if isinstance(p, torch.Tensor)]:
            if not any(numbered.get(n) is p for n in saved["state"]):
                del optimizer.state[p]
        for g, live in zip(groups, optimizer.param_groups, strict=True):
            for key, value in g.items():
                if key != "params":
                    live[key] = self._merge(live.get(key), value, f"{path}.param_groups.{key}")

    def _state_value(self, live: Any, saved: Any, p: torch.Tensor, path: str) -> Any:
        if not isinstance(saved, Stored):
            return self._materialise(saved, live)
        target = live
        if not isinstance(target, torch.Tensor):
            target = self._as_made_by_optimizer(saved, p)
        self._write(target, saved, path)
        return target

    def _as_made_by_optimizer(self, saved: Stored, p: torch.Tensor) -> torch.Tensor:
        """Memory for lazy state that is not there yet: like the parameter, or a plain tensor (step counters)."""
        dtype = getattr(torch, saved.dtype)
        if saved.sharding.placements:
            return torch.empty_like(p, dtype=dtype, requires_grad=False)
        shape = saved.sharding.shape
        device = local_of(p).device if saved.name in self.notes.get("devices", {}) else torch.device("cpu")
        if tuple(p.shape) == shape and shape:
            return torch.empty_like(p, dtype=dtype, device=device, requires_grad=False)
        return torch.empty(shape, dtype=dtype, device=device)

    def _materialise(self, saved: Any, live: Any = None) -> Any:
        """A stored value with copies of its tensors, on the device that they came from."""
        if isinstance(saved, Stored):
            if saved.sharding.placements:
                raise self._mismatch(saved.name, "is sharded and its object cannot be loaded in place")
            (stored,) = saved.pieces
            if saved.name in self.notes.get("arrays", {}):
                array = stored.numpy().copy()
                if isinstance(live, type(array)) and live.shape == array.shape and live.dtype == array.dtype:
                    live[...] = array
                    return live
                return array
            return stored.to(self.notes.get("devices", {}).get(saved.name, "cpu"), copy=True)
        if isinstance(saved, Mapping):
            for k in list(saved):
                saved[k] = self._materialise(saved[k])  # type: ignore[index]
            return saved
        if type(saved) in (list, tuple):
            return type(saved)(self._materialise(x) for x in saved)
        return saved

    def _write(self, live: torch.Tensor, saved: Any, path: str) -> None:
        for here, there in zip(self._fits(live, saved, path), saved.pieces, strict=True):
            self.copy(here, there)

    def _fits(self, live: torch.Tensor, saved: Any, path: str) -> list[torch.Tensor]:
        """The live pieces that the stored ones go into."""
        if not isinstance(saved, Stored):
            raise self._mismatch(path, "is a tensor now, in the checkpoint it is not")
        sharding, pieces = describe(live, key=path)
        dtype = str(live.dtype).removeprefix("torch.")
        if sharding.shape != saved.sharding.shape or dtype != saved.dtype:
            raise self._mismatch(
                path,
                f"is {sharding.shape} of {dtype} now, in the checkpoint {saved.sharding.shape} of {saved.dtype}",
            )
        if sharding.boxes != saved.sharding.boxes:
            raise ShardedOtherwise(f"'{path}' is sharded otherwise than in the checkpoint", where=self.where)
        return pieces

    def _mismatch(self, path: str, what: str) -> LayoutMismatch:
        return LayoutMismatch(
            f"'{path}' {what}",
            where=self.where,
            todo="Restore into the same model and optimizer, or pass strict=False to take what fits by name",
        )
