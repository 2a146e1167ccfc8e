"""The example runs, and the page's commands and figures are what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "PYTHONPATH": str(REPO / "src")}


def test_the_example_finds_the_node() -> None:
    done = subprocess.run(
        [sys.executable, str(REPO / "examples" / "diagnose_a_job.py")],
        capture_output=True,
        text=True,
        env=ENV,
        check=True,
    )
    assert "failed: ECCError" in done.stdout and re.search(r"restart without node-\d+", done.stdout)


def test_neither_torch_nor_the_slow_parts_are_imported() -> None:
    code = "import sys, unbroken.diagnose; print([m for m in ('torch', 'numpy', 'sqlite3', 'rich', 'urllib.request') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV, check=True)
    assert done.stdout.strip() == "[]"


def test_the_page_names_every_reason_and_its_figures_have_files() -> None:
    page = (REPO / "docs" / "diagnosis.md").read_text()
    from unbroken.diagnose import REASONS

    assert not [r for r in REASONS if r not in page]
    for name in re.findall(r"benchmarks/results/(diagnosis\w*\.json)", page):
        value = json.loads((REPO / "benchmarks" / "results" / name).read_text())
        assert value.get("machine") or value.get("commit")
    for option in re.findall(r"unbroken diagnose [^\n`]*?(--[a-z\-]+)", page):
        assert option in (REPO / "src" / "unbroken" / "cli" / "diagnose.py").read_text(), option
