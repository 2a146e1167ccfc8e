"""The kit of all pages: nothing of others becomes markup, no colour stands for two things, misspelt names are errors."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.run_folder import RunFolder
from unbroken.cli.main import dispatch
from unbroken.errors import MissingExtra
from unbroken.page import shell
from unbroken.page.charts.drawing import as_file
from unbroken.page.charts.spec import Bars, LineChart, Series
from unbroken.page.charts.svg import render as draw
from unbroken.page.elements import Markup, element, short, width_of
from unbroken.page.palette import DASHES, LIGHT, OTHERS, SERIES, distinct, series, variables
from unbroken.progress import RunDir
from unbroken.status import write_report_safely

PACKAGE = Path(shell.__file__).parents[1]
SHELL = Path("page/shell.html")
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202e\x1b[31m"


def filled(template: str, **values: object) -> str:
    """What a template of one line gives, in the environment of the pages."""
    return shell._environment().from_string(template).render(**values)


def test_text_of_others_is_escaped_and_loses_what_turns_text_round() -> None:
    made = filled("<p title=\"{{ x }}\">{{ x }}</p>{{ '<b>'|safe }}", x=EVIL)
    assert "<script" not in made and "<img" not in made and made.endswith("<b>")
    assert "\u202e" not in made and "\x1b" not in made and "[31m" not in made
    assert filled("{{ x }}", x=Markup("<b>")) == "<b>"


def test_a_misspelt_name_is_an_error_and_nothing_known_is_a_dash() -> None:
    from jinja2 import UndefinedError

    with pytest.raises(UndefinedError):
        filled("{{ nmae }}", name=1)
    with pytest.raises(UndefinedError):
        filled("{{ x.nmae }}", x={"name": 1})
    assert filled("{{ x }}", x=None) == "–"
    assert (
        filled("{{ n|plural('node') }} {{ 1|plural('node') }} {{ n|thousands }}", n=2000)
        == "2,000 nodes 1 node 2,000"
    )


@pytest.mark.parametrize(
    "template", [p.relative_to(PACKAGE) for p in sorted(PACKAGE.rglob("*.html"))], ids=lambda p: p.as_posix()
)
def test_a_template_fills_blocks_that_the_shell_has(template: Path) -> None:
    """Another block would not be shown, and nobody would say so."""
    text = (PACKAGE / template).read_text()
    blocks = {p: set(re.findall(r"{% block (\w+) %}", (PACKAGE / p).read_text())) for p in (SHELL, template)}
    if '{% extends "page/shell.html" %}' in text:
        assert "main" in blocks[template] <= blocks[SHELL]


def test_a_page_is_one_file_and_its_data_cannot_close_the_script() -> None:
    made = shell.render("page/shell.html", data={"x": EVIL})
    assert made.startswith("<!doctype html>") and made.count("<script") == 2 and made.count("</script>") == 2
    held = re.search(r'<script type="application/json" id="data">(.*?)</script>', made)
    assert held is not None and json.loads(held[1])["x"].startswith("</script><script>")
    bare = shell.render("page/shell.html")
    assert not re.search(r"(?:src|href)=|@import|url\((?!#)|https?://(?!www\.w3\.org/2000/svg)", bare)
    assert 'id="data"' not in bare


@pytest.fixture
def no_jinja(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    shell._environment.cache_clear()
    yield
    monkeypatch.undo()
    assert shell.render("page/shell.html")


@pytest.mark.usefixtures("no_jinja")
def test_a_page_without_jinja_says_what_to_install() -> None:
    for make in (shell.require, lambda: shell.render("page/shell.html")):
        with pytest.raises(MissingExtra, match="Jinja2"):
            make()


@pytest.mark.usefixtures("no_jinja")
def test_what_was_done_does_not_end_because_its_page_cannot_be_drawn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert not shell.write_beside(tmp_path / "page.html", lambda: shell.render("page/shell.html"))
    assert write_report_safely(RunFolder(RunDir(tmp_path / "run")).run_dir) is None
    assert list(tmp_path.rglob("*.html")) == []
    said = [r for r in caplog.records if "Jinja2" in r.getMessage()]
    assert len(said) == 2 and not any(r.exc_info for r in said), "one line, no traceback"


@pytest.mark.usefixtures("no_jinja")
@pytest.mark.parametrize("command", [["trace", "report"], ["diagnose", "--html", "out.html"]])
def test_where_the_page_is_what_was_asked_for_its_lack_is_said_before_the_work(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.csv").write_text("this is no table\n")
    assert dispatch([*command, "jobs.csv"]) == 4
    assert "Jinja2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "module",
    [
        "unbroken.cli.main",
        "unbroken.trace.report",
        "unbroken.diagnose",
        "unbroken.status",
        "unbroken.page.shell",
    ],
)
def test_only_a_page_that_is_made_imports_jinja(module: str) -> None:
    code = f"import {module}, sys; sys.exit(bool({{'jinja2', 'markupsafe'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_elements_escape_children_and_attributes() -> None:
    made = element("text", EVIL, element("b"), x=1.04, y=2.0, data_tip=EVIL, class_=None, cls="a")
    root = ElementTree.fromstring(made)
    assert [c.tag for c in root] == ["b"] and (root.get("x"), root.get("y"), root.get("class")) == (
        "1",
        "2",
        "a",
    )
    assert root.get("data-tip", "").startswith("</script>") and (root.text or "").startswith("</script>")
    assert 'class="a f-blue s-red"' in element("rect", cls="a", fill=LIGHT["blue"], stroke=LIGHT["red"])


@pytest.mark.parametrize("room", [0, 5, 20, 60, 1000])
def test_a_shortened_text_fits(room: float) -> None:
    for text in ("a-very-long-name-of-a-node", "iiiiiiiiii", "WWWW", ""):
        cut = short(text, room)
        assert width_of(cut) <= room or cut == ""
        assert cut == text if width_of(text) <= room else cut == "" or (cut.endswith("…") and len(cut) >= 4)


def lab(colour: str) -> tuple[float, float, float]:
    """CIE L*a*b* of #rrggbb (D65)."""
    rgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb)
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("ground", [0, 1], ids=["light", "dark"])
def test_colours_of_series_can_be_told_apart_and_seen(ground: int) -> None:
    paper = lab(OTHERS["paper"][ground])
    for (a, x), (b, y) in itertools.combinations(((n, lab(c[ground])) for n, c in SERIES.items()), 2):
        assert sum((p - q) ** 2 for p, q in zip(x, y, strict=True)) ** 0.5 > 20, (a, b)
    for name, c in (SERIES | {"ink": OTHERS["ink"], "soft": OTHERS["soft"], "grey": OTHERS["grey"]}).items():
        assert abs(lab(c[ground])[0] - paper[0]) > 30, name
        assert f"--{name}:{c[ground]};" in variables()


