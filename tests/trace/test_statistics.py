"""Statistics against the same numbers computed the straightforward way, in Python."""

from __future__ import annotations

import datetime as dt
import math
import statistics as st
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as hs

from unbroken.errors import InputError, UsageError
from unbroken.samples.schema import JOBS
from unbroken.samples.tables import Findings
from unbroken.trace.inference import parse_rules, rules_from, shipped_rules
from unbroken.trace.readers import load
from unbroken.trace.settings import ReportSettings
from unbroken.trace.statistics import compute

T0 = dt.datetime(2024, 1, 1, 6)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    full = [{c: r.get(c) for c in JOBS.names} for r in rows]
    pq.write_table(pa.Table.from_pylist(full, schema=JOBS.arrow()), path)
    return path


def job(
    i: int, state: str, gpus: float, submit_s: float, wait: float, run: float, **more: Any
) -> dict[str, Any]:
    submit = T0 + dt.timedelta(seconds=submit_s)
    start = submit + dt.timedelta(seconds=wait)
    return {
        "job_id": f"j{i}", "cluster": "c", "user": f"u{i % 3}", "team": f"t{i % 2}", "type": "Eval" if gpus < 64 else "Pretrain",
        "state": state, "state_raw": state, "submit_utc": submit, "start_utc": start,
        "end_utc": start + dt.timedelta(seconds=run), "gpu_num": gpus, "node_num": 1, **more,
    }  # fmt: skip


def findings(path: Path, **k: Any) -> Findings:
    with load([path]) as store:
        return compute(store, **k)


@pytest.fixture
def small(tmp_path: Path) -> tuple[list[dict[str, Any]], Findings]:
    """400 jobs of all kinds, and what is found in them."""
    states = ("COMPLETED", "CANCELLED", "FAILED")
    rows = [
        job(
            i,
            states[i % 7 % 3],
            [0, 1, 2, 8, 64, 100, 256, 0.5][i % 8],
            i * 977.0 % 90000,
            i * 31 % 600,
            (i * i * 7919) % 50000 + i % 11,
        )
        for i in range(400)
    ]
    return rows, findings(write(tmp_path / "jobs.parquet", rows))


def run_of(r: dict[str, Any]) -> float:
    return float((r["end_utc"] - r["start_utc"]).total_seconds())


def test_shares_by_state_type_and_size(small: tuple[list[dict[str, Any]], Findings]) -> None:
    rows, found = small
    gpu = [r for r in rows if r["gpu_num"] > 0]
    total = sum(r["gpu_num"] * run_of(r) for r in gpu)
    for r in found["by_state"].dicts():
        mine = [x for x in gpu if x["state"] == r["state"]]
        assert r["jobs"] == len(mine)
        assert r["jobs_pct"] == pytest.approx(100 * len(mine) / len(gpu))
        assert r["gpu_time_pct"] == pytest.approx(100 * sum(x["gpu_num"] * run_of(x) for x in mine) / total)
    for r in found["by_type"].dicts():
        mine = [x for x in gpu if x["type"] == r["type"]]
        assert r["mean_gpus"] == pytest.approx(st.fmean(x["gpu_num"] for x in mine))
    classes: dict[float, int] = defaultdict(int)
    for x in gpu:
        classes[0.5 if x["gpu_num"] < 1 else 2.0 ** math.ceil(math.log2(x["gpu_num"]))] += 1
    assert {r["size"]: r["jobs"] for r in found["by_size"].dicts()} == dict(classes)
    assert found["by_size"].column("gpu_time_cdf_pct")[-1] == pytest.approx(100)


def test_quantiles_are_the_smallest_value_that_the_share_does_not_exceed(
    small: tuple[list[dict[str, Any]], Findings],
) -> None:
    rows, found = small
    for q in found["run_quantiles"].dicts():
        mine = sorted(
            run_of(x)
            for x in rows
            if (x["gpu_num"] > 0 and q["type"] in ("GPU jobs", x["type"]))
            or (x["gpu_num"] == 0 and q["type"] == "CPU")
        )
        assert q["n"] == len(mine)
        for p in (1, 5, 10, 25, 50, 75, 90, 95, 99):
            exact = mine[max(math.ceil(p / 100 * len(mine)) - 1, 0)]
            assert q[f"p{p}"] == pytest.approx(exact, rel=1 / 16384, abs=0.5), (q["type"], p)
        assert q["mean"] == pytest.approx(st.fmean(mine), rel=1e-4)


