"""Whether this node is fit to train, by the quick checks, for the supervisor: within seconds, and never in the way."""

from __future__ import annotations

from dataclasses import asdict

from ....detect.node.quick import CheckedNode, check_node
from ....detect.node.versions import read_versions
from ....detect.node.whole import open_nvml
from ...wire import Message

_WITHIN_S = 5.0


def check_health() -> Message:
    """What each check found, and what is installed. Folders are not looked at: the run finds out by itself."""
    nvml, why = open_nvml()
    found = check_node(CheckedNode(nvml, why), _WITHIN_S)
    return {
        "checks": [{k: str(v) for k, v in asdict(c).items()} for c in found],
        "versions": read_versions(nvml),
    }
