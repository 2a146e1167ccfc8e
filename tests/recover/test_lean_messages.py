"""What is said of many ranks takes few bytes, loses nothing, and what earlier versions said is still read."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.checkpoint.catalogue import announcement
from unbroken.detect import HangDetector, ProcessInfo
from unbroken.link.bounds import Malformed
from unbroken.link.runs import pack, unpack
from unbroken.progress import RunDir, Timeouts
from unbroken.progress.records.state import RunState
from unbroken.recover.node.supervision.reporting import KeeperReport, ProgressReport, group_looks
from unbroken.recover.supervise.attempt.attempt import Attempt
from unbroken.recover.supervise.nodes.keepers import _read_inventory
from unbroken.recover.supervise.nodes.received import check
from unbroken.recover.supervise.watch import stacks
from unbroken.status.gather import _origin
from unbroken.testing.fake_cluster import NetworkTraffic, Script, SimulatedLoop, run_simulated
from unbroken.testing.fake_cluster.simulated_run import SimulatedRun

from .simulating import reach


@given(st.sets(st.integers(0, 500)))
def test_runs_are_the_same_numbers(numbers: set[int]) -> None:
    runs = pack(numbers)
    assert unpack(json.loads(json.dumps(runs)), "ranks", 501) == sorted(numbers)
    assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(runs)), "no two runs touch"


@pytest.mark.parametrize(
    "runs", [{}, [[0]], [[0, 0]], [[-1, 2]], [["0", 1]], [[0, 10**12]], [[0, 3], [5, 3]], [True]]
)
def test_runs_that_nobody_can_mean_are_refused(runs: Any) -> None:
    with pytest.raises(Malformed):
        unpack(runs, "ranks", 5)


def candidate(attempt: int, step: int, **more: Any) -> dict[str, Any]:
    folder = f"step-{step:08d}.a{attempt:04d}"
    return {
        "attempt": attempt, "step": step, "name": folder, "folder": folder, "place": "", "brought": False, "memory": {},
    } | more  # fmt: skip


CANDIDATES = [
    candidate(2, 40, name=None, memory={"6": "n3", "7": "n3", "8": "n4", "9": "n4", "12": "n9"}),
    candidate(2, 30, memory={"8": "n4"}),
    candidate(1, 20, place="s3://bucket/run"),
    candidate(7, 10, name="imported-step-10.a7", brought=True, place="/elsewhere"),
]


def test_an_announcement_tells_a_node_all_that_its_ranks_need() -> None:
    ranks = {6: 0, 7: 1, 8: 0, 9: 1}  # two slots of one node
    message = {"op": "attempt", "attempt": 3, **json.loads(json.dumps(announcement.pack(ranks, CANDIDATES)))}
    mine = {str(r) for r in ranks}
    expected = [{**c, "memory": {r: n for r, n in c["memory"].items() if r in mine}} for c in CANDIDATES]
    assert announcement.unpack(message) == (ranks, expected)
    before = announcement.as_before(message)
    assert before["ranks"] == {"6": 0, "7": 1, "8": 0, "9": 1} and before["candidates"] == expected
    assert announcement.unpack(before) == (ranks, expected), "a keeper reads what an earlier version sends"


def test_an_announcement_does_not_grow_with_the_ranks_of_others() -> None:
    def size(world: int) -> int:
        held = {str(r): f"node-{r // 8:05d}" for r in range(world)}
        many = [candidate(1, s, memory=held) for s in (30, 20)] + [candidate(1, s) for s in range(18)]
        return len(json.dumps(announcement.pack({r: r for r in range(8)}, many)))

    assert size(64_000) == size(64) < 700


def page(*steps: int, count: int = 1, source: str = "page") -> dict[str, Any]:
    return {
        "count": count, "phase": 2, "source": source, "total": 100, "steps": [[s, 8, (1.0).hex(), 5.0 + s] for s in steps],
    }  # fmt: skip


def test_progress_of_a_node_is_one_row_and_the_steps_of_one_rank(tmp_path: Path) -> None:
    attempt = Attempt.make(1, ("a", "b"), 4, HangDetector(Timeouts()), -1, RunDir(tmp_path))
    report = ProgressReport()
    for rank in range(4):
        report.add(rank, page(0, 1, 2), range(4))
    fields = json.loads(json.dumps(report.take()))
    assert fields["groups"] == [[[[0, 4]], 1, 2, "page", 100, 2]] and list(fields["steps"]) == ["0"]
    message = check({"op": "progress", "attempt": 1, "sent": 7.0, **fields}, 8)
    fresh = attempt.take_groups(message["sent"], message["groups"], message["steps"])
    assert [s.step for s in fresh] == [0, 1, 2] and attempt.total == 100
    assert [attempt.ranks[r].step for r in range(8)] == [2, 2, 2, 2, -1, -1, -1, -1]
    assert report.take() is None, "nothing is told without news"
    report.add(3, page(count=9), range(4))
    assert report.take() == {"groups": [[[[3, 1]], 9, 2, "page", 100, 2]], "steps": {}}


def test_of_ranks_that_print_their_steps_the_first_that_did_is_followed(tmp_path: Path) -> None:
    attempt = Attempt.make(1, ("a",), 4, HangDetector(Timeouts()), -1, RunDir(tmp_path))
    report = ProgressReport()
    seen: list[int] = []
    for news in ({2: page(0, source="log")}, {0: page(1, source="log"), 2: page(1, source="log")}):
        for rank, n in news.items():
            report.add(rank, n, range(4))
        fields = report.take()
        assert fields is not None
        seen += [s.step for s in attempt.take_groups(7.0, fields["groups"], fields["steps"])]
    assert seen == [0, 1]


@pytest.mark.parametrize(
    "fields",
    [
        {"groups": [[[[0, 9]], 1, 2, "page", None, 1]], "steps": {}},
        {"groups": [[[[0, 1]], 1, 99, "page", None, 1]], "steps": {}},
        {"groups": [[[[0, 1]], 1, 2, "page", None, "1"]], "steps": {}},
        {"groups": [[[[0, 1]], 1, 2, "page", None]], "steps": {}},
        {"groups": {}, "steps": {}},
        {"groups": []},
        {"groups": [], "steps": {"9": []}},
        {"groups": [], "steps": {"0": [[1, 2]]}},
    ],
)
def test_progress_that_nobody_can_mean_is_passed_over(fields: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        check({"op": "progress", "attempt": 1, "sent": 7.0, **fields}, 8)


def test_a_node_tells_once_that_its_ranks_have_a_snapshot() -> None:
    sent: list[dict[str, Any]] = []

    async def main(loop: SimulatedLoop) -> None:
        report = KeeperReport(sent.append)
        for rank in (4, 5, 6, 7):
            report.add({"event": "host", "attempt": 1, "step": 5, "rank": rank, "seconds": rank / 10}, 4)
        assert [m["ranks"] for m in sent] == [[[4, 4]]] and sent[0]["seconds"] == 0.7
        report.add({"event": "host", "attempt": 1, "step": 9, "rank": 5, "seconds": 0.1}, 4)
        await asyncio.sleep(1)
        assert sent[1]["step"] == 9 and sent[1]["ranks"] == [[5, 1]], "the others may never have it"

    run_simulated(main)
    assert all(check({"op": "keeper", **m}, 8) for m in sent)


def test_a_supervisor_that_takes_over_hears_again_what_the_attempt_went_on_from() -> None:
    """It was told to the one before, which had not written it down: the run's steps were without a past in its journal."""
    sent: list[dict[str, Any]] = []
    report = KeeperReport(sent.append)
    report.repeat(2)
    told = {"event": "restored", "attempt": 2, "step": 40, "of": 1, "skipped": []}
    report.add(told, 4)
    report.add({"event": "durable", "attempt": 2, "step": 45}, 4)
    report.repeat(2)
    report.repeat(3)
    assert [m["event"] for m in sent] == ["restored", "durable", "restored"] and sent[2] == told


