"""Distribution of a wide utilisation CSV (one column a GPU): ours, DuckDB, pandas, each in its own process.

python3 benchmarks/utilisation.py [--size 10GB] [--pandas-size 300MB] [-o RESULT.json]

The table is synthetic, in the released Acme tables' form (2,288 columns, three decimals, 2 % empty cells). pandas
does what the release's own notebook does (read_csv, melt, dropna, quantile), on a smaller table because it holds all
of it in memory; speeds are compared, and quantiles must agree. Exits 1 below 200 MB/s or above 2 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from machine import describe_machine

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "src"))

from unbroken.units import Bytes  # noqa: E402

SHARES = [0.05, 0.25, 0.5, 0.75, 0.95]
COLUMNS = 2288
MEASURE = """
import json, resource, sys, time
began, cpu = time.perf_counter(), time.process_time()
{body}
took = time.perf_counter() - began
used, helpers = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
cpu = time.process_time() - cpu + helpers.ru_utime + helpers.ru_stime
print(json.dumps({{"seconds": took, "cpu_s": cpu, "rss_mib": (used.ru_maxrss + helpers.ru_maxrss) / 1024,
                  "quantiles": [round(float(q), 3) for q in found]}}))
"""
OURS = """
from pathlib import Path
from unbroken.samples.wide import count
found = count(Path({path!r}), processes={threads}).quantiles({shares})
"""
DUCKDB = """
import duckdb
con = duckdb.connect(); con.execute("SET threads=2; SET memory_limit='1500MB'; SET enable_progress_bar=false")
head = open({path!r}).readline().strip().split(",")
types = ", ".join(f"'{{c}}': '{{'VARCHAR' if i == 0 else 'DOUBLE'}}'" for i, c in enumerate(head))
table = f"read_csv('{path}', header=true, auto_detect=false, delim=',', columns={{{{{{types}}}}}})"
rows = con.execute(f"SELECT approx_quantile(v, {shares}) FROM (UNPIVOT {{table}} ON COLUMNS(* EXCLUDE Time) INTO NAME n VALUE v)").fetchall()
found = rows[0][0]
"""
PANDAS = """
import pandas as pd
data = pd.read_csv({path!r}).melt(id_vars="Time", var_name="Server")
data.dropna(subset=["value"], inplace=True)
found = data["value"].quantile({shares}).values
"""


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--size", default="1GB")
    p.add_argument("--pandas-size", default="300MB")
    p.add_argument("--dir", type=Path, help="where the tables are written [default: the temporary folder]")
    p.add_argument("-o", "--out", type=Path, default=REPO / "benchmarks" / "results" / "utilisation.json")
    args = p.parse_args()
    contenders: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        large, small = Path(folder) / "SM_ACTIVE.csv", Path(folder) / "SM_ACTIVE-small.csv"
        write(large, Bytes(args.size))
        write(small, min(Bytes(args.size), Bytes(args.pandas_size)))
        for threads in (1, 2):
            contenders[f"unbroken, {threads} processes"] = measure(OURS, large, threads)
        contenders["unbroken, small table"] = measure(OURS, small, 2)
        contenders["duckdb, small table"] = measure(DUCKDB, small)
        contenders["pandas, small table"] = measure(PANDAS, small)
    best = contenders["unbroken, 2 processes"]
    result = {
        "machine": describe_machine(),
        "size": args.size,
        "arms": contenders,
        "checks": {
            "at least 200 MB/s": best["mb_per_s"] >= 200,
            "within 2 GiB": best["rss_mib"] <= 2048,
            "quantiles as pandas": "error" in contenders["pandas, small table"]
            or all(
                abs(a - b) < 0.01
                for a, b in zip(
                    contenders["unbroken, small table"]["quantiles"],
                    contenders["pandas, small table"]["quantiles"],
                    strict=True,
                )
            ),
        },
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0 if all(result["checks"].values()) else 1  # type: ignore[attr-defined]


def write(path: Path, size: int) -> None:
    """A table of about `size` bytes; its rows repeat after 400, their times go on."""
    import numpy as np

    rng = np.random.default_rng(0)
    names = [f"10.140.{i // 1600}.{i // 8 % 200}-{i % 8}" for i in range(COLUMNS)]
    tails = []
    for _ in range(400):
        values = np.where(rng.random(COLUMNS) < 0.4, 0, np.clip(rng.normal(60, 25, COLUMNS), 0, 100))
        empty = rng.random(COLUMNS) < 0.02
        tails.append(
            ","
            + ",".join(
                "" if e else f"{v:.3f}".rstrip("0").rstrip(".") for v, e in zip(values, empty, strict=True)
            )
            + "\n"
        )
    at, written, row = datetime(2023, 7, 1), 0, 0
    with open(path, "w", buffering=1 << 22) as f:
        written += f.write("Time," + ",".join(names) + "\n")
        while written < size:
            written += f.write(f"{at + timedelta(seconds=15 * row)}+08:00{tails[row % 400]}")
            row += 1


def measure(body: str, path: Path, threads: int = 2) -> dict[str, Any]:
    """One contender in a process of its own; {"error": ...} if it cannot run."""
    code = MEASURE.format(body=body.format(path=str(path), shares=SHARES, threads=threads))
    env = {**os.environ, "PYTHONPATH": str(REPO / "src")}
    p = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    if p.returncode != 0:
        return {"error": (p.stderr.strip().splitlines() or ["killed"])[-1]}
    contender: dict[str, Any] = json.loads(p.stdout.splitlines()[-1])
    size = path.stat().st_size / 1e6
    contender = {k: round(v, 3) if isinstance(v, float) else v for k, v in contender.items()}
    return {
        "mb": round(size),
        "mb_per_s": round(size / contender["seconds"], 1),
        "mb_per_cpu_s": round(size / contender["cpu_s"], 1),
        **contender,
    }


if __name__ == "__main__":
    sys.exit(main())
