"""`unbroken eval` against what it replaces, in simulated time and with a real model on this machine's GPUs or CPUs.

    python benchmarks/evaluation.py                      # simulated time: seconds to minutes on one core
    python benchmarks/evaluation.py --real               # real contenders on all GPUs of this machine: under 5 minutes on two
    python benchmarks/evaluation.py --real --gpus 1 --arms ours --seconds 200
    python benchmarks/evaluation.py --real --workers 2   # CPU workers, a tiny model

Results go to benchmarks/results/evaluation-simulated.json and evaluation-real-N-DEVICE.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from machine import describe_machine
from own_folders import use_own_folders

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

RESULTS = HERE / "results"


def main() -> int:
    """Runs what was asked and says whether the targets are reached."""
    use_own_folders()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", action="store_true", help="real processes and a real model")
    parser.add_argument("--quick", action="store_true", help="simulated time without the sweep")
    parser.add_argument("--gpus", type=int, default=None)
    parser.add_argument("--workers", type=int, default=None, help="CPU workers where there is no GPU")
    parser.add_argument(
        "--arms",
        dest="contenders",
        default="ours,baseline",
        help="of ours, baseline, opencompass-size, opencompass-workers",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=None,
        help="inference per worker; default: what fits --budget on GPUs, 15 on CPUs",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=300.0,
        help="seconds for everything on GPUs, where --seconds is not given",
    )
    parser.add_argument("--datasets", type=int, default=None, help="how many of the 63; default 6")
    parser.add_argument(
        "--model", default=None, help="tiny, small or medium; default medium on GPUs, tiny on CPUs"
    )
    parser.add_argument(
        "--link",
        type=float,
        default=None,
        help="Gb/s of the throttled storage; default: as long as 14 GB at 25 Gb/s",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.real:
        from evaluation_real import real_contenders

        found = real_contenders(given)
        name = (
            f"evaluation-real-{found['workers']}-{found['device'].replace(' ', '_').replace('/', '_')}.json"
        )
    else:
        from evaluation_simulated import everything

        began = time.process_time()
        found = everything(given.quick)
        found["cpu_s"] = round(time.process_time() - began, 1)
        name = "evaluation-simulated.json"
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / name).write_text(
        json.dumps({"machine": describe_machine(), **rounded(found)}, indent=1) + "\n"
    )
    show(found)
    print(f"\nwritten to {given.out / name}")
    return 0 if all(found["checks"].values()) else 1


def rounded(value: Any) -> Any:
    """Four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {str(k): rounded(v) for k, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list | tuple) else value


def show(found: Mapping[str, Any]) -> None:
    """Prints tables of rows, and the rest as it is."""
    for title, value in found.items():
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            table(title, value)
        elif isinstance(value, Mapping) and value and all(isinstance(v, list) for v in value.values()):
            for name, rows in value.items():
                table(f"{title}: {name}", rows)
        elif value not in ([], {}):
            print(f"\n{title}: {json.dumps(rounded(value))}")


def table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Aligned columns."""
    names = list(dict.fromkeys(k for r in rows for k in r))
    cells = [names, *([str(rounded(r[k])) if k in r else "-" for k in names] for r in rows)]
    widths = [max(len(str(r[i])) for r in cells) for i in range(len(cells[0]))]
    print(f"\n{title}")
    for r in cells:
        print("  " + "  ".join(str(c).ljust(w) for c, w in zip(r, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
