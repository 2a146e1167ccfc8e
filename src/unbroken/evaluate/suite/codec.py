"""Frozen dataclasses to JSON and back, with the types checked and unknown keys named.

decode(Task, {"name": "arc_easy", "shots": 5}, where="suite.toml") -> Task(...)
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from ...errors import InputError, UnknownKey
from ..contracts import Json

T = TypeVar("T")


def encode(value: Any) -> Json:
    """Plain JSON of a dataclass, tuple, mapping or scalar."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, list | tuple | range):
        return [encode(v) for v in value]
    return str(value) if isinstance(value, Path) else value


def decode(cls: type[T], value: Json, *, where: str = "") -> T:
    """A dataclass from plain JSON. Raises UnknownKey, or InputError that names the field."""
    return cast(T, _decode(cls, value, where))


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _decode(kind: Any, value: Json, where: str) -> Any:
    if kind is Any:
        return value
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(kind):
            return None
        chosen = [a for a in get_args(kind) if a is not type(None)]
        if chosen == [int, float] and isinstance(value, float):
            return _decode(float, value, where)
        return _decode(chosen[0], value, where)
    if origin in (tuple, list) or origin is Sequence:
        if not isinstance(value, list | tuple):
            raise _wrong(where, "a list", value)
        kinds = get_args(kind)
        if origin is tuple and len(kinds) > 1 and kinds[-1] is not Ellipsis:
            if len(value) != len(kinds):
                raise _wrong(where, f"{len(kinds)} values", value)
            return tuple(
                _decode(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True))
            )
        return tuple(_decode(get_args(kind)[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin in (dict, Mapping) or origin is typing.Mapping:
        if not isinstance(value, Mapping):
            raise _wrong(where, "a table", value)
        return {k: _decode(get_args(kind)[1], v, f"{where}.{k}") for k, v in value.items()}
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(cast(type, kind), value, where)
    return _scalar(kind, value, where)


def _decode_dataclass(cls: type, value: Json, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise _wrong(where, "a table", value)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in value:
        if key not in fields:
            raise UnknownKey(key, fields, where=where)
    missing = [
        n for n, f in fields.items()
        if n not in value and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]  # fmt: skip
    if missing:
        raise InputError(f"'{missing[0]}' is missing", where=where, todo=f"Give every {cls.__name__} one")
    hints = _hints(cls)
    return cls(**{k: _decode(hints[k], v, f"{where}.{k}" if where else k) for k, v in value.items()})


def _scalar(kind: Any, value: Json, where: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise _wrong(where, "a number that fits", value) from None
    if isinstance(kind, type) and (
        not isinstance(value, kind) or (kind is not bool and isinstance(value, bool))
    ):
        raise _wrong(
            where,
            {str: "text", int: "a whole number", float: "a number", bool: "true or false"}.get(
                kind, kind.__name__
            ),
            value,
        )
    return value


def _wrong(where: str, wanted: str, value: Json) -> InputError:
    shown = repr(value)
    shown = shown if len(shown) <= 300 else shown[:300] + " ..."
    return InputError(
        f"expected {wanted}, found {shown}", where=where, todo="Correct it and run the same command"
    )
