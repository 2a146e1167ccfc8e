"""The arena is a valid safetensors file for every reader, and nothing hostile passes for one."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.checkpoint.capture.direct import plain_bytes
from unbroken.checkpoint.format import dtypes
from unbroken.checkpoint.format.layout import (
    ALIGN,
    MAX_HEADER_BYTES,
    Layout,
    TensorSpec,
    header_length,
    parse_header,
    plan,
    spec,
)
from unbroken.errors import CheckpointCorrupt, UnsaveableState

names = st.text(min_size=1, max_size=12).filter(lambda n: n != "__metadata__" and _encodable(n))
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
specs = st.lists(
    st.builds(TensorSpec, names, st.sampled_from(sorted(dtypes.ITEM_BYTES)), shapes),
    max_size=12,
    unique_by=lambda s: s.name,
)


def _encodable(text: str) -> bool:
    try:
        return bool(text.encode())
    except UnicodeEncodeError:
        return False


def file_of(layout: Layout, seed: int = 0) -> bytes:
    """The whole file with random data."""
    return layout.header() + np.random.default_rng(seed).bytes(layout.data_bytes)


def read(data: bytes) -> Layout:
    """The layout of these bytes, as every reader of ours gets it."""
    length = header_length(data[:8], len(data), where="test")
    return parse_header(data[:length], len(data), where="test")


@settings(max_examples=60, deadline=None)
@given(specs)
def test_the_plan_is_dense_aligned_ordered_and_comes_back(wanted: list[TensorSpec]) -> None:
    layout = plan(wanted)
    assert layout.data_start % ALIGN == 0
    assert [(-dtypes.ITEM_BYTES[s.dtype], s.name) for s in layout.slots] == sorted(
        (-dtypes.ITEM_BYTES[s.dtype], s.name) for s in wanted
    )
    at = 0
    for s in layout.slots:
        assert s.start == at
        assert s.start % dtypes.ITEM_BYTES[s.dtype] == 0
        at = s.stop
    assert layout.data_bytes == sum(s.bytes for s in wanted) == at
    assert plan(reversed(wanted)) == layout
    again = read(file_of(layout))
    assert {s.name: s for s in again.slots} == {s.name: s for s in layout.slots}
    assert again.data_start == layout.data_start


@settings(max_examples=40, deadline=None)
@given(specs)
def test_the_safetensors_library_agrees(wanted: list[TensorSpec]) -> None:
    layout = plan(wanted)
    data = file_of(layout)
    theirs = dict(safetensors.deserialize(data))
    assert set(theirs) == {s.name for s in wanted}
    for s in layout.slots:
        start, stop = layout.span(s.name)
        assert theirs[s.name]["data"] == data[start:stop]
        assert tuple(theirs[s.name]["shape"]) == s.shape


def test_every_torch_type_comes_back_bit_for_bit(tmp_path: Path) -> None:
    kept: dict[str, torch.Tensor] = {}
    for name in [*dtypes.FROM_TORCH, *dtypes._CARRIED]:
        raw = torch.randint(0, 2 if name == "bool" else 255, (3, 4, 16), dtype=torch.uint8)
        kept[name] = raw.view(getattr(torch, name))
    layout = plan(spec(n, str(t.dtype), t.shape) for n, t in kept.items())
    data = bytearray(layout.header())
    for s in layout.slots:
        data += plain_bytes(kept[s.name])
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    true = json.loads(read(bytes(data)).metadata["unbroken.dtypes"])
    assert set(true) == set(dtypes._CARRIED)
    theirs = safetensors.torch.load_file(path)
    for name, tensor in kept.items():
        same = (
            theirs[name]
            if name not in true
            else theirs[name].view(torch.uint8).view(getattr(torch, true[name]))
        )
        assert plain_bytes(same) == plain_bytes(tensor), name


def test_scalars_and_empty_tensors() -> None:
    layout = plan([spec("s", "float32", ()), spec("e", "int64", (0, 7)), spec("b", "bool", (3,))])
    assert (layout.by_name["s"].bytes, layout.by_name["e"].bytes, layout.data_bytes) == (4, 0, 7)
    assert plan([]).data_bytes == 0
    assert safetensors.deserialize(file_of(plan([]))) == []


def test_metadata_that_changes_keeps_the_length() -> None:
    layout = plan([spec("w", "float32", (2,))], aliases={"tied": "w"})
    one, two = layout.header(), layout.header({"step": "123456789", "attempt": "17"})
    assert len(one) == len(two) == layout.data_start
    again = read(two + bytes(8))
    assert again.metadata["step"] == "123456789"
    assert dict(again.aliases) == {"tied": "w"}
    assert again.span("tied") == again.span("w")
    with pytest.raises(ValueError, match="does not fit"):
        layout.header({"x": "y" * 5000})


@pytest.mark.parametrize(
    ("wanted", "aliases", "why"),
    [
        ([spec("w", "float32", (1,)), spec("w", "float32", (1,))], {}, "two tensors"),
        ([spec("__metadata__", "float32", (1,))], {}, "reserves"),
        ([TensorSpec("w", "F128", (1,))], {}, "F128"),
        ([TensorSpec("w", "F32", (-1,))], {}, "negative"),
        ([TensorSpec("\ud800", "F32", (1,))], {}, "Unicode"),
        ([spec("w", "float32", (1,))], {"w": "w"}, "both"),
        ([spec("w", "float32", (1,))], {"a": "v"}, "not stored"),
    ],
)
def test_what_cannot_stand_in_a_file_is_refused(
    wanted: list[TensorSpec], aliases: dict[str, str], why: str
) -> None:
    with pytest.raises(UnsaveableState, match=why):
        plan(wanted, aliases)


def test_a_quantised_type_is_refused_by_its_key() -> None:
    with pytest.raises(UnsaveableState, match=r"'model\.w'.*qint8"):
        spec("model.w", "torch.qint8", (2,))


def _file(table: object, body: int = 0) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text + bytes(body)


def _entry(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "header of 2^63": struct.pack("<Q", 2**63) + b"{}",
    "header above the limit": struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}",
    "header longer than the file": struct.pack("<Q", 100) + b"{}",
    "no JSON": _file(b"not json"),
    "not UTF-8": _file(b'{"\xff": 1}'),
    "a list": _file([]),
    "doubled name": _file(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},' + b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1),
    "deep nesting": _file(b"[" * 100_000),
    "a huge number": _file(b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}', 1),
    "unknown type": _file({"a": _entry("F31")}, 4),
    "type is a number": _file({"a": _entry(3)}, 4),
    "negative shape": _file({"a": _entry(shape=[-1])}, 4),
    "fractional shape": _file({"a": _entry(shape=[1.0])}, 4),
    "boolean shape": _file({"a": _entry(shape=[True])}, 4),
    "shape that overflows": _file({"a": _entry(shape=[2**62, 2**62])}, 4),
    "a thousand dimensions": _file({"a": _entry(shape=[1] * 1000)}, 4),
    "offsets backwards": _file({"a": _entry(offsets=[4, 0])}, 4),
    "three offsets": _file({"a": _entry(offsets=[0, 4, 8])}, 8),
    "shape against bytes": _file({"a": _entry(shape=[2])}, 4),
    "overlap": _file({"a": _entry(), "b": _entry(offsets=[2, 6])}, 6),
    "the same bytes twice": _file({"a": _entry(), "b": _entry()}, 4),
    "gap": _file({"a": _entry(), "b": _entry(offsets=[8, 12])}, 12),
    "gap at the start": _file({"a": _entry(offsets=[4, 8])}, 8),
    "data cut short": _file({"a": _entry()}, 3),
    "data too long": _file({"a": _entry()}, 5),
    "metadata not text": _file({"__metadata__": {"a": 1}}),
    "metadata not a map": _file({"__metadata__": "x"}),
    "aliases torn": _file({"__metadata__": {"unbroken.aliases": "{"}}),
    "alias of nothing": _file({"__metadata__": {"unbroken.aliases": '{"a": "b"}'}}),
    "lone surrogate": _file(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_headers_are_refused(kind: str) -> None:
    with pytest.raises(CheckpointCorrupt):
        read(HOSTILE[kind])


def test_a_file_of_the_library_itself_is_read(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 2), "b": torch.ones(5, dtype=torch.bfloat16)}
    data = safetensors.torch.save(tensors, {"who": "them"})
    layout = read(data)
    start, stop = layout.span("a")
    assert (
        torch.frombuffer(bytearray(data[start:stop]), dtype=torch.float32).reshape(3, 2).equal(tensors["a"])
    )
    assert layout.metadata == {"who": "them"}


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_damage_is_refused_or_changes_nothing_that_matters(data: Any) -> None:
    """Flipped, cut and inserted bytes: either CheckpointCorrupt, or a layout that still is one."""
    layout = plan([spec("weight", "float32", (3, 2)), spec("b", "bfloat16", (5,)), spec("n", "int64", ())])
    whole = bytearray(file_of(layout))
    for _ in range(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from(["flip", "cut", "insert"]))
        at = data.draw(st.integers(0, min(len(whole) - 1, 400)))
        if kind == "flip":
            whole[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del whole[at : at + data.draw(st.integers(1, 5000))]
        else:
            whole[at:at] = data.draw(st.binary(min_size=1, max_size=8))
        if not whole:
            break
    try:
        found = read(bytes(whole))
    except CheckpointCorrupt:
        return
    assert found.file_bytes == len(whole)
    at = 0
    for s in found.slots:
        assert s.start == at
        at = s.stop
    # What we accept, the library accepts as well.
    assert set(dict(safetensors.deserialize(bytes(whole)))) == {s.name for s in found.slots}
