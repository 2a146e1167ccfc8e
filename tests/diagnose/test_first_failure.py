"""Which failure came first, on hosts whose clocks differ by minutes: never the wrong one with certainty."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.cluster.clocks import DRIFT, ClockOffset, Exchange, measure
from unbroken.diagnose import Action, Facts, RankExit, diagnose
from unbroken.diagnose.judge.facts import first_of

NODES = ((0, "node-000"), (1, "node-001"))


def end(
    rank: int, code: int | None = None, signal: int | None = None, *, at: float = 100.0, within: float = 0.0,
    ours: bool = False,
) -> RankExit:  # fmt: skip
    """An end that was seen at `at`, at most `within` seconds after it was."""
    return RankExit(rank, f"node-{rank:03d}", code, signal, at, ours, at - within, at, oom=False)


def judge(folder: Path, logs: dict[int, str], *exits: RankExit, **others: object):  # type: ignore[no-untyped-def]
    paths = []
    for rank, text in logs.items():
        path = folder / f"node-{rank:03d}" / f"rank-{rank}.log"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        paths.append(path)
    nodes = tuple((r, f"node-{r:03d}") for r in {*logs, *(e.rank for e in exits)})
    return diagnose(paths, facts=Facts(exits=exits, nodes=nodes, step=1, **others))  # type: ignore[arg-type]


def traceback(error: str) -> str:
    return f'step 1 loss 2.0\nTraceback (most recent call last):\n  File "train.py", line 9, in <module>\n    go()\n{error}\n'


PEER = traceback(
    "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:33312"
)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_the_true_first_is_always_among_those_named_however_the_clocks_differ(data: st.DataObject) -> None:
    """Node clocks are minutes or days off and drift; offsets are measured over links that are slow in one direction."""
    n = data.draw(st.integers(2, 6))
    seconds = st.floats(0.0, 2.0)
    ends, truth = [], {}
    for rank in range(n):
        skew = data.draw(st.floats(-1e5, 1e5))
        drift = data.draw(st.floats(-DRIFT / 2, DRIFT / 2))

        def clock(true: float, skew: float = skew, drift: float = drift) -> float:
            return true * (1 + drift) + skew

        asked = data.draw(st.floats(0.0, 10.0))
        there, back = asked + data.draw(seconds), 0.0
        back = there + data.draw(seconds)
        offset = measure([Exchange(clock(asked), there, clock(back))])
        true = data.draw(st.floats(20.0, 22.0))
        seen_running = true - data.draw(st.floats(0.0, 0.05))
        seen_ended = true + data.draw(st.floats(0.0, 0.05))
        low, high = offset.translate(clock(seen_running)).earliest, offset.translate(clock(seen_ended)).latest
        ends.append(RankExit(rank, "n", 1, None, high, False, low, high))
        truth[rank] = true
    named = first_of(ends)
    first = min(truth, key=lambda r: truth[r])
    assert first in {e.rank for e in named}


def test_times_that_lie_about_the_order_do_not_name_a_root(tmp_path: Path) -> None:
    """Rank 1 was killed two minutes after rank 0 by the clocks of their hosts, and before it in truth."""
    first, then = end(1, signal=9, at=100.0, within=0.05), end(0, code=3, at=107.0, within=0.05)
    v = judge(tmp_path, {0: "step 1 loss 2.0\n", 1: "step 1 loss 2.0\n"}, then, first)
    assert v.faulty is not None and v.faulty.rank == 1 and v.decided_by == "signal" and v.confidence == 0.9
    v = judge(
        tmp_path, {0: "step 1 loss 2.0\n", 1: "step 1 loss 2.0\n"}, end(1, signal=9, at=107.0), end(0, code=3)
    )
    assert v.faulty is not None and v.faulty.rank == 0, (
        "a kill that certainly came later is not what came first"
    )


def test_ends_in_the_same_moment_are_all_named_and_none_is_blamed(tmp_path: Path) -> None:
    exits = [end(r, signal=9, at=100.0 + r / 100, within=0.05) for r in (2, 0, 1)]
    v = judge(tmp_path, dict.fromkeys(range(3), "step 1 loss 2.0\n"), *exits)
    assert v.faulty is None and v.confidence <= 1 / 3 and v.cordon == ()
    assert v.root is not None and v.root.rank is None
    assert v.root.text == "any of these 3 may have been the first: " + "; ".join(
        f"rank {r} on node-{r:03d} ended by SIGKILL" for r in range(3)
    )
    assert v.decided_by == "signal", "that they were killed is certain"


def test_a_rank_that_lost_its_peer_is_no_candidate_however_the_times_overlap(tmp_path: Path) -> None:
    exits = [end(0, code=1, at=100.0, within=0.05), end(1, signal=9, at=100.01, within=0.05)]
    v = judge(tmp_path, {0: PEER, 1: "step 1 loss 2.0\n"}, *exits)
    assert v.faulty is not None and v.faulty.rank == 1 and v.confidence == 0.9


@pytest.mark.parametrize("code", [1, 3, 255])
def test_a_rank_that_ends_without_a_word_is_the_root_where_the_others_lost_it(
    tmp_path: Path, code: int
) -> None:
    logs = {0: PEER, 1: "step 1 loss 2.0\n"}
    v = judge(tmp_path, logs, end(0, 1, at=100.0, within=0.05), end(1, code, at=100.03, within=0.05))
    assert v.reason == "Unknown" and v.confidence == 0.6 and v.action is Action.RESTART
    assert v.faulty is not None and v.faulty.rank == 1 and v.root is not None
    assert v.root.text.startswith(f"rank 1 on node-001 ended by exit code {code}; the last line of its log")
    assert v.evidence[0].rank == 0 and v.cascade[0].reason == "NCCLRemoteError"
    late = judge(tmp_path, logs, end(0, 1, at=100.0, within=0.05), end(1, code, at=130.0, within=0.05))
    assert late.reason == "NCCLRemoteError", "it certainly ended after the one that had lost a peer"
    bug = {0: traceback("KeyError: 'labels'"), 1: "step 1 loss 2.0\n"}
    assert judge(tmp_path, bug, end(0, 1, within=0.05), end(1, code, within=0.05)).reason == "KeyError"


@pytest.mark.parametrize(
    "error",
    ["RuntimeError: Connection reset by peer", "RuntimeError: store->get('0') got error: Broken pipe"],
)
def test_a_lost_link_that_only_its_words_tell_is_no_rival_and_no_root(tmp_path: Path, error: str) -> None:
    own = {0: traceback(error), 1: traceback("KeyError: 'labels'")}
    v = judge(tmp_path, own, end(0, 1, within=0.05), end(1, 1, within=0.05))
    assert v.reason == "KeyError" and v.faulty is not None and v.faulty.rank == 1
    silent = {0: traceback(error), 1: "step 1 loss 2.0\n"}
    v = judge(tmp_path, silent, end(0, 1, within=0.05), end(1, 1, within=0.05))
    assert v.faulty is not None and v.faulty.rank == 1 and v.reason == "Unknown"


def test_two_errors_in_the_same_moment_are_both_named(tmp_path: Path) -> None:
    logs = {0: traceback("[rank0]: KeyError: 'labels'"), 1: traceback("ValueError: bad batch")}
    v = judge(tmp_path, logs, end(0, 1, at=100.0, within=0.05), end(1, 1, at=100.02, within=0.05))
    assert v.root is not None and v.confidence <= 0.5 and v.faulty is None
    assert "rank 0 on node-000: KeyError: 'labels'; rank 1 on node-001: ValueError: bad batch" in v.root.text
    assert {e.file for e in v.evidence} >= {"node-000/rank-0.log", "node-001/rank-1.log"} or len(
        v.evidence
    ) == 2


def test_the_same_error_on_all_ranks_is_certain_and_its_place_is_not_claimed(tmp_path: Path) -> None:
    logs = dict.fromkeys(range(3), traceback("KeyError: 'labels'"))
    v = judge(tmp_path, logs, *(end(r, 1, at=100.0, within=0.05) for r in range(3)))
    assert v.reason == "KeyError" and v.action is Action.STOP and v.confidence > 0.6
    assert v.notes == ("the same on 3 ranks (0, 1, 2); which of them was first is not known",)


def test_an_error_that_certainly_came_first_is_named_alone_whatever_the_order_of_the_files(
    tmp_path: Path,
) -> None:
    logs = {0: traceback("KeyError: 'labels'"), 1: traceback("ValueError: bad batch")}
    v = judge(tmp_path, logs, end(0, 1, at=160.0, within=0.05), end(1, 1, at=100.0, within=0.05))
    assert v.reason == "ValueError" and v.faulty is not None and v.faulty.rank == 1 and v.confidence > 0.6


@pytest.mark.parametrize("ahead_s", [300.0, -300.0])
def test_lines_of_two_hosts_are_ordered_on_one_clock(tmp_path: Path, ahead_s: float) -> None:
    """Rank 1 failed 20 s after rank 0; its host's clock says minutes before, or minutes after."""

    def log(error: str, second: float) -> str:
        minute, second = divmod(second, 60)
        stamp = f"2026-11-27 10:{30 + int(minute):02d}:{int(second):02d}"
        return f'{stamp} step 1 loss 2.0\n{stamp} ERROR Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    go()\n{error}\n'

    at = 1795775400.0  # 10:30:00
    logs = {0: log("KeyError: 'labels'", 10), 1: log("ValueError: bad batch", 30 + ahead_s)}
    clocks = {"node-000": ClockOffset(0.0, 0.001, 5.0), "node-001": ClockOffset(ahead_s, 0.01, 5.0)}
    exits = end(0, 1, at=at + 11, within=0.05), end(1, 1, at=at + 31, within=0.05)
    v = judge(tmp_path, logs, *exits, wall_clocks=clocks)
    assert v.reason == "KeyError" and v.root is not None and v.root.rank == 0 and v.confidence > 0.6
