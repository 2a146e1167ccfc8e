"""How fast hostile logs are read, and how small real-looking logs become; Drain3 on the same logs in the same run.

    python benchmarks/diagnosis_logs.py [--mb 20] [--words all] [--logs FOLDER] [--drain3] [--out FILE]
    python benchmarks/diagnosis_logs.py --only many

Hostile: each trigger word on every line (five styles), one endless line, a thousand files; a root is planted at a
random place. MB per second of processor time of one core; on a busy machine a loop of known length beside each
measurement says by how much it is slowed (`calm`, at most 1), and both figures are given.
Compression: generated logs in ten styles and, with `--logs`, every file of a folder: lines, share of the bytes kept,
whether the planted root and its traceback are kept. Drain3 (the extra of `make test-all`) keeps one line per template.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import hostile_logs
import training_logs
from own_folders import use_own_folders

from unbroken.diagnose import examine
from unbroken.diagnose.compress import compress
from unbroken.diagnose.match.kinds import patterns_of
from unbroken.diagnose.match.rules import builtin_set
from unbroken.diagnose.match.triggers import WORDS
from unbroken.diagnose.read.sources import expand

_QUIET_LOOP_S = 0.0235  # of `_calm` on the machine of the committed result, idle


def _calm() -> float:
    start = time.process_time()
    sum(i & 3 for i in range(600_000))
    return min(1.0, _QUIET_LOOP_S / (time.process_time() - start))


def _pace(paths: list[Path], size: int) -> tuple[float, float, Any]:
    before, start = _calm(), time.process_time()
    d = examine(paths)
    spent = time.process_time() - start
    return size / 1e6 / spent, size / 1e6 / (spent * (before + _calm()) / 2), d


def hostile(megabytes: float, words: list[str], scratch: Path) -> dict[str, Any]:
    """The worst and the median figures of each kind of flood."""
    examine([Path(__file__)])  # imports and rules
    out: dict[str, Any] = {}
    for style in hostile_logs.STYLES:
        rows = []
        for i, word in enumerate(words):
            path = scratch / "flood.log"
            at = hostile_logs.flood(path, word, style, int(megabytes * 1e6), i, hostile_logs.ROOT)
            raw, scaled, d = _pace([path], path.stat().st_size)
            found = any(e.line == at for s in d.scans for e in s.events)
            rows.append((scaled, raw, word, found))
        rows.sort()
        out[style] = {
            "worst_mb_per_s": round(rows[0][0], 1), "worst_as_measured": round(rows[0][1], 1), "worst_word": rows[0][2],
            "median_mb_per_s": round(statistics.median(r[0] for r in rows), 1), "roots_found": sum(r[3] for r in rows), "of": len(rows),
        }  # fmt: skip
    for kind in ("plain", "words", "bar"):
        path = scratch / "endless.log"
        hostile_logs.endless_line(path, int(4e6 * megabytes), list(WORDS), kind)
        raw, scaled, _ = _pace([path], path.stat().st_size)
        out[f"endless line, {kind}"] = {"mb_per_s": round(scaled, 1), "as_measured": round(raw, 1)}
        path.unlink()
    return out


def many_files(scratch: Path) -> dict[str, Any]:
    """The figures of folders of a thousand small files: read first in a process, and again."""
    out: dict[str, Any] = {}
    many = {
        "a thousand files": lambda f: hostile_logs.many_files(f, 1000, 50_000, list(WORDS), 1),
        "a thousand files of one line": lambda f: hostile_logs.many_of_one(
            f, 1000, 53_000, hostile_logs.ROOT
        ),
    }
    for case, write in many.items():
        folder = scratch / case
        folder.mkdir()
        name, at = write(folder)
        first = subprocess.run([sys.executable, __file__, "--first", str(folder)], check=True, capture_output=True, text=True)  # fmt: skip
        raw, scaled, d = _pace_of_folder(folder)
        raw, scaled = max((raw, scaled), _pace_of_folder(folder)[:2], key=lambda pace: pace[1])
        found = any(d.scans[e.file].name == name and e.line == at for s in d.scans for e in s.events)
        out[case] = {
            "mb_per_s": round(scaled, 1), "as_measured": round(raw, 1), "root_found": found, "first_in_a_process": json.loads(first.stdout),
        }  # fmt: skip
    return out


def _pace_of_folder(folder: Path) -> tuple[float, float, Any]:
    return _pace([folder], sum(f.stat().st_size for f in folder.iterdir()))


def first_in_a_process(folder: Path) -> dict[str, float]:
    """The figures of a folder where nothing was read before, the rules compiled apart."""
    patterns_of(builtin_set())
    raw, scaled, _ = _pace_of_folder(folder)
    return {"mb_per_s": round(scaled, 1), "as_measured": round(raw, 1)}


def compression(folder: Path | None, drain3: bool, scratch: Path) -> dict[str, Any]:
    """Lines and bytes kept of each log, by us and by Drain3."""
    rows = []
    for style in training_logs.STYLES:
        for seed in (1, 2):
            text, at = training_logs.log(style, seed, training_logs.ROOT)
            path = scratch / f"{style}-{seed}.log"
            path.write_text(text)
            rows.append((path, at))
    rows += [(f, None) for f in sorted(folder.rglob("*")) if f.is_file()] if folder else []
    out = []
    for path, at in rows:
        kept: list[tuple[int, bytes]] = []
        start = time.process_time()
        r = compress(expand([path]).logs, lambda s, n, raw, kept=kept: kept.append((n, raw)))  # type: ignore[misc]
        row: dict[str, Any] = {
            "log": path.name, "lines_in": r.lines_in, "lines_out": r.lines_out, "share": round(r.bytes_out / max(1, r.bytes_in), 4),
            "mb_per_s": round(r.bytes_in / 1e6 / max(1e-9, time.process_time() - start), 1),
        }  # fmt: skip
        if at is not None:
            real = {n for n, raw in kept if not raw.startswith(b"[... ")}
            row["root_and_context_kept"] = all(n in real for n in range(at - 4, at + 1))
        if drain3:
            row |= _drain3(path, at)
        out.append(row)
    return {
        "logs": out, "median_share": statistics.median(r["share"] for r in out), "median_lines": statistics.median(r["lines_out"] for r in out),
        "most_lines": max(r["lines_out"] for r in out),
    } | ({"drain3_median_share": statistics.median(r["drain3_share"] for r in out), "drain3_median_lines": statistics.median(r["drain3_lines"] for r in out)} if drain3 else {})  # fmt: skip


def _drain3(path: Path, at: int | None) -> dict[str, Any]:
    """Drain3 with three masks: the first line of each template is what a reader would be shown."""
    from drain3 import TemplateMiner
    from drain3.masking import MaskingInstruction
    from drain3.template_miner_config import TemplateMinerConfig

    config = TemplateMinerConfig()
    config.masking_instructions = [
        MaskingInstruction(r"0x[0-9a-fA-F]+", "HEX"),
        MaskingInstruction(r"\d+\.\d+\.\d+\.\d+", "IP"),
        MaskingInstruction(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?", "NUM"),
    ]
    miner, lines, size = TemplateMiner(config=config), set(), 0
    data = path.read_bytes()
    start = time.process_time()
    for n, raw in enumerate(data.split(b"\n"), 1):
        if miner.add_log_message(raw.decode("utf-8", "replace"))["change_type"] == "cluster_created":
            lines.add(n)
            size += len(raw) + 1
    spent = time.process_time() - start
    row = {"drain3_lines": len(lines), "drain3_share": round(size / len(data), 4), "drain3_mb_per_s": round(len(data) / 1e6 / spent, 2)}  # fmt: skip
    return row | (
        {"drain3_root_and_context_kept": all(n in lines for n in range(at - 4, at + 1))} if at else {}
    )


def main() -> None:
    """The command line."""
    use_own_folders()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mb", type=float, default=20, help="size of each flood")
    parser.add_argument("--words", type=int, default=len(WORDS), help="how many of the trigger words")
    parser.add_argument("--logs", type=Path, help="a folder of logs to compress too")
    parser.add_argument("--drain3", action="store_true", help="Drain3 on the same logs")
    parser.add_argument("--only", choices=["many"], help="the thousand files alone")
    parser.add_argument(
        "--first", type=Path, help="a folder: its pace in this new process, as JSON, and nothing else"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.first:
        print(json.dumps(first_in_a_process(args.first)))
        return
    from machine import describe_machine

    step = max(1, len(WORDS) // args.words)
    with tempfile.TemporaryDirectory() as folder:
        result = {
            "machine": describe_machine(),
            "flood_mb": args.mb,
            "hostile": many_files(Path(folder)),
        }
        if not args.only:
            result["hostile"] = hostile(args.mb, list(WORDS)[::step], Path(folder)) | result["hostile"]
            result["compression"] = compression(args.logs, args.drain3, Path(folder))
    shown = {k: v for k, v in result.get("compression", {}).items() if k != "logs"}
    print(json.dumps(result | ({"compression": shown} if shown else {}), indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
