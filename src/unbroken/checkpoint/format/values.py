"""State as a tree: its tensors by name, and all the rest as plain JSON. Nothing is ever pickled or executed.

    tensors, skeleton = flatten({"model": {"w": t}, "lr": 0.1}, is_tensor)    tensors == {"model.w": t}
    unflatten(skeleton, tensors)                                             the same state, types included

What JSON does not know (tuples, keys that are no text, NaN, bytes, numpy, torch types) is an object with the key
"$". What cannot come back exactly is refused, with its path. No torch here.
"""

from __future__ import annotations

import base64
import datetime as dates
import math
import pathlib
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePath
from typing import Any

from ...errors import CheckpointCorrupt, UnsaveableState

_DEPTH = 100
_EMBEDDED = 16 * 2**20  # bytes of a numpy array or bytes object above which it should be a tensor
_FACTORIES: dict[str, Callable[[], Any]] = {
    "list": list,
    "dict": dict,
    "int": int,
    "float": float,
    "set": set,
    "str": str,
    "bool": bool,
    "tuple": tuple,
    "complex": complex,
    "Counter": Counter,
    "OrderedDict": OrderedDict,
    "deque": deque,
}
_ARRAYS = "biufcmMSU"
"""Kinds of numpy types that are plain bytes: numbers, times and fixed-length text; never objects."""
MAPPINGS = (dict, OrderedDict, Counter, defaultdict)
"""The mappings that come back exactly, their own kinds only."""


def flatten(
    state: object, is_tensor: Callable[[object], bool], path: tuple[str, ...] = ()
) -> tuple[dict[str, Any], Any]:
    """({name: tensor}, skeleton): names are the paths, joined by dots, made unique by a "~n" where two agree.

    `path` is where `state` itself lies in something larger.

    Raises UnsaveableState, naming the path, for a value that could not come back as it is.
    """
    tensors: dict[str, Any] = {}
    return tensors, _Flattener(tensors, is_tensor).encode(state, path, len(path))


def unflatten(skeleton: object, tensors: Mapping[str, Any], *, where: str = "state") -> Any:
    """The state of a skeleton, with its tensors taken from `tensors`. Raises CheckpointCorrupt."""
    try:
        return _decode(skeleton, tensors, where)
    except (
        KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError, ArithmeticError
    ) as e:  # fmt: skip
        raise CheckpointCorrupt(
            f"its values cannot be read: {type(e).__name__}: {e}"[:300], where=where
        ) from None


def tensor_names(skeleton: object) -> set[str]:
    """The names of the tensors that a skeleton asks for."""
    found: set[str] = set()
    waiting = [skeleton]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict) and node.get("$") == "tensor":
            found.add(str(node.get("name")))
        elif isinstance(node, dict):
            waiting += node.values()
    return found


def encode(value: object) -> Any:
    """The JSON of a value without tensors. Raises UnsaveableState."""
    return flatten(value, lambda _: False)[1]


def decode(value: object, *, where: str = "state") -> Any:
    """The value that `encode` took. Raises CheckpointCorrupt."""
    return unflatten(value, {}, where=where)


