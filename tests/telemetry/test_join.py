"""Readings fall into the jobs, phases and plans that had the GPU at that time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from unbroken.cli.telemetry import app
from unbroken.errors import InputError, UsageError
from unbroken.samples.schema import JOBS
from unbroken.telemetry.join import (
    add_spans,
    connect,
    distribution,
    open_jobs,
    open_samples,
    open_spans,
    per_span,
    spans_without_readings,
)
from unbroken.telemetry.recording.spool import Spool
from unbroken.telemetry.samplers.reading import Reading
from unbroken.telemetry.spans import Span, spans_of_evaluation, spans_of_run

T0 = 1_700_000_000


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two nodes of two GPUs for 100 s: GPU 0 works at 80 %, GPU 1 at its second's number; 100 W each; one XID."""
    folder = tmp_path_factory.mktemp("samples")
    for node in ("n1", "n2"):
        spool = Spool(folder, node=node)
        for s in range(100):
            tick = [Reading(0, None, "sm_active_pct", 80.0), Reading(1, None, "sm_active_pct", float(s))]
            tick += [Reading(g, None, "gpu_energy_j", 1000.0 + 100.0 * s) for g in (0, 1)]
            if s == 42:
                tick.append(Reading(1, None, "xid", 79.0))
            spool.write(T0 + s, tick)
        spool.close()
    return folder


def test_phases_of_a_trial_on_one_gpu(tmp_path: Path, samples: Path) -> None:
    spans = tmp_path / "spans.csv"
    spans.write_text(
        "label,part,node,gpu,start_utc,end_utc\n"
        "mmlu,load,n1,1,2023-11-14 22:13:20,2023-11-14 22:13:30\n"
        "mmlu,generate,n1,1,2023-11-14 22:13:30,2023-11-15 06:14:10+08:00\n"
        "gsm8k,generate,n3,1,2023-11-14 22:13:30,2023-11-14 22:14:10\n"
    )
    con = connect()
    open_samples(con, [samples])
    open_spans(con, spans)
    got = {(r["label"], r["part"], r["metric"]): r for r in per_span(con)}
    load, generate = got["mmlu", "load", "sm_active_pct"], got["mmlu", "generate", "sm_active_pct"]
    assert (load["readings"], load["mean"], load["p50"]) == (10, 4.5, 4.5)
    assert (generate["readings"], generate["mean"]) == (40, 29.5)
    assert got["mmlu", "generate", "gpu_energy_j"]["increase"] == 3900.0
    assert got["mmlu", "generate", "xid"]["increase"] == 1
    assert ("mmlu", "load", "xid") not in got
    assert spans_without_readings(con) == (1, 3)
    by_part = {(r["part"], r["metric"]): r for r in per_span(con, ["sm_active_pct"], ["part"])}
    assert set(by_part) == {("load", "sm_active_pct"), ("generate", "sm_active_pct")}


def test_jobs_on_several_nodes(tmp_path: Path, samples: Path) -> None:
    con = connect()
    columns = ", ".join(f'"{c.name}" {c.type}' for c in JOBS.columns)
    con.execute(f"CREATE TABLE jobs ({columns})")
    insert = "INSERT INTO jobs (job_id, type, nodes, start_utc, end_utc) VALUES (?, 'Pretrain', ?, make_timestamp(?), make_timestamp(?))"
    for job, nodes, a, b in (
        ("a", ["n1", "n2"], 0, 50),
        ("b", ["n2"], 50, 100),
        ("c", [], 0, 9),
        ("d", ["n1"], 9, 9),
    ):
        con.execute(insert, [job, nodes, (T0 + a) * 10**6, (T0 + b) * 10**6])
    con.execute(f"COPY jobs TO '{tmp_path / 'jobs.parquet'}'")
    open_samples(con, [samples])
    open_jobs(con, tmp_path / "jobs.parquet")
    got = {(r["label"], r["metric"]): r for r in per_span(con)}
    assert got["a", "sm_active_pct"]["readings"] == 200 and got["b", "sm_active_pct"]["readings"] == 100
    assert got["a", "sm_active_pct"]["mean"] == pytest.approx((80 + 24.5) / 2)
    assert got["a", "gpu_energy_j"]["increase"] == 4 * 4900
    assert {label for label, _ in got} == {"a", "b"}


def test_attempts_of_a_run() -> None:
    records: list[dict[str, object]] = [
        {"kind": "epoch", "host": "h", "t": 0.5},
        {"kind": "attempt", "slots": ["a", "b"], "t": 1.0},
        {"kind": "first_step", "t": 4.0},
        {"kind": "ended", "t": 9.0},
        {"kind": "attempt", "slots": ["a", "s"], "t": 10.0},
        {"kind": "durable", "t": 12.0},
    ]
    spans, host = spans_of_run(records, "plan")
    assert host == "h"
    assert [(s.part, s.node, s.start, s.end) for s in spans] == [
        ("start", "a", 1, 4), ("train", "a", 4, 9), ("start", "b", 1, 4), ("train", "b", 4, 9),
        ("start", "a", 10, 12), ("start", "s", 10, 12),
    ]  # fmt: skip
    assert spans_of_run([], "x") == ([], None)


