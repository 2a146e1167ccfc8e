"""The one framing: whatever way bytes are cut, the same messages come out, or Malformed and nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.link.bounds import Malformed, Message
from unbroken.link.framing import LENGTH, Form, TooLarge, Unpacker, pack

from ..fuzzing import fuzz
from ..hostile import NESTED, frames, lines

messages = st.dictionaries(
    st.text(max_size=8), st.one_of(st.integers(), st.text(max_size=20), st.lists(st.none())), max_size=4
)
forms = st.sampled_from(Form)


def cut(data: bytes, at: Sequence[int]) -> list[bytes]:
    places = sorted({min(a, len(data)) for a in at} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(places)]


def unpack(pieces: Sequence[bytes], unpacker: Unpacker) -> list[Message]:
    found = []
    for piece in pieces:
        unpacker.feed(piece)
        while (m := unpacker.read()) is not None:
            found.append(m)
    return found


@fuzz(30)
@given(
    sent=st.lists(messages, min_size=1, max_size=5),
    at=st.lists(st.integers(0, 600), max_size=12),
    form=forms,
    shown=st.booleans(),
)
def test_however_it_is_cut_the_same_messages_come(
    sent: list[Message], at: list[int], form: Form, shown: bool
) -> None:
    data = b"".join(pack(m, form=form) for m in sent)
    unpacker = Unpacker(1 << 20, form=None if shown else form)
    assert unpack(cut(data, at), unpacker) == [json.loads(json.dumps(m)) for m in sent]
    assert unpacker.form is form and not unpacker.partial


@fuzz(30)
@given(
    data=st.one_of(frames, lines, st.binary(max_size=300)),
    at=st.lists(st.integers(0, 300), max_size=6),
    form=st.one_of(st.none(), forms),
)
def test_nonsense_is_malformed_and_nothing_else(data: bytes, at: list[int], form: Form | None) -> None:
    unpacker = Unpacker(4096, form=form)
    try:
        unpack(cut(data, at), unpacker)
    except Malformed:
        return
    assert len(unpacker._unread) <= 4096 + LENGTH.size + len(data)


@pytest.mark.parametrize("form", Form)
def test_the_limit_holds_before_the_bytes_have_come(form: Form) -> None:
    right = pack({"x": "y" * 90}, form=form)
    unpacker = Unpacker(len(right) - (4 if form is Form.FRAMES else 1), form=form)
    unpacker.feed(right)
    assert unpacker.read() == {"x": "y" * 90}
    unpacker.feed(LENGTH.pack(1 << 29) if form is Form.FRAMES else b"x" * 101)
    with pytest.raises(Malformed, match=r"more than|above the limit"):
        unpacker.read()
    with pytest.raises(TooLarge, match="above the limit of 10"):
        pack({"x": "y" * 90}, 10, form)


def test_one_message_that_makes_no_sense_hides_none_after_it() -> None:
    unpacker = Unpacker(1 << 20)
    unpacker.feed(LENGTH.pack(len(NESTED)) + NESTED + pack({"a": 1}))
    with pytest.raises(Malformed):
        unpacker.read()
    assert unpacker.read() == {"a": 1}


def test_what_it_shows_first_is_what_it_speaks() -> None:
    for first, form in (
        (b"{", Form.LINES),
        (b"\n", Form.LINES),
        (b"rubbish", Form.LINES),
        (b"\0\0\0\2{}", Form.FRAMES),
    ):
        unpacker = Unpacker(1 << 27, form=None)
        unpacker.feed(first)
        unpacker.next()
        assert unpacker.form is form
