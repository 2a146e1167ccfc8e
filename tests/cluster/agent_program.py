"""Stands for an agent in the contract tests: says what it was given, leaves a process beside itself, ends when told."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    args, _ = parser.parse_known_args()
    folder, node = args.folder, os.environ["UNBROKEN_NODE"]
    (folder / f"{node}.exit").unlink(missing_ok=True)
    secret = sys.stdin.buffer.read()
    child = subprocess.Popen(["sleep", "300"], env={**os.environ, "UNBROKEN_ROLE": "keeper"})
    report = {
        "pid": os.getpid(), "child": child.pid, "secret": secret.decode(), "arguments": sys.argv[1:],
        "environment": dict(os.environ), "cwd": os.getcwd(),
    }  # fmt: skip
    aside = folder / f".{node}.{os.getpid()}"
    aside.write_text(json.dumps(report))
    aside.rename(folder / f"{node}.report")
    while not (folder / f"{node}.exit").exists():
        time.sleep(0.02)
    return int((folder / f"{node}.exit").read_text())


if __name__ == "__main__":
    sys.exit(main())
