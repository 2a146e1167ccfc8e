"""What a rank tells its keeper, with parts that are encoded already: the same as if all were encoded together."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.link.framing import Encoded, encode

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=4)


@given(own=OBJECTS, more=OBJECTS, around=OBJECTS)
def test_it_reads_as_if_all_were_encoded_together(
    own: dict[str, Any], more: dict[str, Any], around: dict[str, Any]
) -> None:
    more = {k: v for k, v in more.items() if k not in own}
    around = {k: v for k, v in around.items() if k != "part"}
    part = Encoded(own).with_more(more)
    whole = {"part": {**own, **more}}
    assert json.loads(encode({**around, "part": part})) == {**around, **whole}
    assert json.loads(encode({"part": part, **around})) == {**around, **whole}
    assert json.loads(encode({"list": [{"sealed": {"part": part}}]})) == {"list": [{"sealed": whole}]}


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(TypeError, match="object is no JSON"):
        encode({"a": object()})
