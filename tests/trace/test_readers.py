"""Every format in, the one schema out; nothing dropped without being counted."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unbroken.errors import ContractError, InputError, UsageError
from unbroken.trace.readers import ReadOptions, detect, load
from unbroken.trace.readers.kubernetes import quantity
from unbroken.trace.readers.slurm import expand_hosts, join_lines
from unbroken.trace.store import Store

Read = Callable[..., Store]
COLUMNS = "job_id, state, queue_s, duration_s, gpu_num"


def rows(store: Store, columns: str = COLUMNS) -> list[tuple[Any, ...]]:
    return store.query(f"SELECT {columns} FROM jobs ORDER BY job_id")


def notes(store: Store, kind: str) -> dict[str, int]:
    return {n.text: n.count for n in store.notes if n.kind == kind}


@pytest.mark.parametrize(
    ("file", "reader"),
    [
        ("trace_seren.csv", "acme"),
        ("trace_kalos.csv", "acme"),
        ("Venus/cluster_log.csv", "helios"),
        ("cluster_job_log", "philly"),
        ("pai/pai_job_table.csv", "pai"),
        ("openb_pod_list_default.csv", "gpu2023"),
        ("pods.json", "kubernetes"),
        ("events.json", "kubernetes"),
        ("incidents.jsonl", "incidents"),
        ("fault_trace.json", "node-faults"),
        ("sacct/sacct_17.11_gres.txt", "slurm"),
        ("sacct/sacct_20.11_both.txt", "slurm"),
        ("sacct/sacct_22.05_all.txt", "slurm"),
        ("sacct/sacct_22.05_trailing_bar.txt", "slurm"),
        ("sacct/sacct_22.05_usual.txt", "slurm"),
        ("sacct/sacct_23.02_planned.txt", "slurm"),
    ],
)
def test_the_format_is_detected(fixtures: Path, file: str, reader: str) -> None:
    assert detect(fixtures / file, ReadOptions())[0].name == reader


def test_seren_times_have_their_zone_and_timeouts_are_failures(read: Read) -> None:
    store = read("trace_seren.csv")
    first = store.query("SELECT CAST(submit_utc AS VARCHAR), cluster FROM jobs WHERE job_id = '1001'")[0]
    assert first == ("2023-02-28 16:18:22", "Seren")
    assert [(r[0], r[1]) for r in rows(store)][4:6] == [("1005", "FAILED"), ("1006", "FAILED")]
    assert store.query("SELECT duration_s FROM jobs WHERE job_id = '1004'") == [(122.0,)]
    assert not notes(store, "repaired")


def test_kalos_duration_is_end_minus_start_and_the_difference_is_said(read: Read) -> None:
    store = read("trace_kalos.csv")
    assert rows(store) == [
        ("dlca", "FAILED", 10.0, 8.0, 64.0),
        ("dlcb", "CANCELLED", 12.0, 70.0, 64.0),
        ("dlcc", "COMPLETED", 600.0, 120.0, 1.0),
    ]
    (said,) = [n for n in store.notes if n.kind == "difference"]
    assert (said.count, said.of) == (3, 3)
    assert "end minus submit" in said.text


def test_helios_folder_is_the_cluster(read: Read) -> None:
    store = read("Venus/cluster_log.csv")
    assert store.query("SELECT DISTINCT cluster FROM jobs") == [("Venus",)]
    assert rows(store)[0] == ("1425511", "COMPLETED", 0.0, 36848.0, 1.0)
    assert any("no zone" in t for t in notes(store, "assumption"))


def test_philly_attempts_are_one_job(read: Read) -> None:
    store = read("cluster_job_log")
    assert rows(store) == [
        ("application_1", "COMPLETED", 30.0, 193263.0, 4.0),
        ("application_2", "CANCELLED", None, None, None),
        ("application_3", "FAILED", 60.0, 30.0, 1.0),
        ("application_4", "RUNNING", 60.0, None, 1.0),
    ]
    assert store.rejected()[0].reason == "no time: submitted_time"


def test_pai_sums_its_tasks(read: Read) -> None:
    store = read("pai/pai_job_table.csv")
    assert rows(store, "job_id, state, queue_s, gpu_num, cpu_num") == [
        ("inst_a", "COMPLETED", 10.0, 1.0, 14.0),
        ("inst_b", "FAILED", 10.0, 1.0, 6.0),
        ("inst_c", "RUNNING", 10.0, 4.0, 24.0),
        ("inst_d", "PENDING", None, None, None),
    ]


def test_pai_without_its_tasks_says_what_is_missing(tmp_path: Path, fixtures: Path) -> None:
    lonely = tmp_path / "pai_job_table.csv"
    lonely.write_text((fixtures / "pai/pai_job_table.csv").read_text())
    with pytest.raises(InputError, match="pai_task_table"):
        load([lonely])


def test_gpu2023_pods_share_gpus(read: Read) -> None:
    store = read("openb_pod_list_default.csv")
    assert [r[4] for r in rows(store)] == [8.0, 0.22, 1.0, 0.0]
    assert [r[1] for r in rows(store)] == ["COMPLETED", "UNKNOWN", "FAILED", "PENDING"]


def test_pods_of_one_job_are_one_row(read: Read) -> None:
    store = read("pods.json")
    assert rows(store, "job_id, state, state_raw, gpu_num, duration_s, exit_code, nodes") == [
        ("eval/eval-x", "COMPLETED", "Succeeded", 0.0, 300.0, None, None),
        ("eval/gone", "CANCELLED", "Cancelled", 1.0, 3570.0, None, ["gpu-3"]),
        ("llm/pt-7b", "FAILED", "OOMKilled", 16.0, 7205.0, 137, ["gpu-1", "gpu-2"]),
    ]
    assert notes(store, "set aside") == {"objects that are neither pods nor events": 1}


def test_events_remember_pods_that_are_gone(read: Read) -> None:
    store = read("events.json")
    assert rows(store, "job_id, state, duration_s") == [("llm/old-pod", "UNKNOWN", 1800.0)]
    assert store.query("SELECT reason, node, job_id FROM incidents ORDER BY reason") == [
        ("Evicted", None, "llm/other"),
        ("NodeFailure", "gpu-1", None),
    ]


def test_incidents_and_faults(read: Read) -> None:
    assert read("incidents.jsonl").query(
        "SELECT reason, gpu_num, to_failure_s, node FROM incidents ORDER BY 1"
    ) == [
        ("NVLinkError", 16.0, 7200.0, "gpu-1"),
        ("TypeError", 1.0, 60.0, None),
    ]
    assert read("fault_trace.json").query("SELECT reason, lost_s FROM incidents ORDER BY 1") == [
        ("Driver", None),
        ("GPU", 86400.0),
    ]


@pytest.mark.parametrize("file", ["usual", "all", "trailing_bar", "epoch_no_header"])
def test_real_sacct_output_of_any_field_list(read: Read, file: str) -> None:
    fields = ("JobID", "State", "Submit", "Start", "End", "AllocTRES") if file == "epoch_no_header" else ()
    store = read(f"sacct/sacct_22.05_{file}.txt", fields=fields)
    got = {r[0]: r[1:] for r in rows(store)}
    assert got["1"] == ("COMPLETED", 2.0, 6.0, 16.0)
    assert got["3"] == ("COMPLETED", 8.0, 1.0, 2.0)  # its name has `|` in it
    assert got["4"][0] == "FAILED"
    assert got["7"][0] == "FAILED"  # time limit
    assert got["8"][0] == "CANCELLED"
    assert got["10"][3] == 0.0  # no GPU
    assert got["14"] == ("FAILED", 0.0, 78.0, 1.0)  # its node was taken down
    assert got["15"][:1] + got["15"][2:3] == ("RUNNING", None)
    assert got["16"][:2] == ("PENDING", None)
    assert len(got) == 15
    assert store.rejected_count() == 0


def test_sacct_names_codes_and_hosts(read: Read) -> None:
    store = read("sacct/sacct_22.05_all.txt")
    got = {r[0]: r[1:] for r in rows(store, "job_id, name, exit_code, exit_signal, nodes, cluster")}
    assert got["3"][0] == "sft|stage2|lr=1e-5"
    assert got["4"][1] == 3
    assert got["5"][2] == 11
    assert got["1"][3:] == (["n1", "n2", "n3", "n4"], "testbed")
    assert notes(store, "info")["lines of job steps: left out"] == 18


def test_sacct_of_other_versions(read: Read) -> None:
    old = {r[0]: r[1:] for r in rows(read("sacct/sacct_17.11_gres.txt"), COLUMNS + ", mem_gib")}
    assert old == {
        "100": ("COMPLETED", 30.0, 86400.0, 32.0, 512.0),
        "101": ("CANCELLED", 30.0, 65.0, 2.0, 32.0),
        "102": ("CANCELLED", None, None, 0.0, 32.0),
    }
    middle = {r[0]: r[1:] for r in rows(read("sacct/sacct_20.11_both.txt"))}
    assert middle == {"200": ("FAILED", 60.0, 600.0, 16.0), "201_2": ("FAILED", 60.0, 600.0, 5.0)}
    store = read("sacct/sacct_23.02_planned.txt")
    new = {r[0]: r[1:] for r in rows(store)}
    assert new["300"] == ("FAILED", 7200.0, 86400.0, 64.0)
    assert new["303"][0] == "UNKNOWN"
    assert "a state that is not known to us: counted as UNKNOWN" in notes(store, "assumption")


def test_sacct_without_a_header_asks_for_the_fields(read: Read) -> None:
    with pytest.raises(InputError, match="--fields JobID"):
        read("sacct/sacct_22.05_epoch_no_header.txt")


def test_sacct_without_times_names_the_fields_to_export(read: Read) -> None:
    with pytest.raises(InputError, match="--format=JobID"):
        read("sacct/sacct_22.05_default.txt")


def test_host_lists_expand() -> None:
    assert list(expand_hosts("h[001-003,07],login")) == ["h001", "h002", "h003", "h07", "login"]
    assert list(expand_hosts("r[1-2]n[08-09]")) == ["r1n08", "r1n09", "r2n08", "r2n09"]


def test_names_with_bars_are_joined_where_state_and_times_then_fit() -> None:
    columns = ("JobID", "JobName", "State", "Submit", "Comment")
    line = ["7", "a", "b", "COMPLETED", "2024-01-01T00:00:00", "x", "y"]
    assert join_lines(line, columns) == ["7", "a|b", "COMPLETED", "2024-01-01T00:00:00", "x|y"]
    assert join_lines(["7", "a", "b", "c", "d", "e"], columns) is None


@pytest.mark.parametrize(
    ("text", "value"), [("500m", 0.5), ("64Gi", 64 * 2**30), ("8", 8.0), (8, 8.0), ("x", 0.0)]
)
def test_quantities(text: object, value: float) -> None:
    assert quantity(text) == value


MAP = {"job": "id", "user": "who", "submit": "queued", "start": "began", "end": "finished", "gpus": "accelerators",
       "state": "result"}  # fmt: skip


def test_any_table_by_mapping_counts_every_row(read: Read) -> None:
    store = read("any_table.csv", mapping=MAP)
    assert rows(store) == [
        ("a", "UNKNOWN", 60.0, 3600.0, 8.0),
        ("b", "CANCELLED", 60.0, 60.0, 4.0),
        ("f", "FAILED", None, 540.0, 4.0),
    ]
    reasons = sorted(r.reason for r in store.rejected())
    assert reasons == [
        "a negative number of GPUs, nodes or cores",
        "ends before it starts",
        "line 9: missing columns",
        "no time: queued",
        "the same row again",
    ]
    lines = len(Path(__file__).parent.joinpath("fixtures/any_table.csv").read_text().splitlines()) - 1
    assert store.rejected_count() + len(rows(store)) == lines
    assert notes(store, "repaired") == {
        "start before submit (clock skew): the queue time is taken as unknown": 1
    }
    assert "times without a zone beside times with one: taken as UTC" in notes(store, "assumption")


def test_a_zone_moves_times_without_one(read: Read) -> None:
    store = read("Venus/cluster_log.csv", zone="Asia/Shanghai")
    assert store.query("SELECT CAST(submit_utc AS VARCHAR) FROM jobs WHERE job_id = '1425511'") == [
        ("2020-06-09 10:41:01",)
    ]


def test_mixed_offsets_become_the_same_instants(tmp_path: Path) -> None:
    path = tmp_path / "mixed.csv"
    path.write_text(
        "job_id,gpus,state,submit_time,start_time,end_time\n"
        "a,1,COMPLETED,2024-01-01T10:00:00+08:00,2024-01-01T02:00:10Z,2024-01-01T03:00:10+01:00\n"
        "b,1,COMPLETED,1704074400,1704074410000,1704074470000000\n"
    )
    with load([path]) as store:
        assert [r[2:4] for r in rows(store)] == [(10.0, 0.0), (10.0, 60.0)]


def test_rows_that_share_an_id_but_differ_stay(tmp_path: Path) -> None:
    path = tmp_path / "again.csv"
    path.write_text(
        "job_id,gpus,state,submit_time,start_time,end_time\n"
        "a,1,FAILED,2024-01-01,2024-01-01,2024-01-02\na,1,COMPLETED,2024-01-01,2024-01-02,2024-01-03\n"
    )
    with load([path]) as store:
        assert len(rows(store)) == 2
        assert any("share a job id" in t for t in notes(store, "info"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("zero.csv", b"", "empty"),
        ("binary.csv", b"\x00\x01\x02" * 100, "binary"),
        ("letter.txt", b"Dear all,\nthe cluster is down.\n", "not known"),
        ("columns.csv", b"color,shape\nred,round\n", "not known"),
        ("cut.json", b'{"kind": "PodList", "items": [{"kind": "Pod", "metadata": {"na', "damaged"),
        ("list.json", b'[{"a": 1}]', "not known"),
        ("bad.parquet", b"PAR1junkjunkPAR1", "damaged"),
        ("bad.gz", b"no gzip", "cannot read"),
    ],
)
def test_what_is_no_trace_is_an_error_in_words(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as e:
        load([path])
    assert e.value.hint


def test_wrong_options_name_the_nearest(fixtures: Path) -> None:
    with pytest.raises(UsageError, match="slurm"):
        load([fixtures / "trace_seren.csv"], ReadOptions(format="slurmm"))
    with pytest.raises(UsageError, match="submit"):
        load([fixtures / "any_table.csv"], ReadOptions(mapping={"submitt": "queued"}))
    with pytest.raises(UsageError, match="queued"):
        load([fixtures / "any_table.csv"], ReadOptions(mapping={"submit": "queue"}))
    with pytest.raises(InputError, match="does not exist"):
        load([fixtures / "nothing.csv"])


def test_the_wrong_format_sets_rows_aside_instead_of_inventing_jobs(fixtures: Path) -> None:
    with pytest.raises((InputError, UsageError)):
        load([fixtures / "trace_seren.csv"], ReadOptions(format="slurm", fields=("a", "b")))


def test_only_a_header_is_an_empty_trace(tmp_path: Path, fixtures: Path) -> None:
    path = tmp_path / "trace_seren.csv"
    path.write_text((fixtures / "trace_seren.csv").read_text().splitlines()[0] + "\n")
    with load([path]) as store:
        assert rows(store) == []


def test_compressed_files_are_read(tmp_path: Path, fixtures: Path) -> None:
    path = tmp_path / "trace_seren.csv.gz"
    path.write_bytes(gzip.compress((fixtures / "trace_seren.csv").read_bytes()))
    with load([path]) as store:
        assert len(rows(store)) == 7


def test_foreign_parquet_by_mapping(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "x.parquet"
    table = pa.table(
        {
            "uid": ["a", "b"],
            "t0": [1704074400, 1704074500],
            "secs": [5.0, -5.0],
            "n": [2, 2],
            "how": ["killed", "failed"],
        }
    )
    pq.write_table(table, path)
    with load(
        [path],
        ReadOptions(mapping={"job": "uid", "start": "t0", "duration": "secs", "gpus": "n", "state": "how"}),
    ) as store:
        assert rows(store) == [("a", "CANCELLED", None, 5.0, 2.0)]
        assert store.rejected()[0].reason == "ends before it starts"


def test_parquet_of_a_newer_schema_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from unbroken.samples.schema import JOBS, METADATA_KEY

    path = tmp_path / "jobs.parquet"
    pq.write_table(
        pa.Table.from_pylist([], schema=JOBS.arrow().with_metadata({METADATA_KEY: "jobs 99"})), path
    )
    with pytest.raises(ContractError, match="jobs 99"):
        load([path])


def test_own_parquet_with_bad_rows_is_checked_too(tmp_path: Path) -> None:
    import datetime as dt

    import pyarrow as pa
    import pyarrow.parquet as pq

    from unbroken.samples.schema import JOBS

    t = dt.datetime(2024, 1, 1)
    good = {
        "job_id": "a",
        "state": "COMPLETED",
        "submit_utc": t,
        "start_utc": t,
        "end_utc": t + dt.timedelta(hours=1),
        "gpu_num": 1.0,
    }
    bad = {**good, "job_id": "b", "end_utc": t - dt.timedelta(hours=1)}
    path = tmp_path / "jobs.parquet"
    pq.write_table(pa.Table.from_pylist([good, bad], schema=JOBS.arrow()), path)
    with load([path]) as store:
        assert [r[0] for r in rows(store)] == ["a"]
        assert store.rejected()[0].reason == "ends before it starts"


def test_json_lines_of_pods(tmp_path: Path, fixtures: Path) -> None:
    items = json.loads((fixtures / "pods.json").read_text())["items"]
    path = tmp_path / "pods.jsonl"
    path.write_text("\n".join(json.dumps(i) for i in items))
    with load([path]) as store:
        assert len(rows(store)) == 3


def test_spools_of_telemetry_are_samples(tmp_path: Path) -> None:
    path = tmp_path / "n1.spool.csv"
    path.write_text(
        "time_utc,cluster,node,gpu,device,metric,value\n"
        "2026-01-01 00:00:00.000000,c,n1,0,,gpu_util_pct,97\n"
        "2026-01-01 00:00:01.000000,c,n1,,,host_load1,0.5\n"
        "2026-01-01 00:00:02.0000"
    )
    with load([path]) as store:
        assert store.query("SELECT metric, value, gpu FROM samples ORDER BY 1") == [
            ("gpu_util_pct", 97.0, 0),
            ("host_load1", 0.5, None),
        ]
        assert store.rejected_count() == 1
