"""The expressions that secrets and names are found by: data in tokens.toml, wordings.toml and names.toml, with examples."""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Credentials of one family of issuers; tried where `begin` stands in the text."""

    id: str
    begin: re.Pattern[str]
    regex: re.Pattern[str]


@dataclass(frozen=True)
class Worded:
    """Credentials that the words around them give away: group `group` of `regex`, tried where the lower-case line has
    one of `needs`."""

    id: str
    needs: tuple[str, ...]
    regex: re.Pattern[str]
    group: int


@functools.cache
def shapes() -> tuple[Shape, ...]:
    """The shapes of tokens.toml."""
    return tuple(
        Shape(
            t["id"],
            re.compile("|".join(map(re.escape, t["starts"]))),
            re.compile(rf"(?<![A-Za-z0-9])(?:{t['regex']})"),
        )
        for t in table("tokens.toml")["token"]
    )


@functools.cache
def shared_shapes() -> tuple[re.Pattern[str], ...]:
    """The shapes of wordings.toml that many programs share; the last group is the secret, or all of it."""
    return tuple(re.compile(t["regex"]) for t in table("wordings.toml")["shared"])


@functools.cache
def worded() -> tuple[Worded, ...]:
    """The expressions of wordings.toml on what stands beside a secret."""
    return tuple(
        Worded(t["id"], tuple(t["needs"]), re.compile(t["regex"]), t["group"])
        for t in table("wordings.toml")["worded"]
    )


@functools.cache
def user_names() -> tuple[re.Pattern[str], ...]:
    """The expressions of names.toml on places where a user is named; group 1 is the name."""
    return tuple(re.compile(t["regex"]) for t in table("names.toml")["user"])


def table(name: str) -> dict[str, list[dict[str, Any]]]:
    """A file of expressions beside this one, as it stands there."""
    return tomllib.loads(resources.files(__package__).joinpath(name).read_text("utf-8"))
