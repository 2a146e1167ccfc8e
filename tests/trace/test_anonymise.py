"""No text of a trace's owner gets through `trace anonymise`: a secret is planted in every field of every format."""

from __future__ import annotations

import copy
import csv
import datetime as dt
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from unbroken.cli.main import dispatch
from unbroken.samples.schema import TABLES
from unbroken.trace.output.convert import anonymise_tables
from unbroken.trace.output.disclosure import PSEUDONYMS, REDUCED, REMOVED, Reduced
from unbroken.trace.readers import ReadOptions, load

SECRET = "zoescret"


def planted_rows(header: list[str] | None, rows: list[list[str]]) -> list[list[str]]:
    """A row more for each column and way to plant: alone, and behind what was there."""
    out = [] if header is None else [header]
    for row in rows[:3]:
        for i in range(len(row)):
            for value in (SECRET, f"{row[i]} by {SECRET}", f"{row[i]}{SECRET}"):
                out.append([*row[:i], value, *row[i + 1 :]])
    return out + rows


def delimited(source: Path, delimiter: str = ",", header: bool = True) -> str:
    rows = [r for r in csv.reader(io.StringIO(source.read_text()), delimiter=delimiter) if r]
    planted = planted_rows(rows[0] if header else None, rows[1:] if header else rows)
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter, lineterminator="\n", quoting=csv.QUOTE_MINIMAL).writerows(planted)
    return out.getvalue()


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*path, key))
    elif isinstance(value, str):
        yield path


def planted_objects(items: list[Any]) -> list[Any]:
    out = []
    for item in items:
        for path in leaves(item):
            for text in (SECRET, None):
                one = copy.deepcopy(item)
                at = one
                for key in path[:-1]:
                    at = at[key]
                at[path[-1]] = text or f"{at[path[-1]]} by {SECRET}"
                out.append(one)
    return out + items


def as_list(source: Path) -> str:
    return json.dumps(planted_objects(json.loads(source.read_text())))


def as_items(source: Path) -> str:
    value = json.loads(source.read_text())
    return json.dumps({**value, "items": planted_objects(value["items"])})


def as_lines(source: Path) -> str:
    rows = [json.loads(line) for line in source.read_text().splitlines() if line.strip()]
    return "\n".join(json.dumps(r) for r in planted_objects(rows)) + "\n"


def sacct(source: Path) -> str:
    return delimited(source, "|")


def semicolons(source: Path) -> str:
    return delimited(source, ";")


def headless(source: Path) -> str:
    return delimited(source, header=False)


FORMATS: list[tuple[str, Callable[[Path], str], dict[str, Any]]] = [
    ("trace_seren.csv", delimited, {}), ("trace_kalos.csv", delimited, {}), ("Venus/cluster_log.csv", delimited, {}),
    ("openb_pod_list_default.csv", delimited, {}), ("pai/pai_job_table.csv", headless, {}), ("cluster_job_log", as_list, {}),
    ("pods.json", as_items, {}), ("events.json", as_items, {}), ("incidents.jsonl", as_lines, {}), ("fault_trace.json", as_list, {}),
    ("sacct/sacct_22.05_usual.txt", sacct, {}), ("sacct/sacct_22.05_all.txt", sacct, {}), ("sacct/sacct_23.02_planned.txt", sacct, {}),
    ("any_table.csv", semicolons, {"mapping": {"job": "id", "submit": "queued", "start": "began", "end": "finished", "gpus": "accelerators",
                                              "state": "result", "user": "who"}}),
]  # fmt: skip


def anonymised(source: Path, out: Path, options: dict[str, Any]) -> str:
    with load([source], ReadOptions(**options)) as store:
        said = anonymise_tables(store, out, keep_names=False, shift_s=0.0, key_file=None)
    assert any(said["written"].values())
    return json.dumps([pq.read_table(f).to_pylist() for f in sorted(out.glob("*"))], default=str) + repr(
        [pq.read_metadata(f).metadata for f in sorted(out.glob("*.parquet"))]
    )


