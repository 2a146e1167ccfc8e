"""kill -9 of a writer, of a pruner and of an exporter at random moments: what passes is whole, what was announced stays."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unbroken.checkpoint.catalogue import contents as catalogue
from unbroken.checkpoint.storage.posix import PosixStorage
from unbroken.progress.records.candidate import parse_folder_name

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(900)]
KILLS = int(os.environ.get("KILLS", "40"))

# One process that forks a worker whenever it is told to: importing torch for each kill would take the time.
HOST = """
import os, signal, sys
from pathlib import Path
from unbroken.checkpoint.catalogue.retention import Retention, apply
from unbroken.checkpoint.storage.posix import PosixStorage
from tests.support.checkpoints import save_small
import torch
torch.set_num_threads(1)
root = Path(sys.argv[1])
for line in sys.stdin:
    attempt = int(line)
    worker = os.fork()
    if worker == 0:
        for step in range(1, 10_000):
            name = save_small(root, step, attempt, elements=200_000)
            os.write(1, f"{name}\\n".encode())
            apply(PosixStorage(root), Retention(2), verified=[name])
    os.write(1, f"worker {worker}\\n".encode())
    os.waitpid(worker, 0)
    os.write(1, b"gone\\n")
"""


def test_writers_and_pruners(tmp_path: Path) -> None:
    root, dice = tmp_path / "checkpoints", random.Random(7)
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert host.stdin is not None
    assert host.stdout is not None
    storage, announced = PosixStorage(root), ""
    try:
        for attempt in range(1, KILLS + 1):
            host.stdin.write(f"{attempt}\n")
            worker = next(int(t.split()[1]) for t in host.stdout if t.startswith("worker"))
            time.sleep(dice.uniform(0.0, 0.4))
            os.kill(worker, signal.SIGKILL)
            for told in host.stdout:
                if told.startswith("gone"):
                    break
                announced = told.strip()
            found = catalogue.listing(storage)
            for f in found:
                assert f.status in ("committed", "incomplete"), (f.name, f.why)
                if f.committed:
                    result = catalogue.verify_in(storage, f.name)
                    assert result.ok, result.problems
            if announced:
                key = parse_folder_name(announced)
                assert key is not None
                newest = catalogue.newest(storage)
                assert (newest.attempt, newest.step) >= (key[1], key[0]), "an announced one was lost"
    finally:
        host.kill()
        host.wait()
    assert announced
