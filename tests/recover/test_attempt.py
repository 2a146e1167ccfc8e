"""One attempt from its agents' news: steps of the leading rank, step time, how its ranks ended."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from unbroken.detect import HangDetector
from unbroken.progress import Phase, RunDir, Timeouts
from unbroken.progress.records.steps import Step, read_steps, step_record
from unbroken.recover.supervise.attempt.attempt import Attempt


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    run_dir = RunDir(tmp_path / "run")
    return Attempt.make(3, ("node-000", "node-002"), 2, HangDetector(Timeouts()), 10, run_dir)


def end(code: int | None, at: float, killed_by_agent: bool) -> dict[str, Any]:
    """An agent's report of a rank's end: by this code, else by SIGKILL."""
    return {"code": code, "signal": 9 if code is None else None, "time": at, "ours": killed_by_agent}


def news(
    steps: list[tuple[int, float]],
    *,
    phase: Phase = Phase.TRAINING,
    source: str = "page",
    count: int = 1,
    total: int | None = None,
) -> dict[str, Any]:
    return {
        "count": count, "phase": int(phase), "source": source, "total": total,
        "steps": [[s, 64, (float(s) / 2).hex(), at] for s, at in steps],
    }  # fmt: skip


def test_ranks_lie_on_the_slots_nodes(attempt: Attempt) -> None:
    assert {r: s.node for r, s in attempt.ranks.items()} == {
        0: "node-000",
        1: "node-000",
        2: "node-002",
        3: "node-002",
    }
    assert attempt.node_ranks("node-002") == {2: 0, 3: 1}
    assert (attempt.step, attempt.steps_known, attempt.all_ended) == (-1, False, False)


def test_the_leading_ranks_steps_are_kept_to_the_last_bit(attempt: Attempt) -> None:
    now = 5000.0
    fresh = attempt.take(
        now, {"0": news([(9, now - 2), (10, now - 1), (11, now)], total=99), "1": news([(9, now)])}
    )
    assert [s.step for s in fresh] == [9, 10, 11]
    assert attempt.total == 99 and attempt.step == 11
    assert attempt.first_step is not None and attempt.first_step.step == 9
    assert attempt.caught_up is not None and attempt.caught_up.step == 11, "the floor was step 10"
    assert abs(fresh[-1].time - time.time()) < 5, "the node's clock was related to ours"
    assert attempt.steps_file is not None
    assert read_steps(attempt.steps_file) == [Step(s.step, s.loss, 64, round(s.time, 6)) for s in fresh]


def test_news_of_unknown_ranks_is_passed_over(attempt: Attempt) -> None:
    assert attempt.take(1.0, {"77": news([(1, 1.0)])}) == []


def test_step_time_leaves_evaluations_out(attempt: Attempt) -> None:
    """Else one evaluation would raise the hang deadline to four times its length for a hundred steps."""
    attempt.take(100.0, {"0": news([(0, 100.0)])})
    attempt.take(101.0, {"0": news([(1, 101.0)], phase=Phase.EVALUATING)})
    assert attempt.step_time == pytest.approx(1.0)
    attempt.take(700.0, {"0": news([], phase=Phase.TRAINING)})
    attempt.take(701.0, {"0": news([(2, 701.0)])})
    attempt.take(702.0, {"0": news([(3, 702.0)])})
    assert attempt.step_time == pytest.approx(1.0)
    assert attempt.detector.deadlines(Phase.TRAINING) == (5, 60)


def test_a_log_that_another_rank_prints_leads(attempt: Attempt) -> None:
    for r in ("0", "1", "2"):
        attempt.take(1.0, {r: news([], source="idle")})
    assert [s.step for s in attempt.take(2.0, {"3": news([(4, 2.0)], source="log")})] == [4]
    # It goes on leading when another one begins to print, so that no step comes twice.
    assert attempt.take(3.0, {"0": news([(5, 3.0)], source="log")}) == []
    assert [s.step for s in attempt.take(3.0, {"3": news([(5, 3.0)], source="log")})] == [5]


def test_with_pages_rank_zero_leads_whoever_comes_first(attempt: Attempt) -> None:
    assert attempt.take(1.0, {"2": news([(0, 1.0)])}) == []
    assert [s.step for s in attempt.take(1.0, {"0": news([(0, 1.0)])})] == [0]


def test_failures_in_the_order_of_their_time(attempt: Attempt) -> None:
    for rank, code, at, killed_by_agent in (
        (0, 1, 7.0, False),
        (1, 0, 6.0, False),
        (2, None, 5.0, False),
        (3, None, 4.0, True),
    ):
        attempt.note_exit(rank, end(code, at, killed_by_agent))
    assert [e.rank for e in attempt.failures()] == [2, 0]
    assert [e.rank for e in attempt.exits()] == [3, 2, 1, 0]
    assert attempt.all_ended and not attempt.all_finished


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ([], None),
        ([(0, 0, 1.0, False)], None),
        ([(0, 1, 1.0, False), (1, None, 2.0, True)], None),
        ([(0, 0, 1.0, False), (1, 15, 2.0, True), (0, 1, 3.0, False)], 1),
    ],
)
def test_what_failed_after_a_lapsed_lease_followed_from_it(
    attempt: Attempt, ends: list[tuple[int, int | None, float, bool]], first: int | None
) -> None:
    for rank, code, at, killed_by_agent in ends:
        attempt.note_exit(rank, end(code, at, killed_by_agent))
    stopped = attempt.stopped_by_us()
    assert (stopped.rank if stopped else None) == first


@pytest.mark.parametrize("end", [{"code": 0}, {"signal": 9}])
def test_an_end_may_say_only_how_it_was(attempt: Attempt, end: dict[str, Any]) -> None:
    attempt.note_exit(0, {**end, "time": 1.0, "ours": False})
    assert attempt.ended == 1 and bool(attempt.failures()) == ("signal" in end)


def test_a_full_disk_keeps_the_steps_for_later(attempt: Attempt) -> None:
    assert attempt.steps_file is not None
    place = attempt.steps_file
    place.mkdir()  # stands for a file that cannot be written
    assert len(attempt.take(1.0, {"0": news([(1, 1.0)])})) == 1
    place.rmdir()
    attempt.take(2.0, {"0": news([(2, 2.0)])})
    assert [s.step for s in read_steps(place)] == [1, 2]


def test_what_was_half_written_does_not_stand_there_twice(tmp_path: Path) -> None:
    """In a process whose files may not grow beyond a limit, as on a disk that is full for a while."""
    code = textwrap.dedent("""
        import resource, signal, sys
        from unbroken.detect import HangDetector
        from unbroken.progress import RunDir, Timeouts
        from unbroken.recover.supervise.attempt.attempt import Attempt; from unbroken.progress.records.steps import Step, read_steps
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        attempt = Attempt.make(1, ("n",), 1, HangDetector(Timeouts()), -1, RunDir(sys.argv[1]))
        step = lambda n: attempt._keep([Step(n, 1.0, 1, float(n))])
        step(0)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (attempt.steps_file.stat().st_size + 70, hard))
        for n in range(1, 5): step(n)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        step(5)
        text = attempt.steps_file.read_text()
        print([s.step for s in read_steps(attempt.steps_file)], text.count("\\n"))
    """)
    shown = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout
    assert shown == "[0, 1, 2, 3, 4, 5] 6\n"


def test_steps_file(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    assert read_steps(path) == []
    losses = [0.1, math.inf, -0.0, 5e-324]
    lines = [json.dumps(step_record(Step(i, x, 1, 2.0))) for i, x in enumerate(losses)]
    path.write_text("\n".join(lines) + "\n" + lines[0][:20])
    assert [s.loss for s in read_steps(path)] == losses
    assert math.copysign(1, read_steps(path)[2].loss) == -1


def test_what_it_went_on_from_is_news_once_and_rank_0_has_the_last_word(
    attempt: Attempt, tmp_path: Path
) -> None:
    def tell(to: Attempt, of: int | None, step: int | None, rank: int, known: Any = None) -> bool:
        return to.take_restored({"of": of, "step": step, "rank": rank}, known)

    assert tell(attempt, 2, 40, 3, known=(2, 1, 20)), "by another node: rank 0's agent may be lost with it"
    assert not tell(attempt, 2, 40, 0) and not tell(attempt, 2, 40, 2)
    assert tell(attempt, 1, 20, 0), "it restored a second time"
    assert not tell(attempt, 2, 40, 3), "a node that was slow"
    after, fresh = (
        Attempt.make(3, ("a", "b"), 2, HangDetector(Timeouts()), 10, RunDir(tmp_path / f"run-{i}")) for i in (1, 2)
    )  # fmt: skip
    assert not tell(after, 1, 20, 0, known=(3, 1, 20)), "the journal has it"
    assert tell(fresh, None, None, 1) and not tell(fresh, None, None, 0), "from the beginning"
