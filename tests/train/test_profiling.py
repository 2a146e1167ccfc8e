"""A profile counts what it says, names what is not measured here, and its page shows all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unbroken.errors import UsageError
from unbroken.progress import RunDir
from unbroken.status.profile import profile_section
from unbroken.testing.nvml import FakeGpu, FakeNvml
from unbroken.train.config import ModelConfig
from unbroken.train.planning.sizes import flops_per_token, layer_flops_per_token
from unbroken.train.profiling.activity import SHOWN, ActivityRecorder
from unbroken.train.profiling.command import main, usual_plans
from unbroken.train.profiling.kernels import estimated_sm_activity, longest, read_trace, time_by_kind
from unbroken.train.profiling.page import render_profile, table


def trace(folder: Path) -> Path:
    """Two kernels beside each other, a gap, a copy; and what is no work of a GPU."""
    events = [
        {"cat": "kernel", "name": "nvjet_tst_256x128", "ts": 0, "dur": 100, "args": {"grid": [33, 2, 1]}},
        {
            "cat": "kernel",
            "name": "ncclDevKernel_AllGather",
            "ts": 60,
            "dur": 80,
            "args": {"grid": [24, 1, 1]},
        },
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 160, "dur": 40},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 500},
        {"cat": "gpu_user_annotation", "name": "step", "ts": 0, "dur": 500},
    ]
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_time_by_kind_adds_up_to_the_whole(tmp_path: Path) -> None:
    kernels = read_trace(trace(tmp_path))
    found = {k: round(1e6 * v) for k, v in time_by_kind(kernels).items()}
    # The collective counts where nothing else ran: 40 of its 80 microseconds.
    assert found == {"matrix products": 100, "communication": 40, "copies": 40, "idle": 20}
    assert longest(kernels, 1)[0][:3] == ("matrix products", "nvjet_tst_256x128", 1)
    # 66 blocks on 132 SMs for half the time, 24 on them for 80 of 200 microseconds.
    assert estimated_sm_activity(kernels, 132) == pytest.approx(0.5 * 0.5 + 24 / 132 * 0.4)


def test_activity_is_read_where_there_are_counters_and_named_where_not() -> None:
    recorder = ActivityRecorder(lambda: FakeNvml([FakeGpu()]))
    recorder.start()
    while not recorder.found.samples:
        recorder.stopped.wait(0.01)
    found = recorder.stop()
    means = found.means()[0]
    assert means["sm_active_pct"] == 88.5 and means["tensor_active_pct"] == 41.25
    without = ActivityRecorder(lambda: FakeNvml([FakeGpu(gpm=False)])).stop()
    assert "Hopper" in without.not_measured["sm_active_pct"]
    assert set(ActivityRecorder(lambda: FakeNvml([])).stop().not_measured) == set(SHOWN)


def test_what_is_recomputed_in_full_are_the_blocks() -> None:
    c = ModelConfig(dim=8, layers=2, heads=2, kv_heads=2, hidden=16, vocab=256)
    head = 6 * 256 * 8
    assert flops_per_token(c, 4) - layer_flops_per_token(c, 4) == head


def test_plans_that_do_not_fit_are_refused_before_the_first_starts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not divide"):
        main(["--out", str(tmp_path / "x"), "--ranks", "2", "--plan", "a=--tensor 4"])
    with pytest.raises(UsageError, match="has no name"):
        main(["--out", str(tmp_path / "x"), "--ranks", "2", "--plan", "--tensor 4"])
    assert not (tmp_path / "x").exists()
    assert usual_plans(16)["V2"] == "--parameters 8 --gradients 8 --optimizer -1"
    assert "--pipeline 2 --tensor 2" in usual_plans(4)["V1"]


def profile(gpu: bool) -> dict[str, object]:
    activity = [{"at": 0.2, "gpu": 0, "sm_active_pct": 90.0, "nvlink_tx_bytes_per_s": 2e9}] if gpu else []
    kernels = {"seconds_by_kind": {"matrix products": 0.4, "idle": 0.02}, "longest": []} if gpu else None
    one = {
        "plan": "--tensor 2", "device": "NVIDIA H200" if gpu else "cpu", "ranks": 1, "step_seconds": 0.1,
        "tokens_per_second_per_rank": 1234.5, "mfu": 0.51 if gpu else None, "hfu": 0.6 if gpu else None,
        "activity": activity, "activity_means": {"0": activity[0]} if gpu else {},
        "by_rank": [{"rank": 0, "bytes": {"parameters": 10**9, "gradients": 5, "optimizer": 7}, "kernels": kernels}],
        "formulas": {"mfu": "6 N", "hfu": "more"}, "not_measured": {} if gpu else {"sm_active_pct": "no GPU here"},
    }  # fmt: skip
    return {"training": ["--seq", "64"], "profiles": {"V1": one, "V2": one}}


def test_the_page_and_the_table_show_it_and_say_what_is_not_measured() -> None:
    pytest.importorskip("jinja2")
    made = render_profile(profile(True))
    assert "SM active" in made and "NVLink sent" in made and "kind of kernel" in made and "1.000" in made
    bare = render_profile(profile(False))
    assert "Not measured here" in bare and "no GPU here" in bare and "kind of kernel" not in bare
    said = table(profile(False))
    assert "not measured: sm_active_pct: no GPU here" in said and "MFU = 6 N" in said and "1,234" in said


def test_the_report_of_a_run_shows_the_newest_profile_that_can_be_read(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    run = RunDir(tmp_path)
    for attempt, text in (
        (1, json.dumps(profile(True)["profiles"]["V1"] | {"first_step": 11, "last_step": 20})),
        (2, "{torn"),
    ):  # type: ignore[index]
        run.profile(attempt).parent.mkdir(parents=True)
        run.profile(attempt).write_text(text)
    found = profile_section(run)
    assert found is not None and found.title == "attempt 1, steps 11 to 20"
    assert ("MFU, %", ["51.0"]) in found.rows and len(found.figures) >= 3
    assert profile_section(RunDir(tmp_path / "none")) is None


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(300)
def test_two_plans_on_two_processes(tmp_path: Path) -> None:
    small = [
        "--dim",
        "32",
        "--layers",
        "2",
        "--heads",
        "2",
        "--kv-heads",
        "2",
        "--hidden",
        "64",
        "--seq",
        "32",
    ]
    out = tmp_path / "out"
    common = [
        "--out",
        str(out),
        "--ranks",
        "2",
        "--warm",
        "1",
        "--measure",
        "2",
        *small,
        "--global-batch",
        "8",
    ]
    assert main([*common, "--plan", "V1=--pipeline 2", "--plan", "V2=--parameters 2"]) == 0
    found = json.loads((out / "profile.json").read_text())["profiles"]
    v1, v2 = ([r["bytes"] for r in found[n]["by_rank"]] for n in ("V1", "V2"))
    # V2 shares everything evenly; V1's last stage has the head, its first the embedding: as large here.
    assert sum(b["parameters"] for b in v2) == pytest.approx(sum(b["parameters"] for b in v1), rel=0.02)
    assert v2[0]["optimizer"] == pytest.approx(v2[1]["optimizer"], rel=0.02)
    assert [p["plan"] for p in found.values()] == ["--pipeline 2", "--parameters 2"]
    assert found["V1"]["not_measured"] and found["V1"]["mfu"] is None
    assert (out / "profile.html").exists() and not list(out.glob("*.log"))
