"""Lines of journals: what is torn, flipped or of another shape is never believed; what an older release wrote is read."""

from __future__ import annotations

import errno
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest

from unbroken.errors import InputError
from unbroken.journal import lines


def older(record: object) -> bytes:
    """A line as evaluations wrote it until the end of November 2026."""
    text = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x " % zlib.crc32(text) + text + b"\n"


@pytest.mark.parametrize("write", [lines.encode, older])
def test_any_other_line_is_not_believed(write: object) -> None:
    value = {"a": "line\nbreak \u2028", "b": [1.5, None]}
    line = write(value)  # type: ignore[operator]
    assert line.count(b"\n") == 1
    assert lines.decode(line) == value
    assert all(lines.decode(line[:n]) is None for n in range(len(line)))
    for bad in (line[1:], b"\n", b"zzzzzzzz {}\n", line.replace(b"1.5", b"1.6"), line + line):
        assert lines.decode(bad) is None
    for at in range(len(line)):
        flipped = bytearray(line)
        flipped[at] ^= 1
        assert lines.decode(bytes(flipped)) is None


@pytest.mark.parametrize("value", [[], [1], "text", None, 5])
def test_what_is_no_object_is_no_record(value: object) -> None:
    assert lines.decode(older(value)) is None


def test_one_file_may_hold_lines_of_both_releases(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(older({"n": 1}) + older({"n": 2}) + older({"n": 3})[:-5])
    file = lines.Appender(path)
    offset, length = file.append({"n": 4})
    file.close()
    assert [r["n"] for r in lines.records(path)] == [1, 2, 4]
    assert lines.record_at(path, offset, length) == {"n": 4}
    assert [line.record is None for line in lines.read(path)] == [False, False, True, False]
    assert [line.end for line in lines.read(path)][-1] == path.stat().st_size


def test_only_the_last_line_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(b"rubbish\n" + lines.encode({"n": 1}) + lines.encode({"n": 2})[:9])
    assert [line.torn for line in lines.read(path)] == [False, False, True]
    whole = len(b"rubbish\n" + lines.encode({"n": 1}))
    assert [line.torn for line in lines.read(path, whole)] == [False, False]
    assert [line.torn for line in lines.read(path, whole - 1)] == [False, True]
    assert list(lines.read(path, 0)) == list(lines.read(tmp_path / "absent")) == []


@dataclass(frozen=True)
class Counted:
    n: int
    name: str = ""


def test_types_are_arguments(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(lines.encode({"n": 1}) + b"rubbish\n" + lines.encode({"n": 2, "name": "b", "later": 0}))
    assert list(lines.read_as(path, Counted)) == [Counted(1), Counted(2, "b")]
    path.write_bytes(lines.encode({"n": "one"}))
    with pytest.raises(InputError, match="n"):
        list(lines.read_as(path, Counted))


def test_a_full_disk_and_a_failed_sync_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j.jsonl"
    file = lines.Appender(path)
    file.append({"n": 1})
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
    with pytest.raises(OSError, match="No space left") as e:
        file.append({"n": 2})
    assert e.value.errno == errno.ENOSPC
    monkeypatch.undo()

    def fails(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="Input/output"):
        file.append({"n": 3}, durable=True)
    monkeypatch.undo()
    assert path.read_bytes() == lines.encode({"n": 1})
    with pytest.raises(FileExistsError):
        lines.Appender(path, new=True)