def test_distribution_functions_count(small: tuple[list[dict[str, Any]], Findings]) -> None:
    rows, found = small
    mine = [run_of(x) for x in rows if x["gpu_num"] > 0]
    for r in found["run_cdf"].where(type="GPU jobs").dicts():
        assert r["cdf_pct"] == pytest.approx(
            100 * sum(round(v) <= r["x_s"] * (1 + 1e-6) for v in mine) / len(mine), abs=0.4
        )
    gpus = [x["gpu_num"] for x in rows if x["gpu_num"] > 0]
    for r in found["size_cdf"].dicts():
        assert r["jobs_pct"] == pytest.approx(100 * sum(g <= r["gpus"] for g in gpus) / len(gpus))


def test_gpus_held_are_exact_in_each_hour(small: tuple[list[dict[str, Any]], Findings]) -> None:
    rows, found = small
    table = found["busy"]
    for r in list(table.dicts())[::5]:
        a = r["time_utc"]
        b = a + dt.timedelta(hours=1)
        held = sum(
            x["gpu_num"] * max((min(x["end_utc"], b) - max(x["start_utc"], a)).total_seconds(), 0)
            for x in rows
        )
        assert r["gpus"] == pytest.approx(held / 3600, abs=1e-6)
    assert sum(table.column("gpus")) == pytest.approx(sum(x["gpu_num"] * run_of(x) for x in rows) / 3600)


def test_arrivals_users_and_accounts(small: tuple[list[dict[str, Any]], Findings]) -> None:
    rows, found = small
    for r in found["arrivals_by_hour"].dicts():
        assert r["jobs"] == sum(x["submit_utc"].hour == r["hour"] for x in rows)
    by_user = {r["user"]: r for r in found["by_user"].dicts()}
    mine = [x for x in rows if x["user"] == "u1" and x["gpu_num"] > 0]
    assert by_user["u1"]["gpu_h"] == pytest.approx(sum(x["gpu_num"] * run_of(x) for x in mine) / 3600)
    total = sum(x["gpu_num"] * run_of(x) for x in rows) / 3600
    assert sum(found["accounts"].column("gpu_h")) == pytest.approx(total)
    assert {d.isoweekday() for d in found["accounts"].column("week")} == {1}
    assert found["user_concentration"].column("gpu_time_pct")[-1] == pytest.approx(100)


def test_mttf_is_run_time_over_failures(small: tuple[list[dict[str, Any]], Findings]) -> None:
    rows, found = small
    for r in found["mttf_by_size"].dicts():
        mine = [
            x
            for x in rows
            if x["gpu_num"] > 0
            and (0.5 if x["gpu_num"] < 1 else 2.0 ** math.ceil(math.log2(x["gpu_num"]))) == r["size"]
        ]
        failed = sum(x["state"] == "FAILED" for x in mine)
        if failed:
            mttf = sum(map(run_of, mine)) / failed
            assert r["mttf_h"] == pytest.approx(mttf / 3600)
            assert r["ettr_expected"] == pytest.approx(1 / (1 + (900 + 600) / mttf))


def test_fairness_and_slowdown(small: tuple[list[dict[str, Any]], Findings]) -> None:
    rows, found = small
    r = next(x for x in found["fairness"].dicts() if x["size"] == 8)
    mine = [x for x in rows if x["gpu_num"] == 8]
    waits = [(x["start_utc"] - x["submit_utc"]).total_seconds() for x in mine]
    assert r["mean_s"] == pytest.approx(st.fmean(waits))
    assert r["slowdown"] == pytest.approx(
        (st.fmean(waits) + st.fmean(map(run_of, mine))) / st.fmean(map(run_of, mine))
    )
    assert "Jain" in found["fairness"].remark


def test_cancelled_time_is_split_by_stop_times(tmp_path: Path) -> None:
    hour = 3600.0
    rows = [
        job(1, "CANCELLED", 8, 0, 0, 10 * hour, stop_utc=T0 + dt.timedelta(hours=6)),
        job(2, "CANCELLED", 8, 0, 0, 10 * hour, stop_utc=T0 + dt.timedelta(hours=9, minutes=55)),
        job(3, "CANCELLED", 8, 0, 0, 10 * hour),
    ]
    r = next(findings(write(tmp_path / "jobs.parquet", rows))["cancelled"].dicts())
    assert (r["jobs"], r["stalled_jobs"], r["known"]) == (3, 1, 2)
    assert r["idle_tail_gpu_h"] == pytest.approx(8 * 4)
    assert r["worked_gpu_h"] == pytest.approx(8 * 26)


