"""The journal: what is torn or flipped is never believed, what a successor did not seal does not count."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.journal.lines import decode, encode
from unbroken.progress import JournalWriter, RunDir, claim, read_journal, read_terms
from unbroken.progress.journal import sealable


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


def term(run_dir: RunDir) -> JournalWriter:
    """The next supervisor: claims its epoch, sealing what came before, and opens its journal."""
    before = read_terms(run_dir)
    number = len(before) + 1
    assert claim(run_dir, number, run_id="r", address=("127.0.0.1", 1), sealed=sealable(run_dir, before))
    return JournalWriter(run_dir, number)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), json_values, min_size=1, max_size=5))
@settings(max_examples=100, deadline=None)
def test_encode_decode(record: dict[str, Any]) -> None:
    line = encode(record)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert json.loads(line) == {"sum": line[8:24].decode(), **record} or "sum" in record
    assert decode(line) == record


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_flipped_bit_or_cut_is_seen(data: st.DataObject) -> None:
    line = encode({"kind": "attempt", "attempt": 3, "slots": ["node-000"], "t": 1.25, "text": "äöü"})
    at = data.draw(st.integers(0, len(line) * 8 - 1))
    flipped = bytearray(line)
    flipped[at // 8] ^= 1 << at % 8
    assert decode(bytes(flipped)) is None
    assert decode(line[: data.draw(st.integers(0, len(line) - 1))]) is None


def test_records_come_back_in_order(run_dir: RunDir) -> None:
    writer = term(run_dir)
    for i in range(5):
        told = writer.append("step", number=i)
        assert told["n"] == i + 1 and told["epoch"] == 1
    text = read_journal(run_dir)
    assert [r["number"] for r in text.records] == list(range(5))
    assert text.damaged == 0
    writer.close()


def test_torn_last_line_is_left_out_and_not_counted_as_damage(run_dir: RunDir) -> None:
    writer = term(run_dir)
    writer.append("a")
    writer.append("b")
    path = run_dir.journal(1)
    whole = path.read_bytes()
    for cut in range(len(whole) - 1, whole.index(b"\n"), -1):
        path.write_bytes(whole[:cut])
        text = read_journal(run_dir)
        assert [r["kind"] for r in text.records] == ["a"]
        assert text.damaged == 0


def test_flipped_bit_inside_is_counted_and_the_rest_read(run_dir: RunDir) -> None:
    writer = term(run_dir)
    for kind in ("a", "b", "c"):
        writer.append(kind)
    path = run_dir.journal(1)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"kind":"b"', b'"kind":"x"')
    path.write_bytes(b"".join(lines))
    text = read_journal(run_dir)
    assert [r["kind"] for r in text.records] == ["a", "c"]
    assert text.damaged == 1


def test_full_disk_leaves_no_half_line(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = term(run_dir)
    writer.append("a")
    real = os.write
    room = 30

    def full(fd: int, data: bytes) -> int:
        nonlocal room
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        n = real(fd, bytes(data[:room]))
        room -= n
        return n

    monkeypatch.setattr(os, "write", full)
    for _ in range(2):
        with pytest.raises(OSError) as e:
            writer.append("b")
        assert e.value.errno == errno.ENOSPC
    monkeypatch.undo()
    writer.append("c")
    text = read_journal(run_dir)
    assert [r["kind"] for r in text.records] == ["a", "c"]
    assert text.damaged == 0


def test_failed_fsync_is_not_believed(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = term(run_dir)

    def fails(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError):
        writer.append("a")
    monkeypatch.undo()
    assert read_journal(run_dir).records == []


def test_what_a_predecessor_writes_after_the_seal_does_not_count(run_dir: RunDir) -> None:
    first = term(run_dir)
    first.append("counted")
    second = term(run_dir)
    first.append("too late")
    second.append("mine")
    third = term(run_dir)
    second.append("too late")
    first.append("much too late")
    third.append("now")
    assert [r["kind"] for r in read_journal(run_dir).records] == ["counted", "mine", "now"]


def test_a_torn_end_is_sealed_out_even_if_it_is_completed_later(run_dir: RunDir) -> None:
    first = term(run_dir)
    first.append("counted")
    line = encode({"kind": "torn", "t": 0})
    path = run_dir.journal(1)
    with open(path, "ab") as f:
        f.write(line[:10])
    second = term(run_dir)
    with open(path, "ab") as f:
        f.write(line[10:])
    second.append("mine")
    text = read_journal(run_dir)
    assert [r["kind"] for r in text.records] == ["counted", "mine"]
    assert text.damaged == 0


def test_a_damaged_line_before_a_good_one_stays_inside_the_seal(run_dir: RunDir) -> None:
    first = term(run_dir)
    first.append("a")
    with open(run_dir.journal(1), "ab") as f:
        f.write(b"rubbish\n")
    first.append("b")
    term(run_dir)
    text = read_journal(run_dir)
    assert [r["kind"] for r in text.records] == ["a", "b"]
    assert text.damaged == 1


def test_a_supervisor_that_died_before_its_first_record(run_dir: RunDir) -> None:
    first = term(run_dir)
    first.append("a")
    number = 2
    assert claim(run_dir, number, run_id="r", address=("h", 1), sealed=sealable(run_dir, read_terms(run_dir)))
    third = term(run_dir)
    third.append("c")
    assert [r["kind"] for r in read_journal(run_dir).records] == ["a", "c"]


def test_a_journal_without_epochs_counts_nothing(run_dir: RunDir) -> None:
    JournalWriter(run_dir, 1).append("nobody claimed this")
    assert read_journal(run_dir).records == []
