"""What this node's ranks would import: versions that have to be the same on all nodes of a run."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from ....version import __version__

_PACKAGES = ("torch",)
"""Whose versions decide how ranks talk with each other, and what they compute."""


def read_versions() -> dict[str, str]:
    """By name; "none" for a package that is not installed. Nothing is imported."""
    found = {"python": platform.python_version(), "unbroken": __version__}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found
