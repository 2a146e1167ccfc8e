"""Putting a stored state back into the objects it came from, in place wherever their own tensors can be written. Needs torch."""

from __future__ import annotations

import copy
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import LayoutMismatch, UnbrokenError
from ..capture.state import same_memory
from ..format.manifest import Sharding
from ..format.sharding import describe, local_of
from ..format.values import MAPPINGS, unflatten


@dataclass(frozen=True)
class Stored:
    """A tensor of the checkpoint, in landed memory that will be given back: copied, never handed out."""

    name: str
    dtype: str
    sharding: Sharding
    pieces: tuple[torch.Tensor, ...]
    local: bool = False
    """Each rank has it in a shape of its own: `sharding` is one of them."""


@dataclass(frozen=True)
class Taken:
    """Names (of tensors, and of values as a whole): those that were loaded, those of the live state that stayed as
    they were, those that are only in the checkpoint."""

    names: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


STEP_NAMES = ("step", "global_step", "iteration")
"""Where the usual trainers write the step of a checkpoint; an import takes it from there."""


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
    weights_only: bool = False
    """It holds a model and nothing else by its nature: what else the state has stays as it is, also with `strict`."""
    imported: bool = False
    """Somebody else saved it: a number that says its step has been understood, and need not be in the state."""
    copy: Callable[[torch.Tensor, torch.Tensor], object] = field(
        default=lambda live, stored: live.copy_(stored, non_blocking=True)
    )
    elsewhere: bool = False
    """The shards lie otherwise; only names, global shapes and types are compared."""
    _taken: list[tuple[str, str]] = field(default_factory=list)
    _left: list[str] = field(default_factory=list)
    _unused: list[str] = field(default_factory=list)
    _loaded: set[int] = field(default_factory=set)

    def into(self, state: dict[str, Any]) -> Taken:
        """Loads into the live state, in place; what was taken and what not.

        All is compared before anything is changed. Objects that load by themselves come first; if one raises, they get
        back what they had. Raises LayoutMismatch: then the state is as it was, unless it says otherwise.
        """
        saved = unflatten(self.tree, self.tensors, where=self.where)
        taken = self.compare(state, saved)
        with torch.no_grad():
            self._load_others(state, saved)
            self._merge(state, saved, "")
        return taken

    def compare(self, state: Mapping[str, Any], saved: Any) -> Taken:
        """What of the stored state goes into the live one. Raises LayoutMismatch where it does not fit."""
        self._taken, self._left, self._unused = [], [], []
        self._check(state, saved, "")
        if (self._left or self._unused) and not any(kind == "tensor" for kind, _ in self._taken):
            stored = set(self.tensors)
            if stored or not self._taken:
                tops = ", ".join(map(str, saved)) if isinstance(saved, Mapping) else "no names"
                raise LayoutMismatch(
                    f"nothing of the checkpoint fits by name: it has {tops}, the state has {', '.join(map(str, state))}",
                    where=self.where,
                    hint="Name the parts of the state as they were saved, or rename them: unbroken checkpoint import --rename",
                )
        return Taken(tuple(n for _, n in self._taken), tuple(self._left), tuple(self._unused))

    def by_themselves(self, state: Any, saved: Any) -> list[tuple[Any, Any]]:
        """(object, its stored state) of those that load by themselves and have no sharded tensors: whole copies do for them."""
        return [(o, s) for o, s, _ in self._others(state, saved, "") if not _sharded(o.state_dict())]

    def load_by_themselves(self, state: Any, saved: Any) -> frozenset[int]:
        """Loads them, all or none; their ids. Raises LayoutMismatch."""
        chosen = {id(o) for o, _ in self.by_themselves(state, saved)}
        self._load_others(state, saved, only=chosen)
        return frozenset(self._loaded)

    def _check(self, live: Any, saved: Any, path: str) -> None:
        """Compares names, shapes and types of everything that is loaded in place, before any of it is written."""
        if isinstance(live, torch.Tensor):
            self._fits(live, saved, path)
            self._taken.append(("tensor", path))
        elif not _holds_live(live):
            self._taken.append(("value", path))  # plain data is replaced as a whole
        elif isinstance(live, torch.nn.Module):
            self._check_module(live, saved, path)
        elif _standard_optimizer(live):
            self._check_optimizer(live, saved, path)
        elif callable(getattr(live, "load_state_dict", None)):
            self._taken.append(("tensor" if _holds_stored(saved) else "value", path))
        elif isinstance(live, Mapping):
            if not isinstance(saved, Mapping):
                raise self._mismatch(path, "is a container now, in the checkpoint it is not")
            understood = self._said_step(saved) if not path else set()
            self._compare_names(list(live), [k for k in saved if k in live or k not in understood], path)
            for k, x in live.items():
                if k in saved:
                    self._check(x, saved[k], f"{path}.{k}".lstrip("."))
        elif type(live) in (list, tuple):
            if type(saved) is not type(live) or len(saved) != len(live):
                raise self._mismatch(path, f"has {len(live)} items now, the checkpoint has another number")
            for i, (x, y) in enumerate(zip(live, saved, strict=True)):
                self._check(x, y, f"{path}.{i}")
        else:
            raise self._mismatch(
                path,
                f"is a {type(live).__qualname__} with tensors or objects in it, which cannot be loaded in place",
            )

    def _said_step(self, saved: Mapping[Any, Any]) -> set[str]:
        def is_number(x: Any) -> bool:
            return math.prod(x.sharding.shape) == 1 if isinstance(x, Stored) else isinstance(x, int | float)

        return {k for k in STEP_NAMES if self.imported and k in saved and is_number(saved[k])}

    def _compare_names(self, live: list[Any], saved: list[Any], path: str) -> None:
        have, there = set(live), set(saved)
        missing, extra = [k for k in live if k not in there], [k for k in saved if k not in have]
        if self.strict and missing and not (self.weights_only and not path):
            raise self._mismatch(f"{path}.{missing[0]}".lstrip("."), "is not in the checkpoint", by_name=True)
        if self.strict and extra:
            raise self._mismatch(f"{path}.{extra[0]}".lstrip("."), "is only in the checkpoint", by_name=True)
        self._left += [f"{path}.{k}".lstrip(".") for k in missing]
        self._unused += [f"{path}.{k}".lstrip(".") for k in extra]

    def _check_module(self, module: torch.nn.Module, saved: Any, path: str) -> None:
        if not isinstance(saved, Mapping):
            raise self._mismatch(path, "is a module now, in the checkpoint it is not")
        current = module.state_dict()
        self._compare_names(list(current), list(saved), path)
        for name, live in current.items():
            if name not in saved:
                continue
            if isinstance(live, torch.Tensor):
                self._fits(live, saved[name], f"{path}.{name}")
                self._taken.append(("tensor", f"{path}.{name}"))
            else:
                self._taken.append(("value", f"{path}.{name}"))  # extra state: only the module knows

    def _check_optimizer(self, optimizer: torch.optim.Optimizer, saved: Any, path: str) -> None:
        """Whether `_load_optimizer` can do all that it does."""
        if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= set(saved):
            raise self._mismatch(path, "is an optimizer now, in the checkpoint it is not")
        numbered = self._numbered(optimizer, saved, path)
        for number, entry in saved["state"].items():
            p = numbered.get(number)
            if p is None:
                raise self._mismatch(f"{path}.state.{number}", "belongs to no parameter of the optimizer now")
            for key, value in entry.items() if isinstance(entry, Mapping) else ():
                name = f"{path}.state.{number}.{key}"
                mine = optimizer.state[p].get(key) if p in optimizer.state else None
                if not isinstance(value, Stored):
                    continue
                if isinstance(mine, torch.Tensor):
                    self._fits(mine, value, name)
                elif value.sharding.placements or self.elsewhere:
                    like, _ = describe(p, key=name)
                    same = tuple(value.sharding.shape) in (tuple(like.shape), ())
                    if not same:
                        raise self._mismatch(name, f"is {value.sharding.shape}, its parameter {like.shape}")
                    if not self.elsewhere and like.boxes != value.sharding.boxes:
                        raise ShardedOtherwise(
                            f"'{name}' is sharded otherwise than in the checkpoint", where=self.where
                        )
                self._taken.append(("tensor", name))
        for g, live in zip(saved["param_groups"], optimizer.param_groups, strict=True):
            for key, value in g.items():
                if key != "params" and isinstance(live.get(key), torch.Tensor):
                    self._fits(live[key], value, f"{path}.param_groups.{key}")
        self._taken.append(("value", f"{path}.param_groups"))

    def _numbered(
        self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], path: str
    ) -> dict[Any, Any]:
        """The parameters by the numbers that the checkpoint gives them."""
        groups = saved["param_groups"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in optimizer.param_groups]:
            raise self._mismatch(
                f"{path}.param_groups", "has other groups of parameters than the optimizer now"
            )
        return {
            number: p
            for g, live in zip(groups, optimizer.param_groups, strict=True)
            for number, p in zip(g["params"], live["params"], strict=True)
        }

    def _load_others(self, state: Any, saved: Any, only: set[int] | None = None) -> None:
        """Lets objects load that do it by themselves, before any tensor is written; all or none of them."""
        done: list[tuple[Any, Any, str]] = []
        for live, stored, path in self._others(state, saved, ""):
            if only is not None and id(live) not in only:
                continue
            try:
                before = _copy(live.state_dict())
            except Exception as e:
                raise self._mismatch(path, f"does not tell its state: {type(e).__name__}: {e}") from e
            done.append((live, before, path))
            try:
                self._load_object(live, stored, path)
            except Exception as e:
                spoilt = [p for o, b, p in reversed(done) if not _put_back(o, b)]
                after = f"; {', '.join(spoilt)} may have been changed" if spoilt else "; nothing was changed"
                why = e.message if isinstance(e, UnbrokenError) else f"{type(e).__name__}: {e}"
                raise LayoutMismatch(
                    f"'{path}' (a {type(live).__qualname__}) does not take its state: {why}"[:500] + after,
                    where=self.where,
                    hint="Restore into an object that is built as the saved one was",
                ) from e
        self._loaded = {id(live) for live, _, _ in done}

    def _others(self, live: Any, saved: Any, path: str) -> Iterator[tuple[Any, Any, str]]:
        """(object, stored state, path) of those that are not written in place."""
        if isinstance(live, torch.Tensor) or not _holds_live(live):
            return
        if callable(getattr(live, "load_state_dict", None)) and not isinstance(live, type):
            if not _standard_optimizer(live) and not (
                isinstance(live, torch.nn.Module) and self._shown(live) is not None
            ):
                yield live, saved, path
        elif isinstance(live, Mapping):
            for k, x in live.items():
                if k in saved:
                    yield from self._others(x, saved[k], f"{path}.{k}".lstrip("."))
        elif type(live) in (list, tuple):
            for i, (x, y) in enumerate(zip(live, saved, strict=True)):
                yield from self._others(x, y, f"{path}.{i}")

    def _merge(self, live: Any, saved: Any, path: str) -> Any:
        """The loaded value: `live` itself wherever it can be changed in place."""
        if isinstance(live, torch.Tensor):
            self._write(live, saved, path)
            return live
        if callable(getattr(live, "load_state_dict", None)) and not isinstance(live, type):
            if id(live) not in self._loaded:
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
        if type(live) in MAPPINGS and type(value) is type(live) and live is not value:
            if isinstance(live, defaultdict):
                live.default_factory = value.default_factory
            live.clear()
            (dict if isinstance(live, Counter) else type(live)).update(live, value)  # a Counter adds up
            return live
        if type(live) is list and type(value) is list:
            live[:] = value
            return live
        return value

    def _load_object(self, live: Any, saved: Any, path: str) -> None:
        if isinstance(live, torch.nn.Module):
            if self._module_in_place(live, saved, path):
                return
            given = self._materialise(dict(saved.items()))
            if not self.strict:
                mine = live.state_dict()
                given = {n: given.get(n, v) for n, v in mine.items()}
            live.load_state_dict(given)
        elif _standard_optimizer(live):
            self._load_optimizer(live, saved, path)
        else:
            live.load_state_dict(self._materialise(saved))

    def _shown(self, module: torch.nn.Module) -> dict[str, torch.Tensor] | None:
        """The module's own tensors by name; None if its state dict does not show them directly (hooks, copies)."""
        if type(module).load_state_dict is not torch.nn.Module.load_state_dict:
            return None
        current = module.state_dict()
        own: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
        own.update(module.named_buffers(remove_duplicate=False))
        plain = {n: v for n, v in current.items() if isinstance(v, torch.Tensor)}
        return None if any(n not in own or not same_memory(own[n], v) for n, v in plain.items()) else plain

    def _module_in_place(self, module: torch.nn.Module, saved: Mapping[str, Any], path: str) -> bool:
        """Writes the module's own tensors; False if its state dict does not show them directly."""
        plain = self._shown(module)
        if plain is None:
            return False
        rest = {
            n: self._materialise(v) for n, v in saved.items() if n not in plain and n in module.state_dict()
        }
        if rest:  # extra state: only the module knows how
            module.load_state_dict(rest, strict=False)
        for name, live in plain.items():
            if name in saved:
                self._write(live, saved[name], f"{path}.{name}")
        return True

    def _load_optimizer(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], path: str) -> None:
        """As Optimizer.load_state_dict, but keeps the live tensors, their types and their bits."""
        groups = saved["param_groups"]
        numbered = self._numbered(optimizer, saved, path)
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
        if type(saved) is deque:
            return deque((self._materialise(x) for x in saved), saved.maxlen)
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
        if (sharding.shape != saved.sharding.shape and not saved.local) or dtype != saved.dtype:
            raise self._mismatch(
                path,
                f"is {sharding.shape} of {dtype} now, in the checkpoint {saved.sharding.shape} of {saved.dtype}",
            )
        if not self.elsewhere and sharding.boxes != saved.sharding.boxes:
            raise ShardedOtherwise(f"'{path}' is sharded otherwise than in the checkpoint", where=self.where)
        return pieces

    def _mismatch(self, path: str, what: str, *, by_name: bool = False) -> LayoutMismatch:
        return LayoutMismatch(
            f"'{path}' {what}",
            where=self.where,
            hint="Restore into the same model and optimizer"
            + (", or pass strict=False to take what fits by name" if by_name else ""),
        )


