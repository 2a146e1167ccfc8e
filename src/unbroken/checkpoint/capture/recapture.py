"""Capturing the same state again and again: what has not changed since the last save is recognised, not described again.

While a save looks at thousands of tensors, the GPU may have nothing to do. Nearly always it finds what it found
before: the same modules with the same parameters, the same optimizer with the same entries, each at the same place in
memory. To see that takes a fraction of the time. Values that are no tensors (learning rates, counters) are always read
again, every object's `state_dict` is called once a save at most, and at the least difference everything is described
again. Objects are known by their ids alone: nothing is kept alive, and an id that another object has got since does no
harm, since all that is told of a tensor is compared too. Needs torch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
from torch.optim.swa_utils import AveragedModel

from ..format.manifest import stored_name
from ..format.sharding import is_plain
from ..format.values import flatten
from .state import (
    Captured,
    bare,
    described,
    expand,
    is_leaf,
    is_tensor,
    shown_by_optimizer,
    shows_its_own,
    torchs_own,
)

_GIVE_UP = 3
_AGAIN = 64
"""After so many saves in a row that were not recognised it is tried only now and then: learning takes time too."""


class Capturer:
    """`capture` for a training that saves one state many times."""

    def __init__(self) -> None:
        self._known: _Known | None = None
        self._missed = 0
        self._guard = threading.Lock()

    def capture(self, state: Mapping[str, Any]) -> Captured:
        """What `capture(state)` gives. Raises UnsaveableState."""
        with self._guard:
            known = self._known
            optimized: set[int] = set()
            if known is not None and known.fits(state):
                looked = known.part.look(state, optimized)
                try:
                    found = known.again(state, looked, set(optimized))
                    self._missed = 0
                    return found
                except Exception:  # noqa: BLE001  whatever it was: it is not what it was
                    expanded = known.part.rest(state, looked, optimized)
            else:
                expanded = expand(state, optimized)
            self._known = None
            captured = described(expanded, optimized)
            self._missed += 1
            if self._missed <= _GIVE_UP or self._missed % _AGAIN == 0:
                try:
                    self._known = _Known(state, expanded, captured, optimized)
                except Exception:  # noqa: BLE001  it is only not learnt
                    self._known = None
            return captured


class _Unknown(Exception):
    """Something that is not worth learning, or is not what was learnt."""


def _ids(found: Iterable[Any]) -> list[int]:
    return [id(x) for x in found]


class _Part(Protocol):
    """A part of a state, as it was."""

    def fits(self, value: Any) -> bool:
        """Whether it is worth a look; calls nothing of the value's."""
        ...

    def look(self, value: Any, optimized: set[int]) -> Any:
        """The part expanded, as far as that calls code of others: once a save, in the state's order."""
        ...

    def rest(self, value: Any, looked: Any, optimized: set[int]) -> Any:
        """The part expanded, given what `look` gave."""
        ...

    def again(self, value: Any, looked: Any, optimized: set[int], tensors: list[Any]) -> Any:
        """Its tree; its tensors are added in their order. Raises if it is not as it was."""
        ...


class _Known:
    """What there was at the last capture, to compare with what is there now."""

    def __init__(
        self, state: Mapping[str, Any], expanded: Any, captured: Captured, optimized: set[int]
    ) -> None:
        if captured.notes["arrays"] or any("~" in n for n in captured.live):
            raise _Unknown
        self.places = [_Place(n, t, captured, optimized) for n, t in captured.live.items()]
        self.ids = _ids(captured.live.values())
        tensors: list[Any] = []
        self.part = _learn(state, expanded, captured.tree, (), tensors)
        if type(self.part) is _Other or _ids(tensors) != self.ids:
            raise _Unknown
        self.captured = replace(captured, pieces={}, live={}, known_signature=captured.signature())
        """Without the tensors."""

    def fits(self, state: Mapping[str, Any]) -> bool:
        return self.part.fits(state)

    def again(self, state: Mapping[str, Any], looked: Any, optimized: set[int]) -> Captured:
        """The state as it is now. Raises if a tensor is another one, or elsewhere."""
        tensors: list[Any] = []
        tree = self.part.again(state, looked, optimized, tensors)
        if _ids(tensors) != self.ids:
            raise _Unknown
        live, pieces = {}, {}
        for place, tensor in zip(self.places, tensors, strict=True):
            local = place.again(tensor, optimized)
            live[place.name] = tensor
            if place.stored:
                # A copy on a GPU ends after the call: what the tensor is made to show in between is not what it reads.
                pieces[place.stored] = local.detach() if local.is_cuda else local
        return replace(self.captured, pieces=pieces, live=live, tree=tree)


