"""Where figures were measured, and of which commit: every result says it."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any


def describe_machine() -> dict[str, Any]:
    """Processor, cores, load of the last minute, Python, system, commit (with `-dirty` where something is not committed)
    and date; what is not known is None."""
    model = None
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
    except OSError:
        pass  # no Linux: the processor stays unknown
    carried = Path(__file__).parent.parent / "COMMIT"
    if carried.is_file():  # a tree that was carried to another machine, perhaps into another repository
        commit: str | None = carried.read_text().strip()
    else:
        commit = _describe_commit()
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "commit": commit,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _describe_commit() -> str | None:
    asked = ["git", "describe", "--always", "--dirty", "--abbrev=9", "--exclude=*"]
    try:
        told = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return None  # no git here
    return told.stdout.strip() or None


def driver() -> str | None:
    """The version of the GPUs' driver; None without one."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return told.stdout.split("\n")[0].strip() or None
