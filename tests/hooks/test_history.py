"""What a trainer has logged, as text: the same again, written once."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from unbroken.hooks.states import history
from unbroken.hooks.states.history import History, read


def test_each_entry_is_written_once_and_comes_back_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    write = json.dumps

    def dumps(new: list[Any]) -> str:
        written.append(len(new))
        return write(new)

    monkeypatch.setattr(history.json, "dumps", dumps)
    kept, entries = History(), list[dict[str, Any]]()
    assert read(kept.write(entries)) == []
    for step in range(5):
        entries += [{"loss": 1 / (step + 3), "step": step}] * (step % 3)
        assert read(kept.write(entries)) == entries
    assert sum(written) == len(entries) == 4


def test_another_list_is_written_anew() -> None:
    kept = History()
    kept.write([{"a": 1}, {"a": 2}])
    assert read(kept.write([{"a": 3}])) == [{"a": 3}]
    assert read(kept.write([{"a": 4}, {"a": 5}])) == [{"a": 4}, {"a": 5}]


def test_infinities_and_nan_come_back_and_what_is_no_json_is_refused() -> None:
    back = read(History().write([{"loss": math.inf}, {"loss": math.nan}]))
    assert back[0] == {"loss": math.inf} and math.isnan(back[1]["loss"])
    with pytest.raises(TypeError):
        History().write([{"loss": object()}])