def test_phases_of_an_evaluation() -> None:
    events: list[dict[str, object]] = [
        {"event": "join", "worker": "w0", "node": "n1", "gpus": [0, 1], "at": 1.0},
        {"event": "join", "worker": "w1", "node": "n1", "gpus": [], "at": 1.0},
        {"event": "ready", "worker": "w0", "fetch_s": 2.0, "load_s": 3.0, "at": 10.0},
        {"event": "trial", "worker": "w0", "task": "mmlu", "started": 11.0, "ended": 14.0, "at": 14.0},
        {"event": "trial", "worker": "w1", "task": "arc", "started": 11.0, "ended": 12.0, "at": 14.0},
        {"event": "trial", "worker": "gone", "task": "arc", "started": 11.0, "ended": 12.0, "at": 14.0},
        {"event": "end", "at": 15.0},
    ]
    got = [(s.label, s.part, s.gpu, s.start, s.end) for s in spans_of_evaluation(events)]
    assert got == [
        ("model", "load", 0, 7, 10), ("model", "load", 1, 7, 10), ("model", "fetch", 0, 5, 7), ("model", "fetch", 1, 5, 7),
        ("mmlu", "trial", 0, 11, 14), ("mmlu", "trial", 1, 11, 14), ("arc", "trial", None, 11, 12),
    ]  # fmt: skip


def test_virtual_nodes_are_the_host_that_they_ran_on(tmp_path: Path, samples: Path) -> None:
    from tests.support.run_folder import RunFolder
    from unbroken.progress import RunDir

    made = RunFolder(RunDir(tmp_path / "my-plan"), nodes=2, nproc=1, spares=0, began=float(T0))
    made.attempt()
    made.steps(20)
    made.end("completed")
    base = [
        sys.executable,
        "-m",
        "unbroken",
        "telemetry",
        "join",
        str(samples),
        "--run",
        str(tmp_path / "my-plan"),
    ]
    p = subprocess.run(
        [*base, "--json", "--metric", "sm_active_pct"], capture_output=True, text=True, check=True
    )
    out = json.loads(p.stdout)
    assert out["spans_without_readings"] == out["spans"] > 0, "these nodes are not in the readings"
    con = connect()
    open_samples(con, [samples])
    spans = [Span("run", "train", n, None, T0, T0 + 10) for n in ("node-000", "node-001")]
    assert add_spans(con, spans, "n1")
    (row,) = per_span(con, ["sm_active_pct"])
    assert row["readings"] == 20, "the two virtual nodes are one machine, counted once"
    assert not add_spans(con, [Span("r", None, "n2", 0, T0, T0 + 1)], "n1")


def test_quantiles_of_everything(samples: Path) -> None:
    con = connect()
    open_samples(con, [samples])
    got = {r["metric"]: r for r in distribution(con)}
    assert got["sm_active_pct"]["readings"] == 400 and got["sm_active_pct"]["p50"] == 80.0
    assert got["xid"]["max"] == 79


def test_commands(tmp_path: Path, samples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spans = tmp_path / "plans.csv"
    spans.write_text("label,node,start_utc,end_utc\n3d,n1,2023-11-14 22:13:20,2023-11-14 22:15:00\n")
    base = [sys.executable, "-m", "unbroken", "telemetry"]
    p = subprocess.run(
        [*base, "join", str(samples), "--spans", str(spans), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    out = json.loads(p.stdout)
    assert out["spans"] == 1 and {r["metric"] for r in out["rows"]} == {
        "sm_active_pct",
        "gpu_energy_j",
        "xid",
    }
    app(args=["summary", str(samples)], standalone_mode=False)
    assert capsys.readouterr().out.splitlines()[0].split()[:3] == ["metric", "readings", "mean"]
    with pytest.raises(UsageError, match="nothing to join with"):
        app(args=["join", str(samples)], standalone_mode=False)


def test_mistakes(tmp_path: Path, samples: Path) -> None:
    con = connect()
    with pytest.raises(InputError, match="no readings"):
        open_samples(con, [tmp_path / "absent"])
    (tmp_path / "bad.parquet").write_text("x")
    with pytest.raises(InputError, match="cannot be read"):
        open_samples(con, [tmp_path / "bad.parquet"])
    open_samples(con, [samples])
    (tmp_path / "s.csv").write_text("label,node\na,b\n")
    with pytest.raises(InputError, match="no column"):
        open_spans(con, tmp_path / "s.csv")
    with pytest.raises(InputError):
        open_spans(con, tmp_path / "absent.csv")
    with pytest.raises(InputError):
        open_jobs(con, tmp_path / "absent.parquet")
    assert duckdb.__version__


def test_a_join_that_finds_nothing_says_why(
    tmp_path: Path, samples: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spans = tmp_path / "plans.csv"
    spans.write_text("label,node,start_utc,end_utc\n3d,n1,2023-11-14 22:13:20,2023-11-14 22:15:00\n")
    with pytest.raises(UsageError, match="sm_activ_pct") as e:
        app(["join", str(samples), "--spans", str(spans), "--metric", "sm_activ_pct"], standalone_mode=False)
    assert "Did you mean 'sm_active_pct'?" in str(e.value)
    nodeless = tmp_path / "jobs.parquet"
    row = {c.name: "NULL" for c in JOBS.columns} | {"job_id": "'1'", "nodes": "[]"}
    columns = ", ".join(f"CAST({row[c.name]} AS {c.type}) AS {c.name}" for c in JOBS.columns)
    duckdb.sql(f"COPY (SELECT {columns}) TO '{nodeless}' (FORMAT parquet)")
    app(["join", str(samples), "--jobs", str(nodeless)], standalone_mode=False)
    out, err = capsys.readouterr()
    assert not out
    assert "no job or span has a node" in err
