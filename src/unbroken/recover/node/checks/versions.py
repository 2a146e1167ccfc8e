"""What this node's ranks would import: versions that have to be the same on all nodes of a run."""

from __future__ import annotations

from ....detect.node.versions import read_versions

SAME = ("python", "unbroken", "torch")
"""What decides how ranks talk with each other, and what they compute."""


def read_needed() -> dict[str, str]:
    """By name; "none" for a package that is not installed. Nothing is imported."""
    found = read_versions()
    return {name: found.get(name, "none") for name in SAME}
