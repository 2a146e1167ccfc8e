"""Ticks keep their cadence, files are bounded, and what was written survives a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest

from unbroken.errors import InputError, UsageError
from unbroken.samples.schema import SAMPLES
from unbroken.telemetry.recording.exporter import LastTick, serve
from unbroken.telemetry.recording.record import record
from unbroken.telemetry.recording.spool import HEADER, Spool, find_packed, pack
from unbroken.telemetry.samplers.reading import Coverage, Reading

READINGS = [Reading(0, None, "gpu_power_w", 400.125), Reading(None, 'eth"0,1', "nic_rx_bytes_per_s", 1e9 / 3)]


class Clock:
    """Time that moves only when somebody waits."""

    def __init__(self) -> None:
        self.now = 1000.25

    def __call__(self) -> float:
        return self.now


class Waiter(threading.Event):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        self.clock.now += timeout or 0
        return self.is_set()


class Slow:
    """A sampler whose nth reading takes a while."""

    def __init__(self, clock: Clock, at: int, takes: float) -> None:
        self.clock, self.at, self.takes, self.n = clock, at, takes, 0

    def coverage(self) -> Coverage:
        return Coverage((), ())

    def read(self, now: float) -> list[Reading]:
        self.n += 1
        if self.n == self.at:
            self.clock.now += self.takes
        return READINGS

    def close(self) -> None:
        pass


def test_ticks_fall_on_the_clock_and_late_ones_are_counted() -> None:
    clock = Clock()
    ticks: list[float] = []
    sink: Callable[[float, list[Reading]], None] = lambda when, _: ticks.append(when)  # noqa: E731
    done = record(
        [Slow(clock, 3, 2.5)], [sink], every_s=1, stop=Waiter(clock), for_s=9, clock=clock, wall=clock
    )
    assert ticks == [1001, 1002, 1003, 1006, 1007, 1008, 1009]
    assert (done.ticks, done.missed, done.readings) == (7, 2, 14)


def test_the_spool_is_readable_and_packs_into_the_schema(tmp_path: Path) -> None:
    spool = Spool(tmp_path, node="n1", cluster="c")
    spool.write(1_700_000_000.25, READINGS)
    (live,) = tmp_path.glob("*.spool.csv")
    rows = "SELECT metric, node, cluster, gpu, device, value, epoch_us(time_utc) FROM '{}' ORDER BY metric"
    expected = [
        ("gpu_power_w", "n1", "c", 0, None, 400.125, 1_700_000_000_250_000),
        ("nic_rx_bytes_per_s", "n1", "c", None, 'eth"0,1', 1e9 / 3, 1_700_000_000_250_000),
    ]
    assert duckdb.sql(rows.format(live)).fetchall() == expected
    spool.close()
    (packed,) = find_packed(tmp_path)
    assert duckdb.sql(rows.format(packed)).fetchall() == expected
    assert tuple(duckdb.sql(f"SELECT * FROM '{packed}'").columns) == SAMPLES.names
    assert not list(tmp_path.glob("*.spool.csv"))


def test_without_pyarrow_the_same_table_in_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / "samples-n-1.spool.csv"
    path.write_text(
        HEADER + "2026-01-01 00:00:00.5,,n,3,,sm_active_pct,12.5\n2026-01-01 00:00:01,,n,3,,sm_ac"
    )
    packed = pack(path)
    assert packed is not None and packed.name == "samples-n-1.csv.gz" and not path.exists()
    assert duckdb.sql(f"SELECT gpu, value FROM '{packed}'").fetchall() == [(3, 12.5)]


def test_a_spool_without_readings_leaves_nothing(tmp_path: Path) -> None:
    for text in (HEADER, "", HEADER + "2026-01-01 00:00"):
        path = tmp_path / "samples-n-1.spool.csv"
        path.write_text(text)
        assert pack(path) is None and not list(tmp_path.iterdir())


def test_files_are_bounded_and_old_ones_go(tmp_path: Path, eventually: Callable[..., None]) -> None:
    spool = Spool(tmp_path, node="n", max_bytes=2000, keep_bytes=9_000)
    for i in range(60):
        spool.write(1_700_000_000 + i, READINGS)
        if i % 20 == 19:
            eventually(lambda: not [p for p in tmp_path.glob("*.spool.csv") if p.stat().st_size > 2000])
    spool.close()
    files = find_packed(tmp_path)
    assert len(files) >= 1 and sum(p.stat().st_size for p in files) <= 15_000
    newest = duckdb.sql(f"SELECT max(epoch(time_utc)) FROM '{tmp_path}/*.parquet'").fetchall()
    assert newest == [(1_700_000_059.0,)]


def test_a_full_disk_loses_ticks_not_the_recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path, node="n")
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) // 2]))
    spool.write(1.0, READINGS)
    monkeypatch.undo()
    spool.write(2.0, READINGS)
    assert spool.dropped_ticks == 1
    spool.close()
    (packed,) = find_packed(tmp_path)
    assert duckdb.sql(f"SELECT count(*), min(epoch(time_utc)) FROM '{packed}'").fetchall() == [(2, 2.0)]


def test_bad_names(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        Spool(tmp_path, node="a,b")


@pytest.mark.integration
def test_kill_minus_nine_loses_nothing_that_was_written(
    tmp_path: Path, eventually: Callable[..., None]
) -> None:
    command = [
        sys.executable,
        "-m",
        "unbroken",
        "telemetry",
        "record",
        "--every",
        "50ms",
        "-o",
        str(tmp_path),
        "--node",
        "n",
    ]
    p = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: any(f.stat().st_size > 3000 for f in tmp_path.glob("*.spool.csv")), within=30)
    finally:
        p.kill()
        p.wait()
    (left,) = tmp_path.glob("*.spool.csv")
    whole = left.read_bytes().count(b"\n") - 1
    with open(left, "ab") as f:
        f.write(b"2026-01-01 00:00:00,,n,,,host_lo")
    q = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    eventually(lambda: bool(find_packed(tmp_path)) and not left.exists(), within=30)
    q.send_signal(signal.SIGTERM)
    out, _ = q.communicate(timeout=60)
    assert q.returncode == 0, out
    (first,) = [f for f in find_packed(tmp_path) if f.name.split(".")[0] == left.name.split(".")[0]]
    assert duckdb.sql(f"SELECT count(*) FROM '{first}'").fetchall() == [(whole,)]
    assert not list(tmp_path.glob("*.spool.csv")), out


def test_the_exporter_shows_the_last_tick() -> None:
    last = LastTick("n1", "c")
    last(1.0, [*READINGS, Reading(1, None, "xid", 79.0), Reading(0, None, "ecc_corrected_total", 3.0)])
    last(2.0, [Reading(0, None, "gpu_power_w", 300.0), Reading(1, None, "xid", 79.0)])
    port, end = serve(last, "127.0.0.1:0")
    try:
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    finally:
        end()
    assert 'unbroken_gpu_power_w{cluster="c",device="",gpu="0",node="n1"} 300.0' in text
    assert 'unbroken_xid_events_total{cluster="c",gpu="1",node="n1",xid="79"} 2.0' in text
    assert 'unbroken_ecc_corrected_total{cluster="c",device="",gpu="0",node="n1"} 3.0' in text
    with pytest.raises(UsageError):
        serve(last, "nowhere")
    with pytest.raises(UsageError):
        serve(last, "127.0.0.1:99999")


def test_recording_is_cheap() -> None:
    """CPU time for each tick of this host, without its processes: a hundred times under the promise's tenth."""
    from unbroken.telemetry.samplers.gpu import GpuSampler
    from unbroken.telemetry.samplers.host import HostSampler
    from unbroken.testing.nvml import FakeGpu, FakeNvml

    samplers = [HostSampler(), GpuSampler(FakeNvml([FakeGpu() for _ in range(8)]))]
    began = time.thread_time()
    for i in range(100):
        for s in samplers:
            s.read(float(i))
    assert (time.thread_time() - began) / 100 < 0.005
