"""What was made plain comes back the same, and what no dataclass can be is refused with its place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, NamedTuple

import pytest

from unbroken.errors import InputError, UnknownKey
from unbroken.journal.codec import decode, encode
from unbroken.link.bounds import Malformed, text


class Colour(StrEnum):
    RED = "red"


class Pair(NamedTuple):
    left: Annotated[str, partial(text, empty=False)]
    right: int


@dataclass(frozen=True)
class Inner:
    share: float
    ranks: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outer:
    name: Annotated[str, partial(text, most=5)]
    colour: Colour = Colour.RED
    pairs: tuple[Pair, ...] = ()
    box: tuple[int, str] = (0, "")
    inner: Inner | None = None
    limit: int | float | None = None


WHOLE = Outer("abc", Colour.RED, (Pair("x", 1), Pair("y", 2)), (3, "z"), Inner(0.5, {3: "gpu"}), 0.25)
PLAIN = {
    "name": "abc", "colour": "red", "pairs": [["x", 1], ["y", 2]], "box": [3, "z"],
    "inner": {"share": 0.5, "ranks": {"3": "gpu"}}, "limit": 0.25,
}  # fmt: skip


def test_there_and_back() -> None:
    assert encode(WHOLE) == PLAIN
    assert decode(Outer, json.loads(json.dumps(PLAIN))) == WHOLE
    assert decode(Outer, {"name": "abc", "inner": {"share": 1}}) == Outer("abc", inner=Inner(1.0))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": 5}, "'name' is no text"),
        ({"name": "abcdef"}, "at most 5 characters"),
        ({"colour": "blue"}, "expected one of 'red', found 'blue'"),
        ({"pairs": [["x"]]}, r"expected 2 values"),
        ({"pairs": [["", 1]]}, r"'pairs\[0\]\[0\]' is no text"),
        ({"pairs": "xy"}, "expected a list"),
        ({"box": [1, 2]}, r"expected text, found 2.*box\[1\]"),
        ({"inner": []}, "expected a table"),
        ({"inner": {}}, "'share' is missing"),
        ({"inner": {"share": True}}, "expected a number"),
        ({"inner": {"share": 1.0, "ranks": {"three": "x"}}}, "expected a whole number as key"),
        ({"colours": 1}, "Did you mean 'colour'"),
    ],
)
def test_what_it_cannot_be_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises((InputError, UnknownKey, Malformed), match=said):
        decode(Outer, {**PLAIN, **change})


def test_keys_of_a_newer_version_are_passed_over_at_every_depth_only_where_asked() -> None:
    newer = {**PLAIN, "later": 1, "inner": {"share": 0.5, "ranks": {"3": "gpu"}, "later": 2}}
    assert decode(Outer, newer, newer=True) == WHOLE
    with pytest.raises(UnknownKey, match="later"):
        decode(Outer, newer)