def test_inventories_of_all_versions_are_read() -> None:
    lean = _read_inventory({"runs": [[1, 40, 8, True, False, 1 << 33, [[0, 2], [4, 1]]]]})
    assert [(e["rank"], e["attempt"], e["step"], e["complete"]) for e in lean] == [
        (r, 1, 40, True) for r in (0, 1, 4)
    ]
    before = [{"attempt": 1, "step": 40, "rank": 0, "complete": True}]
    assert _read_inventory({"inventory": before}) == before
    assert _read_inventory({"runs": [[1, 40]]}) == [] and _read_inventory({"runs": 5}) == []


def test_where_many_ranks_stand_is_kept_of_each_place(tmp_path: Path) -> None:
    waits, loops = ("all_reduce (torch/distributed.py:1)",), ("spin (train.py:7)",)
    world = {r: ProcessInfo(r + 100, "S", "", waits, "whole") for r in range(1000)}
    world[513] = ProcessInfo(613, "R", "", loops, "whole")
    found: dict[int, ProcessInfo] = {}
    for first in range(0, 1000, 8):
        ranks = range(first, first + 8)
        answer = json.loads(json.dumps(group_looks({r: world[r] for r in ranks})))
        assert len(json.dumps(answer)) < 300
        found |= stacks.read_processes(answer, ranks)
    assert {r: (p.pid, p.state, p.frames) for r, p in found.items()} == {
        r: (p.pid, p.state, p.frames) for r, p in world.items()
    }
    chosen = stacks.choose(found)
    assert 513 in chosen and len(chosen) == stacks.MOST_TEXTS
    stacks.write({r: world[r] if r in chosen else p for r, p in found.items()}, tmp_path)
    overview = (tmp_path / stacks.OVERVIEW).read_text()
    assert overview.startswith("1 rank, state R: 513\n    spin (train.py:7)\n")
    assert "999 ranks, state S: 0-512, 514-999" in overview and (tmp_path / "stacks-rank-513.txt").is_file()


