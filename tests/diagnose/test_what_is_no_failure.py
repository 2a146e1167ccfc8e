"""Ends that are no failure, quotations, neighbours on a card, ranks that left: the parts that decide them."""

from __future__ import annotations

from pathlib import Path

import pytest

from unbroken.diagnose import Action, Outcome, diagnose
from unbroken.diagnose.judge.occupied import neighbour
from unbroken.diagnose.match.completion import is_full
from unbroken.diagnose.match.events import Topology
from unbroken.diagnose.match.rules import builtin
from unbroken.diagnose.observed.known import with_flight
from unbroken.diagnose.read.flight_recorder import Flight
from unbroken.diagnose.read.quoted import is_fenced, is_open_before, is_talk
from unbroken.progress.records.verdict import HANG, Verdict

from .wild import steps, tb


def judge(folder: Path, lines: list[str], name: str = "log.txt") -> Verdict:
    (folder / name).write_text("\n".join(lines) + "\n")
    return diagnose([folder])


def test_nothing_is_wrong_and_nothing_says_how_are_different_answers(tmp_path: Path) -> None:
    quiet = [
        f"May  4 03:00:{i:02d} n1 kernel: [{i}.000001] usb 1-1: new device number {i}" for i in range(40)
    ]
    clean = judge(tmp_path, quiet, "messages")
    assert (clean.outcome, clean.reason, clean.action) == (Outcome.COMPLETED, None, Action.NONE)
    assert clean.decided_by == "no-fault" and "nothing is wrong" in clean.notes[0]
    (tmp_path / "messages").unlink()
    silent = judge(tmp_path, steps())
    assert (silent.outcome, silent.reason) == (Outcome.UNKNOWN, "Unknown")
    assert "nothing says how" in silent.notes[0] and silent.confidence <= 0.5


def test_a_machines_log_that_breaks_off_is_no_failed_job(tmp_path: Path) -> None:
    quiet = [
        f"May  4 03:00:{i:02d} n1 kernel: [{i}.000001] usb 1-1: new device number {i}" for i in range(40)
    ]
    (tmp_path / "messages").write_text("\n".join(quiet)[:-7])
    assert diagnose([tmp_path]).outcome is Outcome.COMPLETED


def test_an_interrupt_after_a_failure_leaves_the_failure_the_root(tmp_path: Path) -> None:
    lines = steps() + tb("KeyError: 'w'", tag="[rank3]: ") + ["^C"] + tb("KeyboardInterrupt")
    assert judge(tmp_path, lines).reason == "KeyError"


def test_an_interrupt_that_training_went_on_after_is_no_end(tmp_path: Path) -> None:
    lines = steps() + ["^C"] + steps(20, start=300) + tb("KeyError: 'w'")
    assert judge(tmp_path, lines).reason == "KeyError"


def test_a_failure_after_the_words_of_an_end_counts(tmp_path: Path) -> None:
    lines = [
        *steps(),
        "all 300 steps are done",
        *tb("FileNotFoundError: [Errno 2] No such file or directory: '/out'"),
    ]
    assert judge(tmp_path, lines).reason == "FileNotFoundError"


@pytest.mark.parametrize("line,full", [("step 4000/4000 val 2.1", True), ("3000/3000 [2:32:00<00:00]", True), ("step 300/4000 loss 2", False),
                                       ("Epoch 10/10", False), ("[batch=600/600]: Eval", True), ("port 8/8", False)])  # fmt: skip
def test_the_last_of_all_steps(line: str, full: bool) -> None:
    assert is_full(line, None) is full


def test_whether_words_are_quoted() -> None:
    assert (
        is_talk("sample 3: Traceback")
        and is_talk("### Assistant: use KeyError")
        and is_talk("rollout[3] >> NVRM")
    )
    assert not is_talk("RuntimeError: sample 3 is broken") and not is_talk("CUDA error: x")
    assert is_open_before('say "Traceback', 5) and not is_open_before('File "a.py": Traceback', 13)
    block = b"a\n```\nTraceback\n```\nb\nTraceback\n"
    assert is_fenced(block, block.index(b"Trace")) and not is_fenced(block, block.rindex(b"Trace"))
    assert not is_fenced(b"```\nTraceback\nKeyError\n", 5), "a fence that nobody closes hides nothing"


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 1.00 GiB is free. "