def test_cancelled_time_is_split_by_samples_on_the_jobs_nodes(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from unbroken.samples.schema import SAMPLES

    rows = [job(1, "CANCELLED", 8, 0, 0, 4 * 3600, nodes=["n1", "n2"])]
    write(tmp_path / "jobs.parquet", rows)
    samples = [
        {
            "time_utc": T0 + dt.timedelta(minutes=m),
            "node": n,
            "gpu": 0,
            "metric": "gpu_util_pct",
            "value": 90.0 if m < 60 else 0.0,
        }
        for n in ("n1", "n2")
        for m in range(0, 240, 10)
    ]
    full = [{c: s.get(c) for c in SAMPLES.names} for s in samples]
    pq.write_table(pa.Table.from_pylist(full, schema=SAMPLES.arrow()), tmp_path / "samples.parquet")
    r = next(findings(tmp_path)["cancelled"].dicts())
    assert r["idle_tail_gpu_h"] == pytest.approx(8 * (240 - 50) / 60)


def test_failures_from_exits_say_how(tmp_path: Path) -> None:
    rows = [
        job(1, "FAILED", 1, 0, 0, 60, exit_code=137),
        job(2, "FAILED", 1, 0, 0, 60, state_raw="TIMEOUT", exit_code=0),
        job(3, "FAILED", 1, 0, 0, 60, state_raw="NODE_FAIL"),
        job(4, "FAILED", 1, 0, 0, 60, exit_code=0, exit_signal=11),
        job(5, "FAILED", 1, 0, 0, 60, reason="NVLinkError", exit_code=1),
    ]
    found = findings(write(tmp_path / "jobs.parquet", rows))
    assert set(found["failures_by_exit"].column("reason")) == {
        "killed (signal 9)", "time limit", "node failure", "segmentation fault (signal 11)", "NVLinkError",
    }  # fmt: skip


def test_one_job_and_no_job(tmp_path: Path) -> None:
    found = findings(write(tmp_path / "jobs.parquet", [job(1, "COMPLETED", 1, 0, 5, 60)]))
    (row,) = found["summary"].dicts()
    assert (row["jobs"], row["median_run_s"], row["mean_queue_s"]) == (1, 60.0, 5.0)
    none = findings(write(tmp_path / "jobs.parquet", []))
    assert not none["summary"]
    assert all(not r for r in none.results.values())


def test_types_are_inferred_by_rules_that_are_shown(tmp_path: Path) -> None:
    names = {
        "opencompass_mmlu": "Eval",
        "llama-sft-2": "SFT",
        "pretrain_7b": "Pretrain",
        "debug": "Debug",
        "llava-x": "MLLM",
        "thing": "Other",
    }
    rows = [job(i, "COMPLETED", 8, 0, 0, 60, type=None, name=n) for i, n in enumerate(names)]
    rows.append(job(99, "COMPLETED", 512, 0, 0, 60, type=None, name="thing2"))
    rows.append(job(100, "COMPLETED", 512, 0, 0, 60, type="Eval", name="pretrain"))
    path = write(tmp_path / "jobs.parquet", rows)
    found = findings(path)
    assert {r["type"]: r["jobs"] for r in found["by_type"].dicts()} == {
        "Eval": 2,
        "SFT": 1,
        "Pretrain": 2,
        "Debug": 1,
        "MLLM": 1,
        "Other": 1,
    }
    (note,) = [n for n in found.notes if "inferred" in n.text]
    assert note.count == 7
    assert len(note.examples) == len(shipped_rules())
    again = findings(path, settings=ReportSettings(retype=True))
    assert {r["type"]: r["jobs"] for r in again["by_type"].dicts()}["Pretrain"] == 3
    mine = tmp_path / "rules.toml"
    mine.write_text('[[rule]]\ntype = "Debug"\nfield = "name"\nmatch = "thing"\n')
    own = findings(path, rules=(*rules_from(mine), *shipped_rules()))
    assert {r["type"]: r["jobs"] for r in own["by_type"].dicts()}["Debug"] == 3


def test_each_shipped_rule_matches_its_example_and_no_rule_before_it() -> None:
    import duckdb

    con = duckdb.connect()
    rules = [r for r in shipped_rules() if r.field]
    assert len(rules) >= 5
    for rule in rules:
        first = next(
            r
            for r in rules
            if con.execute("SELECT regexp_matches(?, ?)", [rule.example, "(?i)" + r.match]).fetchone()
            == (True,)
        )
        assert first is rule, rule.example


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[rule]]\ntype = 'Nonsense'", "Nonsense"),
        ("[[rule]]\ntype = 'Eval'\nfield = 'nme'", "nme"),
        ("x = [", "TOML"),
        ("a = 1", "no rule"),
    ],
)
def test_wrong_rules_are_errors(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_rules(text, "rules.toml")


def test_a_wrong_regular_expression_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "jobs.parquet", [job(1, "COMPLETED", 8, 0, 0, 60, type=None, name="x")])
    rules = parse_rules("[[rule]]\ntype = 'Eval'\nfield = 'name'\nmatch = '(('", "rules.toml")
    with pytest.raises(UsageError, match="regular expression"):
        findings(path, rules=rules)