class _Place:
    """One tensor's name, and where it lay."""

    __slots__ = (
        "address", "asks", "device", "dtype", "name", "optimized", "shape", "spec", "stored", "stride",
    )  # fmt: skip

    def __init__(self, name: str, t: torch.Tensor, captured: Captured, optimized: set[int]) -> None:
        self.name = name
        self.stored = "" if name in captured.aliases else stored_name(name, 0)
        if self.stored and (self.stored not in captured.pieces or stored_name(name, 1) in captured.pieces):
            raise _Unknown  # in several pieces, or none
        self.spec = getattr(t, "_spec", None)
        local = _local(t, self.spec)
        self.address, self.device = local.data_ptr(), local.device
        self.shape, self.stride, self.dtype = local.shape, local.stride(), local.dtype
        self.asks = t.requires_grad
        self.optimized = id(t) in optimized

    def again(self, t: Any, optimized: set[int]) -> torch.Tensor:
        """Its local memory. Raises _Unknown."""
        local = _local(t, self.spec)
        if (
            t.requires_grad is not self.asks
            or (id(t) in optimized) is not self.optimized
            or local.data_ptr() != self.address
            or local.device != self.device
            or local.dtype is not self.dtype
            or local.shape != self.shape
            or local.stride() != self.stride
        ):
            raise _Unknown
        return local


def _local(t: Any, spec: Any) -> torch.Tensor:
    if spec is None:
        if not is_plain(t):
            raise _Unknown
        return cast(torch.Tensor, t)
    if getattr(t, "_spec", None) is not spec or not is_plain(local := t._local_tensor):
        raise _Unknown
    return cast(torch.Tensor, local)


def _learn(value: Any, expanded: Any, tree: Any, path: tuple[str, ...], tensors: list[Any]) -> _Part:
    """The part at this path; its tensors are added."""
    if isinstance(value, torch.nn.Module):
        named = list(value.named_modules(remove_duplicate=False))
        if all(shows_its_own(m) and _only_torchs_hooks(m) for _, m in named):
            return _Modules(named, tree, path, tensors)
    elif isinstance(value, torch.optim.Optimizer):
        if _plain_dict(expanded) and _plain_dict(tree) and type(expanded.get("state")) is dict:
            return _Optimizer(value, expanded, tree, path, tensors)
    elif (_plain_dict(value) or type(value) is list) and _holds_objects(value):
        return _Several(value, expanded, tree, path, tensors)
    return _Other(expanded, path, tensors)


def _plain_dict(value: Any) -> bool:
    return type(value) is dict and bool(value) and "$" not in value and all(type(k) is str for k in value)


def _holds_objects(value: Any, depth: int = 0) -> bool:
    """Whether there is a module or an optimizer in it, at any depth that is usual."""
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        return True
    inner = _items(value) if type(value) in (dict, list) else ()
    return depth < 5 and any(_holds_objects(x, depth + 1) for _, x in inner)


