"""Other people's recordings become samples: units, places, events, gaps and bad rows included."""

from __future__ import annotations

import http.server
import json
import os
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from unbroken.errors import InputError, StorageError, UsageError
from unbroken.samples.schema import METRICS, SAMPLES
from unbroken.telemetry.readers import convert, detect, fetch
from unbroken.telemetry.readers.names import place


def rows(folder: Path, what: str = "*") -> list[tuple[Any, ...]]:
    sql = f"SELECT {what} FROM '{folder}/**/*.parquet' ORDER BY ALL"
    return duckdb.sql(sql).fetchall()


SM = """Time,10.140.0.131-0,10.140.0.131-1,10.140.1.5-0
2023-07-01 08:00:00+08:00,8.101,,0.437
2023-07-01 08:00:15+08:00,nan,50.0,
"""


@pytest.mark.parametrize(
    ("column", "per_gpu", "expected"),
    [
        ("10.140.0.131", False, ("10.140.0.131", None, None, False)),
        ("10.140.0.131-7", True, ("10.140.0.131", 7, None, False)),
        ("10.140.0.131-mlx5_0", False, ("10.140.0.131", None, "mlx5_0", False)),
        ("10.140.0.131.1", False, ("10.140.0.131", None, None, True)),
        ("10.140.0.131.3", True, ("10.140.0.131", 3, None, False)),
        ("10.140.0.131:9400", True, ("10.140.0.131", None, None, False)),
        ("gpu-node17-3", True, ("gpu-node17", 3, None, False)),
        ("what is this?", True, ("what is this?", None, None, False)),
    ],
)
def test_places(column: str, per_gpu: bool, expected: tuple[Any, ...]) -> None:
    assert place(column, per_gpu) == expected


def test_a_wide_table_is_melted(tmp_path: Path) -> None:
    path = tmp_path / "SM_ACTIVE.csv"
    path.write_text(SM)
    (done,) = convert([path], tmp_path / "out", cluster="Seren")
    assert (done.format, done.rows) == ("acme", 3)
    assert rows(done.folder, "epoch(time_utc), cluster, node, gpu, metric, value") == [
        (1688169600.0, "Seren", "10.140.0.131", 0, "sm_active_pct", 8.101),
        (1688169600.0, "Seren", "10.140.1.5", 0, "sm_active_pct", 0.437),
        (1688169615.0, "Seren", "10.140.0.131", 1, "sm_active_pct", 50.0),
    ]
    assert tuple(duckdb.sql(f"SELECT * FROM '{done.folder}/*.parquet'").columns) == SAMPLES.names


def test_repeated_columns(tmp_path: Path) -> None:
    gpus = tmp_path / "GPU_UTIL-2023-07.csv"
    gpus.write_text("Time,10.0.0.1,10.0.0.1.1,10.0.0.2\n2023-07-01 00:00:00+00:00,1,2,3\n")
    memory = tmp_path / "NODE_MEMORY_UTILIZATION.csv"
    memory.write_text("Time,10.0.0.1,10.0.0.1.1\n2023-07-01 00:00:00+00:00,40,40\n")
    one, two = convert([gpus, memory], tmp_path / "out")
    assert rows(one.folder, "node, gpu, value") == [
        ("10.0.0.1", 0, 1),
        ("10.0.0.1", 1, 2),
        ("10.0.0.2", None, 3),
    ]
    assert rows(two.folder, "node, gpu, metric, value") == [("10.0.0.1", None, "host_mem_used_pct", 40)]
    assert [n.count for n in two.notes if n.kind == "set aside"] == [1]


def test_memory_and_infiniband_say_their_assumptions(tmp_path: Path) -> None:
    (tmp_path / "FB_USED.csv").write_text("Time,10.0.0.1-0\n2023-07-01 00:00:00+00:00,40960\n")
    (tmp_path / "NODE_IB_SEND.csv").write_text("Time,10.0.0.1-mlx5_0\n2023-07-01 00:00:00+00:00,5446.11\n")
    one, two = convert(sorted(tmp_path.glob("*.csv")), tmp_path / "out")
    assert rows(one.folder, "metric, value") == [("gpu_mem_used_gib", 40.0), ("gpu_mem_used_pct", 50.0)]
    assert rows(two.folder, "device, metric, value") == [("mlx5_0", "ib_tx_bytes_per_s", 5446.11e6)]
    assert any("80 GiB" in n.text for n in one.notes) and any("NODE_IB" in n.text for n in two.notes)
    (again,) = convert([tmp_path / "FB_USED.csv"], tmp_path / "out", gpu_memory_gib=160)
    assert rows(again.folder, "metric, value")[1] == ("gpu_mem_used_pct", 25.0)


