"""The logs of attempts that are over: compressed, within their budget, and read as before."""

from __future__ import annotations

import gzip
import os
from dataclasses import replace
from pathlib import Path

import pytest

from unbroken.diagnose.read.sources import blocks, expand
from unbroken.progress import RunDir
from unbroken.progress.growing_logs import drop_middle, used_bytes
from unbroken.recover.supervise.record import old_logs
from unbroken.recover.supervise.record.old_logs import bound_newest, settle_logs, tidy_logs
from unbroken.status.rank_logs import Wanted, rank_logs, read_tail
from unbroken.testing.fake_cluster.simulated_run import SimulatedRun
from unbroken.units import Bytes

from .simulating import Simulate, reach

LINE = "step 1 of many, as a rank prints them\n"
KEEP = 3 << 20


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Five attempts of two ranks, 370 kB of log each, and files that are no logs."""
    run = RunDir(tmp_path / "run")
    for attempt in range(1, 6):
        for rank in (0, 1):
            path = run.rank_log(attempt, f"node-{rank}", rank)
            path.parent.mkdir(parents=True)
            path.write_text(f"attempt {attempt}\n" + LINE * 10_000)
        run.steps(attempt).write_text("{}\n")
    return run


def test_older_attempts_are_compressed_and_read_as_before(run: RunDir) -> None:
    before = {n: [list(read_tail(x, 2)) for x in rank_logs(run, n)] for n in range(1, 6)}
    done = tidy_logs(run, 5, 1 << 40)
    assert (done.compressed, done.removed) == (6, ()) and done.after < done.before / 20
    assert {n: {x.path.suffix for x in rank_logs(run, n)} for n in range(1, 6)} == {
        1: {".gz"}, 2: {".gz"}, 3: {".gz"}, 4: {".log"}, 5: {".log"},
    }  # fmt: skip
    assert {n: [list(read_tail(x, 2)) for x in rank_logs(run, n)] for n in range(1, 6)} == before
    assert tidy_logs(run, 5, 1 << 40).compressed == 0, "once"
    assert run.steps(1).exists()


def test_the_oldest_go_while_all_are_above_the_budget_and_the_newest_two_stay(run: RunDir) -> None:
    plain = 2 * run.rank_log(5, "node-0", 0).stat().st_size
    assert tidy_logs(run, 5, 2 * plain + 100).removed == (1, 2, 3)
    assert [len(rank_logs(run, n)) for n in range(1, 6)] == [0, 0, 0, 2, 2]
    assert tidy_logs(run, 5, 0).removed == (), "what may still be read is never removed"
    assert [len(rank_logs(run, n)) for n in (4, 5)] == [2, 2]


def test_a_log_that_cannot_be_compressed_stays_as_it_is(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk in the middle: the log is whole, and nothing is left beside it."""
    text = run.rank_log(1, "node-0", 0).read_bytes()

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(old_logs.shutil, "copystat", fail)
    assert tidy_logs(run, 5, 1 << 40).compressed == 0
    assert run.rank_log(1, "node-0", 0).read_bytes() == text
    assert os.listdir(run.node(1, "node-0")) == ["rank-0.log"]
    monkeypatch.undo()
    assert tidy_logs(run, 5, 1 << 40).compressed == 6
    assert gzip.decompress((run.node(1, "node-0") / "rank-0.log.gz").read_bytes()) == text


def test_a_log_that_grows_without_end_keeps_its_beginning_and_its_end(run: RunDir) -> None:
    """The writer goes on appending to the same file; every reader passes over what was left out."""
    path = run.rank_log(5, "node-0", 0)
    with open(path, "ab") as writer:
        for n in range(200_000):
            writer.write(f"line {n} of a loop\n".encode())
        writer.flush()
        long, keep = path.stat().st_size, 1 << 20
        if not growing_logs_can_shrink(path.parent):
            pytest.skip("this file system frees no middle of a file")
        freed, refused = bound_newest(run, 5, keep)
        assert refused == "" and freed[path] > long / 2
        assert used_bytes(path) < keep, "beside the least of each"
        writer.write(b"the last line\n")
    assert path.stat().st_size > long, "offsets stay: whoever follows it misses nothing"
    (log,) = rank_logs(run, 5, Wanted(ranks=frozenset({0})))
    lines = list(read_tail(log, None))
    assert lines[0] == "attempt 5" and lines[-1] == "the last line" and not any("\0" in x for x in lines)
    assert sum("left out here" in x for x in lines) == 1
    assert list(read_tail(log, 2)) == ["line 199999 of a loop", "the last line"]
    notes: list[str] = []
    read = b"".join(b for s in expand([path]).logs for b in blocks(s, notes))
    assert b"\0" not in read and read.endswith(b"the last line\n") and len(read) < keep
    assert bound_newest(run, 5, keep)[0] == {}, "once is enough until it has grown again"
    tidy_logs(run, 7, 1 << 40)
    (packed,) = rank_logs(run, 5, Wanted(ranks=frozenset({0})))
    assert packed.path.suffix == ".gz" and list(read_tail(packed, None)) == lines


def chat(run: SimulatedRun, attempt: int) -> None:
    """Four times as much as may be kept, of one rank."""
    path = run.run_dir.rank_log(attempt, "node-00000", 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as f:
        f.write(LINE * (4 * KEEP // len(LINE)))


def used(run: SimulatedRun) -> int:
    return sum(used_bytes(p) for p in run.run_dir.path.glob("attempts/*/*/rank-*.log*"))


def test_an_attempt_that_was_taken_over_is_kept_within_the_budget_and_the_end_of_a_run_too(
    simulate: Simulate, tmp_path: Path
) -> None:
    if not growing_logs_can_shrink(tmp_path):
        pytest.skip("this file system frees no middle of a file")

    async def act(run: SimulatedRun) -> None:
        run.spec = replace(run.spec, keep_logs=Bytes(KEEP))
        await reach(run, 1, 5)
        run.kill_supervisor()
        run.restart_supervisor()
        await run.until(lambda: run.journal("adopted"))
        chat(run, 1)
        await run.until(lambda: used(run) <= KEEP, 150)
        assert [r["attempt"] for r in run.journal("attempt")] == [1] and not run.task.done()
        chat(run, 1)
        run.supervisor.request_stop()
        assert await run.task == "interrupted" and used(run) <= KEEP

    simulate(act, 2)


def test_the_end_of_a_run_removes_the_oldest_logs_and_packs_none(run: RunDir) -> None:
    size = used_bytes(run.rank_log(5, "node-0", 0))
    settle_logs(run, 5 * size)
    assert [len(rank_logs(run, n)) for n in range(1, 6)] == [0, 0, 0, 2, 2]
    assert not [*run.path.glob("attempts/*/*/*.gz")]
    settle_logs(RunDir(run.path / "none"), 0)


def growing_logs_can_shrink(folder: Path) -> bool:
    probe = folder / "probe"
    probe.write_bytes(b"x" * (1 << 20))
    try:
        return drop_middle(probe, 4096, 4096) > 0
    except OSError:
        return False
    finally:
        probe.unlink()
