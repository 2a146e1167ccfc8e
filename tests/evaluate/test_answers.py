from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from unbroken.errors import EvaluationError
from unbroken.evaluate.contracts import Answer, Conditions, PreparedTask, Request, Task
from unbroken.evaluate.result.answers import AnswerStore
from unbroken.evaluate.result.journal import EvaluationJournal, events
from unbroken.evaluate.suite.staged import encode_answer, read_answers, read_block, write_samples
from unbroken.journal import lines

C = Conditions("e", "cpu", "float32", 8)


def prepared(folder: Path, n: int = 10, text: str = "prompt", version: str = "1") -> PreparedTask:
    staged = write_samples(
        folder, [[Request("plain", (f"{text} {i}\u2028\x85",))] for i in range(n)], block=4
    )
    return PreparedTask(Task("t"), version, n, 4, str(folder), staged.prompt_hash, staged.weights)


def answered(p: PreparedTask, block: int, **more: str) -> list[dict[str, object]]:
    return [
        json.loads(encode_answer(Answer(s.id, s.prompt_hash, (f"said {s.id}",), **more)))
        for s in read_block(p, block)
    ]


def test_merge_gives_every_id_once_in_order(tmp_path: Path) -> None:
    p = prepared(tmp_path / "p")
    store = AnswerStore(tmp_path / "a", 1)
    for block in (2, 0, 1, 1):
        store.append(p, block, C if block else replace(C, batch_size=4), answered(p, block))
    found = store.merge(p, {}, tmp_path / "out.jsonl")
    assert [a.sample for a in read_answers(tmp_path / "out.jsonl")] == list(range(10))
    assert {c.batch_size for c in found} == {4, 8}
    store.close()


def test_a_missing_block_is_an_error_unless_it_was_given_up(tmp_path: Path) -> None:
    p = prepared(tmp_path / "p")
    store = AnswerStore(tmp_path / "a", 1)
    store.append(p, 0, C, answered(p, 0))
    store.append(p, 2, C, answered(p, 2))
    with pytest.raises(EvaluationError, match="block 1 of task 't' has no answers"):
        store.merge(p, {}, tmp_path / "out.jsonl")
    store.merge(p, {1: "it died"}, tmp_path / "out.jsonl")
    assert [a.problem for a in read_answers(tmp_path / "out.jsonl")][3:9] == ["", *["it died"] * 4, ""]


def test_a_torn_line_costs_its_block_and_nothing_else(tmp_path: Path) -> None:
    p = prepared(tmp_path / "p")
    store = AnswerStore(tmp_path / "a", 1)
    for block in range(3):
        store.append(p, block, C, answered(p, block))
    store.close()
    file = tmp_path / "a" / "t" / "0001.jsonl"
    os.truncate(file, file.stat().st_size - 7)
    again = AnswerStore(tmp_path / "a", 1)
    assert again.scan(p) == {0, 1}
    again.append(p, 2, C, answered(p, 2))
    again.merge(p, {}, tmp_path / "out.jsonl")
    assert AnswerStore(tmp_path / "a", 2).scan(p) == {0, 1, 2}


def test_damage_inside_a_line_is_noticed(tmp_path: Path) -> None:
    p = prepared(tmp_path / "p")
    store = AnswerStore(tmp_path / "a", 1)
    store.append(p, 0, C, answered(p, 0))
    store.close()
    file = tmp_path / "a" / "t" / "0001.jsonl"
    file.write_bytes(file.read_bytes().replace(b"said 2", b"said 3"))
    assert AnswerStore(tmp_path / "a", 2).scan(p) == set()


def test_other_prompts_another_version_and_problems_are_not_reused(tmp_path: Path) -> None:
    p = prepared(tmp_path / "p")
    store = AnswerStore(tmp_path / "a", 1)
    store.append(p, 0, C, answered(p, 0))
    store.append(p, 1, C, answered(p, 1, problem="500"))
    store.close()
    assert AnswerStore(tmp_path / "a", 2).scan(p) == {0}
    assert AnswerStore(tmp_path / "a", 2).scan(replace(p, version="2")) == set()
    assert AnswerStore(tmp_path / "a", 2).scan(prepared(tmp_path / "q", text="Prompt")) == set()
    longer = prepared(tmp_path / "r", n=12)
    assert AnswerStore(tmp_path / "a", 2).scan(longer) == {0}


def test_a_full_disk_is_an_error_and_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = prepared(tmp_path / "p")
    store = AnswerStore(tmp_path / "a", 1)
    store.append(p, 0, C, answered(p, 0))
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) // 2]))
    with pytest.raises(OSError, match="No space left"):
        store.append(p, 1, C, answered(p, 1))
    monkeypatch.undo()
    store.append(p, 1, C, answered(p, 1))
    store.close()
    assert AnswerStore(tmp_path / "a", 2).scan(p) == {0, 1}


def test_the_journal_goes_on_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    j = EvaluationJournal(path)
    j.write("one", x=1)
    j.close()
    with open(path, "ab") as f:
        f.write(b'12345678 {"event": "tor')
    j = EvaluationJournal(path)
    j.write("two")
    j.close()
    assert [e["event"] for e in events(path)] == ["one", "two"]
    assert [line.record is None for line in lines.read(path)] == [False, True, False]
