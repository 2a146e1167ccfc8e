"""What the node that this process runs on is: read from its kernel and its interfaces, by the agent alone."""

from __future__ import annotations

import glob
import ipaddress
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import UsageError
from ..machine import available_memory, usable_cpus, usable_memory
from ..version import __version__
from .clocks import ClockOffset
from .hello import Gpu, Hello, NodeAddress

_BOOT_ID, _GPUS = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/driver/nvidia/gpus")


def describe_node(
    node: str,
    run_id: str,
    scratch: Path,
    *,
    clock: ClockOffset | None = None,
    wall_clock: ClockOffset | None = None,
) -> Hello:
    """The hello of this host. `scratch` must be there. Raises OSError where it is not."""
    memory, free = usable_memory(), available_memory()
    gpus = tuple(find_gpus())
    return Hello(
        node=node, run_id=run_id, host=socket.gethostname(), boot_id=read_boot_id(), interpreter=sys.executable,
        version=__version__, cpus=usable_cpus(), memory=memory, memory_free=memory if free is None else free, scratch=str(scratch),
        scratch_free=shutil.disk_usage(scratch).free, addresses=tuple(find_addresses()), gpus=gpus,
        visible=tuple(find_visible(gpus)), clock=clock or ClockOffset(), wall_clock=wall_clock or ClockOffset(),
    )  # fmt: skip


def read_boot_id(path: Path = _BOOT_ID) -> str:
    """The kernel's name for this boot; "" where it tells none."""
    try:
        return path.read_text().strip()[:64]
    except OSError:
        return ""


def find_addresses() -> list[NodeAddress]:
    """The addresses of this host's interfaces that are up, loopback last: a host without a network has nothing else."""
    import psutil

    up = {name for name, s in psutil.net_if_stats().items() if s.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    found = [
        NodeAddress(name, a.address)
        for name, addresses in psutil.net_if_addrs().items()
        if name in up
        for a in addresses
        if a.family in families
    ]
    return rank_addresses(found)


def find_address(interface: str) -> str:
    """The address of an interface of this host, IPv4 first. Raises UsageError for one that is not there or has none."""
    import psutil

    addresses = psutil.net_if_addrs()
    if interface not in addresses:
        raise UsageError(
            f"this host has no interface '{interface}'", hint=f"It has {', '.join(sorted(addresses))}"
        )
    found = [a.address for a in addresses[interface] if a.family.name in ("AF_INET", "AF_INET6")]
    if not found:
        raise UsageError(f"the interface '{interface}' has no address", hint="Choose another")
    return str(min(found, key=lambda a: ":" in a)).partition("%")[0]


def rank_addresses(found: Iterable[NodeAddress]) -> list[NodeAddress]:
    """Those that others can reach before those that they cannot (loopback, and addresses of one link); IPv4 first."""

    def key(a: NodeAddress) -> tuple[bool, bool, bool, str, str]:
        ip = ipaddress.ip_address(a.address.partition("%")[0])
        return ip.is_loopback, ip.is_link_local, ip.version == 6, a.interface, a.address

    return sorted(found, key=key)


def find_gpus(folder: Path = _GPUS) -> list[Gpu]:
    """The GPUs that NVIDIA's driver shows this process, in the order of their PCI addresses; none without the driver.

    The driver's own files tell them without a library and without waking a device.
    """
    found = []
    try:
        devices = sorted(os.listdir(folder))
    except OSError:
        return []
    for device in devices:
        try:
            lines = (folder / device / "information").read_text().splitlines()
        except OSError:
            continue
        said = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        if uuid := said.get("GPU UUID"):
            found.append(Gpu(uuid, said.get("Model", "")))
    return found


def find_visible(gpus: Sequence[Gpu], devices: str = "/dev/nvidia[0-9]*") -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them: what stands there already; else by UUID, which
    is sure whatever order a library counts in; else by number, where the driver tells no UUID of each."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [v.strip() for v in visible.split(",") if v.strip() and v.strip() != "-1"]
    found = sorted(int(n[0]) for p in glob.glob(devices) if (n := re.search(r"\d+$", p)))
    if found and len(found) == len(gpus):
        return [g.uuid for g in gpus]
    return [str(n) for n in found]
