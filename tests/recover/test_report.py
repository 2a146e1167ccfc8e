"""The report: what it gathers, ETTR, the page itself, and run directories in every state."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.run_folder import RunFolder
from unbroken.cli.main import dispatch
from unbroken.errors import InputError
from unbroken.page.charts.marks import WIDTH, Mark, badge_rows
from unbroken.progress import RunDir
from unbroken.status import gather, report_json, write_report, write_report_safely
from unbroken.status.curve import Steps, read_executions, thin
from unbroken.status.page import page, time_split

pytestmark = pytest.mark.made_up


@pytest.fixture
def made(tmp_path: Path) -> RunFolder:
    return RunFolder(RunDir(tmp_path / "run"))


def steps_file(path: Path, rows: list[tuple[int, float, float]]) -> Path:
    path.write_text(
        "".join(json.dumps({"step": s, "loss": x.hex(), "tokens": 1, "t": t}) + "\n" for s, x, t in rows)
    )
    return path


def test_last_execution_counts(tmp_path: Path) -> None:
    one = steps_file(tmp_path / "1", [(0, 5.0, 10.0), (1, 4.0, 11.0), (2, 3.0, 12.0), (3, 2.0, 13.0)])
    two = steps_file(tmp_path / "2", [(2, 3.5, 20.0), (3, 2.5, 21.0), (4, 1.5, 22.0)])
    found = read_executions([(1, one), (2, two)])
    last = found.last
    assert last.step.tolist() == [0, 1, 2, 3, 4]
    assert last.loss.tolist() == [5.0, 4.0, 3.5, 2.5, 1.5]
    assert last.attempt.tolist() == [1, 1, 2, 2, 2]
    # Every step takes one second; the first of an attempt counts with the median.
    assert found.productive_s == pytest.approx(5.0)
    assert found.replayed_s == pytest.approx(2.0)
    assert found.first_s == pytest.approx(2.0)


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=20), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_last_execution_is_what_a_rewriting_trainer_would_have(
    tmp_path_factory: pytest.TempPathFactory, attempts: list[list[int]]
) -> None:
    """Against a plain model: each execution throws away everything at its step and above."""
    folder = tmp_path_factory.mktemp("steps")
    kept: list[tuple[int, int]] = []
    files = []
    clock = 0.0
    for number, steps in enumerate(attempts, 1):
        rows = []
        for step in steps:
            clock += 1
            rows.append((step, float(clock), clock))
            kept = [(s, n) for s, n in kept if s < step] + [(step, number)]
        files.append((number, steps_file(folder / str(number), rows)))
    last = read_executions(files).last
    assert list(zip(last.step.tolist(), last.attempt.tolist(), strict=True)) == kept


def test_damaged_and_torn_step_lines(tmp_path: Path) -> None:
    good = json.dumps({"step": 1, "loss": (1.5).hex(), "tokens": 1, "t": 5.0})
    path = tmp_path / "steps.jsonl"
    path.write_text(f'{good}\nrubbish\n{{"step": "x"}}\n{good.replace("5.0", "6.0")}\n{{"step": 3, "lo')
    found = read_executions([(1, path), (2, tmp_path / "absent")])
    assert found.all.step.tolist() == [1, 1]
    assert found.damaged == 2


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=400),
    st.integers(4, 60),
)
@settings(max_examples=60, deadline=None)
def test_thinning_keeps_ends_and_extremes(losses: list[float], points: int) -> None:
    n = len(losses)
    column = np.arange(n)
    steps = Steps(column, np.array(losses), column, column * 1.0, column, column * 1.0)
    thinned = thin(steps, points)
    told = [x for x in losses if not math.isnan(x)]
    assert len(thinned) <= max(points + 2, 4)
    if told:
        assert thinned.loss.min() == min(told)
        assert thinned.loss.max() == max(told)
        assert thinned.loss[0] == told[0] and thinned.loss[-1] == told[-1]
    assert (np.diff(thinned.step) > 0).all()


def test_ettr_and_the_split_of_time(made: RunFolder) -> None:
    made.attempt()
    made.steps(100)
    made.incident("failed", rank=1, back_to=79, unnoticed_s=3.0)
    made.steps(50)
    made.end()
    report = gather(made.run_dir)
    assert report.status == "completed"
    assert report.step == 129
    assert [a.number for a in report.attempts] == [1, 2]
    assert (report.attempts[0].lost, report.attempts[1].first_step) == (20, 80)
    assert report.attempts[1].origin == "step 79, memory"
    assert report.wall_s == pytest.approx(made.now - made.began)
    assert report.ettr == pytest.approx(130 * 0.5 / report.wall_s, rel=0.03)
    split = {k: s for k, _, s in time_split(report)}
    assert split["unnoticed"] == pytest.approx(3.0)
    assert split["replayed"] == pytest.approx(20 * 0.5, rel=0.1)
    assert sum(split.values()) == pytest.approx(report.wall_s, rel=0.01)


def test_pause_counts_neither_as_wall_nor_as_down(made: RunFolder) -> None:
    made.attempt()
    made.steps(50)
    made.pause(86400)
    made.steps(50)
    made.end()
    report = gather(made.run_dir)
    assert report.paused_s == pytest.approx(86400)
    assert report.wall_s < 200
    assert report.ettr is not None and report.ettr > 0.5
    assert "stopped here for 1d" in page(report)


def test_stretches_of_time_do_not_overlap(made: RunFolder) -> None:
    made.attempt()
    for kind in ("failed", "hung", "node_lost", "failed"):
        made.steps(30)
        made.incident(kind, back_to=made.step - 5)
    made.steps(20)
    made.pause(500)
    made.steps(20)
    made.end()
    spans = gather(made.run_dir).spans
    for before, after in itertools.pairwise(spans):
        assert before.end == pytest.approx(after.start)
    assert spans[-1].end == pytest.approx(made.now)
    assert {"setup", "starting", "replayed", "training", "unnoticed", "down", "paused", "finishing"} <= {
        s.kind for s in spans
    }


class _Checked(HTMLParser):
    """Collects what a page refers to, and fails on elements that are closed wrongly."""

    VOID = frozenset({"meta", "br", "link", "img", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            if name == "id" and value:
                self.ids.add(value)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"


def check_page(text: str, folder: Path) -> _Checked:
    parser = _Checked()
    parser.feed(text)
    assert parser.open == []
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//|@import|url\(", text), (
        "the page needs the network"
    )
    for link in parser.links:
        if link.startswith("#"):
            assert link[1:] in parser.ids, f"{link} leads nowhere"
        else:
            assert (folder / link).exists(), f"{link} is not there"
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert data is not None
    json.loads(data[1])
    return parser


@pytest.mark.parametrize("incidents", [0, 1, 30])
def test_page_is_whole_and_self_contained(made: RunFolder, incidents: int) -> None:
    (made.run_dir.path / "agents").mkdir()
    made.attempt()
    for i in range(incidents):
        made.steps(20)
        made.incident(("failed", "hung", "node_lost")[i % 3], back_to=made.step - 3)
    made.steps(40)
    made.end()
    path = write_report(made.run_dir)
    assert path == made.run_dir.report
    text = path.read_text()
    check_page(text, made.run_dir.path)
    assert len(re.findall(r' id="incident-\d+"', text)) == incidents
    if not incidents:
        assert "never interrupted" in text
    assert f"<b>{incidents}</b>" in text


def test_huge_run_stays_small(made: RunFolder) -> None:
    made.attempt()
    made.steps(50_000, losses={777: 1e9, 41_000: math.inf, 42_000: math.nan})
    made.incident("hung", rank=2, back_to=49_000)
    made.steps(51_000)
    made.end()
    text = write_report(made.run_dir).read_text()
    assert len(text) < 1_000_000
    assert "loss 1e+09, above the axis" in text and "loss inf, above the axis" in text


def test_nothing_in_a_log_becomes_markup(made: RunFolder) -> None:
    made.attempt()
    made.steps(3)
    made.incident("failed", rank=0)
    path = made.run_dir.incident(1)
    value = json.loads(path.read_text())
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
    value["verdict"]["root"]["text"] = value["verdict"]["reason"] = value["why"] = value["action"] = evil
    value["kind"] = value["verdict"]["faulty"]["node"] = evil
    path.write_text(json.dumps(value))
    text = page(gather(made.run_dir))
    assert "<script>alert" not in text and "<img" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_stopped_run_says_why_and_how_to_go_on(made: RunFolder) -> None:
    made.attempt()
    made.steps(5)
    made.incident("bug", rank=3)
    report = gather(made.run_dir)
    assert report.status == "stopped"
    text = page(report)
    assert "KeyError: a restart cannot help" in text
    assert (
        f"unbroken run --run-dir {made.run_dir.path} --nodes 2 --nproc 2 --spares 1 -- train.py --lr 3e-4"
        in text
    )


def test_running_and_unstarted_runs(made: RunFolder) -> None:
    before = gather(made.run_dir, now=made.now + 1)
    assert (before.status, before.ettr, before.step) == ("running", None, -1)
    assert "no step was completed yet" in page(before)
    made.attempt()
    made.steps(10)
    during = gather(made.run_dir, now=made.now + 7)
    assert during.ended == made.now + 7
    assert during.attempts[-1].how == "running"
    assert "still running" in page(during)


def test_damaged_parts_are_named_and_the_rest_is_shown(made: RunFolder) -> None:
    made.attempt()
    made.steps(20)
    made.incident("failed", rank=1)
    made.steps(20)
    made.end()
    made.run_dir.incident(1).write_text('{"schema": 1, "numb')
    journal = made.run_dir.journal(1)
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b"first", b"worst").replace(b'"t"', b'"u"')
    journal.write_bytes(b"".join(lines))
    with open(made.run_dir.steps(1), "a") as f:
        f.write("not json\n")
    report = gather(made.run_dir)
    assert report.step == 39
    told = " ".join(report.problems)
    assert "0001.json" in told and "1 line of the journal does not check" in told and "steps.jsonl" in told
    assert "cannot be read" in page(report)
    made.run_dir.spec.write_text("nodes = [")
    assert gather(made.run_dir).spec is None
    assert write_report(made.run_dir).exists()


def test_incident_files_of_every_wrong_shape(made: RunFolder) -> None:
    made.attempt()
    made.steps(3)
    for i, text in enumerate(("[]", "null", "{}", '{"verdict": 3}', "\xff", '{"number":1,"attempt":"x"}'), 1):
        made.run_dir.incident(i).write_text(text, encoding="latin-1")
    report = gather(made.run_dir)
    assert report.incidents == ()
    assert len(report.problems) == 6
    assert page(report)


def test_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    made = RunFolder(RunDir(tmp_path / os.fsdecode(b"run-\xff")))
    made.attempt()
    made.steps(3)
    made.end()
    assert "run-?" in write_report(made.run_dir).read_text()


def test_no_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="no run directory"):
        gather(RunDir(tmp_path))
    assert write_report_safely(RunDir(tmp_path)) is None
    assert dispatch(["report", str(tmp_path / "absent")]) == 3
    assert "no run directory" in capsys.readouterr().err


def test_command_and_json(made: RunFolder, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made.attempt()
    made.steps(30)
    made.incident("node_lost", rank=2, back_to=20)
    made.steps(30)
    made.end()
    assert dispatch(["report", str(made.run_dir.path)]) == 0
    assert capsys.readouterr().out.strip() == str(made.run_dir.report)
    elsewhere = tmp_path / "deep" / "page.html"
    assert dispatch(["report", str(made.run_dir.path), "-o", str(elsewhere)]) == 34
    assert "cannot be written" in capsys.readouterr().err
    elsewhere.parent.mkdir()
    (made.run_dir.path / "agents").mkdir()
    assert dispatch(["report", str(made.run_dir.path), "-o", str(elsewhere), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["status"] == "completed" and told["step"] == 50
    assert told["incidents"][0]["node"] == "node-001" and told["incidents"][0]["steps_lost"] == 9
    assert float.fromhex(told["loss_hex"]) == told["loss"]
    check_page(elsewhere.read_text(), elsewhere.parent)
    assert told == json.loads(json.dumps(report_json(gather(made.run_dir), elsewhere)))


@given(st.lists(st.floats(62, 986), max_size=120))
@settings(max_examples=40, deadline=None)
def test_badges_never_overlap_and_never_leave_the_page(places: list[float]) -> None:
    marks = [Mark(x, str(i + 1), "", "t") for i, x in enumerate(sorted(places))]
    rows = badge_rows(marks)
    assert sorted(int(m.label) for row in rows for _, _, group in row for m in group) == list(
        range(1, len(marks) + 1)
    )
    for row in rows:
        spans = sorted((x - half, x + half) for x, half, _ in row)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        if len(rows) == 1 and any(len(g) > 1 for _, _, g in row):
            assert all(low >= 0 and high <= WIDTH for low, high in spans)


@pytest.mark.slow
def test_a_long_run_is_read_in_little_memory(tmp_path: Path) -> None:
    """Half a million steps: what is kept of one takes 32 bytes, and what is parsed at once is bounded."""
    import tracemalloc

    from unbroken.status.curve import read_executions

    path, count = tmp_path / "steps.jsonl", 500_000
    with path.open("w") as f:
        f.writelines(f'{{"step": {i}, "loss": "0x1.8p+1", "tokens": 7, "t": {i}.5}}\n' for i in range(count))
        f.write('{"step": torn')
    tracemalloc.start()
    try:
        found = read_executions([(1, path)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(found.all) == count and found.damaged == 0 and found.all.loss[-1] == 3.0
    assert peak < 120e6, f"{peak / 1e6:.0f} MB"
