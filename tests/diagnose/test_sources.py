"""Whatever lies in the folder is read, or said not to be: never a traceback, never all of it in memory."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from unbroken.diagnose import Outcome, diagnose, examine
from unbroken.diagnose.read.prefixes import clean
from unbroken.diagnose.read.sources import Source, blocks, expand
from unbroken.errors import InputError

from .logs import job, steps, traceback

KEY = steps(20) + traceback("KeyError: 'labels'", 3)


def test_gz_and_zst_give_the_same_verdict(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    plain = job(tmp_path, KEY)
    data = plain.read_bytes()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "log.gz").write_bytes(gzip.compress(data))
    (tmp_path / "b" / "log.zst").write_bytes(zstandard.compress(data))
    verdicts = [diagnose([p]) for p in (plain, tmp_path / "b" / "log.gz", tmp_path / "b" / "log.zst")]
    assert {(v.reason, v.root.line if v.root else None) for v in verdicts} == {("KeyError", 25)}


def test_a_damaged_archive_is_used_as_far_as_it_goes(tmp_path: Path) -> None:
    data = gzip.compress((KEY + steps(40_000, 30)).encode())
    (tmp_path / "log.gz").write_bytes(data[: len(data) // 2])
    d = examine([tmp_path / "log.gz"])
    assert any("read up to there" in n for n in d.notes)
    (tmp_path / "bad.gz").write_bytes(b"\x1f\x8b" + os.urandom(100))
    assert examine([tmp_path / "bad.gz"]).verdict.outcome is Outcome.UNKNOWN
    (tmp_path / "bad.zst").write_bytes(b"\x28\xb5\x2f\xfd" + os.urandom(100))
    assert examine([tmp_path / "bad.zst"]).notes


def test_no_such_path_and_empty_folder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file or folder"):
        diagnose([tmp_path / "nothing"])
    with pytest.raises(InputError, match="no log to read"):
        diagnose([tmp_path])
    with pytest.raises(InputError, match="quote a glob"):
        diagnose([str(tmp_path / "*.log")])


def test_an_empty_file_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "empty.log").touch()
    d = examine([tmp_path / "empty.log"])
    assert d.verdict.outcome is Outcome.UNKNOWN and any("is empty" in n for n in d.notes)


def test_binaries_are_left_out_and_said(tmp_path: Path) -> None:
    job(tmp_path, KEY)
    (tmp_path / "core").write_bytes(os.urandom(8192))
    (tmp_path / "model.safetensors").write_bytes(os.urandom(100))
    d = examine([tmp_path])
    assert d.verdict.reason == "KeyError" and any("core is not a text log" in n for n in d.notes)
    with pytest.raises(InputError, match="not a text log"):
        diagnose([tmp_path / "core"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_said(tmp_path: Path) -> None:
    job(tmp_path, KEY)
    (tmp_path / "secret.log").write_text("x")
    (tmp_path / "secret.log").chmod(0)
    assert any("cannot read" in n for n in examine([tmp_path]).notes)


def test_unreadable_files_do_not_stop_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job(tmp_path, KEY)
    (tmp_path / "bad.log").write_text("x\n")
    real = Path.open

    def refuse(self: Path, *a: object, **k: object) -> object:
        if self.name == "bad.log":
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *a, **k)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "open", refuse)
    d = examine([tmp_path])
    assert d.verdict.reason == "KeyError" and any("bad.log: Permission denied" in n for n in d.notes)


def test_odd_files_are_passed_over(tmp_path: Path) -> None:
    job(tmp_path, KEY)
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert examine([tmp_path]).verdict.reason == "KeyError"


def test_two_names_of_one_file_are_read_once(tmp_path: Path) -> None:
    log = job(tmp_path, KEY)
    (tmp_path / "again.log").symlink_to(log)
    assert len(expand([tmp_path, log]).logs) == 1


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    job(tmp_path / "a", steps(5))
    job(tmp_path / "b", KEY)
    v = diagnose([str(tmp_path / "*" / "log.txt")])
    assert v.root is not None and v.root.file == "b/log.txt"


def test_links_that_may_not_be_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job(tmp_path, KEY)

    def refuse(path: object, **kw: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os.path, "realpath", refuse)
    assert diagnose([tmp_path]).reason == "KeyError"


def test_paths_tell_rank_node_and_attempt(tmp_path: Path) -> None:
    for name, rank, node, attempt in [
        ("attempts/0002/node-003/rank-24.log", 24, "node-003", 2),
        ("logs/rank7.log.gz", 7, None, None),
        ("logs/worker_12.out", 12, None, None),
        ("logs/node-17.log", None, "node-17", None),
        ("logs/dgx-a04/train.log", None, "dgx-a04", None),
        ("logs/slurm-81234.out", None, None, None),
        ("logs/alice-10.20.30.40.log", None, None, None),
        ("logs/alice-10.log", None, None, None),
        ("logs/llama-7b.log", None, None, None),
        ("alice-10.20.30.40/train.log", None, None, None),
        ("logs/gpu-b12.log", None, "gpu-b12", None),
        ("elastic/attempt_0/5/stderr.log", 5, None, None),
    ]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x\n")
        (source,) = (s for s in expand([tmp_path]).logs if s.path == path)
        assert (source.rank, source.node, source.attempt) == (rank, node, attempt), name


def test_thousands_of_files(tmp_path: Path) -> None:
    for r in range(1500):
        (tmp_path / f"rank{r}.log").write_text(
            f"2026-05-01 10:00:00 step 1 loss: 2.0\n2026-05-01 10:00:0{r % 9} step 2 loss: 2.0\n"
        )
    with (tmp_path / "rank777.log").open("a") as f:
        f.write(traceback("ZeroDivisionError: division by zero"))
    v = diagnose([tmp_path])
    assert v.reason == "ZeroDivisionError" and v.faulty is not None and v.faulty.rank == 777


def test_blocks_end_with_lines_and_long_lines_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(b"a\n" * 1000 + b"y" * 3_000_000 + b"\nend")
    pieces = list(blocks(Source(path, "x.log"), [], size=500))
    assert b"".join(pieces) == path.read_bytes()
    assert all(p.endswith(b"\n") or len(p) >= 1 << 20 for p in pieces[:-1]) and pieces[-1] == b"end"


def test_damage_within_lines_is_cleaned() -> None:
    assert clean(b"a\0b\xff\xfe") == "ab\ufffd\ufffd"
    assert clean(b" 1%|# | 1/9\r 2%|## | 2/9\r") == " 2%|## | 2/9"
    assert clean(b"\x1b[31mRuntimeError\x1b[0m: x") == "RuntimeError: x"
    assert clean(b"\r\r") == ""


def test_a_traceback_behind_a_progress_bar_is_found(tmp_path: Path) -> None:
    body = (
        "  1%|#  | 5/500 [00:10<10:00, 4.0s/it]\r  2%|##  | 6/500 [00:14<10:00, 4.0s/it]\rTraceback (most recent call last):\r\n"
        + '  File "x.py", line 1, in f\r\n    f()\r\nIndexError: list index out of range\r\n'
    )
    v = diagnose([job(tmp_path, body)])
    assert v.reason == "IndexError"


def test_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import io
    import sys

    class In:
        buffer = io.BytesIO(KEY.encode())

    monkeypatch.setattr(sys, "stdin", In)
    assert diagnose(["-"]).reason == "KeyError"


def test_a_line_of_megabytes_is_one_line(tmp_path: Path) -> None:
    from unbroken.diagnose.compress import Compressor
    from unbroken.diagnose.read.excerpt import around

    path = tmp_path / "x.log"
    path.write_text(steps(5) + "y" * 10_000_000 + "\n" + steps(5, 6) + traceback("KeyError: 'labels'", 3))
    shown = next(i for i, t in enumerate(path.read_text().split("\n"), 1) if "KeyError" in t)
    v = diagnose([path])
    assert v.root is not None and (v.reason, v.root.line) == ("KeyError", shown)
    source = expand([path]).logs[0]
    rows = around(source, shown, before=20)
    assert [n for n, t in rows if "KeyError" in t] == [shown] and len({n for n, _ in rows}) == len(rows)
    assert [n for n, t in Compressor().lines(blocks(source, [])) if b"KeyError" in t] == [shown]
