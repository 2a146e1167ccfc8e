"""What `unbroken telemetry record` sees and costs on this machine, in at most 60 seconds.

    python3 benchmarks/telemetry.py [--profile] [-o RESULT.json]

With a GPU: known loads (idle, matrix products, device copies, host copies, copies between GPUs) must show in the
right counters. Everywhere: CPU time of the recorder process at 1 Hz in percent of a core, beside `nvidia-smi` asked
for similar values at the same rate, under load. Needs torch for the loads; exits 1 if a check fails.

Long because it is carried to a GPU machine as one file: it needs nothing beside the package.

--profile shortens these and adds, in microseconds, what each NVML call takes by itself (wall and CPU), what a tick
makes of them, and what NVLink's counters say before and after a copy.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

from machine import describe_machine

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "src"))
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPO / "src")}
PHASE_S = 4.0
OVERHEAD_S = 20.0
PROFILE_PHASE_S, PROFILE_OVERHEAD_S = 2.5, 14.0
PROMISE_PCT = 0.5


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("-o", "--out", type=Path, default=REPO / "benchmarks" / "results" / "telemetry.json")
    p.add_argument("--profile", action="store_true", help="microseconds of each NVML call; shorter phases")
    args = p.parse_args()
    phase_s, overhead_s = (PROFILE_PHASE_S, PROFILE_OVERHEAD_S) if args.profile else (PHASE_S, OVERHEAD_S)
    result: dict[str, Any] = {
        "machine": describe_machine(),
        "checks": {},
    }
    loads = gpu_loads(result)
    if loads:
        see(loads, result, phase_s)
    cost(loads, result, overhead_s)
    if args.profile:
        write(args.out, result)  # a driver may end this process below
        profile(loads, result)
    write(args.out, result)
    print(json.dumps(result, indent=1))
    failed = [name for name, ok in result["checks"].items() if not ok]
    print(f"written to {args.out}; " + (f"FAILED: {', '.join(failed)}" if failed else "all checks passed"))
    return 1 if failed else 0


def write(path: Path, result: dict[str, Any]) -> None:
    """Keeps what is known so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


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


def see(loads: dict[str, Any], result: dict[str, Any], phase_s: float) -> None:
    """Samples ten times a second under each load and checks that the right counters show it."""
    from unbroken.telemetry.samplers.gpu import GpuSampler, load_nvml

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
        while time.monotonic() - began < phase_s:
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


def cost(loads: dict[str, Any], result: dict[str, Any], seconds: float) -> None:
    """CPU time of the recorder process at 1 Hz in percent of a core, its start left out; nvidia-smi beside it."""
    import psutil

    with tempfile.TemporaryDirectory() as folder:
        record = [
            sys.executable,
            "-m",
            "unbroken",
            "telemetry",
            "record",
            "--every",
            "1s",
            "--json",
            "-o",
            folder,
        ]
        commands = {"unbroken": record}
        if shutil.which("nvidia-smi"):
            commands["nvidia-smi"] = nvidia_smi()
        running = {
            n: psutil.Popen(
                c, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=ENVIRONMENT, cwd=REPO, text=True
            )
            for n, c in commands.items()
        }
        busy = loads.get("matmul")
        # The start (imports, opening the driver, asking what it can) is no part of the price of a tick.
        end = time.monotonic() + 30
        while ticks_in(Path(folder)) < 3 and time.monotonic() < end:
            wait_busy(0.2, busy)
        before = {n: cpu_seconds(p) for n, p in running.items()}
        began = time.monotonic()
        wait_busy(seconds, busy)
        elapsed = time.monotonic() - began
        result["cpu_share_pct_at_1hz"] = {
            # A process that has ended measures nothing: then there is no figure.
            n: round(100 * (cpu_seconds(p) - before[n]) / elapsed, 3) if p.poll() is None else None
            for n, p in running.items()
        }
        result["recorder_rss_mib"] = round(running["unbroken"].memory_info().rss / 2**20, 1)
        said = {}
        for n, p in running.items():
            p.terminate()
            said[n] = p.communicate(timeout=60)[0]
        result["recorder_says"] = json.loads(said["unbroken"].splitlines()[-1] or "{}")
        result["recorder_says"].pop("folder", None)
        result["files"] = sorted(f.name.split(".", 1)[1] for f in Path(folder).iterdir())
    result["checks"][f"recording costs under {PROMISE_PCT} % of a core"] = (
        result["cpu_share_pct_at_1hz"]["unbroken"] < PROMISE_PCT
    )


