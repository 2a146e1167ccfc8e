"""The example of the telemetry page runs and names each phase."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "telemetry_phases.py"


def test_phases() -> None:
    p = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=False, timeout=60
    )
    assert p.returncode == 0, p.stderr
    seen = {line.split()[0] for line in p.stdout.splitlines() if "host_cpu_util_pct" in line}
    assert seen == {"load", "generate", "score"}
