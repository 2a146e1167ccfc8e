"""The report in a real browser: no error, hovering tells, nothing is fetched, light and dark."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.run_folder import RunFolder
from unbroken.progress import RunDir
from unbroken.status import write_report

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PROBE = """
<div id="probe"></div><script>
const said = [], probe = document.getElementById("probe");
addEventListener("error", (e) => said.push("ERROR " + e.message));
function hover(id, share) {
  const figure = document.getElementById(id), svg = figure.querySelector("svg"), box = svg.getBoundingClientRect();
  const at = {clientX: box.left + share * box.width, clientY: box.top + box.height / 2, bubbles: true};
  svg.dispatchEvent(new MouseEvent("mousemove", at));
  const tip = document.getElementById("tip");
  said.push(id + ": " + (tip.hidden ? "none" : "block") + " " + tip.textContent.replaceAll("\\n", " / "));
  svg.dispatchEvent(new MouseEvent("mouseleave"));
  said.push(id + " left: " + (tip.hidden ? "none" : "block"));
}
hover("curve", 0.5); hover("timeline", 0.5); hover("curve", 0.001);
dispatchEvent(new Event("beforeprint"));
said.push("open " + [...document.querySelectorAll("details")].every((d) => d.open));
dispatchEvent(new Event("afterprint"));
said.push("closed " + [...document.querySelectorAll("details")].every((d) => !d.open));
said.push("fetched " + performance.getEntriesByType("resource").length);
said.push("wide " + (document.documentElement.scrollWidth > innerWidth));
probe.textContent = said.join("\\n");
</script>
"""


def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("there is no Chromium")


@pytest.mark.made_up
@pytest.mark.parametrize("incidents", [0, 1, 30])
def test_in_a_browser(tmp_path: Path, incidents: int) -> None:
    made = RunFolder(RunDir(tmp_path / "run"))
    made.attempt()
    for i in range(incidents):
        made.steps(30)
        made.incident(("failed", "hung", "node_lost")[i % 3], back_to=made.step - 10)
    made.steps(200)
    made.end()
    text = write_report(made.run_dir).read_text()
    page = tmp_path / "run" / "probe.html"
    page.write_text(text.replace("</body>", PROBE + "</body>"))
    done = subprocess.run(
        [
            browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,1400", "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, check=False, timeout=90,
    )  # fmt: skip
    found = re.search(r'<div id="probe">(.*?)</div>', done.stdout, re.S)
    assert found is not None, done.stderr[-2000:]
    said = html.unescape(found[1]).splitlines()
    assert not [s for s in said if s.startswith("ERROR")]
    assert re.match(r"curve: block step \d+ / loss [\d.]+ / attempt \d+, after .*s", said[0]), said
    assert said[1] == "curve left: none"
    assert re.match(r"timeline: block attempt \d+: \w+", said[2]), said
    assert said[4].startswith("curve: none"), "beside the curve nothing is told"
    assert {"open true", "closed true", "fetched 0", "wide false"} <= set(said)