def test_xids_are_events(tmp_path: Path) -> None:
    (tmp_path / "XID_ERRORS.csv").write_text(
        "Time,n1-0,n1-1\n"
        + "".join(f"2023-07-01 00:00:{s:02}+00:00,{a},0\n" for s, a in enumerate((0, 79, 79, 0, 79, 31)))
    )
    (done,) = convert([tmp_path / "XID_ERRORS.csv"], tmp_path / "out")
    assert rows(done.folder, "second(time_utc), node, gpu, metric, value") == [
        (1, "n1", 0, "xid", 79), (4, "n1", 0, "xid", 79), (5, "n1", 0, "xid", 31),
    ]  # fmt: skip


def test_a_table_larger_than_the_memory_given(tmp_path: Path) -> None:
    path = tmp_path / "GPU_UTIL.csv"
    servers = [f"10.0.{i // 8}.1-{i % 8}" for i in range(160)]
    with open(path, "w") as f:
        f.write("Time," + ",".join(servers) + "\n")
        for s in range(2000):
            f.write(
                f"2023-07-01 {s // 3600:02}:{s // 60 % 60:02}:{s % 60:02}+00:00,"
                + ",".join(str((s + i) % 101) for i in range(160))
                + "\n"
            )
    (done,) = convert([path], tmp_path / "out", memory="100MB")
    assert done.rows == 320_000 and not (done.folder / ".spill").exists()
    assert rows(done.folder, "count(DISTINCT node), min(value), max(value)") == [(20, 0, 100)]


IPMI = """Server,Time,Sys Total Power (W),CPU_Power,MEM_Power,Comment
10.1.1.1,2023-07-01 08:00:00+08:00,4284,648,,fine
10.1.1.1,2023-07-01 08:00:15+08:00,4300 W,na,120.5,
10.1.1.2,not a time,1,2,3,
10.1.1.2,2023-07-01 08:00:15+08:00,broken,540,,
"""


def test_power_tables(tmp_path: Path) -> None:
    path = tmp_path / "GPU_AB_Power.csv"
    path.write_text(IPMI)
    (done,) = convert([path], tmp_path / "out")
    assert done.format == "ipmi"
    assert rows(done.folder, "node, metric, epoch(time_utc) - 1688169600, value") == [
        ("10.1.1.1", "cpu_power_w", 0, 648),
        ("10.1.1.1", "mem_power_w", 15, 120.5),
        ("10.1.1.1", "node_power_w", 0, 4284),
        ("10.1.1.1", "node_power_w", 15, 4300),
        ("10.1.1.2", "cpu_power_w", 15, 540),
    ]
    assert {(n.kind, n.count) for n in done.notes} == {("set aside", 1)} and len(done.notes) == 3
    path.write_text("Time,Sys_Total_Power\n2023-07-01 08:00:00,4284\n")
    (done,) = convert([path], tmp_path / "out")
    assert rows(done.folder, "node, value") == [(None, 4284)] and "which server" in done.notes[0].text


def series(name: str, labels: dict[str, str], values: list[tuple[float, str]]) -> dict[str, Any]:
    return {"metric": {"__name__": name, **labels}, "values": values}


def document(*all_series: dict[str, Any]) -> dict[str, Any]:
    return {"status": "success", "data": {"resultType": "matrix", "result": list(all_series)}}


def test_ranges(tmp_path: Path) -> None:
    gpu = {"gpu": "3", "device": "nvidia3", "Hostname": "n7", "instance": "10.0.0.7:9400"}
    path = tmp_path / "range.json"
    path.write_text(
        json.dumps(
            document(
                series("DCGM_FI_PROF_SM_ACTIVE", gpu, [(1700000000, "0.5"), (1700000015, "NaN")]),
                series("DCGM_FI_DEV_FB_USED", gpu, [(1700000000.25, "1024")]),
                series("DCGM_FI_DEV_XID_ERRORS", gpu, [(1, "0"), (2, "48"), (3, "48")]),
                series("node_load1", {"instance": "10.0.0.8:9100"}, [(1700000000, "2.5")]),
                series("DCGM_FI_DEV_NEW", gpu, [(1700000000, "1")]),
            )
        )
    )
    (done,) = convert([path], tmp_path / "out", cluster="c")
    assert rows(done.folder, "epoch(time_utc), node, gpu, metric, value") == [
        (2.0, "n7", 3, "xid", 48),
        (1700000000.0, "10.0.0.8", None, "node_load1", 2.5),
        (1700000000.0, "n7", 3, "DCGM_FI_DEV_NEW", 1),
        (1700000000.0, "n7", 3, "sm_active_pct", 50.0),
        (1700000000.25, "n7", 3, "gpu_mem_used_gib", 1.0),
    ]
    assert [n.count for n in done.notes] == [1, 1]


