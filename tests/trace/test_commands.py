"""`unbroken trace` as a user types it."""

from __future__ import annotations

import errno
import hmac
import json
import os
from pathlib import Path
from typing import Any

import pytest

from unbroken.cli.main import dispatch
from unbroken.trace.store import Store
from unbroken.units import Bytes


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = dispatch(["trace", *args])
    out, err = capsys.readouterr()
    return code, out, err


def test_report_and_its_json(capsys: pytest.CaptureFixture[str], fixtures: Path, tmp_path: Path) -> None:
    html, js = tmp_path / "report.html", tmp_path / "report.json"
    code, out, _ = run(
        capsys,
        "report",
        str(fixtures / "trace_kalos.csv"),
        "-o",
        str(html),
        "--json-file",
        str(js),
        "--compare",
        "kalos",
        "--svg",
        str(tmp_path / "svg"),
    )
    assert code == 0
    assert "Figure 17" in out
    assert html.read_text().startswith("<!doctype html>")
    assert json.loads(js.read_text())["tables"]["summary"]["rows"]
    assert list((tmp_path / "svg").glob("*.svg"))
    code, out, _ = run(capsys, "report", str(fixtures / "trace_kalos.csv"), "-o", str(html), "--json")
    assert code == 0
    assert json.loads(out)["report"] == str(html)


def test_the_trace_to_compare_with_obeys_the_same_bounds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fixtures: Path, tmp_path: Path
) -> None:
    asked: list[tuple[object, ...]] = []

    class Noted(Store):
        def __init__(self, **given: Any) -> None:
            asked.append((given["memory"], given["threads"], given["scratch"]))
            super().__init__(**given)

    monkeypatch.setattr("unbroken.trace.store.Store", Noted)
    seren, kalos = str(fixtures / "trace_seren.csv"), str(fixtures / "trace_kalos.csv")
    scratch = ("--scratch", str(tmp_path), "--threads", "1", "--memory", "512MiB")
    code, _, err = run(
        capsys, "report", kalos, "--compare", seren, "-o", str(tmp_path / "report.html"), *scratch
    )
    assert code == 0, err
    assert asked == [(Bytes("512MiB"), 1, tmp_path)] * 2


def test_stats_as_text_and_json(capsys: pytest.CaptureFixture[str], fixtures: Path) -> None:
    code, out, err = run(capsys, "stats", str(fixtures / "trace_seren.csv"), "--only", "by_state")
    assert code == 0
    assert "CANCELLED" in out
    code, out, _ = run(capsys, "stats", str(fixtures / "trace_seren.csv"), "--json")
    assert {"summary", "by_state", "run_cdf"} <= set(json.loads(out)["tables"])
    code, _, err = run(capsys, "stats", str(fixtures / "trace_seren.csv"), "--only", "by_stat")
    assert code == 2
    assert "by_state" in err


@pytest.mark.slow
def test_any_table_through_a_mapping(
    capsys: pytest.CaptureFixture[str], fixtures: Path, tmp_path: Path
) -> None:
    pairs = "job=id,user=who,submit=queued,start=began,end=finished,gpus=accelerators,state=result"
    code, out, err = run(
        capsys, "stats", str(fixtures / "any_table.csv"), "--map", pairs, "--only", "summary", "--json"
    )
    assert code == 0
    assert json.loads(out)["set_aside"]["rows"] == 5
    code, _, err = run(capsys, "stats", str(fixtures / "any_table.csv"), "--map", pairs, "--only", "summary")
    assert "rejected in all: 5 rows" in err
    mapping = tmp_path / "map.toml"
    mapping.write_text(
        "[map]\n" + "\n".join(f'{p.split("=")[0]} = "{p.split("=")[1]}"' for p in pairs.split(","))
    )
    code, out, _ = run(
        capsys, "stats", str(fixtures / "any_table.csv"), "--map", str(mapping), "--only", "summary", "--json"
    )
    assert code == 0
    assert json.loads(out)["tables"]["summary"]["rows"][0][1] == 3


