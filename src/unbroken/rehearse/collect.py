"""What a training holds, by name: found in the frames of its loop and among the live objects. Needs torch."""

from __future__ import annotations

import gc
import sys
import sysconfig
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..data.digest import digest

_LIBRARIES = tuple(
    str(Path(p).resolve()) for p in {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
)  # fmt: skip
_OURS = str(Path(__file__).resolve().parents[1])
_PLAIN = (bool, int, float, str, type(None))


def short(value: Any) -> str:
    """A digest as it stands in a trace."""
    return f"{digest(value):016x}"


def user_frames(frame: FrameType | None = None) -> list[FrameType]:
    """The frames of the script, innermost first: not those of libraries, and not ours."""
    at = frame or sys._getframe(1)
    found = []
    while at is not None:
        name = at.f_code.co_filename
        if not name.startswith("<") and not is_library(name):
            found.append(at)
        at = at.f_back  # type: ignore[assignment]
    return found


_known: dict[str, bool] = {}


def is_library(name: str) -> bool:
    """Whether this file of code is a library's or ours, not the script's."""
    if name not in _known:
        path = str(Path(name).resolve())
        _known[name] = path.startswith(_OURS) or path.startswith(_LIBRARIES)
    return _known[name]


class Collector:
    """Finds and names what belongs to the state of a training."""

    def __init__(self) -> None:
        self._found: list[weakref.ref[Any]] = []
        self._scans = 0
        self._names: dict[int, str] = {}

    def scan(self, frames: list[FrameType]) -> list[Any]:
        """Modules that are in no other, schedulers and scalers; new ones are looked for in the first steps, and then rarely."""
        self._name(frames)
        self._scans += 1
        if self._scans <= 2 or self._scans % 64 == 0:
            live = [o for o in gc.get_objects() if _is_wanted(type(o))]
            inner = {id(c) for o in live if isinstance(o, torch.nn.Module) for c in o.modules() if c is not o}
            self._found = [weakref.ref(o) for o in live if id(o) not in inner]
        return [o for r in self._found if (o := r()) is not None]

    def name(self, value: Any) -> str:
        """The variable that holds it, or its class."""
        return self._names.get(id(value)) or type(value).__name__

    def _name(self, frames: list[FrameType]) -> None:
        self._names = {}
        for frame in frames:
            for name, value in _variables(frame):
                self._names.setdefault(id(value), name)
                if (
                    not isinstance(value, _PLAIN)
                    and hasattr(value, "__dict__")
                    and not isinstance(value, torch.nn.Module | type)
                ):
                    for inner, x in list(vars(value).items()):
                        self._names.setdefault(id(x), f"{name}.{inner}")

    def state(
        self, frames: list[FrameType], optimizers: list[torch.optim.Optimizer]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """(digests of the state by name, settings of its modules)."""
        state: dict[str, str] = {}
        settings: dict[str, str] = {}
        trained = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
        names: dict[int, str] = {}
        for found in self.scan(frames):
            if isinstance(found, torch.nn.Module):
                self._module(found, trained, names, state, settings)
            elif isinstance(found, LRScheduler):
                for key, value in found.state_dict().items():
                    if isinstance(value, (*_PLAIN, list, tuple, dict)):
                        state[f"scheduler {self.name(found)}.{key}"] = _plain(value)
            else:
                state[f"scaler {self.name(found)}"] = short(found.state_dict())
        for n, optimizer in enumerate(optimizers):
            self._optimizer(optimizer, n, len(optimizers), names, state)
        self._copies(frames, trained, optimizers, state)
        return state, settings

    def _module(
        self, module: torch.nn.Module, trained: set[int], names: dict[int, str], state: dict[str, str],
        settings: dict[str, str],
    ) -> None:  # fmt: skip
        tensors: list[tuple[str, torch.Tensor, str]] = [
            (n, p, "parameter") for n, p in module.named_parameters()
        ]
        mine = any(id(p) in trained for _, p, _ in tensors)
        tensors += [(n, b, "buffer") for n, b in module.named_buffers()]
        if not tensors:
            return
        of = "" if mine else f"of {self.name(module)}, "
        for name, tensor, kind in tensors:
            name = name.removeprefix("module.")
            if mine:
                names[id(tensor)] = name
            what = kind if mine else f"copy {of}{kind}" if trained else f"{self.name(module)}, {kind}"
            state[f"{what} {name}"] = short(tensor)
        for path, inner in module.named_modules():
            path = path.removeprefix("module").removeprefix(".")
            for key, value in vars(inner).items():
                if isinstance(value, bool | int | float | str) and not key.startswith("_"):
                    settings[f"{of}{path + '.' if path else ''}{key}"] = repr(value)

    def _optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        number: int,
        of: int,
        names: dict[int, str],
        state: dict[str, str],
    ) -> None:
        prefix = f"optimizer{'' if of == 1 else f' {number}'}"
        for g, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    state[f"{prefix} {key} of group {g}"] = _plain(value)
            for k, p in enumerate(group["params"]):
                name = names.get(id(p), f"parameter {k} of group {g}")
                held = optimizer.state.get(p)
                for key, value in held.items() if isinstance(held, Mapping) else ():
                    state[f"{prefix} {key} of {name}"] = short(value)

    def _copies(
        self,
        frames: list[FrameType],
        trained: set[int],
        optimizers: list[torch.optim.Optimizer],
        state: dict[str, str],
    ) -> None:
        """Averages of the weights that somebody keeps in a dict, a list or an object of his own: as many tensors as
        there are parameters, of the same shapes."""
        shapes = sorted(tuple(p.shape) for o in optimizers for g in o.param_groups for p in g["params"])
        seen: set[int] = set()
        for frame in frames:
            for name, value in _variables(frame):
                for path, tensors in _bundles(name, value):
                    ids = [id(t) for _, t in tensors]
                    if set(ids) & trained or ids[0] in seen:
                        continue
                    if sorted(tuple(t.shape) for _, t in tensors) == shapes:
                        seen.update(ids)
                        for key, t in tensors:
                            state[f"copy {path}[{key}]"] = short(t)

    def learnt(self, frames: list[FrameType]) -> dict[str, str]:
        """Tensors of the loop that are learnt and are in no module, for a script without an optimizer of torch."""
        found: dict[str, str] = {}
        for frame in frames:
            for name, value in _variables(frame):
                tensors = [("", value)] if isinstance(value, torch.Tensor) else []
                for path, bundle in [(name, tensors)] if tensors else _bundles(name, value):
                    for key, t in bundle:
                        if t.requires_grad and t.is_leaf:
                            found.setdefault(
                                f"parameter {path}[{key}]" if key else f"parameter {path}", short(t)
                            )
        return found

    def variables(self, frames: list[FrameType]) -> dict[str, str]:
        """Plain values of the loop."""
        found: dict[str, str] = {}
        for frame in frames:
            for name, value in _variables(frame):
                if (
                    isinstance(value, bool | int | float | str)
                    and name not in found
                    and len(repr(value)) < 80
                ):
                    found[name] = repr(value)
        return found


_wanted: dict[type, bool] = {}


def _is_wanted(kind: type) -> bool:
    """Asked of each of a million objects, so remembered by type."""
    known = _wanted.get(kind)
    if known is None:
        known = _wanted[kind] = issubclass(kind, torch.nn.Module | LRScheduler | torch.amp.GradScaler)
    return known


def _variables(frame: FrameType) -> list[tuple[str, Any]]:
    places = [frame.f_locals] if frame.f_locals is frame.f_globals else [frame.f_locals, frame.f_globals]
    return [
        (n, v) for p in places for n, v in list(p.items())
        if not n.startswith("__") and not isinstance(v, ModuleType | FunctionType | BuiltinFunctionType | type)
    ]  # fmt: skip


def _bundles(name: str, value: Any) -> Iterator[tuple[str, list[tuple[str, torch.Tensor]]]]:
    """(path, tensors) of a container of tensors, or of an object that holds one."""
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer | torch.Tensor | type):
        return
    for path, held in ((name, value), *_held_by(name, value)):
        if isinstance(held, Mapping):
            items = [(str(k), x) for k, x in list(held.items())]
        elif isinstance(held, list | tuple):
            items = [(str(i), x) for i, x in enumerate(held)]
        else:
            continue
        tensors = [(k, x) for k, x in items if isinstance(x, torch.Tensor)]
        if tensors and len(tensors) == len(items):
            yield path, tensors


def _held_by(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, (*_PLAIN, Mapping, list, tuple)) or not hasattr(value, "__dict__"):
        return []
    return [(f"{name}.{k}", v) for k, v in list(vars(value).items())]


def _plain(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 and not isinstance(value, torch.Tensor) else short(value)
