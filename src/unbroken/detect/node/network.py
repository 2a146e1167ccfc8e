"""Network interfaces and InfiniBand ports, by what Linux says of them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from .counters import describe_counts, read_counters
from .result import CheckResult, State


def check_network(expected: Collection[str] = (), root: Path = Path("/")) -> list[CheckResult]:
    """`expected` are interfaces, and ports such as mlx5_0/1, that have to be up. Of others a missing carrier says nothing: they
    may be meant to have none."""
    found = []
    seen = {
        p.name: _find_interface_trouble(p)
        for p in sorted(root.glob("sys/class/net/*"))
        if (p / "device").exists()
    }
    ports = sorted(root.glob("sys/class/infiniband/*/ports/*"))
    seen |= {f"{p.parent.parent.name}/{p.name}": _find_port_trouble(p) for p in ports}
    for name in sorted(set(expected) - seen.keys()):
        found.append(CheckResult("network", State.BAD, "it is not there", name))
    counted = read_counters(None, root)
    for name, trouble in seen.items():
        if not trouble:
            errors = describe_counts(counted.get(("network", name), {}))
            found.append(CheckResult("network", State.GOOD, f"it is up{errors}", name))
        elif name in expected:
            found.append(CheckResult("network", State.BAD, trouble, name))
        else:
            found.append(
                CheckResult("network", State.NOT_CHECKED, f"{trouble}; expect it, and it is a fault", name)
            )
    return found or [CheckResult("network", State.NOT_CHECKED, "there is no interface of hardware")]


def _find_interface_trouble(folder: Path) -> str:
    state = _read(folder / "operstate")
    return "" if state == "up" else f"it is {state or 'in an unknown state'}"


def _find_port_trouble(folder: Path) -> str:
    state = _read(folder / "state")
    return "" if "ACTIVE" in state else f"the port is {state or 'in an unknown state'}"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