def nvidia_smi() -> list[str]:
    """nvidia-smi asked once a second for what it can say of the same; the name of one field depends on its age."""
    fields = "timestamp,index,utilization.gpu,memory.used,power.draw,temperature.gpu,clocks.sm"
    for more in (",clocks_event_reasons.active", ",clocks_throttle_reasons.active", ""):
        command = ["nvidia-smi", f"--query-gpu={fields}{more}", "--format=csv"]
        if subprocess.run(command, capture_output=True, check=False, timeout=30).returncode == 0:
            break
    return [*command, "-l", "1"]


def ticks_in(folder: Path) -> int:
    """Ticks in the spool of a recorder, told by the load of the host that each has."""
    return sum(f.read_text().count(",host_load1,") for f in folder.glob("*.spool.csv"))


class Timed:
    """An NVML whose calls are timed: (name, wall seconds, CPU seconds of this thread)."""

    def __init__(self, nvml: Any) -> None:
        self.__dict__["_nvml"] = nvml
        self.__dict__["calls"] = []

    def __getattr__(self, name: str) -> Any:
        it = getattr(self._nvml, name)
        if not name.startswith("nvml") or not callable(it):
            return it

        def timed(*args: Any) -> Any:
            label = name
            if name == "nvmlDeviceGetFieldValues":
                label += f" of {len(args[1])}"
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return it(*args)
            finally:
                self.calls.append((label, time.perf_counter() - wall, time.thread_time() - cpu))

        return timed


def profile(loads: dict[str, Any], result: dict[str, Any]) -> None:
    """Microseconds of each NVML call, of a tick's parts, and what each counter of NVLink says."""
    from unbroken.errors import UnbrokenError
    from unbroken.telemetry.recording.spool import Spool
    from unbroken.telemetry.samplers.gpu import GpuSampler, load_nvml
    from unbroken.telemetry.samplers.host import HostSampler

    out: dict[str, Any] = {}
    result["profile_us"] = out
    host = HostSampler()
    try:
        nvml = load_nvml()
    except UnbrokenError as e:  # without a GPU the host's share is still worth showing
        out["gpus"] = str(e).splitlines()[0]
        nvml = None
    busy = threading.Event()
    load = loads.get("matmul")

    def keep_busy() -> None:
        while load and not busy.is_set():
            load()

    thread = threading.Thread(target=keep_busy)
    thread.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            spool = Spool(Path(folder), node="n")
            if nvml is not None:
                out["ticks"] = profile_ticks(nvml, GpuSampler, host, spool)
                out["calls"] = profile_calls(nvml)
            else:
                out["ticks"] = {"host": cost_of(lambda: host.read(time.monotonic()), 50)}
            spool.close()
    finally:
        busy.set()
        thread.join()
    if nvml is not None:
        result["nvlink"] = nvlink_before_and_after(nvml, loads)


def profile_ticks(nvml: Any, sampler_of: Any, host: Any, spool: Any) -> dict[str, Any]:
    """The calls of six ticks a second apart, by name: how many a tick, median wall and mean CPU microseconds."""
    timed = Timed(nvml)
    wall = time.perf_counter()
    sampler = sampler_of(timed)
    opening = time.perf_counter() - wall
    out: dict[str, Any] = {"opening": round(1e6 * opening), "opening_calls": len(timed.calls)}
    parts: dict[str, list[tuple[float, float]]] = {"gpus": [], "host": [], "write": []}
    first: list[Any] = []
    calls: list[Any] = []
    for tick in range(7):
        timed.calls.clear()
        readings: list[Any] = []
        for name, part in (
            ("gpus", lambda r=readings: r.extend(sampler.read(time.monotonic()))),
            ("host", lambda r=readings: r.extend(host.read(time.monotonic()))),
            ("write", lambda r=readings: spool.write(time.time(), r)),
        ):
            began, cpu = time.perf_counter(), time.thread_time()
            part()
            if tick > 0:
                parts[name].append((time.perf_counter() - began, time.thread_time() - cpu))
        if tick == 0:
            first = list(timed.calls)
        else:
            calls += timed.calls
        time.sleep(1.0)
    out["parts"] = {n: summary(v) for n, v in parts.items()}
    out["first_tick_calls"] = by_name(first, 1)
    out["calls_of_a_tick"] = by_name(calls, 6)
    return out