class _Several:
    """A dictionary or a list with modules or optimizers in it."""

    def __init__(
        self, value: Any, expanded: Any, tree: Any, path: tuple[str, ...], tensors: list[Any]
    ) -> None:
        self.kind = type(value)
        self.parts = {k: _learn(x, expanded[k], tree[k], (*path, str(k)), tensors) for k, x in _items(value)}

    def _made(self, found: dict[Any, Any]) -> Any:
        return found if self.kind is dict else list(found.values())

    def fits(self, value: Any) -> bool:
        return (
            type(value) is self.kind
            and [k for k, _ in _items(value)] == list(self.parts)
            and all(part.fits(value[k]) for k, part in self.parts.items())
        )

    def look(self, value: Any, optimized: set[int]) -> Any:
        return self._made({k: part.look(value[k], optimized) for k, part in self.parts.items()})

    def rest(self, value: Any, looked: Any, optimized: set[int]) -> Any:
        return self._made({k: part.rest(value[k], looked[k], optimized) for k, part in self.parts.items()})

    def again(self, value: Any, looked: Any, optimized: set[int], tensors: list[Any]) -> Any:
        return self._made(
            {k: part.again(value[k], looked[k], optimized, tensors) for k, part in self.parts.items()}
        )


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    return value.items() if type(value) is dict else enumerate(value)


def _only_torchs_hooks(m: torch.nn.Module) -> bool:
    """Whether nobody but torch (FSDP, to take back what a forward pass left gathered) is told before a state dict."""
    return all(
        str(getattr(hook, "__module__", "")).startswith("torch.distributed.")
        for hook in m._state_dict_pre_hooks.values()
    )


class _Modules:
    """A module and all in it, whose state dict is nothing but their parameters and buffers."""

    def __init__(
        self,
        named: list[tuple[str, torch.nn.Module]],
        tree: Any,
        path: tuple[str, ...],
        tensors: list[Any],
    ) -> None:
        self.tree, self.path, self.depth = tree, ".".join(path), len(path)
        self.kinds = {type(m) for _, m in named}
        averages = [m for _, m in named if isinstance(m, AveragedModel)]
        self.averages = frozenset(id(p) for m in averages for p in m.parameters())
        self.known = [_Module(f"{name}." if name else "", m) for name, m in named]
        for (_, m), known in zip(named, self.known, strict=True):
            known.add(m, tensors)

    def fits(self, value: Any) -> bool:
        return id(value) == self.known[0].id and isinstance(value, torch.nn.Module)

    def look(self, value: Any, optimized: set[int]) -> Any:
        return None  # no code of others is in it

    def rest(self, value: Any, looked: Any, optimized: set[int]) -> Any:
        return expand(value, optimized, self.path, self.depth)

    def again(self, value: Any, looked: Any, optimized: set[int], tensors: list[Any]) -> Any:
        if not all(map(torchs_own, self.kinds)):
            raise _Unknown
        modules: list[torch.nn.Module] = []
        _walk(value, modules)
        if len(modules) != len(self.known):
            raise _Unknown
        for known, m in zip(self.known, modules, strict=True):
            known.check(m)
        for known, m in zip(self.known, modules, strict=True):
            for hook in m._state_dict_pre_hooks.values():
                hook(m, known.prefix, True)
        for known, m in zip(self.known, modules, strict=True):
            known.check_held(m)
            known.add(m, tensors)
            for p in vars(m)["_parameters"].values():
                if p is not None and p.requires_grad and id(p) not in self.averages:
                    optimized.add(id(p))
        return self.tree


def _walk(m: torch.nn.Module, found: list[torch.nn.Module]) -> None:
    """As `named_modules(remove_duplicate=False)`, in its order."""
    found.append(m)
    for child in vars(m)["_modules"].values():
        if child is not None:
            _walk(child, found)


class _Module:
    __slots__ = ("held", "id", "kind", "names", "prefix", "silent")

    def __init__(self, prefix: str, m: torch.nn.Module) -> None:
        self.prefix, self.id, self.kind = prefix, id(m), type(m)
        held = _held_by(m)
        self.names = [list(h) for h in held]
        self.held = [_ids(h.values()) for h in held]
        self.silent = frozenset(m._non_persistent_buffers_set)

    def add(self, m: torch.nn.Module, tensors: list[Any]) -> None:
        """What a state dict shows of it, in its order."""
        parameters, buffers, _ = _held_by(m)
        tensors += [p for p in parameters.values() if p is not None]
        if buffers:
            tensors += [b for n, b in buffers.items() if b is not None and n not in self.silent]

    def check(self, m: torch.nn.Module) -> None:
        """Before anything is called. Raises _Unknown."""
        if (
            id(m) != self.id
            or type(m) is not self.kind
            or not bare(m)
            or m._non_persistent_buffers_set != self.silent
            or (m._state_dict_pre_hooks and not _only_torchs_hooks(m))
        ):
            raise _Unknown

    def check_held(self, m: torch.nn.Module) -> None:
        """After what comes before a state dict. Raises _Unknown."""
        for names, ids, now in zip(self.names, self.held, _held_by(m), strict=True):
            if (now or names) and (list(now) != names or _ids(now.values()) != ids):
                raise _Unknown