@pytest.mark.parametrize("count", [1, 6, 12, 13, 40, 48])
def test_no_two_series_of_a_chart_look_alike(count: int) -> None:
    same = [(series(0), "")] * count
    assert len(set(distinct(same))) == count <= len(SERIES) * len(DASHES)
    kept = [(series(i % 12), "6 4" if i >= 12 else "") for i in range(min(count, 24))]
    assert distinct(kept) == kept, "what differs already stays as it is"
    chart = LineChart(
        "t", "x", "y", tuple(Series(f"s{i}", ((0, i), (1, i)), LIGHT["grey"]) for i in range(count))
    )
    assert len({(s.color, s.dash) for s in chart.series}) == count
    groups = tuple((f"g{i}", LIGHT["red"], (float(i),)) for i in range(min(count, 12)))
    assert len({g[1] for g in Bars("t", "v", ("a",), groups).groups}) == len(groups)
    ElementTree.fromstring(draw(chart))


def test_a_drawing_as_a_file_has_a_namespace_and_light_colours_of_its_own() -> None:
    chart = LineChart("t", "x", "y", (Series("a", ((0, 0), (1, 1)), LIGHT["blue"]),))
    root = ElementTree.fromstring(as_file(draw(chart)))
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and root[0].get("fill") == "#fff"
    assert LIGHT["blue"] in {e.get("stroke") for e in root.iter()}
    assert "http" not in draw(chart)