def test_convert_keeps_rows_that_cannot_be_read(
    capsys: pytest.CaptureFixture[str], fixtures: Path, tmp_path: Path
) -> None:
    pairs = "job=id,submit=queued,start=began,end=finished,gpus=accelerators,state=result"
    code, out, _ = run(
        capsys, "convert", str(fixtures / "any_table.csv"), "--map", pairs, "-o", str(tmp_path), "--json"
    )
    assert code == 0
    assert json.loads(out)["written"] == {"jobs.parquet": 3, "set_aside.csv": 5}
    assert len((tmp_path / "set_aside.csv").read_text().splitlines()) >= 6
    code, out, _ = run(capsys, "stats", str(tmp_path / "jobs.parquet"), "--only", "summary", "--json")
    assert json.loads(out)["tables"]["summary"]["rows"][0][1] == 3
    code, out, _ = run(
        capsys, "convert", str(fixtures / "trace_seren.csv"), "--csv", "-o", str(tmp_path / "csv"), "--json"
    )
    code, out, _ = run(capsys, "stats", str(tmp_path / "csv" / "jobs.csv"), "--only", "by_state", "--json")
    assert code == 0
    assert {r[1] for r in json.loads(out)["tables"]["by_state"]["rows"]} == {
        "COMPLETED",
        "CANCELLED",
        "FAILED",
    }


def test_anonymised_traces_have_the_same_statistics_and_none_of_the_names(
    capsys: pytest.CaptureFixture[str], fixtures: Path, tmp_path: Path
) -> None:
    source = str(fixtures / "sacct/sacct_23.02_planned.txt")
    key = tmp_path / "key"
    args = ("anonymise", source, "--shift", "520d", "--key-file", str(key), "--json")
    code, out, _ = run(capsys, *args, "-o", str(tmp_path / "a"))
    assert code == 0
    assert oct(key.stat().st_mode & 0o777) == "0o600"
    import pyarrow.parquet as pq

    table = pq.read_table(tmp_path / "a" / "jobs.parquet").to_pylist()
    text = json.dumps(table, default=str)
    for secret in ("ann", "bob", "llm", "torchtitan", "h001", "sacct_23.02", '"300"'):
        assert secret not in text, secret
    plain = {}
    for folder, file in (("a", tmp_path / "a"), ("s", Path(source))):
        _, out, _ = run(capsys, "stats", str(file), "--only", "by_state,run_quantiles,by_size", "--json")
        plain[folder] = {k: [r[1:] for r in v["rows"]] for k, v in json.loads(out)["tables"].items()}
    assert plain["a"] == plain["s"]
    job = next(r for r in table if r["gpu_num"] == 64)
    assert job["start_utc"].weekday() == 5 and job["start_utc"].hour == 2
    assert job["start_utc"].year < 2024 or job["start_utc"].month < 6
    assert len(job["nodes"]) == 8
    run(capsys, *args, "-o", str(tmp_path / "b"))
    assert pq.read_table(tmp_path / "b" / "jobs.parquet").to_pylist() == table
    run(capsys, "anonymise", source, "-o", str(tmp_path / "c"), "--json")
    assert pq.read_table(tmp_path / "c" / "jobs.parquet").column("user").to_pylist() != [
        r["user"] for r in table
    ]


def test_the_nodes_of_an_anonymised_job_keep_their_order(
    capsys: pytest.CaptureFixture[str], fixtures: Path, tmp_path: Path
) -> None:
    """A job's n-th node is where its n-th ranks ran."""
    import pyarrow.parquet as pq

    head, _, job, *_ = (fixtures / "sacct/sacct_23.02_planned.txt").read_text().splitlines()
    fields = dict(zip(head.split("|"), job.split("|"), strict=True))
    asked = [["z9", "m5", "a1"], ["m5"], ["a1", "z9"], ["q3", "m5", "z9", "b2"]]
    rows = [{**fields, "JobID": str(i), "NodeList": ",".join(nodes)} for i, nodes in enumerate(asked)]
    source, key = tmp_path / "sacct.txt", tmp_path / "key"
    source.write_text("\n".join([head, *("|".join(r.values()) for r in rows)]) + "\n")
    assert (
        run(capsys, "anonymise", str(source), "--key-file", str(key), "-o", str(tmp_path / "hidden"))[0] == 0
    )

    def shown(node: str) -> str:
        return "n" + hmac.digest(key.read_bytes(), f"node\0{node}".encode(), "sha256").hex()[:12]

    table = pq.read_table(tmp_path / "hidden" / "jobs.parquet")
    assert sorted(table["nodes"].to_pylist()) == sorted([shown(n) for n in nodes] for nodes in asked)
    assert (jobs := table["job_id"].to_pylist()) == sorted(jobs), (
        "in an order that does not tell the source's"
    )