def _held_by(m: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    held = vars(m)
    return held["_parameters"], held["_buffers"], held["_modules"]


class _Optimizer:
    """An optimizer whose state is tensors by parameter; its groups are read again each time."""

    def __init__(
        self, o: torch.optim.Optimizer, expanded: Any, tree: Any, path: tuple[str, ...], tensors: list[Any]
    ) -> None:
        self.id, self.path, self.depth = id(o), ".".join(path), len(path)
        self.order = list(expanded)
        self.state_tree = tree["state"]
        self.entries: list[tuple[Any, list[str], list[int]]] = []
        self.others: dict[str, _Other] = {}
        for key, inner in expanded.items():
            if key != "state":
                self.others[key] = _Other(inner, (*path, key), tensors)
                continue
            for number, entry in inner.items():
                if type(entry) is not dict or not all(
                    type(k) is str and is_tensor(x) for k, x in entry.items()
                ):
                    raise _Unknown
                self.entries.append((number, list(entry), _ids(entry.values())))
                tensors += entry.values()

    def fits(self, value: Any) -> bool:
        return id(value) == self.id and isinstance(value, torch.optim.Optimizer)

    def look(self, value: Any, optimized: set[int]) -> Any:
        shown = shown_by_optimizer(value, optimized)
        if type(shown) is not dict:
            return expand(shown, optimized, self.path, self.depth)
        return {k: x if k == "state" else self._expanded(k, x, optimized) for k, x in shown.items()}

    def _expanded(self, key: str, value: Any, optimized: set[int]) -> Any:
        return expand(value, optimized, f"{self.path}.{key}", self.depth + 1)

    def rest(self, value: Any, looked: Any, optimized: set[int]) -> Any:
        if type(looked) is not dict:
            return looked
        return {k: self._expanded(k, x, optimized) if k == "state" else x for k, x in looked.items()}

    def again(self, value: Any, looked: Any, optimized: set[int], tensors: list[Any]) -> Any:
        if type(looked) is not dict or list(looked) != self.order:
            raise _Unknown
        tree: dict[str, Any] = {}
        for key, inner in looked.items():
            if key != "state":
                tree[key] = self.others[key].again(inner, inner, optimized, tensors)
                continue
            if type(inner) is not dict or len(inner) != len(self.entries):
                raise _Unknown
            for (number, entry), (known, names, ids) in zip(inner.items(), self.entries, strict=True):
                if number != known or type(number) is not type(known) or type(entry) is not dict:
                    raise _Unknown
                if list(entry) != names or _ids(entry.values()) != ids:
                    raise _Unknown
                tensors += entry.values()
            tree[key] = self.state_tree
        return tree


class _Other:
    """Anything else: looked at again each time; its tensors must be the same."""

    def __init__(self, expanded: Any, path: tuple[str, ...], tensors: list[Any]) -> None:
        self.path = path
        found, _ = flatten(expanded, is_leaf, path)
        self.names = list(found)
        tensors += found.values()

    def fits(self, value: Any) -> bool:
        return True

    def look(self, value: Any, optimized: set[int]) -> Any:
        return expand(value, optimized, ".".join(self.path), len(self.path))

    def rest(self, value: Any, looked: Any, optimized: set[int]) -> Any:
        return looked

    def again(self, value: Any, looked: Any, optimized: set[int], tensors: list[Any]) -> Any:
        found, tree = flatten(looked, is_leaf, self.path)
        if list(found) != self.names:
            raise _Unknown
        tensors += found.values()
        return tree
