"""Putting a stored state back into the objects it came from, in place wherever their own tensors can be written. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import LayoutMismatch
from .manifest import Sharding
from .sharding import describe, local_of
from .state import same_memory
from .values import unflatten


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


def _holds_live(v: Any) -> bool:
    """Whether there is anything in it that is loaded in place: a tensor, or an object with a state."""
    if isinstance(v, torch.Tensor):
        return True
    if isinstance(v, Mapping):
        return any(_holds_live(x) for x in v.values())
    if isinstance(v, list | tuple):
        return any(_holds_live(x) for x in v)
    return callable(getattr(v, "load_state_dict", None)) and not isinstance(v, type)
