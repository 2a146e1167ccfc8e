"""What does my cluster spend its GPU time on? A report, and the same numbers in Python.

    python examples/characterise_a_cluster.py [jobs.txt ...]

Without arguments a small synthetic trace stands in for the output of sacct.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from unbroken.trace.published.study import acme
from unbroken.trace.readers import load
from unbroken.trace.report import build_report, page
from unbroken.trace.synthetic import generate


def main(files: list[Path], out: Path) -> None:
    if not files:
        files = [out / "jobs.parquet"]
        generate.write_jobs(generate.TracePlan("Seren", jobs=20_000, seed=1), files[0])
    with load(files) as store:
        report = build_report(store, [(f.name, "") for f in files], references=acme(("Seren",)))
    (out / "report.html").write_text(page(report))
    for row in report.findings["by_state"].dicts():
        print(
            f"{row['state']:<10} {row['jobs_pct']:5.1f} % of the GPU jobs, {row['gpu_time_pct']:5.1f} % of the GPU time"
        )
    for note in report.notes:
        print(f"{note.kind}: {note.text}")
    print(f"Report: {out / 'report.html'}")


if __name__ == "__main__":
    main([Path(a) for a in sys.argv[1:]], Path(tempfile.mkdtemp(prefix="unbroken-example-")))
