"""What is asked of a cluster: `NAME[,option=value...]` of a command line, `[cluster]` of run.toml, and each cluster's options.

A cluster's options are one frozen dataclass, its class attribute `Options`: a default and a documenting text for every
field, checked when it is built. Fields may be text, whole numbers, numbers, true or false, `Duration`, `Bytes`, `Path`,
and a tuple of texts.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import UnknownKey, UsageError
from ..progress import ClusterChoice
from ..units import Bytes, Duration

T = TypeVar("T")
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """Of a cluster that takes none."""


def parse_choice(text: str) -> ClusterChoice:
    """What `--cluster` says. A word without `=` is one more value of the option before it (`hosts,hosts=a,b,c`), or an option
    that is true, straight after the name. Raises UsageError."""
    name, *words = text.split(",")
    options: dict[str, str] = {}
    last = ""
    for word in words:
        key, equals, value = word.partition("=")
        if equals:
            last = key.strip().replace("-", "_")
            if last in options:
                raise UsageError(f"--cluster gives '{last}' twice", where=text)
            options[last] = value
        elif last:
            options[last] += f",{word}"
        else:
            options[word.strip().replace("-", "_")] = "true"
    if not name.strip() or "" in options:
        raise UsageError(f"--cluster {text!r} names no cluster or an option without a name",
                         hint="Write it like: --cluster hosts,file=HOSTS")  # fmt: skip
    return ClusterChoice(name.strip(), options)


def make_options(kind: type[T], values: Mapping[str, Any], *, where: str) -> T:
    """The options of a cluster from texts or values. Raises UnknownKey (naming the nearest), UsageError."""
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            if not fields:
                raise UsageError(f"it has no option '{key}', nor any other", where=where)
            raise UnknownKey(key, fields, where=where, what="option")
    for key, field in fields.items():
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if needed and key not in values:
            raise UsageError(
                f"the option '{key}' is missing", where=where, hint=f"Write --cluster NAME,{key}=..."
            )
    hints = get_type_hints(kind)
    return kind(**{k: _read(hints[k], v, f"{where}, option '{k}'") for k, v in values.items()})


def _read(kind: Any, value: Any, where: str) -> Any:
    """A value as this kind, from the text of a command line or from TOML."""
    origin, kinds = get_origin(kind), [k for k in get_args(kind) if k is not type(None)]
    if origin in (Union, types.UnionType):
        return _read(kinds[0], value, where)
    if origin is tuple:
        return tuple(value.split(",")) if isinstance(value, str) else tuple(value)
    if kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _WORDS:
            return _WORDS[value.lower()]
        raise UsageError(f"expected yes or no, found {value!r}", where=where)
    if kind in (Duration, Bytes) and isinstance(value, str):
        try:
            return kind(value)
        except UsageError as e:
            raise UsageError(e.message, where=where, hint=e.hint) from e
    if isinstance(value, list | tuple | bool):
        raise UsageError(f"expected one value, found {value!r}", where=where)
    try:
        return (Path if kind is Path else kind)(value)
    except (TypeError, ValueError):
        names = {int: "a whole number", float: "a number"}
        raise UsageError(f"expected {names.get(kind, kind.__name__)}, found {value!r}", where=where) from None
