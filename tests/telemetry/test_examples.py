"""The example of the telemetry page runs and names each phase."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "telemetry_phases.py"


def test_phases(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    seen = {line.split()[0] for line in lines if "host_cpu_util_pct" in line}
    assert seen == {"load", "generate", "score"}