def test_looks_of_an_earlier_version_are_read() -> None:
    before = {"looks": {"3": {"pid": 9, "state": "S", "wchan": "", "frames": ["f (a.py:1)"], "text": "all"}}}
    assert stacks.read_processes(before, [3]) == {3: ProcessInfo(9, "S", "", ("f (a.py:1)",), "all")}
    assert stacks.read_processes({"groups": [[[[3, 1]], "S"]], "pids": []}, [3]) == {}


def test_journals_of_all_versions_say_what_an_attempt_began_from() -> None:
    lean = {"attempt": 2, "step": 40, "name": None, "in_memory": 8, "brought": False}
    before = {"attempt": 2, "step": 40, "name": None, "memory": {"0": "n0"}, "brought": False}
    for best in (lean, before):
        record = {"kind": "attempt", "t": 1.0, "attempt": 3, "slots": ["n0"], "candidates": [best]}
        assert _origin(record) == "step 40, memory"
        assert RunState.of([record]).accepted == {(2, 40)}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_bytes_of_an_event_grow_as_the_nodes_up_to_thousands_of_ranks(tmp_path: Path) -> None:
    """Of a start, of training, of a lost node and of a takeover, at 64 and 640 nodes of 8 ranks."""

    def count(nodes: int) -> list[tuple[NetworkTraffic, NetworkTraffic]]:
        async def main(loop: SimulatedLoop) -> list[tuple[NetworkTraffic, NetworkTraffic]]:
            timeouts = Timeouts(suspect=30, hang=60, lease=60)  # type: ignore[arg-type]
            script = Script(start_s=20, step_s=5, save_every=4)
            run = SimulatedRun(
                loop, tmp_path / f"run-{nodes}", nodes, nproc=8, spares=1, script=script, timeouts=timeouts
            )
            network, found = run.hardware.network, []

            async def measure(work: Any) -> None:
                before = network.to_supervisor.copy(), network.to_nodes.copy()
                await work
                found.append((network.to_supervisor.since(before[0]), network.to_nodes.since(before[1])))

            async def lose() -> None:
                run.faults.lose("node-00003", noticed_after_s=2.0, proven=True)
                await run.until(lambda: run.journal("resumed"))

            async def take_over() -> None:
                run.kill_supervisor()
                run.restart_supervisor()
                await run.until(lambda: run.journal("adopted"))

            await measure(reach(run, 1, 5))
            await measure(asyncio.sleep(60))
            await measure(lose())
            await measure(take_over())
            run.supervisor.request_stop()
            await run.task
            return found

        return run_simulated(main)

    for few, many in zip(count(64), count(640), strict=True):
        for less, more in zip(few, many, strict=True):
            assert more.size / less.size < 11, f"{less} at 64 nodes, {more} at 640"