def test_scrapes_of_dcgm_and_of_our_own_exporter(tmp_path: Path) -> None:
    path = tmp_path / "metrics.txt"
    path.write_text(
        "# HELP DCGM_FI_DEV_GPU_TEMP x\n# TYPE DCGM_FI_DEV_GPU_TEMP gauge\n"
        'DCGM_FI_DEV_GPU_TEMP{gpu="1",Hostname="n1"} 61\n'
        "# TYPE unbroken_host_load1 gauge\n"
        'unbroken_host_load1{cluster="c",node="n2",gpu="",device=""} 3.5\n'
    )
    os.utime(path, (1_700_000_000, 1_700_000_000))
    (done,) = convert([path], tmp_path / "out")
    assert rows(done.folder, "epoch(time_utc), node, gpu, metric, value") == [
        (1700000000.0, "n1", 1, "gpu_temp_c", 61),
        (1700000000.0, "n2", None, "host_load1", 3.5),
    ]


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, list[str]]]]]:
    asked: list[dict[str, list[str]]] = []

    class Prometheus(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            q = urllib.parse.parse_qs(urllib.parse.urlparse(self.path).query)
            asked.append(q)
            start, end, step = (float(q[k][0]) for k in ("start", "end", "step"))
            times = [start + i * step for i in range(int((end - start) / step) + 1)]
            body = document(
                series("DCGM_FI_DEV_GPU_UTIL", {"gpu": "0", "Hostname": "n"}, [(t, "7") for t in times])
            )
            refused = len(times) > 11_000 or q["query"][0] == "bad("
            data = json.dumps({"status": "error", "error": "parse error"} if refused else body).encode()
            self.send_response(400 if refused else 200)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    s = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Prometheus)
    t = threading.Thread(target=s.serve_forever)
    t.start()
    yield f"http://127.0.0.1:{s.server_address[1]}", asked
    s.shutdown()
    s.server_close()
    t.join()


def test_fetching_asks_in_pieces(tmp_path: Path, server: tuple[str, list[dict[str, list[str]]]]) -> None:
    url, asked = server
    done = fetch(url, "DCGM_FI_DEV_GPU_UTIL", 0, 15 * 24_999, 15, tmp_path)
    assert done.rows == 25_000 and len(asked) == 3
    assert rows(done.folder, "count(DISTINCT time_utc), max(epoch(time_utc))") == [(25_000, 15 * 24_999.0)]
    with pytest.raises(InputError, match="parse error"):
        fetch(url, "bad(", 0, 100, 1, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["DCGM_FI_DEV_GPU_UTIL"]


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    def file(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    out = tmp_path / "out"
    for path, words in (
        (file("x.csv", "a,b\n1,2\n"), "none that telemetry knows"),
        (file("empty.json", ""), "empty"),
        (tmp_path / "absent.csv", "cannot be read"),
    ):
        with pytest.raises(InputError, match=words):
            detect(path)
    bad = [
        (file("SM_ACTIVE-2023-01.csv", "Time,n1\nyesterday,3\n"), None, "no wide table"),
        (file("SM_ACTIVE.csv", "Time,n1\n2023-07-01 00:00:00,abc\n"), None, "cannot be read"),
        (file("mine.csv", "Time,n1\n2023-07-01 00:00:00,1\n"), "acme", "no metric that is known"),
        (
            file("p.json", '{"status":"error","error":"x","data":{"resultType":"matrix"}}'),
            "prometheus",
            "with an error",
        ),
        (
            file("p1.json", '{"status":"success","data":{"resultType":"vector","result":[]}}'),
            "prometheus",
            "no range",
        ),
        (file("p2.json", '{"status":"success","data":{"resultType":"matrix"}}'), "prometheus", "no answer"),
        (file("p3.json", "[1"), "prometheus", "cannot be read"),
        (file("p.csv", "a,b\n1,2\n"), "ipmi", "no column of times"),
    ]
    for path, kind, words in bad:
        with pytest.raises(InputError, match=words):
            convert([path], out, format=kind)
        assert not list(out.iterdir()), "something was left of a failed conversion"
    with pytest.raises(UsageError):
        convert([], out, format="x")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        convert([file("SM_ACTIVE.csv", SM)], tmp_path / "file" / "below")
    expression = document({"metric": {}, "values": [[1, "2"]]})
    with pytest.raises(InputError, match="--metric"):
        convert([file("e.json", json.dumps(expression))], out)
    (done,) = convert([file("e.json", json.dumps(expression))], out, metric="node_power_w")
    assert rows(done.folder, "metric, value") == [("node_power_w", 2.0)]


def test_every_name_that_we_map_to_is_known_or_our_own() -> None:
    from unbroken.telemetry.readers.names import ACME, DCGM, IPMI

    own = {"gpu_mem_copy_util_pct", "gpu_mem_free_gib", "gpu_engine_active_pct"}
    own |= {"remapped_rows_corrected_total", "remapped_rows_uncorrected_total"}
    assert {m for m, _ in (*DCGM.values(), *ACME.values())} | set(IPMI.values()) <= set(METRICS) | own
