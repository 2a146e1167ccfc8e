"""The compiler's table holds the streams that it notes: freed ones ended the process on a GPU."""

from __future__ import annotations

import gc

import pytest

from unbroken.train.world import hold_streams


@pytest.mark.slow  # the compiler alone takes seconds to import
def test_what_the_compiler_notes_lives_until_its_next_note(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import graph_bytecode_inputs as table

    monkeypatch.setattr(table, "weakref", table.weakref)  # given back afterwards
    hold_streams()
    ended = []

    class Stream:
        def __del__(self) -> None:
            ended.append(id(self))

    stream = Stream()
    was = id(stream)
    table.store_user_object_weakrefs(stream)
    del stream
    gc.collect()
    assert not ended and id(table.get_external_object_by_index(0)) == was
    table.reset_user_object_tracking()
    assert ended == [was]
