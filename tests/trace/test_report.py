"""The report: whole, self-contained, honest about what it lacks; and looked at in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from unbroken.errors import TraceError
from unbroken.page.charts.scales import Axis, amount, nice_range, seconds, short, ticks
from unbroken.page.charts.spec import Bars, Box, Boxes, Chart, Heat, LineChart, Series
from unbroken.page.charts.svg import render
from unbroken.trace.figures.reference import Reference
from unbroken.trace.published.study import acme
from unbroken.trace.readers import load
from unbroken.trace.report import TraceReport, build_report, export, page, write_images
from unbroken.trace.statistics import compute


@pytest.fixture(scope="module")
def full(seren: Path) -> TraceReport:
    """A report with everything, compared with the study."""
    with load([seren]) as store:
        return build_report(store, [("jobs.parquet", "parquet")], references=acme())


class Page(HTMLParser):
    """Collects links, sources and whether tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.figures = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for k, v in attrs:
            if k in ("src", "href") and v:
                self.addresses.append(v)
            if k == "id" and v:
                self.ids.append(v)
        self.figures += tag == "figure"
        if tag not in ("meta", "link", "br", "rect", "line", "path", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("rect", "line", "path", "circle"):
            return
        assert self.open and self.open[-1] == tag, (tag, self.open[-3:])
        self.open.pop()


def parsed(html: str) -> Page:
    p = Page()
    p.feed(html)
    assert not p.open
    return p


def test_the_page_is_whole_and_needs_nothing_from_outside(full: TraceReport) -> None:
    html = page(full)
    p = parsed(html)
    assert all(a.startswith("#") or a == "data:," for a in p.addresses)
    assert {a[1:] for a in p.addresses if a.startswith("#")} <= set(p.ids)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", html)
    assert p.figures == len(full.figures)
    assert len(html.encode()) < 5_000_000


def test_the_figures_of_the_study_are_there_with_a_sentence_each(full: TraceReport) -> None:
    numbers = {f.number for f in full.figures}
    assert {"Table 2", "Table 3", *(f"Figure {n}" for n in (2, 3, 4, 5, 6, 7, 8, 17))} <= numbers
    for f in full.figures:
        assert f.sentence.endswith("."), f.key
        assert len(f.sentence) > 25
        assert "None" not in f.sentence and "nan" not in f.sentence
        assert set(f.results) <= set(full.findings.results)


def test_published_curves_are_beside_ours(full: TraceReport) -> None:
    by_key = {f.key: f for f in full.figures}
    for key in ("duration", "sizes", "utilisation", "power"):
        labels = [s.label for p in by_key[key].panels if isinstance(p, LineChart) for s in p.series if s.dash]
        assert any("Seren (published)" in x for x in labels), key
    assert any("published" in h for h in by_key["failures"].grids[0].header)
    assert any(n.kind == "difference" and "populations" in n.text for n in full.notes)


def test_comparison_with_another_trace(seren: Path, kalos: Path) -> None:
    with load([kalos]) as other:
        reference = Reference("Kalos", compute(other))
    with load([seren / "jobs.parquet"]) as store:
        made = build_report(store, [("jobs.parquet", "parquet")], references=[reference])
    labels = [
        s.label
        for f in made.figures
        for p in f.panels
        if isinstance(p, LineChart)
        for s in p.series
        if s.dash
    ]
    assert "Kalos" in labels
    parsed(page(made))


def test_json_holds_everything_and_no_nan(full: TraceReport) -> None:
    text = json.dumps(full.as_json(), allow_nan=False)
    data = json.loads(text)
    assert set(data["tables"]) == set(full.findings.results)
    assert data["tables"]["by_state"]["rows"]
    assert data["compared_with"]["Seren"]["run_cdf"]["rows"]


@pytest.mark.parametrize(
    "file",
    ["trace_seren.csv", "pods.json", "incidents.jsonl", "sacct/sacct_22.05_usual.txt", "cluster_job_log"],
)
def test_small_traces_make_a_page_too(fixtures: Path, file: str) -> None:
    with load([fixtures / file]) as store:
        made = build_report(store, [(file, "x")])
    html = page(made)
    parsed(html)
    assert "Not shown" in html or "Chapters without data" in html


def test_an_empty_trace_and_one_job(tmp_path: Path, fixtures: Path) -> None:
    lines = (fixtures / "trace_seren.csv").read_text().splitlines()
    path = tmp_path / "trace_seren.csv"
    for n in (1, 2):
        path.write_text("\n".join(lines[:n]) + "\n")
        with load([path]) as store:
            html = page(build_report(store, [("trace_seren.csv", "acme")]))
        parsed(html)
        assert ("The trace holds no job" in html) == (n == 1)


def test_what_was_set_aside_is_shown_and_escaped(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(
        "job_id,user,gpus,state,submit_time,start_time,end_time\n"
        "<script>alert(1)</script>,<b>eve</b>,1,COMPLETED,2024-01-02,2024-01-02,2024-01-01\n"
        "ok,<img src=x onerror=alert(1)>,1,COMPLETED,2024-01-01,2024-01-01,2024-01-02\n"
    )
    with load([path]) as store:
        html = page(build_report(store, [(path.name, "table")], title="</title><script>"))
    assert "<script>alert" not in html and "<img src=x" not in html and "</title><script>" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert "ends before it starts" in html


CHARTS: list[Chart] = [
    LineChart(
        "t", "x", "y", (Series("a", ((1, 2), (10, 3)), "#000"), Series("b", ((1, 1),), "#111", "6 4")), "log"
    ),
    LineChart("t", "x", "y", (Series("a", (), "#000"),)),
    LineChart("t", "x", "y", (Series("a", ((0, 0), (1, float("nan"))), "#000", step=True, area=True),)),
    Bars(
        "t",
        "v",
        ("a", "b"),
        (("g", "#000", (1.0, None)), ("h", "#111", (2.0, 3.0))),
        published=(("p", (1.0, None)),),
    ),
    Bars("t", "v", ("a & <b>",), (("g", "#000", (0.0,)),), horizontal=True),
    Bars("t", "v", ("a",), (("g", "#000", (1e-3,)),), log=True),
    Bars("t", "v", (), (("g", "#000", ()),), stacked=True, unit="%"),
    Boxes("t", "v", (Box("a", 1, 1, 1, 1, 1, "#000"), Box("b", 0.5, 1, 2, 4, 1024, "#111", True))),
    Boxes("t", "v", ()),
    Heat("t", ("Mon",), ("0h", "1h"), ((0.0, 5.0),)),
    Heat("t", ("Mon",), ("0h",), ((0.0,),)),
]


@pytest.mark.parametrize("chart", CHARTS, ids=range(len(CHARTS)))
def test_every_chart_is_well_formed_whatever_the_data(chart: Chart) -> None:
    svg = render(chart)
    root = ElementTree.fromstring(svg)
    for element in root.iter():
        for k, v in element.attrib.items():
            assert "nan" not in v.lower() or k in ("aria-label", "data-chart"), (k, v)
            if k in ("width", "height") and v[0] != "1":
                assert not v.startswith("-"), (element.tag, k, v)


def test_axes_and_words() -> None:
    axis = Axis("log", 1, 100, 0, 200)
    assert [axis.at(v) for v in (0, 1, 10, 100, 1000)] == [0, 0, 100, 200, 200]
    assert nice_range([3, 97], "linear", from_zero=True) == (0, 100)
    assert [t[1] for t in ticks(Axis("log", 1, 1024, 0, 1), "number", 6)][:3] == ["1", "4", "16"]
    assert [short(v) for v in (0, 0.5, 12, 3500, 2_000_000)] == ["0", "0.5", "12", "3,500", "2M"]
    assert [amount(v) for v in (None, 1.0, 1.04, 12345.6)] == ["–", "1", "1.0", "12,346"]
    assert [seconds(v) for v in (1, 61, 1800, 7200, 200000)] == [
        "1 s",
        "1 min 1 s",
        "30 min",
        "2.0 h",
        "2.3 d",
    ]


def test_figures_are_written_as_svg(full: TraceReport, tmp_path: Path) -> None:
    files = write_images(full, tmp_path, png=False)
    assert len(files) >= 20
    for f in files:
        ElementTree.parse(f)


def test_png_without_a_program_says_what_to_install(
    full: TraceReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export.shutil, "which", lambda name: None)
    with pytest.raises(TraceError, match="rsvg-convert"):
        write_images(full, tmp_path, png=True)


# --- in a real browser -------------------------------------------------------------------------------------------------

CHROMIUM = next(
    (p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--enable-logging=stderr")  # fmt: skip


def browse(tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    profile = tmp_path / "profile"
    return subprocess.run(
        [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", *args],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.browser
@pytest.mark.slow
@needs_browser
def test_it_opens_without_console_errors_and_is_interactive(full: TraceReport, tmp_path: Path) -> None:
    """Loads the page with all network names unreachable, hovers a curve, switches a series off, prints to PDF."""
    probe = """<script>addEventListener("load",()=>{const svg=document.querySelector("svg[data-chart]");
    const r=svg.getBoundingClientRect();
    svg.dispatchEvent(new MouseEvent("mousemove",{clientX:r.left+r.width*.6,clientY:r.top+r.height*.6,bubbles:true}));
    const shown=document.getElementById("tip").textContent;
    const key=svg.querySelector(".key"); key.dispatchEvent(new MouseEvent("click",{bubbles:true}));
    const hidden=getComputedStyle(svg.querySelector('path.s[data-series="0"]')).display;
    const wide=document.documentElement.scrollWidth<=innerWidth;
    document.title="PROBE "+JSON.stringify({shown,hidden,wide,figures:document.querySelectorAll("figure").length});});</script></body>"""
    path = tmp_path / "report.html"
    path.write_text(page(full).replace("</body>", probe))
    done = browse(
        tmp_path,
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--window-size=1280,1000",
        "--virtual-time-budget=4000",
        "--dump-dom",
        path.as_uri(),
    )
    assert not re.findall(r"CONSOLE.*(?:error|Uncaught|refused).*", done.stderr, re.IGNORECASE), done.stderr[
        -2000:
    ]
    found = re.search(r"PROBE (\{.*?\})</title>", done.stdout)
    assert found, done.stdout[:500]
    said = json.loads(found[1].replace("&amp;", "&").replace("&quot;", '"'))
    assert "published" in said["shown"] and "%" in said["shown"]
    assert said["hidden"] == "none"
    assert said["wide"]
    assert said["figures"] == len(full.figures)
    shot, pdf = tmp_path / "page.png", tmp_path / "page.pdf"
    browse(tmp_path, "--window-size=1280,4000", f"--screenshot={shot}", path.as_uri())
    browse(tmp_path, f"--print-to-pdf={pdf}", "--no-pdf-header-footer", path.as_uri())
    assert shot.stat().st_size > 100_000
    assert pdf.read_bytes()[:5] == b"%PDF-"


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(
    export.converter() is None, reason="neither rsvg-convert, resvg nor Chromium on this machine"
)
def test_figures_are_written_as_png(fixtures: Path, tmp_path: Path) -> None:
    with load([fixtures / "trace_seren.csv"]) as store:
        made = build_report(store, [("trace_seren.csv", "acme")])
    few = TraceReport(**{**made.__dict__, "sections": made.sections[1:2]})
    files = [f for f in write_images(few, tmp_path / "images", png=True) if f.suffix == ".png"]
    assert files
    assert all(f.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for f in files)
