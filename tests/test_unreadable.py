"""A file that is no text is told in words, wherever a command reads one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "command",
    [
        ["train", "--config", "FILE"],
        ["diagnose", "--rules", "FILE", "FILE"],
        ["trace", "report", "FILE", "--map", "FILE"],
        ["eval", "plan", "FILE", "--gpus", "1"],
    ],
    ids=lambda c: c[0],
)
def test_what_is_no_text(tmp_path: Path, command: list[str]) -> None:
    file = tmp_path / "file.toml"
    file.write_bytes(b"\xff\xfe not text")
    done = subprocess.run(
        [sys.executable, "-m", "unbroken", *(str(file) if x == "FILE" else x for x in command)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode not in (0, 1)
    assert "no text" in done.stderr
    assert "codec" not in done.stderr
    assert "Traceback" not in done.stderr
