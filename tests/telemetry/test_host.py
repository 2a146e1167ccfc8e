"""The host's counters are read right, from files of the kernel's shape."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from unbroken.errors import InputError
from unbroken.samples.schema import METRICS
from unbroken.telemetry.samplers.host import HostSampler


class Machine:
    """A root folder with the files of a kernel, whose counters a test moves."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for device in ("eth0", "eth1"):
            (root / "sys/class/net" / device / "device").mkdir(parents=True)
        for virtual in ("lo", "docker0"):
            (root / "sys/class/net" / virtual).mkdir(parents=True)
        (root / "sys/block/nvme0n1/device").mkdir(parents=True)
        (root / "sys/block/loop0").mkdir(parents=True)
        (root / "proc/net").mkdir(parents=True)
        self.set(busy=100, idle=300, rx=0, tx=0, read=0, ib=0)

    def set(self, *, busy: int, idle: int, rx: int, tx: int, read: int, ib: int, joules: int = 0) -> None:
        p = self.root / "proc"
        (p / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 2 3 4\nintr 1 2 3\n")
        (p / "meminfo").write_text("MemTotal:       1000000 kB\nMemFree: 1 kB\nMemAvailable:    250000 kB\n")
        (p / "loadavg").write_text("3.25 2.00 1.00 1/100 12345\n")
        line = "{:>6}: {} 1 0 0 0 0 0 0 {} 1 0 0 0 0 0 0\n"
        (p / "net/dev").write_text(
            "Inter-|   Receive\n face |bytes\n"
            + "".join(line.format(d, rx, tx) for d in ("lo", "eth0", "docker0", "eth1"))
        )
        row = "{} {} {} 1 1 {} 1 1 1 {} 1 0 1 1\n"
        (p / "diskstats").write_text(
            row.format(259, 0, "nvme0n1", read, 8)
            + row.format(259, 1, "nvme0n1p1", read, 8)
            + row.format(7, 0, "loop0", 1, 1)
        )
        for zone, share in (("intel-rapl:0", 1), ("intel-rapl:1", 2), ("intel-rapl:0:0", 50)):
            folder = self.root / "sys/class/powercap" / zone
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "energy_uj").write_text(f"{joules * 1_000_000 * share}\n")
        counters = self.root / "sys/class/infiniband/mlx5_0/ports/1/counters"
        counters.mkdir(parents=True, exist_ok=True)
        (counters / "port_xmit_data").write_text(f"{ib}\n")
        (counters / "port_rcv_data").write_text("N/A (no PMA)\n")


def test_rates_shares_and_units(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    sampler = HostSampler(tmp_path)
    first = sampler.read(10.0)
    assert not any(r.metric.endswith("_per_s") for r in first)
    machine.set(busy=175, idle=325, rx=3000, tx=500, read=20, ib=1000, joules=100)
    got = {(r.metric, r.device): r.value for r in sampler.read(12.0)}
    assert got == {
        ("host_cpu_util_pct", None): 75.0,
        ("host_mem_used_pct", None): 75.0,
        ("host_mem_used_gib", None): 750000 / 2**20,
        ("host_load1", None): 3.25,
        ("cpu_power_w", None): 150.0,
        ("nic_rx_bytes_per_s", "eth0"): 1500.0,
        ("nic_tx_bytes_per_s", "eth0"): 250.0,
        ("nic_rx_bytes_per_s", "eth1"): 1500.0,
        ("nic_tx_bytes_per_s", "eth1"): 250.0,
        ("disk_read_bytes_per_s", "nvme0n1"): 5120.0,
        ("disk_write_bytes_per_s", "nvme0n1"): 0.0,
        ("ib_tx_bytes_per_s", "mlx5_0/1"): 2000.0,
    }
    assert {m for m, _ in got} <= set(METRICS)
    sampler.close()


def test_a_counter_that_starts_again_gives_no_rate(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.set(busy=1, idle=1, rx=10**9, tx=10**9, read=5, ib=5, joules=9)
    sampler = HostSampler(tmp_path)
    sampler.read(0.0)
    machine.set(busy=2, idle=2, rx=100, tx=2 * 10**9, read=5, ib=0)
    readings = sampler.read(1.0)
    got = {r.metric for r in readings if r.device}
    assert "nic_rx_bytes_per_s" not in got and "nic_tx_bytes_per_s" in got and "ib_tx_bytes_per_s" not in got
    assert not any(r.metric == "cpu_power_w" for r in readings)


def test_this_machine() -> None:
    sampler = HostSampler()
    sampler.read(time.monotonic())
    deadline = time.monotonic() + 5
    got: dict[str, float] = {}
    while "host_cpu_util_pct" not in got and time.monotonic() < deadline:
        time.sleep(0.05)
        got |= {r.metric: r.value for r in sampler.read(time.monotonic())}
    assert 0 <= got["host_cpu_util_pct"] <= 100 and 0 < got["host_mem_used_pct"] < 100


def test_another_system_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Linux"):
        HostSampler(tmp_path)
