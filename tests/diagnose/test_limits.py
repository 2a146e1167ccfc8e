"""A bound on time or bytes: heads and tails first, what was left out is said, and nothing is surer than it can be."""

from __future__ import annotations

import gzip
import threading
import time
from pathlib import Path

import pytest

from tests.diagnose.logs import job, steps, traceback
from unbroken.diagnose import Limits, Outcome, Verdict, diagnose, examine
from unbroken.errors import InputError

CUDA = "RuntimeError: CUDA error: an illegal memory access was encountered"


def long_log(folder: Path, lines: int = 60_000, **kw: str) -> Path:
    return job(folder, steps(lines) + traceback(CUDA, 3), **kw)


def test_generous_limits_change_nothing(tmp_path: Path) -> None:
    path = long_log(tmp_path)
    assert diagnose([path], limits=Limits(seconds=600, bytes=1 << 40)) == diagnose([path])


def test_the_tail_is_read_and_what_was_not_is_said(tmp_path: Path) -> None:
    path = long_log(tmp_path)
    whole, part = diagnose([path]), diagnose([path], limits=Limits(bytes=200_000))
    assert part.reason == whole.reason == "CUDAError" and part.root and whole.root
    assert part.root.text == whole.root.text and part.root.rank == 3
    assert part.root.line is None, "lines behind a part that was not read are not known"
    size = path.stat().st_size
    assert size - 300_000 < part.unread < size
    assert "not everything was read" in part.notes[-1] and part.confidence <= 0.75 < whole.confidence
    assert Verdict.from_json(part.as_json()) == part and part.as_json()["unread"] == part.unread


def test_what_stands_in_the_head_keeps_its_line(tmp_path: Path) -> None:
    body = steps(20) + traceback(CUDA, 3) + "NCCL INFO chatter of the tear-down\n" * 100_000
    path = job(tmp_path, body)
    whole, part = diagnose([path]), diagnose([path], limits=Limits(bytes=200_000))
    assert part.root and whole.root and part.root.line == whole.root.line and part.unread


def test_the_middle_is_read_backwards_as_far_as_the_limit_reaches(tmp_path: Path) -> None:
    body = steps(200_000) + traceback(CUDA, 3) + "NCCL INFO chatter of the tear-down\n" * 100_000
    path = job(tmp_path, body)
    size = path.stat().st_size
    part = diagnose([path], limits=Limits(bytes=size - 1_000_000))
    assert part.reason == "CUDAError" and 0 < part.unread < 3_000_000


@pytest.mark.parametrize("limits", [Limits(bytes=300_000), Limits(seconds=0.05)])
def test_every_file_gets_its_share(tmp_path: Path, limits: Limits) -> None:
    for i in range(6):
        job(tmp_path, steps(30_000) + (traceback(CUDA, 5) if i == 5 else ""), f"rank-{i}.log")
    d = examine([tmp_path], limits=limits)
    if limits.bytes:
        assert d.verdict.reason == "CUDAError" and d.verdict.root and d.verdict.root.file == "rank-5.log"
    assert sum(s.unread for s in d.scans) == d.verdict.unread > 0
    assert sum(s.unread + s.log_end.bytes for s in d.scans) == sum(
        f.stat().st_size for f in tmp_path.iterdir()
    )


def test_a_compressed_log_is_passed_over_and_its_lines_are_counted(tmp_path: Path) -> None:
    text = long_log(tmp_path / "plain").read_bytes()
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(text, 1))
    whole, part = diagnose([path]), diagnose([path], limits=Limits(bytes=200_000))
    assert part.unread > 1_000_000 and part.root and whole.root
    assert (part.reason, part.root.line) == (whole.reason, whole.root.line)


def test_time_is_kept_and_other_threads_go_on(tmp_path: Path) -> None:
    """A thread beside it gets its turn all the time: no step holds the interpreter for long."""
    job(tmp_path, "ERROR: push failed, will try again\n" * 3_000_000)
    ended, gaps = threading.Event(), [0.0]

    def beat() -> None:
        last = time.thread_time(), time.monotonic()
        while not ended.wait(0.005):
            now = time.thread_time(), time.monotonic()
            gaps.append(now[1] - last[1])
            last = now

    beside = threading.Thread(target=beat)
    beside.start()
    start = time.monotonic()
    v = diagnose([tmp_path], limits=Limits(seconds=0.2))
    took = time.monotonic() - start
    ended.set()
    beside.join()
    assert took < 4.0, "a fifth of a second, and a loaded machine"
    assert v.unread and v.outcome in (Outcome.UNKNOWN, Outcome.FAILED)
    assert sorted(gaps)[-3] < 1.0


def test_a_log_that_vanishes_or_shrinks_is_no_accident(tmp_path: Path) -> None:
    from unbroken.diagnose.engine import examine_sources
    from unbroken.diagnose.match.rules import builtin_set
    from unbroken.diagnose.read.sources import expand

    path = long_log(tmp_path)
    sources = expand([path])
    path.write_text("short now\n")
    d = examine_sources(sources, builtin_set(), limits=Limits(bytes=200_000))
    assert d.scans[0].log_end.bytes <= 20
    path.unlink()
    assert examine_sources(sources, builtin_set(), limits=Limits(bytes=200_000)).notes


def test_one_endless_line(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x" * 30_000_000)
    v = diagnose([tmp_path], limits=Limits(bytes=3_000_000))
    assert 20_000_000 < v.unread < 30_000_000


def test_limits_have_to_be_above_zero() -> None:
    for wrong in ({"seconds": 0.0}, {"bytes": 0}, {"seconds": float("nan")}):
        with pytest.raises(InputError):
            Limits(**wrong)  # type: ignore[arg-type]
