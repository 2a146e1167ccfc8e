"""The script of the kit in a real browser: tips, sorting with what unfolds below a row, filtering, folding for print."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from unbroken.page import shell
from unbroken.page.elements import Markup, element

CHROMIUM = next(
    (p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None
)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
]

TABLE = """{% extends "page/shell.html" %}{% block main %}{{ drawn }}
<input data-filters="#rows"><table><thead><tr><th data-sort="text">name</th><th data-sort="num">value</th></tr></thead><tbody id="rows">
{% for name, value in rows %}<tr><td><button class="unfold" aria-expanded="false"></button>{{ name }}</td><td>{{ value }}</td></tr>
<tr class="more" hidden><td colspan="2">about {{ name }}</td></tr>{% endfor %}</tbody></table>
<details><summary>s</summary>d</details>{% endblock %}"""
ROWS = (("node-10", "1,200"), ("node-2", "–"), ("node-1", "3.5"), ("node-30", "-4"))
PROBE = """<div id="probe"></div><script>
const said = [], all = (q) => [...document.querySelectorAll(q)], heads = all("th");
addEventListener("error", (e) => said.push("ERROR " + e.message));
const names = () => all("#rows > tr:not(.more)").map((r) => r.children[0].textContent + (r.nextElementSibling.textContent === "about " + r.children[0].textContent ? "" : "!")).join(" ");
heads[0].click(); said.push("name up: " + names());
heads[0].click(); said.push("name down: " + names());
heads[1].click(); said.push("value down: " + names());
heads[1].click(); said.push("value up: " + names());
all(".unfold")[0].click(); said.push("unfolded: " + all("tr.more:not([hidden])").length);
const input = document.querySelector("input"); input.value = "node 30"; input.dispatchEvent(new Event("input"));
said.push("found: " + all("#rows > tr:not(.more):not([hidden])").map((r) => r.textContent.slice(0, 7)));
const bar = document.querySelector("svg rect"), tip = document.getElementById("tip");
bar.dispatchEvent(new MouseEvent("mousemove", {clientX: 5, clientY: 5, bubbles: true}));
said.push("tip: " + tip.querySelector("b").textContent + "|" + tip.hidden + "|" + tip.querySelectorAll("img").length);
document.body.dispatchEvent(new MouseEvent("mousemove", {bubbles: true})); said.push("left: " + tip.hidden);
dispatchEvent(new Event("beforeprint")); said.push("print: " + document.querySelector("details").open);
document.getElementById("probe").textContent = said.join("\\n");
</script></body>"""


def test_tips_tables_and_print(tmp_path: Path) -> None:
    title = element("title", "<img src=x>first\nsecond")
    drawn = Markup(element("svg", element("rect", title, width=9, height=9), viewBox="0 0 9 9"))
    page = shell._environment().from_string(TABLE).render(drawn=drawn, rows=ROWS, data=None)
    file = tmp_path / "page.html"
    file.write_text(page.replace("</body>", PROBE))
    done = subprocess.run(
        [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri(),
        ],
        capture_output=True, text=True, check=False, timeout=90,
    )  # fmt: skip
    found = re.search(r'<div id="probe">(.*?)</div>', done.stdout, re.S)
    assert found is not None, done.stderr[-2000:]
    assert html.unescape(found[1]).splitlines() == [
        "name up: node-1 node-2 node-10 node-30",
        "name down: node-30 node-10 node-2 node-1",
        "value down: node-10 node-1 node-30 node-2",
        "value up: node-2 node-30 node-1 node-10",
        "unfolded: 1",
        "found: node-30",
        "tip: <img src=x>first|false|0",
        "left: true",
        "print: true",
    ]
