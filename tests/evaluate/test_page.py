"""The page says what the report says, needs nothing but itself, and lets no text of others become markup."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.support.fake_reports import fake_report
from unbroken.evaluate.contracts import Assignment, Metric, Report, SampleNote, Score, WorkerSeen
from unbroken.evaluate.result.page import render, write_page
from unbroken.evaluate.result.page.gantt import busy_curve, rows_of
from unbroken.evaluate.result.page.markup import duration, number, percent
from unbroken.evaluate.result.results import summary
from unbroken.journal.codec import encode
from unbroken.page.charts.scales import time_step

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
EMPTY = Report("s", "m", "", 0.0, 0.0, (), {}, (), (), (), 0.0, 0.0, 0.0)


class Page(HTMLParser):
    """Element counts, text, and whether every element is closed."""

    VOID = frozenset({"meta", "input", "br", "link", "img"})
    LOOSE = frozenset({"th", "td", "tr", "dt", "dd", "thead", "tbody"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.attributes += attrs
        if tag not in self.VOID | self.LOOSE:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.LOOSE:
            assert self.open, f"</{tag}> closes nothing"
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_it_needs_nothing_but_itself() -> None:
    page = Page(render(fake_report()))
    assert page.open == []
    for name, value in page.attributes:
        assert name not in ("src", "srcset"), value
        if name == "href":
            assert str(value).startswith("#")
    text = render(fake_report())
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert "http://" not in text.replace("http://www.w3.org", "")


def test_a_page_says_what_the_other_way_would_change() -> None:
    page = Page(render(fake_report()))
    assert "differs more than chance" in page.text and "texts are drawn at random" in page.text
    assert "In 54 tasks every answer is the same" in page.text
    assert "texts that are drawn at random differ either way (" in page.text
    assert "harness's own batches" not in Page(render(replace(fake_report(), checks=()))).text


def test_a_page_says_that_its_times_are_those_of_a_part() -> None:
    assert "answers were there before" not in Page(render(fake_report())).text
    resumed = Page(render(replace(fake_report(), reused=4120))).text
    assert "4,120 answers were there before" in resumed and "for what was still missing" in resumed


@pytest.mark.parametrize(
    ("naive", "tile", "sentence"),
    [
        (170.0, "1.70 ×faster than one", "this was 1.70 × faster"),
        (95.0, "1.05 ×slower than one", "this was 1.05 × slower"),
        (100.1, "1.00 ×as fast as one", "this was 1.00 × as fast"),
    ],
)
def test_slower_than_one_trial_per_dataset_is_called_slower(naive: float, tile: str, sentence: str) -> None:
    report = fake_report(tasks=3)
    report = replace(report, started=0.0, ended=100.0, naive_s=naive)
    assert tile in Page(render(report)).text
    assert sentence in summary(report)


def test_a_task_that_was_answered_before_says_so() -> None:
    whole = fake_report(tasks=3)
    task = whole.scores[0].task
    part = replace(whole, trials=tuple(t for t in whole.trials if t.task != task))

    def cell(report: Report) -> str:
        row = re.search(rf'<tr class=taskrow data-task="{task}">.*?</tr>', render(report))
        assert row is not None
        return re.split("<td[^>]*>", row[0])[7]

    assert "before" in cell(replace(part, reused=10)) and cell(part) == ""
    assert cell(replace(whole, reused=10)).endswith("s"), "asked again in part: its time is this run's"
    group = re.search(r'<tr class=grouprow data-task="mmlu">.*?</tr>', render(replace(part, reused=10)))
    assert group is not None and "before" not in group[0]


def test_a_score_without_any_verdict_is_no_number() -> None:
    none = Score("t", (Metric("acc", float("nan"), float("nan")),), 9, 0)
    made = render(replace(fake_report(tasks=2), scores=(none,), groups=()))
    text = Page(made.split('<script type="application/json"')[0]).text
    assert "nan" not in text and "9 without verdict" in text
    assert 'data-v="nan"' not in made and "NaN" not in made.split("<script")[1], "which no browser can parse"


def test_scores_errors_and_times_are_there() -> None:
    report = fake_report()
    page = Page(render(report))
    for score in report.scores:
        assert score.task in page.text
        assert number(score.metrics[0].value) in page.text
    assert "1 task without a score" in page.text
    assert report.errors["xsum"] in page.text
    assert "12 without verdict" in page.text
    assert "HTTP 429" in page.text
    assert "batch size 8" in page.text, "a task that ran otherwise says so"
    assert f"{report.makespan_s / report.lower_bound_s:.2f} ×" in page.text
    assert f"{report.naive_s / report.makespan_s:.2f} ×" in page.text
    assert percent(report.busy_fraction) in page.text
    assert "mmlu" in page.text


def test_every_trial_and_scoring_is_a_bar_of_its_worker() -> None:
    report = fake_report(nodes=2)
    rows = rows_of(report)
    gpu = [r for r in rows if not r.cpu]
    cpu = [r for r in rows if r.cpu]
    assert len(gpu) == 16
    assert [r.name for r in cpu] == ["cpu-0", "cpu-1", "cpu-2", "cpu-3"]
    bars = [b for r in gpu for b in r.bars if b.kind not in ("start", "fetch", "load")]
    assert len(bars) == len(report.trials)
    assert sum(len(r.bars) for r in cpu) == len(report.scorings)
    assert {b.kind for b in bars} == {"infer", "shared", "lost"}
    for row in rows:
        for a, b in zip(row.bars, row.bars[1:], strict=False):
            assert a.end <= b.start + 1e-6, "bars of one worker do not overlap"
    made = Page(render(report))
    shown = sum(1 for n, v in made.attributes if n == "class" and str(v).startswith("b "))
    assert shown == sum(len(r.bars) for r in rows)


def test_nodes_stand_in_the_order_of_their_numbers() -> None:
    found = [r.node for r in rows_of(fake_report(nodes=12)) if not r.cpu]
    assert list(dict.fromkeys(found)) == [f"node-{i}" for i in range(12)]


def test_a_scoring_that_was_shared_out_is_a_bar_of_each_worker() -> None:
    report = fake_report(nodes=1)
    first = report.scorings[0]
    t0 = first.started
    parts = (("cpu-8", t0, t0 + 2), ("cpu-9", t0 + 2, t0 + 7), ("cpu-8", t0 + 2, t0 + 6))
    shared = replace(first, worker="cpu-8", ended=t0 + 7, parts=parts)
    report = replace(report, scorings=(shared,))
    rows = {r.name: r.bars for r in rows_of(report) if r.cpu}
    assert {n: [(round(b.start + report.started - t0), round(b.end - b.start)) for b in bars] for n, bars in rows.items()} == {
        "cpu-8": [(0, 2), (2, 4)], "cpu-9": [(2, 5)],
    }  # fmt: skip
    assert all("one of 3 parts" in b.says and "of 11" in b.says for bars in rows.values() for b in bars)


def test_workers_that_never_said_hello_are_not_hidden() -> None:
    trial = Assignment("arc", "ghost", (0,), 1.0, 2.0, 1.0)
    report = replace(EMPTY, trials=(trial,), ended=3.0)
    assert [r.name for r in rows_of(report)] == ["ghost"]
    assert "ghost" in render(report)


def test_the_busy_curve_is_the_share_of_workers_inside_inference() -> None:
    workers = (WorkerSeen("a", "n", (0,), 0.0), WorkerSeen("b", "n", (1,), 0.0))
    trials = (Assignment("t", "a", (0,), 0.0, 10.0, 10.0), Assignment("t", "b", (1,), 0.0, 5.0, 2.5))
    report = replace(EMPTY, started=0.0, ended=10.0, workers=workers, trials=trials)
    assert busy_curve(report, 4) == pytest.approx([0.75, 0.75, 0.5, 0.5])
    assert sum(busy_curve(report, 40)) / 40 == pytest.approx((10 + 2.5) / 20)
    assert busy_curve(EMPTY) == []


def test_a_page_without_times_neither_shows_nor_links_any() -> None:
    full = fake_report()
    page = Page(
        render(
            replace(
                full,
                trials=(),
                scorings=(),
                workers=(),
                lower_bound_s=0.0,
                naive_s=0.0,
                expected_s=0.0,
                checks=(),
            )
        )
    )
    links = {v for k, v in page.attributes if k == "href"}
    assert links == {"#all-scores"}
    assert (
        "every answer was there already" in page.text
        and "of worker time" not in page.text.split("How to read")[0]
    )
    assert {v for k, v in Page(render(full)).attributes if k == "href"} >= {
        "#makespan",
        "#timeline",
        "#workers",
    }


def test_hostile_names_stay_text() -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
    score = Score(
        evil, (Metric(evil, float("nan"), float("inf")), Metric("x", 1e300)), 3, 2,
        (SampleNote(1, evil, evil),), evil, evil, evil,
    )  # fmt: skip
    report = Report(
        evil, evil, evil, 0.0, 10.0, (score,), {evil: evil},
        (Assignment(evil, evil, (0,), 1.0, 9.0, 8.0, "lost", evil),), (),
        (WorkerSeen(evil, evil, (0,), 0.0, 0.5, 0.5, 1.0, 9.0, evil),), 5.0, 20.0, 0.5, groups=(score,),
        licences={evil: evil},
    )  # fmt: skip
    text = render(report)
    page = Page(text)
    assert page.open == []
    assert page.counts["script"] == 2
    assert "img" not in page.counts
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert page.text.count("alert(2)") > 5


@pytest.mark.parametrize(
    "report",
    [
        EMPTY,
        replace(EMPTY, errors={"arc": "broken"}, ended=5.0),
        replace(EMPTY, scores=(Score("arc", (), 5, 0),), ended=5.0),
        replace(fake_report(tasks=3, gpus=1), workers=(), trials=()),
        fake_report(nodes=16, tasks=200),
    ],
)
def test_odd_reports_make_a_page_too(report: Report) -> None:
    page = Page(render(report))
    assert page.open == []
    assert "nan" not in page.text.lower().replace("finance", "")


def test_the_report_can_be_taken_out_of_the_page_again(tmp_path: Path) -> None:
    report = fake_report()
    write_page(report, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    data = re.search(r'<script type="application/json" id="report">(.*?)</script>', text)
    assert data is not None
    assert json.loads(data[1]) == json.loads(json.dumps(encode(report)))


def test_numbers_for_people() -> None:
    assert [number(v) for v in (0.7391304, 23.0355, 0.0, 1.0, 120102720584002.0, -0.00001, 6432.1)] == [
        "0.7391", "23.04", "0", "1.000", "1.201e+14", "-1.000e-05", "6432.1",
    ]  # fmt: skip
    assert [duration(s) for s in (0.04, 9.96, 59.4, 59.6, 200, 3599.7, 7500, 200_000)] == [
        "0.0 s", "10.0 s", "59 s", "1 min 00 s", "3 min 20 s", "1 h 00 min", "2 h 05 min", "2 d 8 h",
    ]  # fmt: skip
    assert [percent(v) for v in (0.0, 0.5, 0.99999, 1.0)] == ["0.0 %", "50.0 %", "99.9 %", "100 %"]
    assert [time_step(s, 10) for s in (0.5, 9, 200, 5000, 90_000)] == [0.05, 1, 30, 600, 10_800]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_it_works_in_a_browser(tmp_path: Path) -> None:
    write_page(fake_report(tasks=12), tmp_path / "page.html")

    def dom(fragment: str) -> str:
        out = subprocess.run(
            [
                str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                "--disable-background-networking", "--disable-component-update", "--disable-sync",
                f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--v=0",
                "--virtual-time-budget=2000", "--dump-dom", f"file://{tmp_path / 'page.html'}{fragment}",
            ],
            capture_output=True, text=True, timeout=300, check=True,
        )  # fmt: skip
        assert "Uncaught" not in out.stderr, out.stderr
        return out.stdout

    whole = dom("")
    assert "<title>piqa" not in whole, "the script has taken over the bars' titles"
    assert 'id="zoom-out" type="button" hidden' in whole
    zoomed = dom("#zoom=30,60")
    assert 'id="zoom-out" type="button" hidden' not in zoomed
    ticks = re.findall(r'<g class="tick">.*?<text[^>]*>([^<]+)</text>', zoomed)
    assert ticks[0] == "30 s"
    assert ticks[-1] == "1:00 min"