class _Flattener:
    def __init__(self, tensors: dict[str, Any], is_tensor: Callable[[object], bool]) -> None:
        self.tensors = tensors
        self.is_tensor = is_tensor

    def encode(self, v: Any, path: tuple[str, ...], depth: int) -> Any:
        kind: type = type(v)
        if depth > _DEPTH:
            raise UnsaveableState(".".join(path[:6]) + "...", "it is nested too deeply, or contains itself")
        if v is None or type(v) in (bool, str):
            return v if type(v) is not str else self._text(v, path)
        if type(v) is int:
            # Python reads no longer literals; no step counter is that long.
            return v if v.bit_length() < 4096 else self._refuse(v, path, "the number is too long")
        if type(v) is float:
            return v if math.isfinite(v) else {"$": "float", "v": repr(v)}
        if self.is_tensor(v):
            return {"$": "tensor", "name": self._name(v, path)}
        how = _SIMPLE.get(kind)
        if how is not None:
            return how(v)
        if kind in (bytes, bytearray):
            if len(v) > _EMBEDDED:
                self._refuse(v, path, f"{len(v)} bytes are too many outside of a tensor")
            return {"$": type(v).__name__, "v": base64.b64encode(v).decode()}
        if kind is slice:
            return {"$": "slice", "v": [self.encode(x, path, depth + 1) for x in (v.start, v.stop, v.step)]}
        return self._container(v, path, depth) or self._of_another_library(v, path)

    def _container(self, v: Any, path: tuple[str, ...], depth: int) -> Any:
        def inner(values: Any) -> list[Any]:
            return [self.encode(x, (*path, str(i)), depth + 1) for i, x in enumerate(values)]

        kind = type(v)
        if kind is list:
            # A list stands for itself, so an empty one has to be told from "not a container".
            return inner(v) or {"$": "list", "v": []}
        if kind is tuple:
            return {"$": "tuple", "v": inner(v)}
        if kind is deque:
            return {"$": "deque", "v": inner(v), "maxlen": v.maxlen}
        if kind in (set, frozenset):
            return {"$": kind.__name__, "v": inner(sorted(v, key=lambda x: (type(x).__name__, repr(x))))}
        if kind in MAPPINGS:
            pairs = [(k, self.encode(x, (*path, str(k)), depth + 1)) for k, x in v.items()]
            plain = all(type(k) is str for k in v) and "$" not in v
            if kind is dict and plain:
                return {self._text(k, path): x for k, x in pairs} or {"$": "dict", "v": []}
            tagged: dict[str, Any] = {"$": kind.__name__}
            tagged["v"] = [[self.encode(k, (*path, "key"), depth + 1), x] for k, x in pairs]
            if kind is defaultdict:
                name = getattr(v.default_factory, "__name__", "None")
                if v.default_factory is not None and _FACTORIES.get(name) is not v.default_factory:
                    self._refuse(v, path, f"its default factory is not one of {', '.join(_FACTORIES)}")
                tagged["factory"] = name
            return tagged
        return None

    def _of_another_library(self, v: Any, path: tuple[str, ...]) -> Any:
        kind = type(v)
        if isinstance(v, PurePath) and kind in _PATHS.values():
            tag = {"$": "path", "v": self._text(str(v), path)}
            return tag if kind is type(Path()) else {**tag, "kind": kind.__name__}
        if kind in (dates.datetime, dates.time, dates.timezone):
            zone = _zone_parts(v if kind is dates.timezone else v.tzinfo)
            if zone is False:
                self._refuse(v, path, "its time zone is not a fixed offset from UTC")
            if kind is dates.timezone:
                return {"$": "timezone", "zone": zone}
            parts = [v.hour, v.minute, v.second, v.microsecond]
            parts = [v.year, v.month, v.day, *parts] if kind is dates.datetime else parts
            return {"$": kind.__name__, "v": parts, "zone": zone, "fold": v.fold}
        module = kind.__module__.partition(".")[0]
        if module == "numpy":
            import numpy as np

            if isinstance(v, np.dtype) and v.names is None and v.kind in _ARRAYS and v.subdtype is None:
                return {"$": "numpy.dtype", "v": v.str}
            if type(v) is np.ndarray and v.dtype.kind in _ARRAYS:
                if v.nbytes > _EMBEDDED:
                    self._refuse(v, path, f"an array of {v.nbytes} bytes should be a tensor")
                data = base64.b64encode(np.ascontiguousarray(v).tobytes()).decode()
                return {"$": "ndarray", "dtype": v.dtype.str, "shape": list(v.shape), "v": data}
            if isinstance(v, np.generic) and v.dtype.kind in _ARRAYS and v.dtype.type is kind:
                return {"$": "numpy", "dtype": v.dtype.str, "v": base64.b64encode(v.tobytes()).decode()}
        if module == "torch":
            if kind.__name__ in ("dtype", "device", "memory_format", "layout"):
                return {"$": f"torch.{kind.__name__}", "v": str(v)}
            if kind.__name__ == "Size":
                return {"$": "torch.Size", "v": list(v)}
        return self._refuse(
            v, path, f"a {kind.__module__}.{kind.__qualname__} is neither a tensor nor plain data"
        )

    def _name(self, v: Any, path: tuple[str, ...]) -> str:
        base = ".".join(path) or "state"
        name, n = base, 0
        while name in self.tensors:
            n += 1
            name = f"{base}~{n}"
        self.tensors[name] = v
        return name

    def _text(self, v: str, path: tuple[str, ...]) -> str:
        if not v.isascii():
            try:
                v.encode()
            except UnicodeEncodeError:
                self._refuse(v, path, "the text is not valid Unicode")
        return v

    def _refuse(self, v: object, path: tuple[str, ...], why: str) -> Any:
        raise UnsaveableState(
            ascii(".".join(path))[1:-1] or "(the state itself)",
            why,
            hint="Leave it out, or save what it consists of: tensors, numbers, text, lists, dicts",
        )


_SIMPLE: dict[type, Callable[[Any], Any]] = {
    complex: lambda v: {"$": "complex", "v": [repr(v.real), repr(v.imag)]},
    range: lambda v: {"$": "range", "v": [v.start, v.stop, v.step]},
    type(...): lambda v: {"$": "ellipsis"},
    Decimal: lambda v: {"$": "Decimal", "v": str(v)},
    Fraction: lambda v: {"$": "Fraction", "v": [str(v.numerator), str(v.denominator)]},
    uuid.UUID: lambda v: {"$": "UUID", "v": str(v)},
    dates.date: lambda v: {"$": "date", "v": v.isoformat()},
    dates.timedelta: lambda v: {"$": "timedelta", "v": [v.days, v.seconds, v.microseconds]},
}
_PATHS = {
    k.__name__: k for k in (type(Path()), pathlib.PurePosixPath, pathlib.PureWindowsPath)
}  # fmt: skip


