"""State comes back as it was, types and order included; what cannot is refused by its path; nothing is executed."""

from __future__ import annotations

import datetime as dates
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.checkpoint.format.values import decode, encode, flatten, unflatten
from unbroken.errors import CheckpointCorrupt, UnsaveableState


def is_tensor(v: object) -> bool:
    return isinstance(v, torch.Tensor)


def through_json(value: object) -> Any:
    return decode(json.loads(json.dumps(encode(value), allow_nan=False)))


def same(a: Any, b: Any) -> bool:
    """Equal in value, type and order, NaN and -0.0 included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return math.isnan(b) if math.isnan(a) else (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        keys = all(same(x, y) for x, y in zip(a, b, strict=True)) if len(a) == len(b) else False
        return keys and all(same(a[x], b[y]) for x, y in zip(a, b, strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary(max_size=8) | st.complex_numbers(allow_nan=False)
)  # fmt: skip
keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=3) | st.integers() | st.just("$")
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None)
@given(trees)
def test_any_plain_value_comes_back(value: Any) -> None:
    assert same(through_json(value), value)


@pytest.mark.parametrize(
    "value",
    [
        Counter({"a": 2, 3: 1}), defaultdict(list, {1: [2]}), defaultdict(None, {"x": 1}), {1, 2, 3}, frozenset("ab"),
        np.float32(1.5), np.int64(-3), np.bool_(True), np.arange(6, dtype=np.uint16).reshape(2, 3),
        np.zeros((0, 4)), np.random.default_rng(1).bit_generator.state, torch.float8_e4m3fn, torch.Size([2, 3]),
        torch.device("cuda:1"), torch.channels_last, Path("/a/b"), range(3, 9, 2), 2**4000, -0.0, float("inf"),
        deque([1, (2,)], 3), slice(1, None, 2), ..., Decimal("1.10"), Fraction(1, 3), UUID(int=5), PurePosixPath("a"),
        dates.date(2026, 1, 2), dates.datetime(2026, 1, 2, 3, 4, 5, 6, dates.UTC), dates.timedelta(1, 2, 3),
        dates.datetime(2026, 1, 2, fold=1), dates.time(1, 2, tzinfo=dates.timezone(dates.timedelta(hours=1), "x")),
        dates.UTC, np.dtype(">i4"), np.datetime64("2026-01-02"), np.array(["a", "bc"]), defaultdict(deque),
        bytearray(b"x"), torch.optim.SGD([torch.ones(1)], lr=0.1).state_dict()["param_groups"],
    ],
    ids=lambda v: f"{type(v).__name__} {str(v)[:20]}",
)  # fmt: skip
def test_the_types_of_training_state(value: Any) -> None:
    assert same(through_json(value), value)


def test_the_random_generators(tmp_path: Path) -> None:
    import random

    for state, restore, draw in [
        (random.getstate(), random.setstate, random.random),
        (np.random.get_state(), np.random.set_state, np.random.random),
    ]:
        first = draw()
        restore(through_json(state))
        assert draw() == first


def test_optimizer_and_scheduler_go_on_alike() -> None:
    def build() -> Any:
        torch.manual_seed(1)
        module = torch.nn.Linear(3, 2)
        adam = torch.optim.AdamW(module.parameters(), lr=0.1)
        return module, adam, torch.optim.lr_scheduler.MultiStepLR(adam, [2, 4])

    def step(module: Any, adam: Any, scheduler: Any) -> float:
        loss = module(torch.ones(3)).square().sum()
        adam.zero_grad()
        loss.backward()
        adam.step()
        scheduler.step()
        return float(loss.detach())

    one = build()
    for _ in range(3):
        step(*one)
    tensors, tree = flatten([x.state_dict() for x in one], is_tensor)
    assert "1.state.0.exp_avg" in tensors
    states = unflatten(json.loads(json.dumps(tree)), {n: t.clone() for n, t in tensors.items()})
    two = build()
    for part, state in zip(two, states, strict=True):
        part.load_state_dict(state)
    assert [step(*one) for _ in range(3)] == [step(*two) for _ in range(3)]


def test_names_of_tensors() -> None:
    a, b, c, d = (torch.ones(i) for i in range(4))
    tensors, tree = flatten({"m": {"x.y": a, "x": {"y": b}}, "l": [c, (d,)], 3: a}, is_tensor)
    assert list(tensors) == ["m.x.y", "m.x.y~1", "l.0", "l.1.0", "3"]
    back = unflatten(tree, tensors)
    assert back["m"]["x"]["y"] is b
    assert back["l"][1] == (d,)
    assert back[3] is a
    assert list(flatten(a, is_tensor)[0]) == ["state"]


class Thing:
    """Something that is no plain data."""


def _loop() -> Any:
    loop: list[Any] = []
    loop.append(loop)
    return {"a": {"loop": loop}}


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"a": [1, {"b": Thing()}]}, "a.1.b"),
        ({"f": lambda: 1}, "f"),
        ({"t": "\ud800"}, "t"),
        ({"g": defaultdict(lambda: 1)}, "g"),
        ({"n": np.array([Thing()], dtype=object)}, "n"),
        ({"s": {Thing()}}, "s.0"),
        ({"big": bytes(2**24 + 1)}, "big"),
        ({"long": 2**5000}, "long"),
        (_loop(), r"a\.loop"),
    ],
)
def test_what_cannot_come_back_is_named(state: Any, path: str) -> None:
    with pytest.raises(UnsaveableState, match=rf"'{path}") as error:
        flatten(state, is_tensor)
    assert error.value.key.startswith(path.replace("\\", ""))


HOSTILE: list[Any] = [
    {"$": "os.system", "v": "x"},
    {"$": "torch.dtype", "v": "torch.load"},
    {"$": "torch.dtype", "v": "hub"},
    {"$": "torch.layout", "v": "torch.float32"},
    {"$": "ndarray", "dtype": "O", "shape": [1], "v": "AAAAAAAAAAA="},
    {"$": "ndarray", "dtype": "<f8", "shape": [10**12], "v": "AAAAAAAAAAA="},
    {"$": "tensor", "name": "nowhere"},
    {"$": "dict", "v": [[[], 1]]},
    {"$": "defaultdict", "factory": "eval", "v": []},
    {"$": "defaultdict"},
    {"$": []},
    {"$": "float", "v": "x" * 10},
    {"$": "bytes", "v": 3},
]


@pytest.mark.parametrize("tree", HOSTILE, ids=str)
def test_hostile_trees_raise_our_error(tree: Any) -> None:
    with pytest.raises(CheckpointCorrupt):
        unflatten({"a": [tree]}, {})


@settings(max_examples=80, deadline=None)
@given(trees, st.data())
def test_mangled_trees_raise_our_error_only(value: Any, data: Any) -> None:
    text = json.dumps(encode({"root": value}))
    at = data.draw(st.integers(0, len(text) - 1))
    mangled = (
        text[:at] + data.draw(st.sampled_from(['"$"', "[", "{", "1", '"', ":", "null"])) + text[at + 1 :]
    )
    try:
        tree = json.loads(mangled)
    except ValueError:
        return
    try:
        decode(tree)
    except CheckpointCorrupt:
        pass


def test_deep_trees_do_not_crash() -> None:
    tree: Any = 1
    for _ in range(5000):
        tree = [tree]
    with pytest.raises(CheckpointCorrupt):
        decode(tree)
