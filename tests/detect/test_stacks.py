"""Looks at processes from outside, and which ranks they show to be late."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from unbroken.detect import ProcessInfo, collect_stacks, late_ranks
from unbroken.detect.stacks import _main_frames, place


def look(state: str = "S", *frames: str) -> ProcessInfo:
    return ProcessInfo(1, state, "", frames, "")


WAITS = "wait (distributed_c10d.py:100)"


@pytest.mark.parametrize(
    ("looks", "behind", "late"),
    [
        ({}, (), ()),
        ({0: look(), 1: look("T")}, (), (1,)),
        ({0: look("D"), 1: look("t"), 2: look()}, (2,), (0, 1)),
        ({0: look(), 1: look()}, (1,), (1,)),
        ({0: look("S", WAITS), 1: look("S", WAITS), 2: look("R", "load (data.py:7)")}, (), (2,)),
        # Other lines of the same function are the same place.
        (
            {0: look("S", WAITS), 1: look("S", "wait (distributed_c10d.py:105)"), 2: look("R", "f (x.py:1)")},
            (),
            (2,),
        ),
        # Nobody is odd: all in the collective, or no majority.
        ({r: look("S", WAITS) for r in range(4)}, (), ()),
        # Of two ranks the one that is in no collective.
        ({0: look("S", WAITS), 1: look("S", "sleep (t.py:1)", "main (t.py:9)")}, (), (1,)),
        (
            {0: look("S", "read (t.py:1)"), 1: look("S", "_engine_run_backward (torch/autograd/graph.py:1)")},
            (),
            (0,),
        ),
        ({0: look("S", "read (t.py:1)"), 1: look("S", WAITS), 2: look("S")}, (2,), (2,)),
        ({0: look("S", "a (x:1)"), 1: look("S", "b (x:1)")}, (), ()),
        ({0: look("S", WAITS)}, (), ()),
        ({0: look("S", "a (x:1)"), 1: look("S", "b (x:1)"), 2: look("S", "c (x:1)")}, (), ()),
    ],
)
def test_late_ranks(looks: dict[int, ProcessInfo], behind: tuple[int, ...], late: tuple[int, ...]) -> None:
    assert late_ranks(looks, behind) == late


def test_a_place_compares_equal_when_it_is_the_same() -> None:
    here = {0: look("S", WAITS, "f (x.py:1)"), 1: look("R", "read (y.py:3)")}
    assert place(here) == place(
        {0: look("S", "wait (distributed_c10d.py:105)", "f (x.py:2)"), 1: look("S", "read (y.py:8)")}
    )
    assert place(here) != place({**here, 1: look("R", "write (y.py:3)")})
    assert place({}) == place({0: look("S", WAITS), 1: look("T", WAITS)}) == place({0: look("S")}) == ""


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


def test_frames_of_the_main_thread_innermost_first() -> None:
    dump = """Process 12: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 15 (idle): "reader"
    read (io.py:1)
Thread 12 (idle): "MainThread"
    all_reduce (c10d.py:9)
    train (train.py:40)
    <module> (train.py:99)
Thread 16 (idle): "writer"
    write (io.py:2)
"""
    assert _main_frames(dump) == ("all_reduce (c10d.py:9)", "train (train.py:40)", "<module> (train.py:99)")
    assert _main_frames("") == ()
