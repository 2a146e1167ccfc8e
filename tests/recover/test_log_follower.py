"""A rank's log is followed for its steps; one that floods costs a bounded time and still tells the newest step."""

from __future__ import annotations

import time
from pathlib import Path

from unbroken.recover.node.logs.log_follower import LogFollower

FLOODS = {
    "a warning": b"WARNING: tokens beyond 4096 are cut, this message repeats for every sample 254\n",
    "what looks like steps": b"batch 7 of step 3: iter 9 of num_updates 7\n",
    "one line without end": b"step loss iter batch " * 8,
    "carriage returns": b"step 3\r",
}


def steps(first: int, last: int) -> bytes:
    return b"".join(f"step {s} loss {1 / s:.4f}\n".encode() for s in range(first, last + 1))


def test_steps_are_read_as_they_come(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(steps(1, 4) + b"step 5 lo")
    follower = LogFollower(log)
    assert [r.step for r in follower.poll(1.0)] == [1, 2, 3, 4] and follower.learnt
    assert follower.poll(2.0) == []
    with open(log, "ab") as f:
        f.write(b"ss 0.5\nand more\n")
    (record,) = follower.poll(3.0)
    assert (record.step, record.loss, record.time) == (5, 0.5, 3.0)
    follower.close()


def test_a_progress_bar_is_read_as_tqdm_writes_it(tmp_path: Path) -> None:
    """Carriage returns, no end of a line, and the bar's own words alone."""
    from tqdm import tqdm

    with open(tmp_path / "log", "w") as out:
        follower = LogFollower(tmp_path / "log")
        steps = tqdm(range(40), file=out, mininterval=0)
        found = []
        for s in steps:
            steps.set_postfix(loss=4 - s / 20)
            out.flush()
            found += [(r.step, r.loss) for r in follower.poll(0.0)]
            if s == 20:
                assert follower.learnt
    assert found[-1][0] in (38, 39) and found[10][1] == found[10][1]
    assert len(found) >= 30
    follower.close()


def test_a_flood_is_followed_in_bounded_time(tmp_path: Path) -> None:
    for name, line in FLOODS.items():
        log = tmp_path / "log"
        with open(log, "wb") as f:
            f.write(steps(1, 5))
            for _ in range(40):
                f.write(line * (1_000_000 // len(line)))
            f.write(b"\n" + steps(6, 9))
        follower = LogFollower(log)
        longest, found = 0.0, []
        while not found or found[-1] < 9:
            began = time.thread_time()
            got = follower.poll(0.0)
            longest = max(longest, time.thread_time() - began)
            found += [r.step for r in got]
            if follower._file.tell() == log.stat().st_size and not got:
                break
        assert longest < 0.5, name
        assert follower.left_out > 30_000_000, name
        if name == "a warning":
            assert found[-1] == 9
        follower.close()


def test_the_last_steps_are_read_when_the_rank_is_gone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(FLOODS["a warning"] * 20_000 + steps(1, 9))
    follower = LogFollower(log)
    assert [r.step for r in follower.finish(1.0)] == list(range(1, 10))
    follower.close()


def test_a_script_that_is_not_followed_costs_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(steps(1, 9))
    follower = LogFollower(log, enabled=False)
    assert follower.poll(1.0) == [] and not follower.learnt
    follower.close()