@pytest.mark.parametrize("bad", [{"pue": 0.5}, {"carbon_kg_per_kwh": -1}, {"checkpoint_interval_s": 0}])
def test_settings_are_checked(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        ReportSettings(**bad)  # type: ignore[arg-type]


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    hs.lists(
        hs.tuples(
            hs.sampled_from(["COMPLETED", "CANCELLED", "FAILED", "RUNNING", "PENDING", "", "weird"]),
            hs.sampled_from([None, 0.0, 0.25, 1.0, 7.0, 1024.0, -1.0]),
            hs.integers(-100, 10**7),
            hs.integers(-100, 10**5),
            hs.integers(-100, 10**7),
        ),
        max_size=12,
    )
)
def test_every_row_is_a_job_or_set_aside(
    tmp_path: Path, drawn: list[tuple[str, float | None, int, int, int]]
) -> None:
    rows = [
        job(i, s, 1.0, a, w, r) | {"gpu_num": g, "state_raw": None} for i, (s, g, a, w, r) in enumerate(drawn)
    ]
    with load([write(tmp_path / "jobs.parquet", rows)]) as store:
        kept = int(store.one("SELECT count(*) FROM jobs")[0])
        assert kept + store.rejected_count() == len(rows)
        found = compute(store)
        assert not kept or found["summary"].column("jobs") == [kept]


def test_utilisation_quantiles_and_polarisation(seren: Path) -> None:
    with load([seren / "samples.parquet"]) as store:
        found = compute(store)
        values = sorted(v[0] for v in store.query("SELECT value FROM samples WHERE metric = 'gpu_power_w'"))
        util = [v[0] for v in store.query("SELECT value FROM samples WHERE metric = 'gpu_util_pct'")]
    row = next(r for r in found["utilisation_quantiles"].dicts() if r["metric"] == "gpu_power_w")
    assert row["p50"] == pytest.approx(values[len(values) // 2], abs=1)
    assert row["mean_exact"] == pytest.approx(st.fmean(values))
    polar = next(r for r in found["polarisation"].dicts() if r["metric"] == "gpu_util_pct")
    assert polar["full_pct"] == pytest.approx(100 * sum(round(v, 1) >= 95 for v in util) / len(util), abs=0.1)
    assert polar["idle_pct"] + polar["between_pct"] + polar["full_pct"] == pytest.approx(100)


def test_energy_and_carbon_follow_from_power_and_what_is_declared(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from unbroken.samples.schema import SAMPLES

    samples = [
        {"time_utc": T0 + dt.timedelta(minutes=m), "cluster": "c", "node": "n1", "metric": k, "value": v}
        for m in range(60)
        for k, v in (("node_power_w", 1000.0), ("gpus_power_w", 660.0), ("cpu_power_w", 110.0))
    ]
    full = [{c: s.get(c) for c in SAMPLES.names} for s in samples]
    pq.write_table(pa.Table.from_pylist(full, schema=SAMPLES.arrow()), tmp_path / "samples.parquet")
    found = findings(tmp_path / "samples.parquet", settings=ReportSettings(pue=1.5, carbon_kg_per_kwh=0.1))
    (row,) = found["energy"].dicts()
    assert row["kwh"] == pytest.approx(1.0)
    assert row["co2e_kg"] == pytest.approx(0.15)
    assert {r["part"]: r["share_pct"] for r in found["power_modules"].dicts()} == pytest.approx(
        {"GPUs": 66.0, "CPUs": 11.0, "rest": 23.0}
    )


def test_failures_against_heat_find_a_planted_relation(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from unbroken.samples.schema import INCIDENTS, SAMPLES

    samples, incidents = [], []
    for n in range(20):
        for h in range(50):
            t = T0 + dt.timedelta(hours=h)
            samples.append(
                {"time_utc": t, "node": f"n{n}", "gpu": 0, "metric": "gpu_temp_c", "value": 30.0 + n}
            )
            if n >= 16 and h % 10 == 0:
                incidents.append(
                    {
                        "incident_id": f"{n}-{h}",
                        "node": f"n{n}",
                        "time_utc": t + dt.timedelta(minutes=5),
                        "category": "Infrastructure",
                    }
                )
    for rows, schema, file in ((samples, SAMPLES, "samples"), (incidents, INCIDENTS, "incidents")):
        full = [{c: s.get(c) for c in schema.names} for s in rows]
        pq.write_table(pa.Table.from_pylist(full, schema=schema.arrow()), tmp_path / f"{file}.parquet")
    rates = findings(tmp_path)["failures_by_heat"].column("per_1000_node_hours")
    assert rates == [0.0, 0.0, 0.0, 0.0, 100.0]
