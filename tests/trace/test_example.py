"""The example runs, and the documentation's commands exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


def test_the_example_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = runpy.run_path(str(REPO / "examples" / "characterise_a_cluster.py"))
    module["main"]([], tmp_path)
    assert (tmp_path / "report.html").stat().st_size > 50_000
    assert "CANCELLED" in capsys.readouterr().out


def test_the_page_names_every_format_command_and_bound() -> None:
    from unbroken.cli.trace import app
    from unbroken.trace.readers import READERS

    text = (REPO / "docs" / "trace.md").read_text()
    for reader in READERS:
        assert f"`{reader.name}`" in text, reader.name
    for command in app.registered_commands:
        name = command.name or (command.callback.__name__ if command.callback else "")
        assert re.search(rf"`{name}[ `]", text), name
    bounds = (REPO / "tests" / "trace" / "test_published.py").read_text()
    assert "STATE_JOBS, STATE_TIME, TYPE_JOBS, TYPE_TIME = 1.0, 7.0, 1.0, 9.0" in bounds
    assert "= 4.5, 1.2, 1.35, 1.6, 1.35" in bounds