@pytest.mark.parametrize(("name", "plant", "options"), FORMATS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_secret_in_any_field_of_any_format_stays(
    fixtures: Path, tmp_path: Path, name: str, plant: Callable[[Path], str], options: dict[str, Any]
) -> None:
    folder = tmp_path / SECRET / Path(name).parent.name
    folder.mkdir(parents=True)
    for beside in (fixtures / name).parent.glob("pai_*"):
        (folder / beside.name).write_text(beside.read_text())
    file = folder / Path(name).name
    text = plant(fixtures / name)
    assert text.count(SECRET) > 10
    file.write_text(text)
    assert SECRET not in anonymised(file, tmp_path / "out", options)


@pytest.mark.parametrize("table", list(TABLES))
def test_a_secret_in_any_column_of_our_own_tables_stays(tmp_path: Path, table: str) -> None:
    spec = TABLES[table]
    base: dict[str, Any] = {
        "job_id": "1",
        "node": "n1",
        "incident_id": "x",
        "metric": "gpu_util_pct",
        "cluster": "c",
    }
    texts = [c.name for c in spec.columns if c.type in ("VARCHAR", "VARCHAR[]")]
    rows = []
    for i, column in enumerate(texts):
        row = {c.name: base.get(c.name) for c in spec.columns} | (
            {"job_id": str(i)} if table == "jobs" else {}
        )
        plain = f"CANCELLED by {SECRET}" if column == "state_raw" else f"{SECRET}-7"
        rows.append(row | {column: [plain] if column == "nodes" else plain})
    now = dt.datetime(2026, 1, 1)
    for row in rows:
        row |= {c.name: now for c in spec.columns if c.type == "TIMESTAMP"}
        if table == "jobs" and row["state"] is None:
            row["state"] = "COMPLETED"
    source = tmp_path / f"{table}.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=spec.arrow()), source)
    assert SECRET not in anonymised(source, tmp_path / "out", {})


def test_every_text_column_has_a_rule() -> None:
    texts = {c.name for t in TABLES.values() for c in t.columns if c.type == "VARCHAR"}
    ruled = set(PSEUDONYMS) | set(REDUCED) | set(REMOVED)
    assert texts == ruled
    assert all(isinstance(r, Reduced) for r in REDUCED.values())


def test_what_everybody_says_is_kept(fixtures: Path, tmp_path: Path) -> None:
    file = tmp_path / "jobs.csv"
    file.write_text(
        "job_id,user,state,submit_time,start_time,end_time,gpu_num,partition,cluster\n"
        "1,ann,CANCELLED by 10077,2026-01-01 00:00:00,2026-01-01 00:01:00,2026-01-01 01:00:00,8,A100,Lab\n"
        "2,bob,NODE_FAIL,2026-01-01 00:00:00,2026-01-01 00:01:00,2026-01-01 01:00:00,8,ann-only,Lab\n"
    )
    with load([file], ReadOptions()) as store:
        said = anonymise_tables(store, tmp_path / "out", keep_names=False, shift_s=0, key_file=None)
        kept = anonymise_tables(
            store, tmp_path / "kept", keep_names=False, shift_s=0, key_file=None, keep_clusters=True
        )
    rows = pq.read_table(tmp_path / "out" / "jobs.parquet").to_pylist()
    assert {r["state_raw"] for r in rows} == {"CANCELLED", "NODE_FAIL"}
    assert "A100" in {r["partition"] for r in rows}
    assert sum(str(r["partition"]).startswith("p") for r in rows) == 1
    assert all(r["cluster"].startswith("c") for r in rows) and len({r["cluster"] for r in rows}) == 1
    assert {r["cluster"] for r in pq.read_table(tmp_path / "kept" / "jobs.parquet").to_pylist()} == {"Lab"}
    assert any("kept as they are" in line for line in said["did"]) and "cluster names are kept" in kept["did"]


def test_a_key_that_others_may_read_is_refused(
    fixtures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o640)
    args = [
        "trace",
        "anonymise",
        str(fixtures / "trace_seren.csv"),
        "--key-file",
        str(key),
        "-o",
        str(tmp_path / "o"),
    ]
    assert dispatch(args) == 5
    assert "chmod 600" in capsys.readouterr().err
    key.chmod(0o600)
    assert dispatch(args) == 0