def by_name(calls: list[Any], ticks: int) -> dict[str, Any]:
    """Calls by name, the dearest first."""
    named: dict[str, list[tuple[float, float]]] = {}
    for name, wall, cpu in calls:
        named.setdefault(name, []).append((wall, cpu))
    order = sorted(named, key=lambda n: -sum(w for w, _ in named[n]))
    return {n: {"a_tick": round(len(named[n]) / ticks, 2), **summary(named[n])} for n in order}


def summary(took: list[tuple[float, float]]) -> dict[str, float]:
    """Median wall and mean CPU time in microseconds."""
    return {
        "wall": round(1e6 * median(w for w, _ in took), 1),
        "cpu": round(1e6 * fmean(c for _, c in took), 1),
        "worst": round(1e6 * max(w for w, _ in took), 1),
    }


def cost_of(call: Any, times: int = 40, within_s: float = 0.25) -> Any:
    """What a call takes, called up to `times` times within `within_s` seconds; the error where it fails."""
    took = []
    end = time.perf_counter() + within_s
    while len(took) < times and (len(took) < 2 or time.perf_counter() < end):
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            call()
        except Exception as e:  # noqa: BLE001 (whatever a driver says, the other calls are still worth timing)
            return f"{type(e).__name__}: {e}"
        took.append((time.perf_counter() - wall, time.thread_time() - cpu))
    return summary(took)


def profile_calls(n: Any) -> dict[str, Any]:
    """Each NVML call that telemetry makes or could make, by itself on GPU 0, repeated."""
    from unbroken.telemetry.samplers import gpm, gpu, links

    h = n.nvmlDeviceGetHandleByIndex(0)
    up = links.links_up(n, h)
    one = {
        "utilisation": lambda: n.nvmlDeviceGetUtilizationRates(h),
        "memory": lambda: n.nvmlDeviceGetMemoryInfo(h),
        "power": lambda: n.nvmlDeviceGetPowerUsage(h),
        "temperature": lambda: n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU),
        "sm clock": lambda: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM),
        "memory clock": lambda: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM),
        "reasons": lambda: n.nvmlDeviceGetCurrentClocksEventReasons(h),
        "energy": lambda: n.nvmlDeviceGetTotalEnergyConsumption(h),
        "link state": lambda: n.nvmlDeviceGetNvLinkState(h, 0),
        "link error counter": lambda: n.nvmlDeviceGetNvLinkErrorCounter(h, 0, 0),
        "link counters as recorded": links.link_counters(n, h) or (lambda: None),
    }
    out = {name: cost_of(call) for name, call in one.items()}
    singles = [f for table in (gpu.MEDIUM_FIELDS, gpu.SLOW_FIELDS) for _, names, _ in table for f in names]
    for name in (*singles, "NVML_FI_DEV_POWER_INSTANT", "NVML_FI_DEV_POWER_AVERAGE", *links.TOTALS):
        out[name] = field_cost(n, h, [getattr(n, name, 0)])
    for name in links.BY_LINK:
        out[f"{name}, one link"] = field_cost(n, h, [(getattr(n, name), 0)])
        out[f"{name}, {len(up)} links"] = field_cost(n, h, [(getattr(n, name), link) for link in up])
    try:
        samples = [n.nvmlGpmSampleAlloc(), n.nvmlGpmSampleAlloc()]
        out["GPM sample"] = cost_of(lambda: n.nvmlGpmSampleGet(h, samples[0]))
        time.sleep(0.15)
        n.nvmlGpmSampleGet(h, samples[1])
        request = n.c_nvmlGpmMetricsGet_t()
        request.version, request.numMetrics = n.NVML_GPM_METRICS_GET_VERSION, len(gpm.GPM_METRICS)
        request.sample1, request.sample2 = samples
        for i, (_, constant, _) in enumerate(gpm.GPM_METRICS):
            request.metrics[i].metricId = getattr(n, constant)
        out["GPM metrics"] = cost_of(lambda: n.nvmlGpmMetricsGet(request))
        for s in samples:
            n.nvmlGpmSampleFree(s)
    except (AttributeError, n.NVMLError) as e:
        out["GPM"] = f"{type(e).__name__}: {e}"
    try:
        events = n.nvmlEventSetCreate()
        n.nvmlDeviceRegisterEvents(h, n.nvmlEventTypeXidCriticalError, events)
        out["event, none there"] = cost_of(lambda: wait_for_event(n, events))
        n.nvmlEventSetFree(events)
    except n.NVMLError as e:
        out["event"] = str(e)
    return out


