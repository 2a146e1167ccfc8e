"""Looks at processes from outside, and which ranks they show to be late."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from unbroken.detect import ProcessInfo, RankStep, collect_stacks, explain_hang
from unbroken.detect.stacks import ChildInfo, Doing, name_place
from unbroken.detect.stacks.standing import find_standing
from unbroken.progress import Phase


def look(state: str = "S", *frames: str) -> ProcessInfo:
    return ProcessInfo(1, state, "", frames, "")


WAITS = "wait (torch/distributed/distributed_c10d.py:100)"


def waits(site: str = "main (t.py:9)", op: str = "all_reduce") -> ProcessInfo:
    return ProcessInfo(1, "S", "", (f"{op} (torch/distributed/distributed_c10d.py:100)", site), "", site=site)


def named(
    looks: dict[int, ProcessInfo],
    steps: dict[int, RankStep] | None = None,
    missing: dict[int, str] | None = None,
) -> tuple[int, ...]:
    return tuple(c.rank for c in explain_hang(looks, steps or {}, missing).culprits)


@pytest.mark.parametrize(
    ("looks", "behind", "late"),
    [
        ({}, (), ()),
        ({0: look(), 1: look("T")}, (), (1,)),
        ({0: look("D"), 1: look("t"), 2: look()}, (2,), (0, 1)),
        ({0: look("S", "f (x.py:1)"), 1: look("S", "f (x.py:1)")}, (1,), (1,)),
        ({0: look("S", WAITS), 1: look("S", WAITS), 2: look("R", "load (data.py:7)")}, (), (2,)),
        # Nobody is odd: all in the collective, or no majority.
        ({r: look("S", WAITS) for r in range(4)}, (), ()),
        # Of two ranks the one that is in no collective.
        ({0: look("S", WAITS), 1: look("S", "sleep (t.py:1)", "main (t.py:9)")}, (), (1,)),
        (
            {0: look("S", "read (t.py:1)"), 1: look("S", "_engine_run_backward (torch/autograd/graph.py:1)")},
            (),
            (0,),
        ),
        # One of which no stack is known is not named for that.
        ({0: look("S", "read (t.py:1)"), 1: look("S", WAITS), 2: look("S")}, (), (0,)),
        ({0: look("S", "a (x:1)"), 1: look("S", "b (x:1)")}, (), ()),
        ({0: look("S", WAITS)}, (), ()),
        ({0: look("S", "a (x:1)"), 1: look("S", "b (x:1)"), 2: look("S", "c (x:1)")}, (), ()),
    ],
)
def test_who_holds_the_others_up(
    looks: dict[int, ProcessInfo], behind: tuple[int, ...], late: tuple[int, ...]
) -> None:
    assert named(looks, {r: RankStep(4 if r in behind else 5) for r in looks}) == late


def test_all_that_never_joined_are_named_with_what_they_missed() -> None:
    looks = {r: waits() for r in range(1000)} | {7: look("R", "f (x.py:1)"), 400: look("T")}
    picture = explain_hang(looks, {r: RankStep(3) for r in looks})
    assert [(c.rank, c.doing, c.missed) for c in picture.culprits] == [
        (7, "runs its own code", "all_reduce at main (t.py:9)"),
        (400, "is stopped", "all_reduce at main (t.py:9)"),
    ]
    assert [(g.odd, len(g.ranks), g.relation) for g in picture.groups] == [
        (True, 1, "never joined"),
        (True, 1, "never joined"),
        (False, 998, "joined"),
    ]


def test_tens_of_thousands_of_ranks_are_judged_in_a_moment_wherever_they_stand() -> None:
    """Seconds of a processor, so that other load does not count: about 0.2; by comparing each with all it took 8."""
    here, there = waits(), look("R", "f (x.py:1)")
    looks = {r: here if r % 2 else there for r in range(32_000)}
    began = time.process_time()
    assert len(named(looks)) == 16_000
    assert time.process_time() - began < 2


def test_one_in_another_collective_is_named_and_nobody_where_two_halves_differ() -> None:
    ahead = {0: waits(), 1: waits(), 2: waits("main (t.py:12)", "barrier"), 3: waits()}
    (culprit,) = explain_hang(ahead, {}).culprits
    assert (culprit.rank, culprit.relation, culprit.text) == (
        2,
        "joined",
        "waits in barrier at main (t.py:12)",
    )
    halves = {r: waits("main (t.py:12)" if r < 2 else "main (t.py:9)") for r in range(4)}
    assert named(halves) == () and "no majority" in explain_hang(halves, {}).why
    # The same line a step later is another collective.
    assert named({r: waits() for r in range(4)}, {r: RankStep(6 if r == 1 else 5) for r in range(4)}) == (1,)


def test_one_that_has_finished_is_what_the_others_wait_for() -> None:
    picture = explain_hang({r: waits() for r in (0, 1)}, {2: RankStep(5, finished=True)})
    assert [(c.rank, c.relation) for c in picture.culprits] == [(2, "finished")]


def test_flight_recorders_are_believed_first() -> None:
    looks = {r: waits() for r in range(4)}
    picture = explain_hang(looks, {}, {3: "all_reduce 41 of dp"})
    assert [(c.rank, c.missed) for c in picture.culprits] == [(3, "all_reduce 41 of dp")]


@pytest.mark.parametrize(
    ("process", "phase", "doing"),
    [
        (ProcessInfo(1, "S", "", ("main (t.py:1)",), "", gil=("main (t.py:1)",)), Phase.TRAINING, Doing.LOCK_HELD),
        (look("S", "poll (multiprocessing/connection.py:1)", "_get_data (torch/utils/data/dataloader.py:1)"), Phase.TRAINING, Doing.LOADER),
        (look("S", "wait (subprocess.py:1)", "evaluate (t.py:1)"), Phase.TRAINING, Doing.EVALUATION),
        (look("S", "wait (subprocess.py:1)", "main (t.py:1)"), Phase.TRAINING, Doing.CHILD),
        (look("S", "open (t.py:1)"), Phase.CHECKPOINTING, Doing.CHECKPOINT),
        (look("S", "save (torch/serialization.py:1)"), Phase.TRAINING, Doing.CHECKPOINT),
        (look("S", "wait (threading.py:1)", "main (t.py:1)"), Phase.TRAINING, Doing.LOCK),
        (look("R", "main (t.py:1)"), Phase.TRAINING, Doing.CODE),
        (look("S"), Phase.TRAINING, Doing.UNKNOWN),
        (look("Z"), Phase.TRAINING, Doing.DEAD),
    ],
)  # fmt: skip
def test_what_a_rank_is_doing(process: ProcessInfo, phase: Phase, doing: Doing) -> None:
    assert find_standing(0, process, phase, False).doing is doing


def test_the_worker_that_is_waited_for_is_described() -> None:
    idle = ChildInfo(40, "python", "S", ("get (multiprocessing/queues.py:1)",))
    dead = ChildInfo(41, "python", "Z")
    process = replace(look("S", "_get_data (torch/utils/data/dataloader.py:1)"), children=(idle, dead))
    assert "process 41 (python), dead, not reaped" in find_standing(0, process, Phase.TRAINING, False).detail


def test_a_place_compares_equal_when_it_is_the_same() -> None:
    here = {0: look("S", WAITS, "f (x.py:1)"), 1: look("R", "read (y.py:3)")}
    assert name_place(here) == name_place(
        {0: look("S", "wait (distributed_c10d.py:105)", "f (x.py:2)"), 1: look("S", "read (y.py:8)")}
    )
    assert name_place(here) != name_place({**here, 1: look("R", "write (y.py:3)")})
    stopped = {0: look("S", WAITS), 1: look("T", WAITS)}
    assert name_place({}) == name_place(stopped) == name_place({0: look("S")}) == ""


def test_a_stopped_process_is_seen_as_such(eventually: Callable[..., None]) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not collect_stacks(child.pid).cannot_run
        os.kill(child.pid, signal.SIGSTOP)
        eventually(lambda: collect_stacks(child.pid, timeout=5).state == "T")
        told = collect_stacks(child.pid, timeout=5)
        assert told.cannot_run and "stopped by a signal" in told.text
    finally:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert collect_stacks(child.pid).state == "Z"
        child.wait()
        if child.stdin is not None:
            child.stdin.close()
    gone = collect_stacks(child.pid)
    assert gone.state == "?" and gone.cannot_run and "gone" in gone.text


def test_what_a_process_started_is_looked_at_too(eventually: Callable[..., None]) -> None:
    code = "import subprocess; subprocess.run(['sleep', '60'])"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        eventually(lambda: any(c.name == "sleep" for c in collect_stacks(child.pid, timeout=5).children))
        told = collect_stacks(child.pid, timeout=5)
        assert told.busy is False and "(sleep), sleeping" in told.text
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
