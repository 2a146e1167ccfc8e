"""Readings fall into the jobs, phases and plans that had the GPU at that time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from unbroken.errors import InputError
from unbroken.telemetry.join import (
    connect,
    distribution,
    open_jobs,
    open_samples,
    open_spans,
    per_span,
    spans_without_readings,
)
from unbroken.telemetry.reading import Reading
from unbroken.telemetry.spool import Spool
from unbroken.trace.schema import JOBS

T0 = 1_700_000_000


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    """Two nodes of two GPUs for 100 s: GPU 0 works at 80 %, GPU 1 at its second's number; 100 W each; one XID."""
    for node in ("n1", "n2"):
        spool = Spool(tmp_path / "samples", node=node)
        for s in range(100):
            tick = [Reading(0, None, "sm_active_pct", 80.0), Reading(1, None, "sm_active_pct", float(s))]
            tick += [Reading(g, None, "gpu_energy_j", 1000.0 + 100.0 * s) for g in (0, 1)]
            if s == 42:
                tick.append(Reading(1, None, "xid", 79.0))
            spool.write(T0 + s, tick)
        spool.close()
    return tmp_path / "samples"


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
    con.execute(f"CREATE TABLE jobs ({JOBS.ddl()})")
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


def test_quantiles_of_everything(samples: Path) -> None:
    con = connect()
    open_samples(con, [samples])
    got = {r["metric"]: r for r in distribution(con)}
    assert got["sm_active_pct"]["readings"] == 400 and got["sm_active_pct"]["p50"] == 80.0
    assert got["xid"]["max"] == 79


def test_commands(tmp_path: Path, samples: Path) -> None:
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
    p = subprocess.run([*base, "summary", str(samples)], capture_output=True, text=True, check=True)
    assert p.stdout.splitlines()[0].split()[:3] == ["metric", "readings", "mean"]
    p = subprocess.run([*base, "join", str(samples)], capture_output=True, text=True, check=False)
    assert p.returncode == 2 and "--jobs or --spans" in p.stderr


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
