"""The norm of a gradient and the work of a rank: from the progress page to what is watched, and nothing that makes no sense."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from unbroken.detect.stragglers import SlowKind
from unbroken.detect.work import WorkMeter, read_used
from unbroken.errors import UsageError
from unbroken.link.bounds import Malformed
from unbroken.progress import PageReader, Run, StepRecord
from unbroken.progress import page as layout
from unbroken.progress.records.steps import Step, read_steps, step_record
from unbroken.recover.node.ranks.process import _record
from unbroken.recover.node.supervision.reporting import ProgressReport
from unbroken.recover.supervise.attempt.loss import LossFollower
from unbroken.recover.supervise.attempt.slow import WorkFollower
from unbroken.recover.supervise.nodes.received import check


def test_norm_and_work_travel_on_the_page(tmp_path: Path) -> None:
    path = tmp_path / "p" / "rank-0.page"
    layout.create(path, rank=0, attempt=1)
    run, reader = Run(path), PageReader(path)
    run.step(1, loss=2.0, norm=0.5, busy=0.25)
    run.step(2, loss=2.0)
    first, second = reader.take()
    assert (first.norm, first.busy) == (0.5, 0.25) and (second.norm, second.busy) == (None, None)
    assert [len(_record(r)) for r in (first, second)] == [5, 4]


def test_steps_keep_the_norm(tmp_path: Path) -> None:
    steps = [Step(1, 2.0, 0, 10.0, 0.1), Step(2, 2.0, 0, 11.0)]
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps(step_record(s)) + "\n" for s in steps))
    assert read_steps(path) == steps


def test_a_norm_that_is_no_number_is_found_before_the_loss() -> None:
    follower = LossFollower()
    for step in range(1, 50):
        follower.take(Step(step, 2.0, 0, 0.0, 0.5 if step < 40 else float("inf")))
    assert follower.finding is not None and follower.finding.since == 40


def test_what_a_process_works_is_read_from_outside() -> None:
    meter = WorkMeter(os.getpid())
    assert meter.take(0, [], 0.0) is None
    began = read_used(os.getpid())
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    window = meter.take(20, [StepRecord(20, 0, 1.0, 0.0)], 2.0)
    assert window is not None and (window.steps, window.wall) == (20, 0.1)
    assert 0.04 / 20 <= window.busy <= (read_used(os.getpid()) - began + 0.01) / 20
    assert meter.take(25, [StepRecord(25, 0, 1.0, 0.0)], 3.0) is None, "too few steps"


def test_what_a_script_reports_counts_and_a_processor_beside_a_gpu_does_not() -> None:
    for busy in (0.3, None):
        meter = WorkMeter(os.getpid(), on_processor=False)
        meter.take(0, [], 0.0)
        records = [StepRecord(s, 0, 1.0, 0.0, busy=busy and busy + s / 100) for s in range(10)]
        window = meter.take(10, records, 5.0)
        assert (window is None) is (busy is None)
        if window is not None:
            assert window.busy == pytest.approx(0.345) and window.peak == pytest.approx(0.39)


def test_ranks_that_report_are_put_together(tmp_path: Path) -> None:
    follower = WorkFollower({r: f"n{r // 2}" for r in range(8)})
    for step in range(10, 200, 10):
        for node in range(4):
            follower.take(
                [[r, step, 10, 1.0, 0.6 if r == 5 else 0.5, None] for r in (2 * node, 2 * node + 1)]
            )
    assert follower.finding is not None
    finding, steps = follower.finding
    assert (finding.kind, finding.nodes, finding.ranks, steps) == (SlowKind.NODE, ("n2",), (5,), 10)


def test_a_pipeline_stage_with_more_work_is_told_as_such_and_no_node_of_it(tmp_path: Path) -> None:
    path = tmp_path / "p" / "rank-0.page"
    layout.create(path, rank=0, attempt=1)
    assert PageReader(path).read().peers == 0
    Run(path).set_peers(3)
    assert PageReader(path).read().peers == 3
    with pytest.raises(UsageError):
        Run(None).set_peers(-1)
    with pytest.raises(UsageError):
        Run(path).set_peers(1 << 63)  # whoever reads it would refuse all that this rank reports
    meter, report = WorkMeter(os.getpid(), on_processor=False), ProgressReport()
    meter.take(0, [], 0.0)
    window = meter.take(10, [StepRecord(s, 0, 1.0, 0.0, busy=0.3) for s in range(10)], 5.0, 3)
    assert window is not None
    report.add(
        0, {"count": 10, "phase": 2, "source": "page", "total": None, "steps": [[9, "0x1p0", 0, 1.0]]}, [0]
    )
    report.add_work(0, window)
    sent = report.take()
    assert sent is not None and sent["work"] == [[0, 9, 10, 0.5, 0.3, 0.3, 3]]
    follower = WorkFollower({r: f"n{r // 2}" for r in range(12)})
    for step in range(10, 200, 10):
        follower.take(
            [
                [r, step, 10, 1.0, 0.65 if r >= 8 else 0.5, None, *([r // 4] if r >= 4 else [])]
                for r in range(12)
            ]
        )
    assert follower.finding is not None
    assert follower.finding[0].kind is SlowKind.STAGE and "stage 2" in follower.finding[0].why


def test_ranks_that_wait_for_their_data_name_the_storage_and_no_node(tmp_path: Path) -> None:
    path = tmp_path / "p" / "rank-0.page"
    layout.create(path, rank=0, attempt=1)
    run, reader, report = Run(path), PageReader(path), ProgressReport()
    assert reader.read().data_s is None
    run.add_data_wait(0.5)
    run.add_data_wait(1.5)
    assert reader.read().data_s == 2.0
    meter = WorkMeter(os.getpid(), on_processor=False)
    meter.take(0, [], 0.0, 0, 1.0)
    records = [StepRecord(s, 0, 1.0, 0.0, busy=0.3) for s in range(10)]
    window = meter.take(10, records, 5.0, 0, reader.read().data_s)
    assert window is not None and window.data == pytest.approx(0.1)
    report.add(
        0, {"count": 10, "phase": 2, "source": "page", "total": None, "steps": [[9, "0x1p0", 0, 1.0]]}, [0]
    )
    report.add_work(0, window)
    sent = report.take()
    assert sent is not None and sent["work"] == [[0, 9, 10, 0.5, 0.3, 0.3, 0, 0.1]]
    follower = WorkFollower({r: f"n{r // 2}" for r in range(8)})
    for step in range(10, 300, 10):
        slow = step > 120
        follower.take(
            [[r, step, 10, 1.5 if slow else 1.0, 0.5, None, 0, 0.5 if slow else 0.01] for r in range(8)]
        )
    assert follower.finding is not None and follower.finding[0].kind is SlowKind.STORAGE


@pytest.mark.parametrize("busy", [-1e-6, -5.0, float("inf"), float("-inf")])
def test_a_script_that_reckons_its_work_wrongly_loses_no_steps_by_it(busy: float) -> None:
    """One such number in a report, and its steps were passed over with it."""
    meter, report = WorkMeter(os.getpid(), on_processor=True), ProgressReport()
    meter.take(0, [], 0.0)
    window = meter.take(10, [StepRecord(s, 0, 1.0, 0.0, busy=busy) for s in range(10)], 5.0, 0, float("inf"))
    if window is not None:
        report.add_work(0, window)
    report.add(
        0, {"count": 10, "phase": 2, "source": "page", "total": None, "steps": [[9, "0x1p0", 0, 1.0]]}, [0]
    )
    sent = report.take()
    assert sent is not None
    check(
        {
            "op": "progress",
            "attempt": 1,
            "sent": 1.0,
            "groups": [],
            "steps": {},
            "work": sent.get("work", []),
        },
        8,
    )


@pytest.mark.parametrize(
    "row", [[], [0] * 5, [9, 1, 10, 1.0, 1.0, None], [0, 1, 0, 1.0, 1.0, None], [0, 1, 10, -1.0, 1.0, None],
            [0, 1, 10, 1.0, "x", None], [0, 1, 10, 1.0, 1.0, float("nan")],
            [0, 1, 10, 1.0, 1.0, None, -1], [0, 1, 10, 1.0, 1.0, None, 1, -1.0],
            [0, 1, 10, 1.0, 1.0, None, 1, 1.0, 1]],
)  # fmt: skip
def test_work_that_makes_no_sense_is_refused(row: list[Any]) -> None:
    message = {"op": "progress", "attempt": 1, "sent": 1.0, "groups": [], "steps": {}, "work": [row]}
    with pytest.raises(Malformed):
        check(message, 8)
    good = {
        **message,
        "work": [
            [0, 1, 10, 1.0, 1.0, None],
            [1, 1, 10, 1.0, 1.0, None, 3],
            [1, 1, 10, 1.0, 1.0, None, 0, 0.5],
        ],
    }
    assert check(good, 8) is good
