"""What a rank prints onto a disk that is full is lost, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unbroken.progress import page as layout

PRINTS = """
import resource, sys, unbroken
if sys.argv[1] == "attached":
    unbroken.attach()
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
for stream in (sys.stdout, sys.stderr):
    print("before", file=stream)
resource.setrlimit(resource.RLIMIT_FSIZE, (20, most))
for step in range(100):
    print("step", step)
    print("warning", step, file=sys.stderr, flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
for stream in (sys.stdout, sys.stderr):
    print("after", file=stream)
"""


@pytest.mark.parametrize("unbuffered", ["1", ""])
def test_a_training_goes_on_without_the_lines_that_the_disk_refuses(tmp_path: Path, unbuffered: str) -> None:
    page = tmp_path / "rank-0.page"
    layout.create(page, rank=0, attempt=1)
    env = {**os.environ, "UNBROKEN_PAGE": str(page), "PYTHONUNBUFFERED": unbuffered}
    codes = {}
    for how in ("attached", "alone") if unbuffered else ("attached",):
        with open(tmp_path / how, "ab") as out, open(tmp_path / f"{how}.err", "ab") as err:
            command = [sys.executable, "-c", PRINTS, how]
            codes[how] = subprocess.run(command, stdout=out, stderr=err, env=env, check=False).returncode
    assert codes["attached"] == 0 != codes.get("alone"), "a disk like this one ends a script that prints"
    for name in ("attached", "attached.err"):
        text = (tmp_path / name).read_text()
        assert "before" in text and text.endswith("after\n")
        if unbuffered or name.endswith("err"):
            assert text.count("bytes of output are lost") == 1 and "step 99" not in text
