"""Options that several commands share: the fields of one dataclass, which a command takes as its parameter `asked`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints

Command = Callable[..., None]


def takes(shared: type) -> Callable[[Command], Command]:
    """Makes a command with a parameter `asked` of this dataclass one with each field of it as an option.

    The default of a field is its option; what typer reads is the signature that is made here.
    """
    types = get_type_hints(shared)
    options = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=types[f.name])
        for f in fields(shared)
    ]

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True)
        parameters = [*(p for p in own.parameters.values() if p.name != "asked"), *options]

        @functools.wraps(command)
        def called(**given: Any) -> None:
            asked = shared(**{p.name: given.pop(p.name) for p in options})
            command(**given, asked=asked)

        called.__annotations__ = {p.name: p.annotation for p in parameters}
        called.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return called

    return decorate