def wait_for_event(n: Any, events: Any) -> None:
    """Looks for an event as telemetry does."""
    try:
        n.nvmlEventSetWait_v2(events, 0)
    except n.NVMLError as e:
        if e.value != n.NVML_ERROR_TIMEOUT:
            raise


def field_cost(n: Any, h: Any, fields: list[Any]) -> Any:
    """What one call for these fields takes, NVML's own word for its latency, and whether they are answered."""
    took = cost_of(lambda: n.nvmlDeviceGetFieldValues(h, fields))
    if isinstance(took, str):
        return took
    answers = n.nvmlDeviceGetFieldValues(h, fields)
    good = [a for a in answers if a.nvmlReturn == n.NVML_SUCCESS]
    return {
        **took,
        "nvml_says": sum(a.latencyUsec for a in answers),
        "answered": f"{len(good)} of {len(fields)}",
        "returns": sorted({a.nvmlReturn for a in answers}),
    }


def nvlink_before_and_after(n: Any, loads: dict[str, Any]) -> list[dict[str, Any]]:
    """Every NVLink counter of GPU 0 by its way and kind: first, after a second of rest, after one of copies."""
    from unbroken.telemetry.samplers import links

    h = n.nvmlDeviceGetHandleByIndex(0)
    up = links.links_up(n, h)

    def counters() -> dict[str, Any]:
        out: dict[str, Any] = {"links_up": len(up)}
        for name in (c for c in links.COUNTERS if hasattr(n, c)):
            try:
                out[f"call {name}"] = [
                    n.nvmlDeviceGetNvLinkErrorCounter(h, link, getattr(n, name)) for link in up
                ]
            except n.NVMLError as e:
                out[f"call {name}"] = str(e)
        ask = [(getattr(n, name), link) for name in links.BY_LINK for link in up]
        ask += [getattr(n, name) for name in links.TOTALS]
        names = [name for name in links.BY_LINK for _ in up] + list(links.TOTALS)
        for name, a in zip(names, n.nvmlDeviceGetFieldValues(h, ask) if ask else [], strict=True):
            ok = a.nvmlReturn == n.NVML_SUCCESS
            value = getattr(a.value, links.VALUE_TYPES[a.valueType]) if ok else f"return {a.nvmlReturn}"
            out.setdefault(f"field {name}", []).append(value)
        return out

    seen = [{"at": "first", **counters()}]
    for name in ("idle", "peer_copy"):
        if name in loads:
            wait_busy(1.0, loads[name])
            seen.append({"at": f"after {name}", **counters()})
    return seen


def wait_busy(seconds: float, load: Any) -> None:
    """Waits, keeping the GPU busy where there is one."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        load() if load else time.sleep(min(left, 0.2))


def cpu_seconds(process: Any) -> float:
    """CPU time of a process and its finished children."""
    t = process.cpu_times()
    return float(t.user + t.system + t.children_user + t.children_system)


if __name__ == "__main__":
    sys.exit(main())
