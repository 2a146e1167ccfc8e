"""What the supervisor knows decides where the logs are silent, and yields where they are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from unbroken.diagnose import Action, Category, Facts, HangFact, Outcome, RankExit, diagnose

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 10, in <module>
    main()
  File "train.py", line 5, in main
    {raise_}
{error}
"""
PEER = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] "
    "Connection closed by peer [127.0.0.1]:33312"
)


def run_logs(folder: Path, tails: dict[int, str], per_node: int = 2) -> Path:
    for rank, tail in tails.items():
        log = folder / "attempts" / "0001" / f"node-{rank // per_node:03d}" / f"rank-{rank}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        steps = "".join(f"2026-11-27 10:00:{s:02d} step {s} loss: {3.0 - s / 100}\n" for s in range(1, 13))
        log.write_text(steps + tail)
    return folder / "attempts" / "0001"


def exits(*rows: tuple[int, int | None, int | None, float, bool]) -> tuple[RankExit, ...]:
    return tuple(RankExit(r, f"node-{r // 2:03d}", code, sig, t, ours) for r, code, sig, t, ours in rows)


def test_first_exception_wins_over_its_peers(tmp_path: Path) -> None:
    bad = TRACEBACK.format(raise_="x = batch['labels']", error="KeyError: 'labels'")
    peer = TRACEBACK.format(raise_="dist.all_reduce(t)", error=PEER)
    logs = run_logs(tmp_path, {0: peer, 1: peer, 2: bad, 3: peer})
    v = diagnose(
        [logs],
        facts=Facts(
            exits=exits(
                (2, 1, None, 1.0, False),
                (0, 1, None, 1.1, False),
                (1, 1, None, 1.2, False),
                (3, 1, None, 1.3, False),
            )
        ),
    )
    assert (v.outcome, v.category, v.reason) == (Outcome.FAILED, Category.SCRIPT, "KeyError")
    assert v.action is Action.STOP and not v.recoverable
    assert v.root is not None and v.root.file == "node-001/rank-2.log" and v.root.line == 18
    assert v.faulty is not None and (v.faulty.rank, v.faulty.node) == (2, "node-001")
    assert {c.reason for c in v.cascade} == {"NCCLRemoteError"}


def test_killed_rank_without_a_word_is_unknown_and_restartable(tmp_path: Path) -> None:
    peer = TRACEBACK.format(raise_="dist.all_reduce(t)", error=PEER)
    logs = run_logs(tmp_path, {0: peer, 1: "", 2: peer, 3: peer})
    v = diagnose(
        [logs],
        facts=Facts(
            exits=exits(
                (1, None, 9, 1.0, False),
                (0, 1, None, 1.1, False),
                (2, None, 15, 1.2, True),
                (3, 1, None, 1.3, False),
            )
        ),
    )
    assert v.outcome is Outcome.FAILED and v.reason == "Unknown"
    assert v.recoverable and v.action is Action.RESTART and v.confidence <= 0.5
    assert v.faulty is not None and v.faulty.rank == 1 and v.faulty.node == "node-000"


@pytest.mark.parametrize("number", [11, 7, 6])
def test_crash_in_native_code_is_restartable(tmp_path: Path, number: int) -> None:
    logs = run_logs(tmp_path, {0: "", 1: ""})
    v = diagnose([logs], facts=Facts(exits=exits((0, None, number, 1.0, False), (1, None, 15, 2.0, True))))
    assert (v.outcome, v.reason, v.recoverable, v.action) == (
        Outcome.FAILED,
        "Unknown",
        True,
        Action.RESTART,
    )
    assert v.decided_by == "exit-code"


def test_lost_node_is_cordoned(tmp_path: Path) -> None:
    peer = TRACEBACK.format(raise_="dist.all_reduce(t)", error=PEER)
    logs = run_logs(tmp_path, {0: peer, 1: peer, 2: "", 3: ""})
    v = diagnose([logs], facts=Facts(lost_nodes=("node-001",), exits=exits((0, 1, None, 1.0, False))))
    assert (v.reason, v.category, v.action) == (
        "NodeFailure",
        Category.INFRASTRUCTURE,
        Action.RESTART_ELSEWHERE,
    )
    assert v.cordon == ("node-001",) and v.recoverable and v.decided_by == "lost-node"


