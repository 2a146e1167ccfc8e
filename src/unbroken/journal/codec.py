"""Dataclasses to plain JSON and back: types are checked, missing and unknown keys are named.

    decode(Task, {"name": "arc_easy", "shots": 5}, where="suite.toml") -> Task(...)

`Annotated[int, check]` has the raw value looked at first: `check(value, name)` returns it, or raises a ValueError, which
is passed on. That is how what comes over a link is bounded (link/bounds.py has such checks).
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from ..errors import InputError, UnknownKey

T = TypeVar("T")
_PLAIN = (str, int, float, bool, type(None))


def encode(value: Any) -> Any:
    """Plain JSON of a dataclass, named tuple, mapping, sequence or scalar."""
    if type(value) in _PLAIN:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, list | tuple | range):
        return [encode(v) for v in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def decode(cls: type[T], value: Any, *, where: str = "", newer: bool = False) -> T:
    """A dataclass from plain JSON; with `newer`, keys that it does not know are passed over, as of a newer version.

    Raises UnknownKey, InputError that names the field, and what checks of annotated fields raise.
    """
    return cast(T, _Decoder(newer).decode(cls, value, where))


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


@cache
def _shape(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """Origin and arguments of a type, looked up once: thousands of agents say hello in the same second."""
    return get_origin(kind), get_args(kind)


@cache
def _fields_of(cls: type) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The type of each field that may be given, and the names of those that must be."""
    fields = [f for f in dataclasses.fields(cls) if f.init]
    nothing = dataclasses.MISSING
    must = tuple(f.name for f in fields if f.default is nothing and f.default_factory is nothing)
    return {f.name: _hints(cls)[f.name] for f in fields}, must


@dataclasses.dataclass(frozen=True)
class _Decoder:
    newer: bool

    def decode(self, kind: Any, value: Any, where: str) -> Any:
        """The value as this kind of thing."""
        if kind is Any:
            return value
        if type(value) is kind and kind in _PLAIN:
            return value
        origin, kinds = _shape(kind)
        if origin is Annotated:
            for check in kinds[1:]:
                value = check(value, where)
            return self.decode(kinds[0], value, where)
        if origin in (Union, types.UnionType):
            return self._one_of(kinds, value, where)
        if origin in (tuple, list) or origin is Sequence:
            return self._sequence(origin, kinds, value, where)
        if origin in (dict, Mapping) or origin is typing.Mapping:
            if not isinstance(value, Mapping):
                raise _wrong(where, "a table", value)
            return {
                _key(kinds[0], k, where): self.decode(kinds[1], v, f"{where}.{k}") for k, v in value.items()
            }
        if dataclasses.is_dataclass(kind):
            return self._fields(cast(type, kind), value, where)
        if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):  # a named tuple
            hints = _hints(kind)
            return kind(*self._sequence(tuple, tuple(hints[n] for n in kind._fields), value, where))
        return _scalar(kind, value, where)

    def _one_of(self, kinds: tuple[Any, ...], value: Any, where: str) -> Any:
        if value is None and type(None) in kinds:
            return None
        chosen = [a for a in kinds if a is not type(None)]
        if chosen == [int, float] and isinstance(value, float):
            return self.decode(float, value, where)
        return self.decode(chosen[0], value, where)

    def _sequence(self, origin: Any, kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise _wrong(where, "a list", value)
        if origin is tuple and kinds[-1] is not Ellipsis:
            if len(value) != len(kinds):
                raise _wrong(where, f"{len(kinds)} values", value)
        else:
            kinds = (kinds[0],) * len(value)
        return tuple(
            self.decode(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True))
        )

    def _fields(self, cls: type, value: Any, where: str) -> Any:
        if not isinstance(value, Mapping):
            raise _wrong(where, "a table", value)
        fields, must = _fields_of(cls)
        if not self.newer:
            for key in value:
                if key not in fields:
                    raise UnknownKey(key, fields, where=where)
        for name in must:
            if name not in value:
                raise InputError(f"'{name}' is missing", where=where, hint=f"Give every {cls.__name__} one")
        return cls(
            **{
                k: self.decode(fields[k], v, f"{where}.{k}" if where else k)
                for k, v in value.items()
                if k in fields
            }
        )


def _key(kind: Any, key: Any, where: str) -> Any:
    """The key of a table: JSON has texts only."""
    if kind is not int:
        return key
    try:
        return int(key)
    except (TypeError, ValueError):
        raise _wrong(where, "a whole number as key", key) from None


def _scalar(kind: Any, value: Any, where: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(value)
        except ValueError:
            raise _wrong(where, f"one of {', '.join(repr(m.value) for m in kind)}", value) from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise _wrong(where, "a number that fits", value) from None
    if isinstance(kind, type) and (
        not isinstance(value, kind) or (kind is not bool and isinstance(value, bool))
    ):
        names = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
        raise _wrong(where, names.get(kind, kind.__name__), value)
    return value


def _wrong(where: str, wanted: str, value: Any) -> InputError:
    shown = repr(value)
    shown = shown if len(shown) <= 300 else shown[:300] + " ..."
    return InputError(
        f"expected {wanted}, found {shown}", where=where, hint="Correct it and run the same command"
    )