def test_synth_is_read_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(
        capsys,
        "synth",
        "-o",
        str(tmp_path),
        "--jobs",
        "3000",
        "--cluster",
        "kalos",
        "--seed",
        "5",
        "--sample-nodes",
        "2",
        "--sample-hours",
        "1",
        "--json",
    )
    assert code == 0
    assert json.loads(out)["written"]["jobs.parquet"] == 3000
    code, out, _ = run(capsys, "stats", str(tmp_path), "--only", "summary,utilisation_quantiles", "--json")
    assert code == 0
    assert json.loads(out)["tables"]["utilisation_quantiles"]["rows"]


def test_accounts(capsys: pytest.CaptureFixture[str], fixtures: Path) -> None:
    code, out, _ = run(capsys, "accounts", str(fixtures / "Venus/cluster_log.csv"), "--json")
    assert code == 0
    assert {r[2] for r in json.loads(out)["rows"]} == {"vcJkd", "vchbv", "vcpDC"}
    code, out, _ = run(capsys, "accounts", str(fixtures / "trace_seren.csv"))
    assert "No job has a team" in out


def test_formats(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "formats", "--json")
    assert code == 0
    assert {"acme", "philly", "helios", "pai", "gpu2023", "slurm", "kubernetes", "table", "parquet"} <= set(
        json.loads(out)["formats"]
    )


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("report", "nothing.csv"), 3, "does not exist"),
        (("report", "{f}/trace_seren.csv", "--timezone", "Mars/Olympus"), 2, "time zone"),
        (("report", "{f}/trace_seren.csv", "--compare", "nobody"), 3, "compare"),
        (("report", "{f}/trace_seren.csv", "-o", "{t}/none/x.html"), 2, "folder"),
        (("report", "{f}/trace_seren.csv", "--pue", "0.2"), 2, "PUE"),
        (("report", "{f}/trace_seren.csv", "--map", "submit"), 2, "no pair"),
        (("report", "{f}/sacct/README.md"), 3, "not known"),
        (("stats", "{f}/trace_seren.csv", "--memory", "much"), 2, "size"),
        (("synth", "-o", "{t}", "--cluster", "Helios"), 2, "Seren"),
        (("synth", "-o", "{t}", "--start", "yesterday"), 2, "no day"),
    ],
)
def test_mistakes_end_in_words_and_a_code(
    capsys: pytest.CaptureFixture[str],
    fixtures: Path,
    tmp_path: Path,
    args: tuple[str, ...],
    code: int,
    says: str,
) -> None:
    filled = [a.format(f=fixtures, t=tmp_path) for a in args]
    got, _, err = run(capsys, *filled)
    assert got == code, err
    assert says in err
    assert "Traceback" not in err


HEADER = "job_id,user,team,state,submit,start,end,gpus"
SOUND = "1,ann,red,COMPLETED,2026-01-01T00:00:00Z,2026-01-01T00:01:00Z,2026-01-01T00:02:00Z,8"
BACKWARDS = "2,ann,red,COMPLETED,2026-01-01T00:00:00Z,2026-01-01T00:05:00Z,2026-01-01T00:02:00Z,8"


def table(path: Path, *rows: str) -> str:
    path.write_text("\n".join((HEADER, *rows)) + "\n")
    return str(path)


