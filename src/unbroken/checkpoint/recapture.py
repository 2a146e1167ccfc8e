"""Capturing the same state again and again: what has not changed since the last save is recognised, not described anew.

While a save looks at thousands of tensors, the GPU may have nothing to do. Nearly always it finds what it found
before: the same modules with the same parameters, the same optimizer with the same entries, each at the same place in
memory. To see that takes a sixth of the time. Values that are no tensors (learning rates, counters) are always read
anew, and at the least difference everything is. Holds no tensor: what the training lets go of is free. Needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast
from weakref import ref

import torch

from .manifest import stored_name
from .sharding import is_plain
from .state import Captured, capture, expand_plain, is_leaf, is_tensor
from .values import flatten

Ref = Callable[[], Any]
_GIVE_UP = 3
"""After so many saves in a row of which none was like the one before, learning is a waste."""


class Capturer:
    """`capture` for a training that saves one state many times. Not for several threads at once."""

    def __init__(self) -> None:
        self._known: _Known | None = None
        self._missed = 0

    def capture(self, state: Mapping[str, Any]) -> Captured:
        """What `capture(state)` gives. Raises UnsaveableState."""
        if self._known is not None:
            if (found := self._known.again(state)) is not None:
                self._missed = 0
                return found
            self._missed += 1
        self._known = None  # also where the next line raises
        captured = capture(state)
        if self._missed < _GIVE_UP:
            self._known = _learn(state, captured)
        return captured


class _Unknown(Exception):
    """Something that is not worth learning, or is not what was learnt."""


def _learn(state: Mapping[str, Any], captured: Captured) -> _Known | None:
    try:
        return _Known(state, captured)
    except _Unknown:
        return None


def _same(refs: Iterable[Ref], found: Iterable[Any]) -> bool:
    """Whether these are the very objects; both have the same number."""
    return all(r() is x for r, x in zip(refs, found, strict=True))


def _no_object() -> None:
    return None


def _refer(x: Any) -> Ref:
    return _no_object if x is None else ref(x)


class _Known:
    """What there was at the last capture, to compare with what is there now."""

    def __init__(self, state: Mapping[str, Any], captured: Captured) -> None:
        if (
            type(state) is not dict
            or not all(type(key) is str and key != "$" for key in state)
            or captured.notes["arrays"]
            or any("~" in n for n in captured.live)
        ):
            raise _Unknown
        self.names = list(captured.live)
        self.leaves = [_Place(n, t, captured) for n, t in captured.live.items()]
        self.captured = replace(captured, pieces={}, live={}, known_signature=captured.signature())
        """Without the tensors."""
        self.parts: dict[str, _Modules | _Optimizer | _Rest] = {}
        for key, value in state.items():
            tree = captured.tree[key]
            if isinstance(value, torch.nn.Module):
                self.parts[key] = _Modules(value, tree)
            elif isinstance(value, torch.optim.Optimizer):
                self.parts[key] = _Optimizer(key, value, tree)
            else:
                self.parts[key] = _Rest(key, value)

    def again(self, state: Mapping[str, Any]) -> Captured | None:
        """The state as it is now, if all tensors are those of the last time; else None."""
        if type(state) is not dict or list(state) != list(self.parts):
            return None
        try:
            tree = {key: part.again(state[key]) for key, part in self.parts.items()}
            live, pieces = {}, {}
            for leaf in self.leaves:
                tensor = leaf.tensor()
                local = leaf.again(tensor)
                live[leaf.name] = tensor
                if leaf.stored:
                    # A copy on a GPU ends after the call: what the tensor is made to show in between is not what it reads.
                    pieces[leaf.stored] = local.detach() if local.is_cuda else local
        except (_Unknown, RuntimeError):  # the latter: memory that is no longer plain
            return None
        return replace(self.captured, pieces=pieces, live=live, tree=tree)


class _Place:
    """One tensor, and where it lay."""

    __slots__ = ("address", "asks", "device", "dtype", "name", "shape", "spec", "stored", "stride", "tensor")

    def __init__(self, name: str, t: torch.Tensor, captured: Captured) -> None:
        self.name = name
        self.stored = "" if name in captured.aliases else stored_name(name, 0)
        if self.stored and (self.stored not in captured.pieces or stored_name(name, 1) in captured.pieces):
            raise _Unknown  # in several pieces, or none
        self.tensor: Ref = ref(t)
        self.spec = getattr(t, "_spec", None)
        local = _local(t, self.spec)
        self.address, self.device = local.data_ptr(), local.device
        self.shape, self.stride, self.dtype = local.shape, local.stride(), local.dtype
        self.asks = t.requires_grad

    def again(self, t: Any) -> torch.Tensor:
        """Its local memory. Raises _Unknown."""
        if t is None or t.requires_grad is not self.asks:
            raise _Unknown
        local = _local(t, self.spec)
        if (
            local.data_ptr() != self.address
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


_OWN = torch.nn.Module
_METHODS = (
    "state_dict", "parameters", "named_parameters", "_save_to_state_dict", "get_extra_state", "modules", "named_modules",
    "children", "named_children",
)  # fmt: skip


def _torchs_own(kind: type) -> bool:
    return all(getattr(kind, name) is getattr(_OWN, name) for name in _METHODS)


class _Modules:
    """A module and all in it, whose state dict is nothing but their parameters and buffers."""

    def __init__(self, root: torch.nn.Module, tree: Any) -> None:
        self.tree = tree
        named = list(root.named_modules())
        self.kinds = {type(m) for _, m in named}
        self.known = [_Module(f"{name}." if name else "", m) for name, m in named]
        self._check()

    def _check(self) -> None:
        if not all(map(_torchs_own, self.kinds)):
            raise _Unknown
        for m in self.known:
            m.before()
        for m in self.known:
            m.check()

    def again(self, root: Any) -> Any:
        if self.known[0].module() is not root:
            raise _Unknown
        self._check()
        return self.tree


class _Module:
    __slots__ = ("held", "kind", "module", "names", "prefix", "silent")

    def __init__(self, prefix: str, m: torch.nn.Module) -> None:
        self.module: Ref = ref(m)
        self.prefix = prefix
        self.kind = type(m)
        held = _held_by(m)
        self.names = [list(h) for h in held]
        self.held = [[_refer(x) for x in h.values()] for h in held]
        self.silent = frozenset(m._non_persistent_buffers_set)

    def before(self) -> None:
        """What `state_dict` does first: FSDP gathers nothing, but takes back here what a forward pass left gathered."""
        m = self.module()
        if m is None:
            raise _Unknown
        for hook in m._state_dict_pre_hooks.values():
            hook(m, self.prefix, True)

    def check(self) -> None:
        m = self.module()
        if m is None or type(m) is not self.kind:
            raise _Unknown
        held = vars(m)
        if (
            held["_state_dict_hooks"]
            or "state_dict" in held
            or held["_non_persistent_buffers_set"] != self.silent
        ):
            raise _Unknown
        for names, refs, now in zip(self.names, self.held, _held_by(m), strict=True):
            if (now or names) and (list(now) != names or not _same(refs, now.values())):
                raise _Unknown


def _held_by(m: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    held = vars(m)
    return held["_parameters"], held["_buffers"], held["_modules"]


class _Optimizer:
    """An optimizer whose state is tensors by parameter; its groups are read anew each time."""

    def __init__(self, key: str, o: torch.optim.Optimizer, tree: Any) -> None:
        self.optimizer: Ref = ref(o)
        self.parameters = [[ref(p) for p in g["params"]] for g in o.param_groups]
        inner = o.state_dict()
        if type(inner) is not dict or type(inner.get("state")) is not dict or type(tree) is not dict:
            raise _Unknown
        self.state_tree = tree["state"]
        self.entries = []
        for number, entry in inner["state"].items():
            if type(entry) is not dict or not all(type(k) is str and is_tensor(x) for k, x in entry.items()):
                raise _Unknown
            self.entries.append((number, list(entry), [ref(x) for x in entry.values()]))
        self.rest = {k: _Rest(f"{key}.{k}", v, (key, k)) for k, v in inner.items() if k != "state"}
        self.order = list(inner)

    def again(self, o: Any) -> Any:
        if o is None or self.optimizer() is not o:
            raise _Unknown
        groups = [g["params"] for g in o.param_groups]
        if [len(g) for g in groups] != [len(g) for g in self.parameters]:
            raise _Unknown
        inner = o.state_dict()
        if type(inner) is not dict or list(inner) != self.order or len(inner["state"]) != len(self.entries):
            raise _Unknown
        if not all(_same(r, g) for r, g in zip(self.parameters, groups, strict=True)):
            raise _Unknown
        for (number, entry), (known, names, refs) in zip(inner["state"].items(), self.entries, strict=True):
            if (
                number != known
                or type(entry) is not dict
                or list(entry) != names
                or not _same(refs, entry.values())
            ):
                raise _Unknown
        return {k: self.state_tree if k == "state" else self.rest[k].again(v) for k, v in inner.items()}


class _Rest:
    """Anything else: it is small, and looked at anew each time; its tensors must be the same."""

    def __init__(self, where: str, value: Any, path: tuple[str, ...] = ()) -> None:
        self.where, self.path = where, path or (where,)
        found, _ = self._look(value)
        self.names, self.refs = list(found), [ref(t) for t in found.values()]

    def _look(self, value: Any) -> tuple[dict[str, Any], Any]:
        expanded = expand_plain(value, self.where)
        if expanded is None and value is not None:
            raise _Unknown
        return flatten(expanded, is_leaf, self.path)

    def again(self, value: Any) -> Any:
        found, tree = self._look(value)
        if list(found) != self.names or not _same(self.refs, found.values()):
            raise _Unknown
        return tree