def test_hang_names_the_late_rank(tmp_path: Path) -> None:
    logs = run_logs(tmp_path, {0: "", 1: "", 2: "", 3: ""})
    facts = Facts(
        hang=HangFact(12, "training", 90.0, late=(3,)),
        nodes=((3, "node-001"),),
        exits=exits((0, None, 9, 1.0, True)),
    )
    v = diagnose([logs], facts=facts)
    assert (v.outcome, v.reason, v.action) == (Outcome.HUNG, "Hang", Action.RESTART)
    assert v.faulty is not None and (v.faulty.rank, v.faulty.node) == (3, "node-001")


def test_hang_with_an_exception_in_the_log_is_that_exception(tmp_path: Path) -> None:
    bad = TRACEBACK.format(raise_="x / n", error="ZeroDivisionError: division by zero")
    logs = run_logs(tmp_path, {0: "", 1: bad})
    v = diagnose([logs], facts=Facts(hang=HangFact(12, "training", 90.0)))
    assert (v.outcome, v.reason) == (Outcome.FAILED, "ZeroDivisionError")


def test_cuda_oom_stops(tmp_path: Path) -> None:
    oom = TRACEBACK.format(
        raise_="loss.backward()",
        error="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB. GPU 1 has a total capacity of 79.10 GiB",
    )
    v = diagnose([run_logs(tmp_path, {0: "", 1: oom})], facts=Facts(exits=exits((1, 1, None, 1.0, False))))
    assert (v.reason, v.action, v.recoverable) == ("OutOfMemoryError", Action.STOP, False)
    assert v.faulty is not None and (v.faulty.rank, v.faulty.gpu) == (1, 1)


def test_counted_oom_kill(tmp_path: Path) -> None:
    v = diagnose(
        [run_logs(tmp_path, {0: "", 1: ""})],
        facts=Facts(oom_kills=(1,), exits=exits((1, None, 9, 1.0, False))),
    )
    assert (v.reason, v.recoverable, v.action) == ("OutOfMemoryError", True, Action.RESTART)


def test_a_kill_for_memory_that_is_only_counted_is_less_sure_and_says_so(tmp_path: Path) -> None:
    logs = run_logs(tmp_path, {0: "", 1: ""})
    named, counted = (
        diagnose(
            [logs],
            facts=Facts(
                oom_kills=(1,), exits=(RankExit(1, "node-000", None, 9, 1.0, oom=True, oom_counted=counted),)
            ),
        )
        for counted in (False, True)
    )
    assert named.reason == counted.reason == "OutOfMemoryError" and counted.confidence < named.confidence
    assert "does not say whom" in counted.notes[0] and "does not say whom" not in named.notes[0]


def test_several_that_were_killed_for_memory_at_once_are_all_named(tmp_path: Path) -> None:
    ends = exits((0, None, 9, 1.0, False), (1, None, 9, 1.0, False))
    v = diagnose([run_logs(tmp_path, {0: "", 1: ""})], facts=Facts(oom_kills=(0, 1), exits=ends))
    assert v.reason == "OutOfMemoryError" and v.faulty is not None
    assert (v.faulty.rank, v.faulty.node) == (None, "node-000") and "ranks 0, 1" in v.notes[0]


def test_completed(tmp_path: Path) -> None:
    logs = run_logs(tmp_path, {0: "UserWarning: something failed harmlessly\n"})
    assert diagnose([logs], facts=Facts(completed=True)).outcome is Outcome.COMPLETED


def test_exit_one_without_a_word_is_unknown(tmp_path: Path) -> None:
    v = diagnose([run_logs(tmp_path, {0: "", 1: ""})], facts=Facts(exits=exits((1, 1, None, 1.0, False))))
    assert v.outcome is Outcome.FAILED and v.reason == "Unknown" and v.confidence < 0.5
