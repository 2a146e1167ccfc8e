"""What is installed on a node, to be compared with the other nodes': driver, kernel, libraries."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from ...version import __version__
from .result import CheckResult, State

_LIBRARIES = ("torch", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "numpy", "safetensors")


def read_versions(nvml: Any | None = None) -> dict[str, str]:
    """By name; what is not there is left out. torch is not imported."""
    found = {"kernel": platform.release(), "python": platform.python_version(), "unbroken": __version__}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if nvml is not None:
        for key, ask in (
            ("driver", lambda: nvml.nvmlSystemGetDriverVersion()),
            ("cuda of the driver", lambda: str(nvml.nvmlSystemGetCudaDriverVersion())),
            ("vbios", lambda: nvml.nvmlDeviceGetVbiosVersion(nvml.nvmlDeviceGetHandleByIndex(0))),
        ):
            try:
                said = ask()
                found[key] = said if isinstance(said, str) else said.decode()
            except (nvml.NVMLError, AttributeError):
                continue
    return found


def compare_versions(nodes: Mapping[str, Mapping[str, str]]) -> dict[str, list[CheckResult]]:
    """By node, where it has other versions than most: bad where a clear majority has another one. With two nodes, or half against
    half, it is only said."""
    out: dict[str, list[CheckResult]] = {n: [] for n in nodes}
    names = sorted({k for found in nodes.values() for k in found})
    for name in names:
        held = {n: found.get(name, "none") for n, found in nodes.items()}
        (most, count), *others = Counter(held.values()).most_common()
        if not others:
            continue
        clear = count * 2 > len(held)
        for node, version in held.items():
            if version == most and clear:
                continue
            text = f"{name} is {version}; " + (
                f"{count} of {len(held)} nodes have {most}" if clear else "no version has a majority"
            )
            out[node].append(CheckResult("versions", State.BAD if clear else State.NOT_CHECKED, text, name))
    return out
