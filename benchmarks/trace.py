"""`unbroken trace report` against pandas code that computes the same statistics, in one run; and memory at 100 M jobs.

python3 benchmarks/trace.py [--jobs 1M,10M,100M] [--wide 10GB] [--memory 3GiB] [--dir FOLDER] [-o RESULT.json]

The traces are synthetic (`unbroken trace synth`, seed 0). Ours: the whole command, from starting Python to the HTML file
with all figures. pandas: one process that reads the same file and computes the same tables (no report), twice:
*straightforward* takes distribution functions as the notebook of the study's release does, a selection of the rows for
each point of the axis (1,025 of them for the number of GPUs), and *tuned* sorts once and searches. pandas is left out
where its memory would not fit the machine. All contenders run equally often. Beside the seconds on the clock stand those of
the processor: ours uses two cores, pandas one. Memory is told twice, of the largest process and of all together; the
bounds are for all together. Exits 1 where a bound is missed: 1 M jobs within 5 s and 10x the
straightforward pandas, 100 M jobs within 4 GiB, a wide CSV at 200 MB/s within 2 GiB.
Needs pandas (requirements/all.txt); `--python` names another interpreter for it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from machine import describe_machine

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "src"))

from unbroken.units import Bytes  # noqa: E402

PANDAS_BYTES_A_ROW = 583
"""Measured at the peak: 5,555 MiB for ten million jobs in Parquet (results/trace-10m.json)."""
SAMPLE_S = 0.05
"""Between two looks at the memory of all processes."""

PANDAS = r"""
import sys
import numpy as np
import pandas as pd
path, style = sys.argv[1], sys.argv[2]

def job_cdf(frame, key, points):
    data = frame[[key]].dropna()
    if style == "straightforward":
        return [len(data[data[key] <= x]) / len(data) * 100 for x in points]
    values = np.sort(data[key].to_numpy())
    return np.searchsorted(values, points, side="right") / len(values) * 100

def sum_cdf(frame, key, weight, points):
    data = frame[[key, weight]].dropna()
    total = data[weight].sum()
    if style == "straightforward":
        return [data[data[key] <= x][weight].sum() / total * 100 for x in points]
    data = data.sort_values(key)
    ends = np.concatenate([[0], data[weight].cumsum().to_numpy()])
    return ends[np.searchsorted(data[key].to_numpy(), points, side="right")] / total * 100

columns = ["job_id", "cluster", "user", "team", "type", "state", "submit_utc", "start_utc", "end_utc", "queue_s", "duration_s", "gpu_num", "cpu_num", "exit_code", "stop_utc"]
df = pd.read_parquet(path, columns=columns) if path.endswith(".parquet") else pd.read_csv(path, usecols=columns, parse_dates=["submit_utc", "start_utc", "end_utc", "stop_utc"])
out = {}
# checks, as a reader has to make them
bad = (df.end_utc < df.start_utc) | (df.start_utc < df.submit_utc) | (df.gpu_num < 0)
out["set_aside"] = int(bad.sum())
df = df[~bad]
out["doubled"] = int(df.duplicated(["cluster", "job_id"]).sum())
df["kind"] = df["type"].where(df.gpu_num > 0, "CPU")
df["gpu_s"] = df.gpu_num * df.duration_s
df["size"] = 2 ** np.ceil(np.log2(df.gpu_num.where(df.gpu_num > 0)))
gpu = df[df.gpu_num > 0]
q = [.01, .05, .1, .25, .5, .75, .9, .95, .99]
out["summary"] = gpu[["duration_s", "queue_s", "gpu_num"]].agg(["mean", "median", "max"]), df.submit_utc.min(), df.end_utc.max()
for key in ("state", "kind", "size"):
    g = gpu.groupby(key).agg(jobs=("gpu_s", "size"), gpu_s=("gpu_s", "sum"), gpus=("gpu_num", "mean"))
    out["by_" + key] = g.assign(jobs_pct=g.jobs / g.jobs.sum() * 100, time_pct=g.gpu_s / g.gpu_s.sum() * 100)
