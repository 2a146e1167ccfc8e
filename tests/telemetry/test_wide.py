"""A wide table counted from its text gives what parsing each cell would."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unbroken.errors import InputError
from unbroken.samples import wide
from unbroken.samples.wide import count

STAMP = "2023-07-01 08:00:{:02}+08:00"
plain = st.floats(0, 4000).map(lambda x: f"{round(x, 3):g}") | st.integers(0, 99_999_999).map(str)
odd = st.sampled_from(
    [
        "",
        "nan",
        "-3.25",
        "1e-05",
        "12345.678",
        "100000000",
        "0.12345",
        "+7",
        " 5 ",
        ".5",
        "7.",
        "x",
        ".",
        "-",
        "1.2.3",
        "1-5",
        "1/5",
        "2023-07",
        "7p-1",
        "12345678",
        "1234.567",
        "null",
    ]
)
cells = st.lists(plain | plain | odd, min_size=3, max_size=3)


def expected(rows: list[list[str]]) -> tuple[list[float], int, int]:
    values, missing, unreadable = [], 0, 0
    for cell in (c.strip() for r in rows for c in r):
        if cell in ("", "nan", "null"):
            missing += 1
            continue
        try:
            values.append(float(cell))
        except ValueError:
            unreadable += 1
    return values, missing, unreadable


@given(st.lists(cells, min_size=1, max_size=12), st.sampled_from(["\n", "\r\n"]), st.booleans())
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_like_parsing_every_cell(tmp_path: Path, rows: list[list[str]], newline: str, ended: bool) -> None:
    lines = [",".join([STAMP.format(i), *r]) for i, r in enumerate(rows)]
    text = newline.join(["Time,a,b,c", *lines]) + (newline if ended else "")
    (tmp_path / "t.csv").write_bytes(text.encode())
    values, missing, unreadable = expected(rows)
    c = count(tmp_path / "t.csv")
    assert (c.rows, c.count, c.missing, c.unreadable, c.ragged) == (
        len(rows),
        len(values),
        missing,
        unreadable,
        0,
    )
    assert (c.first, c.last) == (STAMP.format(0), STAMP.format(len(rows) - 1))
    if values:
        assert c.mean == pytest.approx(float(np.mean(values)), rel=1e-9, abs=6e-4)
        got = c.quantiles([0, 0.3, 0.5, 1])
        assert got == pytest.approx(np.quantile(values, [0, 0.3, 0.5, 1]).tolist(), rel=3e-4, abs=6e-4)


@pytest.mark.parametrize("piece", [64, 1000, 1 << 18])
def test_pieces_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr("unbroken.samples.piece.PIECE", piece)
    rng = np.random.default_rng(1)
    table = np.round(rng.uniform(0, 100, (300, 20)), 3)
    out = io.StringIO()
    for i, row in enumerate(table):
        out.write(STAMP.format(i % 60) + "," + ",".join(f"{v:g}" for v in row) + "\n")
    (tmp_path / "t.csv").write_text("Time," + ",".join(f"s{i}" for i in range(20)) + "\n" + out.getvalue())
    c = count(tmp_path / "t.csv")
    assert (c.rows, c.count, c.ragged) == (300, 6000, 0)
    assert c.quantiles([0.25, 0.5]) == pytest.approx(np.quantile(table, [0.25, 0.5]).tolist(), abs=1e-9)
    assert list(c.means().values()) == pytest.approx(table.mean(0).tolist())
    assert c.share_below([50.0]) == pytest.approx([(table <= 50).mean()])


@pytest.mark.parametrize("processes", [2, 3, 7])
@pytest.mark.parametrize("helpers", ["work", "cannot start", "die"])
def test_processes_count_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int, helpers: str
) -> None:
    """Whatever becomes of the helpers, and however many share the file: every row once."""
    r = random.Random(processes)
    cells = ["", "0", "5", "99.5", "12.345", "5000.25", "-3", "1e3"]
    rows = [",".join([f"2023-07-01 00:{i:04d}", *(r.choice(cells) for _ in range(5))]) for i in range(997)]
    rows.insert(500, "2023-07-01 ragged,1")
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["Time,a,b,c,d,e", *rows]))
    alone = count(path, processes=1)
    monkeypatch.setattr(wide, "SEVERAL_FROM", 0)
    if helpers != "work":
        command = str(tmp_path / "no-python") if helpers == "cannot start" else "/bin/false"
        monkeypatch.setattr("sys.executable", command)
    together = count(path, processes=processes)
    shares = [0.0, 0.1, 0.5, 0.9, 1.0]
    assert together.rows == alone.rows == 997 and together.ragged == alone.ragged == 1
    assert (together.missing, together.first, together.last) == (alone.missing, alone.first, alone.last)
    assert together.quantiles(shares) == alone.quantiles(shares) and together.count == alone.count
    assert together.means() == pytest.approx(alone.means())


def test_many_cores_start_few_helpers_and_import_nothing_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each helper takes memory; and a numpy.py in the user's folder is none of ours."""
    (tmp_path / "numpy.py").write_text("raise SystemExit(1)\n")
    rows = [f"{STAMP.format(i % 60)},{i}" for i in range(200)]
    (tmp_path / "t.csv").write_text("\n".join(["Time,a", *rows]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(wide, "SEVERAL_FROM", 0)
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*args: object, **kw: object) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **kw))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(wide.subprocess, "Popen", start)
    assert count(Path("t.csv"), processes=128).count == 200
    assert len(started) == wide.MOST_PROCESSES - 1
    assert [p.returncode for p in started] == [0] * len(started)


def test_ragged_rows_are_counted_and_left_out(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        f"Time,a,b\n{STAMP.format(0)},1,2\n{STAMP.format(1)},3\n\n{STAMP.format(2)},4,5,6\n{STAMP.format(3)},7,8\n"
    )
    c = count(tmp_path / "t.csv")
    assert (c.rows, c.ragged, c.means()) == (2, 2, {"a": 4.0, "b": 5.0})


def test_what_is_no_table(tmp_path: Path) -> None:
    for text in ("", "Time,a", "Time\n1\n", "Time,a\n", "Time,a\nx\ny\n"):
        (tmp_path / "t.csv").write_text(text)
        with pytest.raises(InputError):
            count(tmp_path / "t.csv")
    with pytest.raises(InputError):
        count(tmp_path / "absent.csv")


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "FB_USED.csv"
    path.write_text(f"Time,10.0.0.1-0,10.0.0.1-1\n{STAMP.format(0)},1024,3072\n{STAMP.format(1)},,2048\n")
    command = [sys.executable, "-m", "unbroken", "telemetry", "summary", str(path), "--json"]
    p = subprocess.run(command, capture_output=True, text=True, check=True)
    (row,) = json.loads(p.stdout)["metrics"]
    assert (row["metric"], row["readings"], row["missing"]) == ("gpu_mem_used_gib", 3, 1)
    assert (row["mean"], row["p50"], row["max"]) == (2.0, 2.0, 3.0)
