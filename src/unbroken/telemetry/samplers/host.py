"""Readings of the host from Linux' own counters: CPU, memory, load, NICs, InfiniBand ports, disks.

The files stay open and are read again from their start: one system call each and no parsing of what is not used.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ...errors import InputError
from .reading import Coverage, Reading

SECTOR = 512
"""Bytes: the unit of /proc/diskstats whatever the disk's own sectors are (Linux, iostats.rst)."""
IB_WORD = 4
"""Bytes: the unit of port_xmit_data and port_rcv_data (InfiniBand specification, PortCounters)."""


class HostSampler:
    """Reads the counters below `root`, the root of a Linux system (a test gives a folder of its own)."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._fds: dict[str, int] = {}
        self._before: dict[tuple[str, str], float] = {}
        self._then: float | None = None
        if not (root / "proc" / "stat").exists():
            raise InputError("the host cannot be read", where=str(root / "proc"), hint="This needs Linux")
        self._nics = frozenset(_physical(root / "sys/class/net", "device"))
        self._disks = frozenset(_physical(root / "sys/block", "device"))
        self._ports = [
            (f"{port.parent.parent.name}/{port.name}", port / "counters")
            for port in sorted(root.glob("sys/class/infiniband/*/ports/*"))
            if (port / "counters/port_xmit_data").exists()
        ]
        self._packages = [
            zone / "energy_uj"
            for zone in sorted(root.glob("sys/class/powercap/*-rapl:*"))
            if zone.name.count(":") == 1 and os.access(zone / "energy_uj", os.R_OK)
        ]
        self._joules: list[float] = []
        self._cpu: tuple[float, float] | None = None

    def coverage(self) -> Coverage:
        """What this host has."""
        metrics = ["host_cpu_util_pct", "host_mem_used_pct", "host_mem_used_gib", "host_load1"]
        metrics += ["nic_tx_bytes_per_s", "nic_rx_bytes_per_s"]
        missing = []
        for there, names, what in (
            (
                self._packages,
                ("cpu_power_w",),
                "no RAPL counter under /sys/class/powercap that this user may read",
            ),
            (self._disks, ("disk_read_bytes_per_s", "disk_write_bytes_per_s"), "no disk under /sys/block"),
            (
                self._ports,
                ("ib_tx_bytes_per_s", "ib_rx_bytes_per_s"),
                "no InfiniBand port under /sys/class/infiniband",
            ),
        ):
            if there:
                metrics += names
            else:
                missing += [(n, what) for n in names]
        return Coverage(tuple(sorted(metrics)), tuple(missing))

    def read(self, now: float) -> list[Reading]:
        """The readings of this moment; rates appear from the second call on."""
        out: list[Reading] = []
        self._read_cpu(out)
        self._read_memory(out)
        load = self._text("proc/loadavg", 128).split()
        if load:
            out.append(Reading(None, None, "host_load1", float(load[0])))
        elapsed = now - self._then if self._then is not None else 0.0
        self._then = now
        self._read_power(elapsed, out)
        for device, metric, counter in self._counters():
            key = (metric, device)
            before = self._before.get(key)
            self._before[key] = counter
            # A smaller counter: the driver was loaded again, and the difference says nothing.
            if before is not None and elapsed > 0 and counter >= before:
                out.append(Reading(None, device, metric, (counter - before) / elapsed))
        return out

    def close(self) -> None:
        """Closes the files."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _read_cpu(self, out: list[Reading]) -> None:
        fields = [float(x) for x in self._text("proc/stat", 256).split("\n", 1)[0].split()[1:9]]
        if len(fields) < 5:
            return
        idle, total = fields[3] + fields[4], sum(fields)
        if self._cpu is not None and total > self._cpu[1]:
            busy = 1.0 - (idle - self._cpu[0]) / (total - self._cpu[1])
            out.append(Reading(None, None, "host_cpu_util_pct", 100.0 * min(1.0, max(0.0, busy))))
        self._cpu = (idle, total)

    def _read_memory(self, out: list[Reading]) -> None:
        kib = {}
        for line in self._text("proc/meminfo", 256).splitlines():
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                kib[name] = float(rest.split()[0])
        if len(kib) == 2 and kib["MemTotal"]:
            used = kib["MemTotal"] - kib["MemAvailable"]
            out.append(Reading(None, None, "host_mem_used_gib", used / 2**20))
            out.append(Reading(None, None, "host_mem_used_pct", 100.0 * used / kib["MemTotal"]))

    def _read_power(self, elapsed: float, out: list[Reading]) -> None:
        """Watts of all processor packages together, from counters that begin again at their range's end."""
        texts = [self._text(str(p.relative_to(self._root)), 64).strip() for p in self._packages]
        joules = [float(t) / 1e6 for t in texts if t.isdigit()]
        before, self._joules = self._joules, joules
        if not joules or len(before) != len(joules) or elapsed <= 0:
            return
        spent = [now - then for now, then in zip(joules, before, strict=True)]
        if min(spent) >= 0:
            out.append(Reading(None, None, "cpu_power_w", sum(spent) / elapsed))

    def _counters(self) -> Iterable[tuple[str, str, float]]:
        """(device, metric of the rate, bytes so far) of each NIC, port and disk."""
        for line in self._text("proc/net/dev", 1 << 16).splitlines()[2:]:
            name, _, rest = line.partition(":")
            name = name.strip()
            if name != "lo" and (not self._nics or name in self._nics):
                fields = rest.split()
                yield name, "nic_rx_bytes_per_s", float(fields[0])
                yield name, "nic_tx_bytes_per_s", float(fields[8])
        for port, counters in self._ports:
            for metric, name in (
                ("ib_tx_bytes_per_s", "port_xmit_data"),
                ("ib_rx_bytes_per_s", "port_rcv_data"),
            ):
                text = self._text(str(counters.relative_to(self._root) / name), 64)
                if text.strip().isdigit():
                    yield port, metric, float(text) * IB_WORD
        if self._disks:
            for line in self._text("proc/diskstats", 1 << 16).splitlines():
                fields = line.split()
                if len(fields) > 9 and fields[2] in self._disks:
                    yield fields[2], "disk_read_bytes_per_s", float(fields[5]) * SECTOR
                    yield fields[2], "disk_write_bytes_per_s", float(fields[9]) * SECTOR

    def _text(self, name: str, size: int) -> str:
        """The start of a counter file; empty if it is gone (an unplugged device)."""
        try:
            fd = self._fds.get(name)
            if fd is None:
                fd = self._fds[name] = os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC)
            return os.pread(fd, size, 0).decode(errors="replace")
        except OSError:
            return ""


def _physical(folder: Path, marker: str) -> list[str]:
    """The entries of a /sys folder that stand for hardware and not for a bridge, a tunnel or a loop device."""
    try:
        return [e.name for e in folder.iterdir() if (e / marker).exists()]
    except OSError:
        return []