def _decode(v: Any, tensors: Mapping[str, Any], where: str) -> Any:
    if isinstance(v, list):
        return [_decode(x, tensors, where) for x in v]
    if not isinstance(v, dict):
        return v
    if "$" not in v:
        return {k: _decode(x, tensors, where) for k, x in v.items()}
    tag = v["$"]
    if tag == "tensor":
        return tensors[v["name"]]
    if tag in ("list", "tuple", "set", "frozenset"):
        kinds: dict[str, Callable[[Any], Any]] = {
            "list": list,
            "tuple": tuple,
            "set": set,
            "frozenset": frozenset,
        }
        return kinds[tag](_decode(x, tensors, where) for x in v["v"])
    if tag == "deque":
        return deque((_decode(x, tensors, where) for x in v["v"]), v["maxlen"])
    if tag == "slice":
        return slice(*(_decode(x, tensors, where) for x in v["v"]))
    if tag in ("dict", "OrderedDict", "Counter", "defaultdict"):
        pairs = [(_decode(k, tensors, where), _decode(x, tensors, where)) for k, x in v["v"]]
        if tag == "defaultdict":
            return defaultdict(None if v["factory"] == "None" else _FACTORIES[v["factory"]], pairs)
        return (
            Counter(dict(pairs))
            if tag == "Counter"
            else OrderedDict(pairs)
            if tag == "OrderedDict"
            else dict(pairs)
        )
    return _DECODE[tag](v)


def _array(v: Any) -> Any:
    import numpy as np

    dtype = np.dtype(v["dtype"])
    if dtype.kind not in _ARRAYS or dtype.names is not None:
        raise ValueError(f"arrays of {dtype} are not read")
    return np.frombuffer(base64.b64decode(v["v"]), dtype).reshape(v.get("shape", ())).copy()


def _numpy_dtype(text: str) -> Any:
    import numpy as np

    found = np.dtype(text)
    if found.kind not in _ARRAYS or found.names is not None:
        raise ValueError(f"the type {text} is not read")
    return found


def _zone(value: Any) -> dates.timezone | None:
    """[days, seconds, microseconds, name or null] of a fixed offset from UTC."""
    if value is None:
        return None
    offset = dates.timedelta(*value[:3])
    return dates.timezone(offset) if value[3] is None else dates.timezone(offset, value[3])


def _zone_parts(zone: Any) -> Any:
    """What `_zone` takes; False for a zone whose rules are not in it."""
    if zone is None:
        return None
    if type(zone) is not dates.timezone:
        return False
    offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
    return [offset.days, offset.seconds, offset.microseconds, name[0] if name else None]


def _torch(v: Any) -> Any:
    import torch

    kind, _, name = v["$"].partition(".")[2], None, str(v["v"])
    if kind == "device":
        return torch.device(name)
    found = getattr(torch, name.removeprefix("torch."))
    if type(found).__name__ != kind:
        raise ValueError(f"{name} is no {kind}")
    return found


def _size(v: Any) -> Any:
    import torch

    return torch.Size(v["v"])


_DECODE: dict[str, Callable[[Any], Any]] = {
    "float": lambda v: float(v["v"]),
    "complex": lambda v: complex(float(v["v"][0]), float(v["v"][1])),
    "range": lambda v: range(*v["v"]),
    "path": lambda v: _PATHS[v["kind"]](v["v"]) if "kind" in v else Path(v["v"]),
    "ellipsis": lambda v: ...,
    "Decimal": lambda v: Decimal(v["v"]),
    "Fraction": lambda v: Fraction(int(v["v"][0]), int(v["v"][1])),
    "UUID": lambda v: uuid.UUID(v["v"]),
    "date": lambda v: dates.date.fromisoformat(v["v"]),
    "datetime": lambda v: dates.datetime(*v["v"]).replace(tzinfo=_zone(v["zone"]), fold=v["fold"]),
    "time": lambda v: dates.time(*v["v"]).replace(tzinfo=_zone(v["zone"]), fold=v["fold"]),
    "timedelta": lambda v: dates.timedelta(*v["v"]),
    "timezone": lambda v: _zone(v["zone"]),
    "numpy.dtype": lambda v: _numpy_dtype(v["v"]),
    "bytes": lambda v: base64.b64decode(v["v"]),
    "bytearray": lambda v: bytearray(base64.b64decode(v["v"])),
    "ndarray": _array,
    "numpy": lambda v: _array(v)[()],
    "torch.dtype": _torch,
    "torch.device": _torch,
    "torch.memory_format": _torch,
    "torch.layout": _torch,
    "torch.Size": _size,
}