def _standard_optimizer(v: Any) -> bool:
    """Whether it is an optimizer whose state can be written in place."""
    standard = torch.optim.Optimizer.load_state_dict
    return isinstance(v, torch.optim.Optimizer) and type(v).load_state_dict is standard


def _copy(value: Any) -> Any:
    """A state dict that later changes do not reach; tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if hasattr(value, "placements") else value.detach().to("cpu", copy=True)
    if type(value) in MAPPINGS:
        return (
            type(value)(value.default_factory, {k: _copy(v) for k, v in value.items()})
            if isinstance(value, defaultdict)
            else type(value)({k: _copy(v) for k, v in value.items()})
        )
    if type(value) in (list, tuple):
        return type(value)(_copy(v) for v in value)
    return copy.deepcopy(value)


def _put_back(live: Any, before: Any) -> bool:
    """Whether an object has again what it had."""
    try:
        live.load_state_dict(before)
    except Exception:  # noqa: BLE001  its own code; who calls says so
        return False
    return True


def _holds_stored(v: Any) -> bool:
    if isinstance(v, Mapping):
        return any(_holds_stored(x) for x in v.values())
    return isinstance(v, Stored) or (isinstance(v, list | tuple) and any(_holds_stored(x) for x in v))


def _sharded(v: Any) -> bool:
    """Whether there is a tensor in it of which this rank holds only a share."""
    if isinstance(v, torch.Tensor):
        return hasattr(v, "placements")
    if isinstance(v, Mapping):
        return any(_sharded(x) for x in v.values())
    return isinstance(v, list | tuple) and any(_sharded(x) for x in v)


def _holds_live(v: Any) -> bool:
    """Whether there is anything in it that is loaded in place: a tensor, or an object with a state."""
    if isinstance(v, torch.Tensor):
        return True
    if isinstance(v, Mapping):
        return any(_holds_live(x) for x in v.values())
    if isinstance(v, list | tuple):
        return any(_holds_live(x) for x in v)
    return callable(getattr(v, "load_state_dict", None)) and not isinstance(v, type)