@pytest.mark.parametrize("text,own,expect", [
    (OOM + "Process 7 has 60.00 GiB memory in use. Including non-PyTorch memory, this process has 19.00 GiB memory in use.", (), (7, False)),
    (OOM + "Process 7 has 60.00 GiB memory in use. Including non-PyTorch memory, this process has 19.00 GiB memory in use.", (7,), (7, True)),
    (OOM + "Including non-PyTorch memory, this process has 79.00 GiB memory in use.", (), None),
    (OOM + "Process 7 has 78.90 GiB memory in use. Of the allocated memory 77.00 GiB is allocated by PyTorch", (), None),
    (OOM + "Process 7 has 2.00 GiB memory in use. Including non-PyTorch memory, this process has 77.00 GiB memory in use.", (), None),
    (OOM + "Process 7 has 70.00 GiB memory in use. Process 8 has 8.00 GiB memory in use. Of the allocated memory 7.00 GiB is allocated by PyTorch", (), (7, False)),
])  # fmt: skip
def test_who_filled_the_card(text: str, own: tuple[int, ...], expect: tuple[int, bool] | None) -> None:
    found = neighbour(text, own)
    assert (found and (found.pid, found.same_job)) == expect


def test_a_rank_that_left_in_peace_is_named_and_no_restart_is_promised(tmp_path: Path) -> None:
    late = "[rank{r}]:[E502 12:00:00.1 ProcessGroupNCCL.cpp:632] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=311, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600012 milliseconds before timing out."
    for r in (0, 1, 3):
        (tmp_path / f"rank{r}.log").write_text("\n".join([*steps(31), late.format(r=r)]) + "\n")
    (tmp_path / "rank2.log").write_text("\n".join([*steps(30), "iterator exhausted, bye"]) + "\n")
    v = diagnose([tmp_path])
    assert v.reason == "NCCLTimeoutError" and v.faulty is not None and v.faulty.rank == 2
    assert v.action is Action.STOP and not v.recoverable and v.confidence < 0.8
    assert v.root is not None and v.root.file == "rank2.log" and "exhausted" in v.root.text


def test_several_missing_ranks_of_a_flight_recorder_are_not_one() -> None:
    base = Verdict(Outcome.HUNG, None, HANG)
    topology = Topology(nodes=["a", "b"], gpus_per_node=4)
    one = with_flight(base, Flight((0, 1), (5,), ()), topology)
    assert one.faulty is not None and (one.faulty.rank, one.faulty.node) == (5, "b")
    same_node = with_flight(base, Flight((0, 1), (4, 6), ()), topology)
    assert same_node.faulty is not None and (same_node.faulty.rank, same_node.faulty.node) == (None, "b")
    assert with_flight(base, Flight((0, 1), (1, 6), ()), topology).faulty is None
    assert "1, 6" in with_flight(base, Flight((0, 1), (1, 6), ()), topology).notes[-1]


@pytest.mark.parametrize("outer,reason,stops", [
    ("KeyError: Caught KeyError in DataLoader worker process 3.", "KeyError", True),
    ("OSError: Caught OSError in DataLoader worker process 3.", "OSError", False),
    ("ray.exceptions.RayTaskError(ConnectionError): ray::run() (pid=1, ip=10.0.0.1)", "ConnectionError", False),
    ("tenacity.RetryError: RetryError[<Future at 0x7f state=finished raised TimeoutError>]", "ConnectionError", False),
])  # fmt: skip
def test_a_wrapper_alone_is_not_certain(outer: str, reason: str, stops: bool, tmp_path: Path) -> None:
    v = judge(tmp_path, steps() + tb(outer))
    assert v.reason == reason and v.confidence <= 0.5 and (v.action is Action.STOP) is stops


def test_no_wrapper_is_ever_a_certain_root() -> None:
    wrappers = [r for r in builtin() if r.id.startswith("wrapper-")]
    assert wrappers and all(r.role == "cascade" for r in wrappers)
