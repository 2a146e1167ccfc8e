"""The work of ranks on GPUs whose script tells nothing: read from the GPUs' counters, and nobody is named for waiting."""

from __future__ import annotations

import itertools
import json
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unbroken.detect.stragglers import RankWork, SlowFinding, SlowKind, SlowWatch
from unbroken.detect.work import GpuActivity, WorkMeter, WorkWindow, reckon_work
from unbroken.errors import UnbrokenError
from unbroken.link.bounds import Malformed
from unbroken.progress import Run, StepRecord
from unbroken.progress import page as layout
from unbroken.recover.node.ranks.counters import NodeCounters, RankCounters, find_gpu
from unbroken.recover.node.ranks.process import RankProcess
from unbroken.recover.node.supervision.reporting import ProgressReport
from unbroken.recover.node.warm.process import RankStart
from unbroken.recover.supervise.attempt.slow import WorkFollower
from unbroken.recover.supervise.nodes.received import check
from unbroken.testing.nvml import FakeGpu, FakeNvml

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
A_WORK, A_WAIT, TENSOR = 0.96, 0.18, 0.6
"""Of its time at work a GPU's SMs are busy so much; while it waits in NCCL; and its tensor cores at work."""
ENV = {"CUDA_VISIBLE_DEVICES": "GPU-00000000,GPU-00000001", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def row(rank: int, k: int, step_s: float, work: float, waits: float) -> list[Any]:
    """What an agent tells of a rank that works so much of a step and waits so much of it in NCCL."""
    return [rank, 10 * k, 10, step_s, A_WORK * work + A_WAIT * waits, TENSOR * work / step_s, 0, None]


def follow(
    work: Mapping[int, float], *, idle: Mapping[int, float] | None = None, windows: int = 20
) -> list[SlowFinding]:
    """What is found of eight ranks whose work is 0.1 s times a factor: all wait in NCCL for the last one, after so much time with
    nothing to do on their GPU."""
    follower, draw, found = WorkFollower({r: f"n{r // 2}" for r in range(8)}), random.Random(0), []
    own, idle = {r: 0.1 * work.get(r, 1.0) for r in range(8)}, idle or {}
    step_s = max(own[r] + idle.get(r, 0.0) for r in range(8))
    for k in range(1, windows + 1):
        rows = [
            row(r, k, step_s, own[r] * draw.gauss(1, 0.005), step_s - own[r] - idle.get(r, 0.0))
            for r in range(8)
        ]
        follower.take([], rows)
        if follower.finding is not None:
            found.append(follower.finding[0])
            follower.finding = None
    return found


def test_a_rank_a_tenth_slower_is_named_by_its_counters_with_what_it_costs() -> None:
    first = follow({5: 1.1})[0]
    assert (first.kind, first.ranks, first.nodes) == (SlowKind.NODE, (5,), ("n2",))
    assert 0.006 < first.excess <= 0.01 and "counters" in first.why and first.step <= 100
    assert not follow({}, windows=200) and not follow({5: 1.04})


def test_who_waits_in_nccl_for_processors_that_lag_is_not_named() -> None:
    """Five ranks have nothing to do for half of a step; the SMs of the three that wait for them are busier, by a tenth and more."""
    idle = dict.fromkeys(range(5), 0.05)
    active = [row(r, 1, 0.15, 0.1, 0.05 if r > 4 else 0.0)[4] for r in (0, 7)]
    assert active[1] > 1.08 * active[0]
    assert not follow({}, idle=idle)
    assert not follow({7: 1.1}, idle=idle), "its GPU is slow, and nobody waits for it"


@pytest.mark.parametrize(
    ("part", "named"),
    [("equal", False), ("more", True), ("less", False), ("processor", False), ("behind", False)],
)
def test_in_what_was_recorded_on_two_gpus_the_one_with_more_work_is_named_and_nobody_else(
    part: str, named: bool
) -> None:
    """benchmarks/gpu_work.py under FSDP2: seven ranks as its first GPU, the eighth as the other. In `processor` its SMs are busier for waiting,
    in `behind` it has more work and waits all the same."""
    recorded = json.loads((RESULTS / "gpu-work-2xh200.json").read_text())["parts"][part]["rows"]
    follower, found = WorkFollower({r: f"n{r}" for r in range(8)}), []
    for k in range(20):
        rows = []
        for r in range(8):
            windows = recorded[r == 7]
            _, steps, wall, tensor_s, active = windows[(k + r) % len(windows)]
            rows.append([r, 10 * k, steps, wall, active * wall, tensor_s / wall, 0, None])
        follower.take([], rows)
        if follower.finding is not None:
            found.append(follower.finding[0])
    assert {f.ranks for f in found if f.nodes} == ({(7,)} if named else set())


def test_stages_are_not_compared_by_counters_and_ranks_of_one_are() -> None:
    """The second stage waits in NCCL while the first one's processors lag: its SMs are busier by more than a tenth."""
    follower, found = WorkFollower({r: f"n{r}" for r in range(12)}), []
    for k in range(1, 30):
        rows = [row(r, k, 0.2, 0.15, 0.05) for r in range(6)] + [
            row(r, k, 0.2, 0.13, 0.0) for r in range(6, 12)
        ]
        if k > 12:
            rows[3] = row(3, k, 0.2, 0.18, 0.02)
        for r in range(12):
            rows[r][6] = 1 + r // 6
        follower.take([], rows)
        if follower.finding is not None:
            found.append(follower.finding[0])
    assert {(f.kind, f.ranks) for f in found} == {(SlowKind.NODE, (3,))}


def test_a_run_that_grows_slow_is_no_fabric_where_counters_alone_speak() -> None:
    follower = WorkFollower({r: f"n{r // 2}" for r in range(8)})
    for k in range(1, 40):
        step_s = 0.1 if k < 20 else 0.13
        follower.take([], [row(r, k, step_s, 0.09, step_s - 0.09) for r in range(8)])
    assert follower.finding is None


def test_what_counters_said_of_waiting_does_not_hold_for_what_scripts_tell_later() -> None:
    watch = SlowWatch({r: f"n{r}" for r in range(4)})
    for k in range(10):
        watch.observe(k, 1.0, {r: RankWork(0.5, waits=2.0 if r == 3 else 1.6) for r in range(4)})
    found = [
        watch.observe(k, 1.0, {r: RankWork(0.6 if r == 3 else 0.5) for r in range(4)}) for k in range(10)
    ]
    assert found[-1] is not None and found[-1].ranks == (3,)


def test_who_tells_his_work_is_not_compared_with_counters() -> None:
    told, counted = WorkWindow(10, 10, 1.0, 0.5), WorkWindow(10, 10, 1.0, 0.9, tensor=0.6)
    assert set(reckon_work({0: told, 1: counted, 2: told})) == {0, 2}
    assert reckon_work({1: counted})[1] == RankWork(0.9, waits=0.9 / 0.6)
    assert reckon_work({1: WorkWindow(10, 10, 1.0, 0.5, tensor=0.3)}) == {} == reckon_work({})


class Reader:
    """Answers with what it was given, when asked."""

    def __init__(self, found: GpuActivity | None) -> None:
        self.found, self.asked = found, 0

    def ask(self) -> None:
        self.asked += 1

    def answer(self) -> GpuActivity | None:
        return self.found


def window(
    reader: Reader, busy: float | None = None, *, training: bool = True
) -> tuple[WorkWindow | None, WorkWindow | None]:
    """What a meter says at the end of a window of ten steps of 0.5 s, and a moment later."""
    meter = WorkMeter(1, on_processor=False, gpu=reader)
    meter.take(0, [], 100.0)
    meter.take(5, [], 102.0, training=training)
    records = [StepRecord(s, 0, 1.0, 0.0, busy=busy) for s in range(10)]
    return meter.take(10, records, 105.0), meter.take(10, [], 105.05)


def test_a_window_has_what_was_counted_between_its_ends() -> None:
    reader = Reader(GpuActivity(5.01, 0.9, 0.5))
    at_once, later = window(reader)
    assert at_once is None and reader.asked == 2
    assert later is not None and (later.busy, later.tensor, later.wall) == (0.45, 0.5, 0.5)
    assert window(Reader(None)) == (None, None), "the driver does not answer"
    assert window(Reader(GpuActivity(12.0, 0.9, 0.5))) == (None, None), "of more than the window"
    assert window(Reader(GpuActivity(5.0, 0.9, 0.0))) == (None, None), "no tensor core works"
    assert window(Reader(GpuActivity(5.0, 0.9, 0.5)), training=False) == (None, None), "an evaluation"


def test_a_script_that_tells_its_work_goes_before_the_counters() -> None:
    reader = Reader(GpuActivity(5.0, 0.9, 0.5))
    at_once, later = window(reader, busy=0.3)
    assert at_once is not None and at_once.tensor is None and at_once.busy == pytest.approx(0.3)
    assert later is None and reader.asked == 1


def test_counters_travel_apart_from_what_scripts_tell() -> None:
    report = ProgressReport()
    news = {"count": 10, "phase": 2, "source": "page", "total": None, "steps": [[9, "0x1p0", 0, 1.0]]}
    report.add(0, news, [0])
    report.add_work(0, WorkWindow(9, 10, 0.5, 0.45, None, 3, None, 0.6))
    sent = report.take()
    assert (
        sent is not None and "work" not in sent and sent["counted"] == [[0, 9, 10, 0.5, 0.45, 0.6, 3, None]]
    )
    message = {"op": "progress", "attempt": 1, "sent": 1.0, "groups": [], "steps": {}}
    assert check(message | {"counted": sent["counted"]}, 8)
    good = sent["counted"][0]
    for bad in (
        {}, [[]], [good[:7]], [[*good, 1]], [[8, *good[1:]]], [[*good[:5], 1.5, 3, None]], [[*good[:5], None, 3, None]],
        [[*good[:6], 3, -1.0]], [[*good[:4], "x", *good[5:]]],
    ):  # fmt: skip
        with pytest.raises(Malformed):
            check(message | {"counted": bad}, 8)


# --- the driver


def wait_for(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 5
    while not (found := what()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return found


def opened(nvml: Any, clock: Callable[[], float] = time.monotonic) -> tuple[NodeCounters, RankCounters]:
    node = NodeCounters(lambda: nvml, clock)
    rank = node.of_rank(ENV)
    assert rank is not None
    return node, rank


def test_two_readings_give_the_means_of_the_ranks_own_gpu() -> None:
    gpus = [FakeGpu(), FakeGpu(gpm_values={"SM_UTIL": 90.0, "ANY_TENSOR_UTIL": 45.0}, processes=(7,))]
    nvml = FakeNvml(gpus)
    ticks = itertools.count(0.0, 1.5)
    _, rank = opened(nvml, lambda: next(ticks))
    rank.ask()
    assert wait_for(lambda: not rank._waits) and rank.answer() is None
    nvml.calls = 0
    rank.ask()
    found = wait_for(rank.answer)
    assert (found.active, found.tensor) == (0.9, 0.45) and found.seconds == 1.5 and nvml.calls == 3
    assert rank.answer() is None
    gpus[1].processes = (7, 8)
    rank.ask()
    assert wait_for(lambda: not rank._waits) and rank.answer() is None, "somebody else works there too"


@pytest.mark.parametrize("gpu", [FakeGpu(gpm=False), FakeGpu(split=True), FakeGpu(lost=True)])
def test_a_gpu_that_cannot_be_counted_is_said_once_and_not_asked_again(gpu: FakeGpu) -> None:
    nvml = FakeNvml([FakeGpu(), gpu])
    node, rank = opened(nvml)
    rank.ask()
    assert wait_for(lambda: node.lacking)
    nvml.calls = 0
    rank.ask()
    time.sleep(0.01)
    assert rank.answer() is None and nvml.calls == 0 and len(node.lacking) == 1


def test_no_driver_and_a_driver_that_hangs_stop_nobody() -> None:
    def no_driver() -> Any:
        raise UnbrokenError("no driver")

    node = NodeCounters(no_driver)
    rank = node.of_rank(ENV)
    assert rank is not None
    rank.ask()
    assert wait_for(lambda: "no driver" in str(node.lacking))
    held, nvml = threading.Event(), FakeNvml([FakeGpu(), FakeGpu()])
    nvml.nvmlGpmSampleGet = lambda h, s: held.wait(5)  # type: ignore[method-assign,assignment]
    _, rank = opened(nvml)
    began = time.monotonic()
    for _ in range(100):
        rank.ask()
        assert rank.answer() is None
    assert time.monotonic() - began < 1
    held.set()


def test_an_agent_tells_a_window_of_a_script_that_tells_its_steps_alone(tmp_path: Path) -> None:
    page = tmp_path / "p" / "rank-1.page"
    layout.create(page, rank=1, attempt=1)
    run, now = Run(page), 100.0
    (tmp_path / "log").touch()
    nvml = FakeNvml([FakeGpu(), FakeGpu(gpm_values={"SM_UTIL": 90.0, "ANY_TENSOR_UTIL": 45.0})])
    start = RankStart(1, 1, ("x",), ".", {**ENV, "UNBROKEN_PAGE": str(page)}, tmp_path / "log")
    process: Any = SimpleNamespace(pid=os.getpid(), poll=lambda: None)
    rank = RankProcess(process, start, False, NodeCounters(lambda: nvml, lambda: now))
    for step in range(25):
        run.step(step)
        now += 0.25
        rank.sample(now)
        # What is asked for at the end of a window is there at a later look.
        wait_for(lambda: not rank._meter._gpu._waits)  # type: ignore[union-attr]
        if rank.work is not None:
            break
    assert rank.work is not None and (rank.work.steps, rank.work.wall) == (10, 0.25)
    assert (rank.work.busy, rank.work.tensor) == (0.9 * 0.25, 0.45)
    rank.close()


@pytest.mark.parametrize(
    ("devices", "local", "ranks", "gpu"),
    [("GPU-1,GPU-2", 1, 2, "GPU-2"), ("0,1", 0, 2, "0"), ("0,1,2", 1, 2, "1"), ("", 0, 1, ""), ("GPU-1", 1, 2, ""),
     ("0,0", 1, 2, ""), ("MIG-1,MIG-2", 0, 2, "")],
)  # fmt: skip
def test_the_gpu_of_a_rank(devices: str, local: int, ranks: int, gpu: str) -> None:
    env = {"CUDA_VISIBLE_DEVICES": devices, "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(ranks)}
    assert find_gpu(env) == gpu