def test_a_converted_folder_is_read_again_beside_what_it_set_aside(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    assert run(capsys, "convert", table(tmp_path / "jobs.csv", SOUND, BACKWARDS), "-o", str(folder))[0] == 0
    assert "ends before it starts" in (folder / "set_aside.csv").read_text()
    code, out, err = run(capsys, "stats", str(folder), "--only", "by_state", "--json")
    assert code == 0, err
    assert [f["name"] for f in json.loads(out)["files"]] == ["jobs.parquet"]
    assert run(capsys, "convert", table(tmp_path / "jobs.csv", SOUND), "-o", str(folder))[0] == 0
    assert not (folder / "set_aside.csv").exists()  # of the trace before


@pytest.mark.parametrize("command", ["anonymise", "accounts", "compare"])
def test_every_command_says_what_it_set_aside(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    trace = table(tmp_path / "jobs.csv", SOUND, BACKWARDS)
    sound = table(tmp_path / "sound.csv", SOUND)
    args = {
        "anonymise": ("anonymise", trace, "-o", str(tmp_path / "out")),
        "accounts": ("accounts", trace),
        "compare": ("report", sound, "--compare", trace, "-o", str(tmp_path / "report.html")),
    }[command]
    code, _, err = run(capsys, *args)
    assert code == 0
    assert "rejected in" in err
    assert "1 rows" in err
    if command != "compare":
        assert json.loads(run(capsys, *args, "--json")[1])["set_aside"] == 1


@pytest.mark.parametrize("command", ["report", "stats", "accounts"])
def test_a_trace_without_rows_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    output = ("-o", str(tmp_path / "report.html")) if command == "report" else ()
    code, _, err = run(capsys, command, table(tmp_path / "header.csv"), *output)
    assert (code, "only headers" in err) == (3, True)
    code, _, err = run(capsys, command, table(tmp_path / "bad.csv", BACKWARDS), *output)
    assert code == 3
    assert "1 of 1 rows: ends before it starts" in err
    assert "convert" in err


@pytest.mark.parametrize(
    "args",
    [
        ("convert", "TRACE", "-o", "TRACE"),
        ("anonymise", "TRACE", "-o", "TRACE"),
        ("synth", "--jobs", "1", "-o", "TRACE"),
        ("report", "TRACE", "-o", "FOLDER"),
        ("report", "TRACE", "-o", "FOLDER/report.html", "--svg", "TRACE"),
        ("report", "TRACE", "-o", "FOLDER/report.html", "--json-file", "FOLDER/none/report.json"),
        ("synth", "--jobs", "1", "-o", "FOLDER", "--sample-nodes", "1", "--sample-every", "0s"),
    ],
)
def test_an_output_that_cannot_be_is_refused_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, args: tuple[str, ...]
) -> None:
    trace, folder = table(tmp_path / "jobs.csv", SOUND), tmp_path / "folder"
    folder.mkdir()
    code, _, err = run(capsys, *(a.replace("TRACE", trace).replace("FOLDER", str(folder)) for a in args))
    assert code == 2
    assert err.count("\n") == 1
    assert not list(folder.iterdir())


@pytest.mark.parametrize("command", ["report", "convert", "anonymise", "synth"])
def test_a_disk_that_refuses_is_said_in_one_paragraph(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    trace, folder = table(tmp_path / "jobs.csv", SOUND), tmp_path / "folder"
    folder.mkdir()
    output = str(folder / "report.html" if command == "report" else folder)
    args = (command, "-o", output, *(("--jobs", "1") if command == "synth" else (trace,)))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("unbroken.atomic.write_text", full)
        patch.setattr("unbroken.trace.output.convert.copy", full)
        patch.setattr("unbroken.trace.synthetic.generate.write_jobs", full)
        code, _, err = run(capsys, *args)
        assert (code, "No space left on device" in err) == (34, True)
    # as root every folder can be written
    monkeypatch.setattr("os.access", lambda _path, mode: not mode & os.W_OK)
    code, _, err = run(capsys, *args)
    assert (code, "Permission denied" in err) == (34, True)
