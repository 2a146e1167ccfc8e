"""Every file reader of trace, telemetry and diagnose meets anything: only our own errors leave it, memory is bounded."""

from __future__ import annotations

import gzip
import json
import pickle
import random
import resource
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzzing import fuzz
from unbroken.diagnose import diagnose
from unbroken.diagnose.match.rules import load as load_rules
from unbroken.errors import InputError, UnbrokenError
from unbroken.telemetry.readers import convert
from unbroken.trace.readers import ReadOptions, load

FIXTURES = Path(__file__).parent / "fixtures"
SEEDS = sorted(f for f in FIXTURES.rglob("*") if f.is_file() and f.suffix not in (".md", ".sh"))
RANGE = {"status": "success", "data": {"resultType": "matrix", "result": [
    {"metric": {"__name__": "DCGM_FI_DEV_GPU_UTIL", "gpu": "0", "Hostname": "n1"}, "values": [[1700000000, "5"], [1700000015, "7"]]}]}}  # fmt: skip
SCRAPE = '# HELP DCGM_FI_DEV_GPU_TEMP t\n# TYPE DCGM_FI_DEV_GPU_TEMP gauge\nDCGM_FI_DEV_GPU_TEMP{gpu="0",Hostname="n1"} 45 1700000000000\n'
IPMI = "Time,node,CPU_Power,Total_Power\n2023-03-01 00:00:00,n1,200,3000\n"
WIDE = "Time,10.0.0.1-0,10.0.0.1-1\n2023-03-01 00:00:00,5,6\n"
READINGS = {"range.json": json.dumps(RANGE), "metrics.prom": SCRAPE, "IPMI.csv": IPMI, "GPU_UTIL.csv": WIDE}
DUMP = {"version": "2.4", "rank": 0, "world_size": 2, "entries": [
    {"record_id": 0, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": 1, "profiling_name": "nccl:all_reduce", "state": "scheduled",
     "time_created_ns": 1, "frames": []}], "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}}  # fmt: skip
PIECES = [b"", b",", b"\n", b"\r\n", b"|", b'"', b"{", b"[" * 3000, b"}", b"null", b"NaN", b"1e999", b"-1", b"9" * 40, b"\xff\xfe", b"\x00", b"\xef\xbb\xbf",
          b"2026-13-45 99:99:99", b"\\u0000", b"\xf0\x9f\x92\xa5", b"(" * 50, b"true", b"'", b";", b"\t", b"a" * 5000]  # fmt: skip


def damaged(data: bytes, seed: int) -> bytes:
    """A file with pieces cut out, doubled, replaced, put in; sometimes cut off, sometimes packed."""
    rng = random.Random(seed)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((0, 1, 3, 20, 200)))
        new = rng.choice((rng.choice(PIECES), data[at:end] * 2, bytes(rng.randrange(256) for _ in range(4))))
        data = data[:at] + new + data[end:]
    return data[: rng.randrange(len(data) + 1)] if rng.random() < 0.2 else data


def written(folder: str, name: str, data: bytes, seed: int) -> Path:
    packed = seed % 7 == 0
    path = Path(folder) / (name + ".gz" if packed else name)
    data = gzip.compress(data) if packed else data
    path.write_bytes(data[: len(data) * 2 // 3] if seed % 35 == 0 else data)
    return path


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_a_missing_column_of_a_known_format_is_told(tmp_path: Path) -> None:
    text = (FIXTURES / "openb_pod_list_default.csv").read_text().replace("memory_mib", "mem", 1)
    (tmp_path / "openb_pod_list_default.csv").write_text(text)
    with pytest.raises(InputError, match="memory_mib"):
        load([tmp_path / "openb_pod_list_default.csv"], ReadOptions())


@fuzz(16)
@given(which=st.sampled_from(SEEDS), seed=st.integers(0, 2**32))
def test_trace_readers(which: Path, seed: int) -> None:
    before = peak_mib()
    with tempfile.TemporaryDirectory() as folder:
        path = written(folder, which.name, damaged(which.read_bytes()[:6000], seed), seed)
        try:
            load([path], ReadOptions()).close()
        except UnbrokenError as e:
            assert str(e)
    assert peak_mib() - before < 300


@fuzz(25)
@given(which=st.sampled_from(sorted(READINGS)), seed=st.integers(0, 2**32))
def test_telemetry_readers(which: str, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / which
        path.write_bytes(damaged(READINGS[which].encode(), seed))
        try:
            convert([path], Path(folder) / "out")
        except UnbrokenError as e:
            assert str(e)


def broken(value: Any, rng: random.Random) -> Any:
    """A value of the same form with leaves of other types and keys that are missing."""
    if rng.random() < 0.08:
        return rng.choice((None, -1, 1 << 70, "x", [], {}, 1.5, float("nan"), b"", "\udcff"))
    if isinstance(value, dict):
        return {k: broken(v, rng) for k, v in value.items() if rng.random() > 0.05}
    if isinstance(value, list | tuple):
        return [broken(v, rng) for v in value]
    return value


@fuzz(25)
@given(seed=st.integers(0, 2**32), pickled=st.booleans())
def test_flight_recorder_dumps(seed: int, pickled: bool) -> None:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(2):
            value = broken({**DUMP, "rank": rank}, rng)
            if pickled:
                data = pickle.dumps(value)
            else:
                data = json.dumps(value, default=str).encode()
            if rng.random() < 0.3:
                data = damaged(data, seed)
            (Path(folder) / f"nccl_trace_rank_{rank}{'' if pickled else '.json'}").write_bytes(data)
        (Path(folder) / "log.txt").write_text("step: 1 loss: 2.0\nRuntimeError: x\n")
        diagnose([folder])


@fuzz(25)
@given(
    data=st.binary(max_size=2000),
    suffix=st.sampled_from([".log", ".txt", ".gz", ".zst", ".out", ".json", ""]),
)
def test_diagnose_opens_any_file(data: bytes, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"x{suffix}"
        path.write_bytes(data)
        try:
            diagnose([path])
        except UnbrokenError as e:
            assert str(e)


def test_a_bomb_is_read_in_pieces(tmp_path: Path) -> None:
    """120 MB of one packed line take no such memory."""
    with gzip.open(tmp_path / "bomb.log.gz", "wb", compresslevel=1) as f:
        for _ in range(120):
            f.write(b"a" * (1 << 20))
    before = peak_mib()
    diagnose([tmp_path / "bomb.log.gz"])
    assert peak_mib() - before < 100


@fuzz(25)
@given(seed=st.integers(0, 2**32))
def test_rule_files(seed: int) -> None:
    text = b'[[rule]]\nid = "x-y"\nregex = "some words (\\\\d+)"\nrole = "root"\nreason = "CUDAError"\nexample = "some words 3"\nsource = "s"\n'
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "r.toml").write_bytes(damaged(text, seed))
        try:
            load_rules([Path(folder)])
        except UnbrokenError as e:
            assert str(e)
