"""Keeps a benchmark away from what the user has: past incidents, runtime estimates, models' hashes, settings."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path


def use_own_folders() -> None:
    """Folders of its own for state, caches and settings, for this process and all that it starts; gone at its end."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("HF_HOME", str(cache / "huggingface"))  # models and data sets stay where they are
    place = Path(tempfile.mkdtemp(prefix="unbroken-benchmark-"))
    starter = os.getpid()
    atexit.register(lambda: shutil.rmtree(place, ignore_errors=True) if os.getpid() == starter else None)
    for name in ("STATE", "CACHE", "CONFIG"):
        os.environ[f"XDG_{name}_HOME"] = str(place / name.lower())
    os.environ.pop("UNBROKEN_INCIDENTS", None)
