"""A disk that is really full, at any point of an evaluation: said as one, and the same command goes on to the same scores."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unbroken.cli.main import dispatch
from unbroken.testing.evaluation import BACKEND, HARNESS, fake_model

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(400)]
SUITE = f"""
[suite]
name = "d"
[[task]]
name = "a"
harness = "{HARNESS}"
options = {{samples = 400}}
[[task]]
name = "p"
harness = "plain"
"""


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own; its size is changed by mounting it again."""
    place = tmp_path / "small"
    place.mkdir()
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", place], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a file system of a given size needs root and the right to mount")
    yield place
    subprocess.run(["umount", place], check=True)


def resize(place: Path, kib: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={kib}k", place], check=True)


def test_wherever_the_disk_gets_full_it_is_said_and_the_same_command_goes_on(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("s.toml").write_text(SUITE)
    Path("p").mkdir()
    rows = [{"q": f"{i} " + "x" * 200, "answer": ""} for i in range(300)]
    Path("p/data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    Path("p/infer.py").write_text("def prompt(row):\n    return row['q']\n")
    Path("p/score.py").write_text("def score(row, output):\n    return len(output) % 3 == 0\n")
    fake_model(tmp_path / "m")

    def run(out: Path) -> tuple[int, str, list[Any]]:
        code = dispatch(["eval", "run", "s.toml", "-m", "m", "--backend", BACKEND, "--workers", "1", "--cpu-workers", "1",
                         "--priors", "none", "--quiet", "--json", "-o", str(out)])  # fmt: skip
        said = capsys.readouterr()
        scores = json.loads(said.out)["scores"] if said.out and not code else []
        return code, said.err, [(s["task"], s["scored"], s["metrics"]) for s in scores]

    code, _, expected = run(small / "whole")
    assert code == 0 and len(expected) == 2
    blocks = [p.lstat().st_blocks for p in (small / "whole").rglob("*")]
    used = sum(blocks) // 2 + 4  # KiB of what a whole evaluation leaves
    subprocess.run(["rm", "-rf", small / "whole"], check=True)
    for share in (2, 15, 30, 45, 55, 65, 75, 85):
        resize(small, max(4, used * share // 100))
        out = small / "out"
        code, said, _ = run(out)
        assert (code, "No space left" in said) == (50, True), (share, said)
        assert "the same command" in said and "Traceback" not in said and "defect" not in said, share
        resize(small, 64 << 10)
        code, said, found = run(out)
        assert (code, found) == (0, expected), (share, said)
        subprocess.run(["rm", "-rf", out], check=True)