out["by_type_and_state"] = gpu.groupby(["kind", "state"]).agg(jobs=("gpu_s", "size"), gpu_s=("gpu_s", "sum"))
for key, xs in (("duration_s", [2 ** (k / 2) for k in range(43)]), ("queue_s", [2 ** (k / 2) for k in range(37)])):
    out[key + "_quantiles"] = df.groupby("kind")[key].describe(percentiles=q), gpu[key].describe(percentiles=q)
    for kind, part in [*df.groupby("kind"), ("GPU jobs", gpu)]:
        out[key, kind] = job_cdf(part, key, xs)
failed = gpu[gpu.state == "FAILED"]
for kind, part in [*failed.groupby("kind"), ("GPU jobs", failed)]:
    out["to_failure", kind] = job_cdf(part, "duration_s", [2 ** (k / 2) for k in range(43)])
out["demand"] = gpu.groupby("kind").gpu_num.describe(percentiles=[.05, .25, .5, .75, .95])
out["size_cdf"] = job_cdf(gpu, "gpu_num", range(1025)), sum_cdf(gpu, "gpu_num", "gpu_s", range(1025))
out["fairness"] = gpu.groupby("size").queue_s.describe(percentiles=[.5, .9, .99]), gpu.groupby("size").duration_s.mean()
hours = df.submit_utc.dt.floor("h")
out["submit"] = hours.value_counts().sort_index().resample("h").sum()
out["heat"] = df.groupby([df.submit_utc.dt.dayofweek, df.submit_utc.dt.hour]).size()
out["daily"] = df.groupby(df.submit_utc.dt.date).size()
# GPUs held: exact mean of each hour
epoch = pd.Timestamp("1970-01-01")
held = None
for column, sign in (("start_utc", 1), ("end_utc", -1)):
    s = (gpu[column] - epoch) / pd.Timedelta(seconds=1)
    t = pd.DataFrame({"h": (s // 3600).astype("int64"), "g": sign * gpu.gpu_num, "gs": sign * gpu.gpu_num * (s % 3600)}).groupby("h").sum()
    held = t if held is None else held.add(t, fill_value=0)
held = held.reindex(range(held.index.min(), held.index.max() + 1), fill_value=0)
out["busy"] = held.g.cumsum() - held.gs / 3600
u = gpu.groupby("user").agg(jobs=("gpu_s", "size"), gpu_s=("gpu_s", "sum"), failed=("state", lambda s: (s == "FAILED").sum()), wait=("queue_s", "mean"))
u = u.sort_values("gpu_s", ascending=False)
out["users"] = u, u.gpu_s.cumsum() / u.gpu_s.sum(), u.jobs.cumsum() / u.jobs.sum()
week = df.start_utc.dt.to_period("W").dt.start_time
out["accounts"] = df.groupby([week, "team"]).agg(jobs=("gpu_s", "size"), gpu_s=("gpu_s", "sum"))
out["teams"] = df.groupby(["team", "state"]).gpu_s.sum().unstack()
out["exits"] = failed.groupby(["state", "exit_code"]).agg(n=("gpu_s", "size"), gpus=("gpu_num", "mean"), run=("duration_s", "mean"))
c = gpu[gpu.state == "CANCELLED"]
tail = ((c.end_utc - c.stop_utc) / pd.Timedelta(seconds=1)).clip(lower=0)
out["cancelled"] = c.groupby("kind").gpu_s.sum(), (c.gpu_num * tail).where(tail > 600).groupby(c.kind).sum()
m = gpu.groupby("size").agg(run=("duration_s", "sum"), failed=("state", lambda s: (s == "FAILED").sum()))
out["mttf"] = m.run / m.failed
s = out["by_state"]
print({"failed_pct": round(float(s.loc["FAILED", "jobs_pct"]), 6), "cancelled_time_pct": round(float(s.loc["CANCELLED", "time_pct"]), 6), "median_run_s": float(out["summary"][0].loc["median", "duration_s"]), "mean_queue_s": round(float(out["summary"][0].loc["mean", "queue_s"]), 6), "held": round(float(out["busy"].sum()), 3)})
"""


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--jobs", default="1M", help="sizes, e.g. 1M,10M,100M")
    p.add_argument("--wide", default="0", help="size of a wide utilisation CSV, e.g. 10GB (0: none)")
    p.add_argument("--memory", default="3GiB", help="what DuckDB may hold")
    p.add_argument(
        "--repeat", type=int, default=3, help="runs of every contender up to 2 M jobs; the fastest counts"
    )
    p.add_argument("--dir", type=Path, help="where the traces are written [default: the temporary folder]")
    p.add_argument("--python", default=sys.executable, help="the interpreter that has pandas")
    p.add_argument("-o", "--out", type=Path, default=REPO / "benchmarks" / "results" / "trace.json")
    args = p.parse_args()
    contenders: dict[str, Any] = {}
    checks: dict[str, bool] = {}
    with tempfile.TemporaryDirectory(prefix="trace-bench-", dir=args.dir) as name:
        folder = Path(name)
        for text in args.jobs.split(","):
            size = count(text)
            contenders |= jobs_contenders(size, folder, args, checks)
            for f in folder.glob("*"):
                shutil.rmtree(f) if f.is_dir() else f.unlink()
        if Bytes(args.wide):
            contenders |= wide_contender(Bytes(args.wide), folder, checks)
    result = {
        "machine": MACHINE | {"load_after": round(os.getloadavg()[0], 2)},
        "arms": contenders,
        "checks": checks,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0 if all(checks.values()) else 1


MACHINE = describe_machine()


def jobs_contenders(
    size: int, folder: Path, args: argparse.Namespace, checks: dict[str, bool]
) -> dict[str, Any]:
    """Our report and pandas on one synthetic trace."""
    label = short(size)
    trace = folder / "trace"
    print(f"writing {label} jobs ...", file=sys.stderr)
    made = run([sys.executable, "-m", "unbroken", "trace", "synth", "-o", str(trace), "--jobs", str(size)])
    out: dict[str, Any] = {f"{label}: synth": made}
    jobs = trace / "jobs.parquet"
    runs = args.repeat if size <= 2_000_000 else 1
    report = [sys.executable, "-m", "unbroken", "trace", "report", str(jobs), "-o", str(folder / "report.html"), "--memory", args.memory, "--scratch", str(folder)]  # fmt: skip
    ours = best(report, runs)
    out[f"{label}: unbroken trace report (Parquet)"] = ours
    (folder / "report.html").stat()
    ours["report_mb"] = round((folder / "report.html").stat().st_size / 1e6, 2)
    checks[f"{label}: report under 5 MB"] = ours["report_mb"] < 5
    if size <= 1_000_000:
        checks[f"{label}: within 5 s"] = ours["seconds"] <= 5
    if size >= 100_000_000:
        checks[f"{label}: within 4 GiB"] = ours["rss_all_mib"] <= 4096
    csv = folder / "csv"
    if size <= 10_000_000:
        run([sys.executable, "-m", "unbroken", "trace", "convert", str(jobs), "--csv", "-o", str(csv)])
        report[5] = str(csv / "jobs.csv")
        ours_csv = best(report, runs)
        out[f"{label}: unbroken trace report (CSV, {csv_mb(csv):.0f} MB)"] = ours_csv
        if size <= 1_000_000:
            checks[f"{label}: from CSV within 5 s"] = ours_csv["seconds"] <= 5
    if PANDAS_BYTES_A_ROW * size > 0.8 * memory_of_machine():
        out[f"{label}: pandas"] = {
            "left out": f"about {PANDAS_BYTES_A_ROW * size / 2**30:.0f} GiB would be needed"
        }
        return out
    for kind, path, mine in (("Parquet", jobs, ours), ("CSV", csv / "jobs.csv", out.get(f"{label}: unbroken trace report (CSV, {csv_mb(csv):.0f} MB)"))):  # fmt: skip
        if mine is None:
            continue
        for style in ("straightforward", "tuned"):
            theirs = best([args.python, "-c", PANDAS, str(path), style], runs, env={})
            out[f"{label}: pandas, {style} ({kind})"] = theirs
            if "error" not in theirs:
                theirs["times_ours"] = round(theirs["seconds"] / mine["seconds"], 1)
                theirs["times_ours_cpu"] = round(theirs["cpu_s"] / mine["cpu_s"], 1)
                if style == "straightforward":
                    checks[f"{label}: at least 10x straightforward pandas ({kind})"] = (
                        theirs["times_ours"] >= 10
                    )
    return out


def wide_contender(size: int, folder: Path, checks: dict[str, bool]) -> dict[str, Any]:
    """Our report on a wide utilisation CSV."""
    from utilisation import write  # benchmarks/utilisation.py, the same table

    path = folder / "seren" / "SM_ACTIVE.csv"
    path.parent.mkdir()
    print(f"writing a wide table of {Bytes(size)} ...", file=sys.stderr)
    write(path, size)
    contender = run(
        [sys.executable, "-m", "unbroken", "trace", "report", str(path), "-o", str(folder / "report.html")]
    )
    contender["mb_per_s"] = round(path.stat().st_size / 1e6 / contender["seconds"], 1)
    contender["mb_per_cpu_s"] = round(path.stat().st_size / 1e6 / contender["cpu_s"], 1)
    checks["wide CSV: at least 200 MB/s"] = contender["mb_per_s"] >= 200
    checks["wide CSV: within 2 GiB"] = contender["rss_all_mib"] <= 2048
    return {f"wide CSV of {Bytes(size)}: unbroken trace report": contender}


def best(command: list[str], runs: int, env: dict[str, str] | None = None) -> dict[str, Any]:
    """The fastest of some runs."""
    contenders = [run(command, env) for _ in range(runs)]
    good = [a for a in contenders if "error" not in a]
    return min(good, key=lambda a: a["seconds"]) if good else contenders[0]


def run(command: list[str], env: dict[str, str] | None = None) -> dict[str, Any]:
    """Seconds, CPU seconds and peak memory of a command; what it printed last; its error if it failed.

    CPU seconds are of all its processes. `rss_mib` is of the largest one, `rss_all_mib` the largest sum over all of
    them that was seen; pages that they share count in each, so that it is rather too much.
    """
    full = {**os.environ, "PYTHONPATH": str(REPO / "src")} if env is None else {**os.environ, **env}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        began = time.perf_counter()
        child = subprocess.Popen(command, stdout=out, stderr=err, env=full)
        ended, sums = threading.Event(), [0]
        watcher = threading.Thread(target=watch, args=(child.pid, ended, sums), daemon=True)
        watcher.start()
        _, status, used = os.wait4(child.pid, 0)
        took = time.perf_counter() - began
        ended.set()
        watcher.join()
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        printed, errors = out.read().strip().splitlines(), err.read().strip().splitlines()
    contender: dict[str, Any] = {
        "seconds": round(took, 2),
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "rss_mib": round(used.ru_maxrss / 1024),
        "rss_all_mib": round(max(max(sums) / 2**20, used.ru_maxrss / 1024)),
    }
    if child.returncode:
        return {"error": (errors or ["killed"])[-1][:300], **contender}
    if printed:
        contender["last_line"] = re.sub(r"/\S*/", "", printed[-1])[
            :300
        ]  # not where this machine keeps its files
    return contender


def watch(pid: int, ended: threading.Event, sums: list[int]) -> None:
    """Appends the resident bytes of a process and its descendants together whenever they are the most so far."""
    while not ended.wait(SAMPLE_S):
        now = sum(resident(p) for p in family(pid))
        if now > sums[-1]:
            sums.append(now)


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    with contextlib.suppress(OSError):  # it ends while we look
        for f in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in f.read_text().split():
                found += family(int(child))
    return found


def resident(pid: int) -> int:
    """Bytes of a process in memory; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def csv_mb(folder: Path) -> float:
    """Megabytes of the CSV."""
    f = folder / "jobs.csv"
    return f.stat().st_size / 1e6 if f.exists() else 0.0


def count(text: str) -> int:
    """1M, 250k, 1000 as a number."""
    scale = {"k": 10**3, "M": 10**6, "G": 10**9}.get(text[-1:], 1)
    return int(float(text.rstrip("kMG")) * scale)


def short(n: int) -> str:
    """1,000,000 as '1 M jobs'."""
    return f"{n / 1e6:g} M"


def memory_of_machine() -> int:
    """Bytes of memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


if __name__ == "__main__":
    sys.exit(main())
