"""What `unbroken telemetry record` sees and costs on this machine, in at most 60 seconds.

    python3 benchmarks/telemetry.py [-o RESULT.json]

With a GPU: known loads (idle, matrix products, device copies, host copies, copies between GPUs) must show in the
right counters. Everywhere: CPU time of the recorder process at 1 Hz in percent of a core, beside `nvidia-smi` asked
for similar values at the same rate, under load. Needs torch for the loads; exits 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "src"))
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPO / "src")}
PHASE_S = 4.0
OVERHEAD_S = 20.0
PROMISE_PCT = 0.5


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("-o", "--out", type=Path, default=REPO / "benchmarks" / "results" / "telemetry.json")
    args = p.parse_args()
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git("rev-parse", "--short", "HEAD"),
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "python": platform.python_version()},
        "checks": {},
    }
    loads = gpu_loads(result)
    if loads:
        see(loads, result)
    cost(loads, result)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    failed = [name for name, ok in result["checks"].items() if not ok]
    print(f"written to {args.out}; " + (f"FAILED: {', '.join(failed)}" if failed else "all checks passed"))
    return 1 if failed else 0


def gpu_loads(result: dict[str, Any]) -> dict[str, Any]:
    """A function for each load that keeps the GPU busy for about 50 ms; empty without a GPU."""
    try:
        import torch
    except ImportError:
        result["gpus"] = "torch is not installed"
        return {}
    if not torch.cuda.is_available():
        result["gpus"] = "none"
        return {}
    result["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    result["machine"]["torch"] = torch.__version__
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    c = torch.empty_like(a)
    big = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(big)
    host = torch.empty(1 << 29, dtype=torch.uint8, pin_memory=True)

    def idle() -> None:
        time.sleep(0.05)

    def matmul() -> None:
        for _ in range(32):
            torch.matmul(a, a, out=c)
        torch.cuda.synchronize()

    def device_copy() -> None:
        for _ in range(64):
            other.copy_(big)
        torch.cuda.synchronize()

    def host_copy() -> None:
        for _ in range(4):
            big[: host.numel()].copy_(host, non_blocking=True)
        torch.cuda.synchronize()

    loads = {"idle": idle, "matmul": matmul, "device_copy": device_copy, "host_copy": host_copy}
    if torch.cuda.device_count() > 1:
        there = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:1")

        def peer_copy() -> None:
            for _ in range(8):
                there.copy_(big, non_blocking=True)
            torch.cuda.synchronize()

        loads["peer_copy"] = peer_copy
    for f in loads.values():
        f()
    return loads


def see(loads: dict[str, Any], result: dict[str, Any]) -> None:
    """Samples ten times a second under each load and checks that the right counters show it."""
    from unbroken.telemetry.gpu import GpuSampler, load_nvml

    sampler = GpuSampler(load_nvml())
    coverage = sampler.coverage()
    result["metrics"] = list(coverage.metrics)
    result["missing"] = dict(coverage.missing)
    means: dict[str, dict[str, float]] = {}
    for name, load in loads.items():
        sums: dict[str, list[float]] = {}
        began, next_read = (
            time.monotonic(),
            time.monotonic() + 1.0,
        )  # NVML's own averages look back up to a second
        sampler.read(time.monotonic())
        done = threading.Event()

        def sample(
            sums: dict[str, list[float]] = sums, at: float = next_read, done: threading.Event = done
        ) -> None:
            while not done.wait(max(0.0, at - time.monotonic())):
                for r in sampler.read(time.monotonic()):
                    if r.gpu == 0:
                        sums.setdefault(r.metric, []).append(r.value)
                at += 0.1

        thread = threading.Thread(target=sample)
        thread.start()
        while time.monotonic() - began < PHASE_S:
            load()
        done.set()
        thread.join()
        means[name] = {m: round(fmean(v), 3) for m, v in sorted(sums.items())}
        energy = sums.get("gpu_energy_j")
        if energy and len(energy) > 10:
            means[name]["power_from_energy_w"] = round(
                (energy[-1] - energy[0]) / (0.1 * (len(energy) - 1)), 1
            )
    sampler.close()
    result["means_of_gpu_0"] = means
    checks = result["checks"]
    if "sm_active_pct" in coverage.metrics:
        checks["idle shows no SM activity"] = means["idle"]["sm_active_pct"] < 5
        checks["matmul shows SM activity"] = means["matmul"]["sm_active_pct"] > 80
        checks["matmul shows tensor activity"] = means["matmul"]["tensor_active_pct"] > 50
        checks["device copy shows DRAM and no tensor activity"] = (
            means["device_copy"]["dram_active_pct"] > 50 and means["device_copy"]["tensor_active_pct"] < 5
        )
        checks["host copy shows PCIe bytes received"] = means["host_copy"]["pcie_rx_bytes_per_s"] > 5e9
        if "peer_copy" in means:
            checks["peer copy shows NVLink or PCIe bytes sent"] = (
                means["peer_copy"]["nvlink_tx_bytes_per_s"] + means["peer_copy"]["pcie_tx_bytes_per_s"] > 5e9
            )
    checks["matmul draws more power than idle"] = (
        means["matmul"]["gpu_power_w"] > 1.5 * means["idle"]["gpu_power_w"]
    )


def cost(loads: dict[str, Any], result: dict[str, Any]) -> None:
    """CPU time of the recorder process at 1 Hz in percent of a core, its start left out; nvidia-smi beside it."""
    import psutil

    with tempfile.TemporaryDirectory() as folder:
        commands = {
            "unbroken": [
                sys.executable,
                "-m",
                "unbroken",
                "telemetry",
                "record",
                "--every",
                "1s",
                "-o",
                folder,
            ],
        }
        if shutil.which("nvidia-smi"):
            fields = "timestamp,index,utilization.gpu,memory.used,power.draw,temperature.gpu,clocks.sm,clocks_throttle_reasons.active"
            commands["nvidia-smi"] = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv", "-l", "1"]
        quiet: dict[str, Any] = {
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.DEVNULL,
            "env": ENVIRONMENT,
        }
        running = {n: psutil.Popen(c, **quiet) for n, c in commands.items()}
        busy = loads.get("matmul")
        wait_busy(5.0, busy)
        before = {n: cpu_seconds(p) for n, p in running.items()}
        began = time.monotonic()
        wait_busy(OVERHEAD_S, busy)
        elapsed = time.monotonic() - began
        result["cpu_share_pct_at_1hz"] = {
            n: round(100 * (cpu_seconds(p) - before[n]) / elapsed, 3) for n, p in running.items()
        }
        result["recorder_rss_mib"] = round(running["unbroken"].memory_info().rss / 2**20, 1)
        for p in running.values():
            p.terminate()
            p.wait(60)
        result["files"] = sorted(f.name.split(".", 1)[1] for f in Path(folder).iterdir())
    result["checks"][f"recording costs under {PROMISE_PCT} % of a core"] = (
        result["cpu_share_pct_at_1hz"]["unbroken"] < PROMISE_PCT
    )


def wait_busy(seconds: float, load: Any) -> None:
    """Waits, keeping the GPU busy where there is one."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        load() if load else time.sleep(min(left, 0.2))


def cpu_seconds(process: Any) -> float:
    """CPU time of a process and its finished children."""
    t = process.cpu_times()
    return float(t.user + t.system + t.children_user + t.children_system)


def cpu_model() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def git(*args: str) -> str:
    """What git says of this checkout; empty where it is none."""
    try:
        return subprocess.run(
            ["git", *args], cwd=REPO, capture_output=True, text=True, check=False
        ).stdout.strip()
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
