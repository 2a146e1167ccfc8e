"""A trace of dozens of clusters gives a page that can be read, and counts over time are not taken for readings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from unbroken.cli.main import dispatch
from unbroken.errors import InputError
from unbroken.page.charts.scales import amount
from unbroken.trace.figures.reference import Reference
from unbroken.trace.figures.workloads import durations
from unbroken.trace.readers import ReadOptions, load
from unbroken.trace.report import build_report, page
from unbroken.trace.report.build import cards
from unbroken.trace.settings import ReportSettings


def trace(folder: Path, clusters: int, jobs: int = 1200) -> Path:
    file = folder / "jobs.csv"
    rows = ["job_id,cluster,user,state,submit_time,start_time,end_time,gpu_num"]
    for i in range(jobs):
        c = int((i * 7919 % jobs) / jobs * clusters * (i % 97) / 97)
        day = i % 27 + 1
        rows.append(
            f"{i},vc{c:02d}-a1b2,u{i % 50},{('COMPLETED', 'FAILED', 'CANCELLED')[i % 3]},2026-01-{day:02d} 00:00:00,"
            f"2026-01-{day:02d} 00:{i % 60:02d}:00,2026-01-{day:02d} {1 + i % 20:02d}:00:00,{1 << i % 5}"
        )
    file.write_text("\n".join(rows) + "\n")
    return file


def made(file: Path) -> tuple[str, object]:
    with load([file], ReadOptions()) as store:
        report = build_report(store, [(file.name, "table")])
        return page(report), report


def test_forty_clusters_are_one_page_with_few_colours_and_short_sentences(tmp_path: Path) -> None:
    html, report = made(trace(tmp_path, 40))
    number = len(report.findings.get("clusters").rows)  # type: ignore[attr-defined]
    assert number > 30
    assert report.title == f"{number} clusters"  # type: ignore[attr-defined]
    assert len(html) < 1_000_000
    for f in report.figures:  # type: ignore[attr-defined]
        named = set(re.findall(r"vc\d\d-a1b2", f.sentence))
        assert len(named) <= 4 and len(f.sentence) < 500, f.sentence
        for panel in f.panels:
            lines = getattr(panel, "series", ())
            assert len({s.label.split(":")[0] for s in lines}) <= 6
            assert len({(s.color, s.dash) for s in lines}) == len(lines), f"{f.key}: {lines}"
        for g in f.grids:
            assert len(g.header) <= 9
    figure = next(f for f in report.figures if f.key == "clusters")  # type: ignore[attr-defined]
    hours = [r["gpu_h"] for r in report.findings.get("clusters").dicts()]  # type: ignore[attr-defined]
    assert hours == sorted(hours, reverse=True)
    assert len(figure.grids[0].rows) == number and len(figure.panels) == 12
    others = f"{number - 4} others"
    summary = report.findings.get("summary")  # type: ignore[attr-defined]
    assert len(summary.rows) == 5 and summary.rows[-1][0] == others
    assert sum(summary.column("jobs")) == 1200
    types = next(f for f in report.figures if f.key == "types")  # type: ignore[attr-defined]
    assert types.sentence.count("Other") == 1 and not types.panels, "jobs without a type say so once"
    assert figure.table_first and html.index("<td>vc00-a1b2</td>") < html.index("<svg"), (
        "the table comes first"
    )
    assert "<details><summary>The numbers" not in html[: html.index("<svg")]
    assert not any("vc" in what for _, what in cards(report.findings)), (
        "the numbers on top are of all clusters"
    )  # type: ignore[attr-defined]
    held: dict[object, float] = {}
    for r in report.findings.get("busy").dicts():  # type: ignore[attr-defined]
        held[r["time_utc"]] = held.get(r["time_utc"], 0.0) + r["gpus"]
    busy = next(f for f in report.figures if f.key == "busy")  # type: ignore[attr-defined]
    assert f"at most {amount(max(held.values()), 0)}," in busy.sentence, "of all clusters together"
    against = durations(report.findings, [Reference("other", report.findings)], ReportSettings())  # type: ignore[attr-defined]
    assert against is not None and len(against.panels) <= 12, (
        "with a reference a panel a type, not one a type and cluster"
    )


def test_a_few_clusters_stay_as_they_were(tmp_path: Path) -> None:
    _, report = made(trace(tmp_path, 5))
    assert not report.findings.get("clusters")  # type: ignore[attr-defined]
    assert all(f.key != "clusters" for f in report.figures)  # type: ignore[attr-defined]


def test_counts_over_time_are_refused_in_words(tmp_path: Path, shared_data: Path) -> None:
    mine = tmp_path / "usage.csv"
    mine.write_text(
        "time,running_jobs,pendingJobs,idle_gpus,gpu_utilization\n2026-01-01 00:00:00,3,4,5,0.5\n"
    )
    for file in (mine, shared_data / "helios" / "Earth_vc6YE_cluster_sequence.csv"):
        with pytest.raises(InputError, match="counts over time"):
            load([file])


def test_a_table_of_which_nothing_can_be_drawn_is_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gpus_by_kind.csv"
    file.write_text("time,V100,A100\n" + "".join(f"2026-01-01 00:0{i}:00,{i},{i}\n" for i in range(9)))
    assert dispatch(["trace", "report", str(file), "-o", str(tmp_path / "r.html")]) == 3
    assert "nothing in it can be drawn" in capsys.readouterr().err and not (tmp_path / "r.html").exists()


def test_a_wide_table_of_servers_is_still_read(tmp_path: Path) -> None:
    file = tmp_path / "GPU_UTIL.csv"
    file.write_text(
        "Time,10.0.0.1-0,10.0.0.1-1,used-2\n" + "".join(f"2026-01-01 00:0{i}:00,5,6,7\n" for i in range(9))
    )
    with load([file]) as store:
        assert store.has("samples")


def test_stray_files_of_a_folder_are_passed_over_with_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace(tmp_path, 3, 60)
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "README.txt").write_text("This trace was taken in January.\n")
    (tmp_path / "core.log").write_bytes(b"\x00\x01\x02")
    assert dispatch(["trace", "stats", str(tmp_path), "--only", "summary"]) == 0
    said = capsys.readouterr().err
    assert said.count("passed over") == 3 and "[notes.txt]" in said
    assert dispatch(["trace", "stats", str(tmp_path / "notes.txt")]) == 3, "a file that was named is not"
    (tmp_path / "jobs.csv").unlink()
    assert dispatch(["trace", "stats", str(tmp_path)]) == 3, "nor is a folder without any trace"
