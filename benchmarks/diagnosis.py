"""Scores diagnosis tools on folders of labelled failure logs: ours, three simple baselines, and Drain3 for speed.

    python benchmarks/diagnosis.py FOLDER [FOLDER ...] [--out benchmarks/results/diagnosis.json] [--show] [--drain3 PYTHON]

FOLDER holds one folder per case: `case.json` (category, reason, acceptable_reasons, evidence, evidence_file,
evidence_line, faulty, recoverable_by_restart, needs_node_cordon) and the logs. Reasons "Success", "TimeLimit",
"Cancelled" and "Preempted" are endings that are no failure: any reason found there is a false alarm. Make more cases
with `python -m tests.support.failure_logs OUT --cases 300`.

Calibration: answers in bins of the confidence that they state, against the share whose reason is acceptable, over all
folders; `certain_and_wrong` counts those at 0.8 and above that are not.

Figures: reason strict and by acceptable reasons, category, evidence (the root line fits the label's expression),
exact line, faulty node and rank where the label has one, recoverable, cordon, false alarms, wrong stops (a stop where
a restart helps), bytes and lines per CPU second. Times are process times of one core. On a busy machine
`--keep-speeds RESULT.json` judges again and keeps the speeds of that earlier result, marked with the machine and the
commit that they are from.

The baselines name no node, never cordon and never say that a job had no failure, so that `faulty` and `no false alarm`
can only be 0 for them, and `cordon` is the share of cases that need none. Their `recoverable` and their action are our
own table's for the reason that they found.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from machine import describe_machine
from own_folders import use_own_folders

from unbroken.diagnose import REASONS, Action, Faulty, Outcome, Root, Verdict, diagnose
from unbroken.diagnose.compress import compress
from unbroken.diagnose.match.rules import builtin_set, defaults
from unbroken.diagnose.read.prefixes import take_apart
from unbroken.diagnose.read.sources import expand
from unbroken.diagnose.redact.decoded import visible
from unbroken.diagnose.redact.redact import Redactor

HEALTHY = {
    "Success": "completed",
    "TimeLimit": "time_limit",
    "Cancelled": "cancelled",
    "Preempted": "preempted",
}
_EXCEPTION = re.compile(r"^(?:[\w.]+\.)?[A-Z]\w+(?:Error|Exception)\b")
_KEYWORDS = (
    ("Xid", "ECCError"), ("NVLink", "NVLinkError"), ("Node failure", "NodeFailure"), ("out of memory", "OutOfMemoryError"), ("DataLoader worker", "DataloaderKilled"),
    ("botocore", "S3StorageError"), ("CUDA error", "CUDAError"), ("state_dict", "ModelLoadingError"), *((r, r) for r in REASONS),
    ("ncclRemoteError", "NCCLRemoteError"), ("collective operation timeout", "NCCLTimeoutError"), ("TIME LIMIT", "Hang"),
)  # fmt: skip


def read(case: Path) -> list[tuple[str, int, str]]:
    """Every line of a case as (file, number, text)."""
    rows = []
    for f in sorted(case.iterdir()):
        if f.name != "case.json":
            data = gzip.decompress(f.read_bytes()) if f.suffix == ".gz" else f.read_bytes()
            rows += [(f.name, i, t) for i, t in enumerate(data.decode("utf-8", "replace").split("\n"), 1)]
    return rows


def ours(case: Path) -> Verdict:
    """The product."""
    return diagnose([case])


def redacted(case: Path) -> Verdict:
    """The product on logs from which every secret, user, address and domain was taken: the verdict must be the same.

    The root's text is then that of the original line, since labels may quote an address.
    """
    rows = read(case)
    redact = Redactor()
    files: dict[str, list[str]] = {}
    for file, _, text in rows:
        files.setdefault(file, []).append(text)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / case.name
        folder.mkdir()
        for file, texts in files.items():
            data = "\n".join(redact.lines(texts)).encode()
            (folder / file).write_bytes(gzip.compress(data) if file.endswith(".gz") else data)
        v = diagnose([folder])
    if v.root is None or v.root.line is None or v.root.file not in files:
        return v
    v = replace(v, root=replace(v.root, text=visible(files[v.root.file][v.root.line - 1])))
    names = {name: value for (_, value), name in redact.names().items()}
    if v.faulty and v.faulty.node in names:
        v = replace(v, faulty=replace(v.faulty, node=names[v.faulty.node]))
    return v


def last_exception(case: Path) -> Verdict:
    """Baseline: the last line that starts with an exception's class, read by our own rules."""
    rules = builtin_set()
    for file, n, text in reversed(read(case)):
        body = take_apart(text, 2026).body
        rule = rules.best(body, exception=True, noise=False) if _EXCEPTION.match(body) else None
        if rule is not None and rule.reason in REASONS:
            return _simple(rule.reason, file, n, text)
    return Verdict(Outcome.UNKNOWN, reason="Unknown")


def earliest_rule(case: Path) -> Verdict:
    """Baseline: our own rules without any chronology: the first line that any of them takes."""
    rules = builtin_set()
    for file, n, text in read(case):
        rule = rules.best(take_apart(text, 2026).body, exception=False)
        if rule is None and _EXCEPTION.match(text):
            rule = rules.best(take_apart(text, 2026).body, exception=True)
        if rule is not None and rule.reason in REASONS:
            return _simple(rule.reason, file, n, text)
    return Verdict(Outcome.UNKNOWN, reason="Unknown")


def keywords(case: Path) -> Verdict:
    """Baseline: a list of keywords by priority, as in many launchers."""
    rows = read(case)
    for word, reason in _KEYWORDS:
        for file, n, text in rows:
            if word in text:
                return _simple(reason, file, n, text)
    return Verdict(Outcome.UNKNOWN, reason="Unknown")


def _simple(reason: str, file: str, n: int, text: str) -> Verdict:
    m = re.match(r"\[rank(\d+)\]", text)
    category = REASONS.get(reason)
    return Verdict(
        Outcome.FAILED,
        category,
        reason,
        Root(file, n, text),
        faulty=Faulty(rank=int(m.group(1))) if m else None,
        recoverable=defaults()[reason].recoverable,
        action=Action(defaults()[reason].action),
    )


CONTENDERS: dict[str, Callable[[Path], Verdict]] = {
    "unbroken": ours,
    "last exception": last_exception,
    "earliest rule": earliest_rule,
    "keyword priority": keywords,
}


def judge(label: dict[str, Any], v: Verdict) -> dict[str, bool | None]:
    """What is right of one verdict; None where the label asks nothing."""
    want, healthy = label["reason"], label["reason"] in HEALTHY
    reason = v.reason is None and v.outcome.value == HEALTHY[want] if healthy else v.reason == want
    category = v.category.value if v.category else "None" if v.reason is None else "Unknown"
    faulty, found = label.get("faulty"), v.faulty or Faulty()
    text = v.root.text if v.root else ""
    return {
        "reason": reason,
        "acceptable reason": reason or v.reason in label["acceptable_reasons"],
        "category": category == label["category"],
        "evidence": bool(text) and re.search(label["evidence"], text) is not None,
        "exact line": v.root is not None
        and (v.root.file, v.root.line) == (label["evidence_file"], label["evidence_line"]),
        "faulty": (found.node, found.rank) == (faulty["node"], faulty["rank"]) if faulty else None,
        "recoverable": None
        if healthy and want != "Success"
        else v.recoverable == label["recoverable_by_restart"],
        "cordon": bool(v.cordon) == label["needs_node_cordon"],
        "no false alarm": v.reason is None if healthy else None,
        "no wrong stop": v.action.value != "stop" if label["recoverable_by_restart"] else None,
    }


BINS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.01)
"""Bounds of the bins of stated confidence."""


def calibration(answers: list[tuple[float, bool]]) -> dict[str, Any]:
    """Stated confidence against the share that was right, in bins, and how many were certain and wrong."""
    bins = []
    for low, high in itertools.pairwise(BINS):
        inside = [(c, ok) for c, ok in answers if low <= c < high]
        if inside:
            right = sum(ok for _, ok in inside)
            stated = sum(c for c, _ in inside) / len(inside)
            bins.append({"from": low, "to": min(high, 1.0), "answers": len(inside), "right": right, "share": round(right / len(inside), 4), "stated": round(stated, 4)})  # fmt: skip
    certain = [ok for c, ok in answers if c >= 0.9]
    return {
        "bins": bins,
        "at_0.9": {"answers": len(certain), "right": sum(certain), "share": round(sum(certain) / max(1, len(certain)), 4)},
        "certain_and_wrong": sum(1 for c, ok in answers if c >= 0.8 and not ok),
    }  # fmt: skip


def score(
    folder: Path, contender: Callable[[Path], Verdict], show: bool, only: set[str] | None = None
) -> dict[str, Any]:
    """All figures of one tool on one folder."""
    right: dict[str, list[int]] = {}
    size = lines = 0
    spent = 0.0
    wrong: dict[str, list[str]] = {}
    answers: list[tuple[float, bool]] = []
    for case in sorted(folder.iterdir()):
        if not (case / "case.json").is_file() or (only is not None and case.name not in only):
            continue
        label = json.loads((case / "case.json").read_text())
        start = time.process_time()
        verdict = contender(case)
        spent += time.process_time() - start
        size += label.get("bytes", 0)
        lines += label.get("lines", 0)
        judged = judge(label, verdict)
        answers.append((verdict.confidence, bool(judged["acceptable reason"])))
        for key, ok in judged.items():
            if ok is not None:
                done = right.setdefault(key, [0, 0])
                done[0] += ok
                done[1] += 1
                if not ok and key != "exact line":
                    wrong.setdefault(case.name, []).append(key)
        if show and case.name in wrong:
            r = verdict.root
            print(
                f"{case.name}: wrong {', '.join(wrong[case.name])}; want {label['reason']} {label['faulty']} at {label['evidence_file']}:{label['evidence_line']}"
            )
            print(
                f"    got {verdict.outcome.value} {verdict.reason} {verdict.faulty} by {verdict.decided_by} at {r.file if r else ''}:{r.line if r else ''} {r.text[:120] if r else ''}"
            )
    return {
        "figures": {k: {"right": a, "of": b, "share": round(a / b, 4)} for k, (a, b) in right.items()},
        "mb_per_s": round(size / 1e6 / spent, 1) if spent else None, "lines_per_s": round(lines / spent) if spent else None, "wrong": wrong, "answers": answers,
    }  # fmt: skip


def keep_speeds(result: dict[str, Any], former: dict[str, Any]) -> None:
    """Replaces speeds by those of an earlier result, and says where they are from; contenders that it lacks have none."""
    result["speeds_of"] = former.get("speeds_of", former["machine"])
    for name, contender in result["arms"].items():
        earlier = former["arms"].get(name, {})
        contender |= {"mb_per_s": earlier.get("mb_per_s"), "lines_per_s": earlier.get("lines_per_s")}
    if "speed" in former:
        result["speed"] = former["speed"]


def big_log(path: Path, megabytes: int) -> None:
    """A metric-heavy log of that size with one failure at its end."""
    import random

    rng = random.Random(1)
    moment = datetime.datetime(2026, 3, 20, 11, 31)
    with path.open("w") as f:
        f.write("[2026-03-20 11:30:00] submitting job 1 nodelist=node-1,node-2 gpus_per_node=8\n")
        n = 0
        while f.tell() < megabytes * 1_000_000:
            rows = []
            for _ in range(1000):
                n += 1
                moment += datetime.timedelta(seconds=5)
                rows.append(
                    f" [{moment:%Y-%m-%d %H:%M:%S}] iteration {n:8d}/  900000 | consumed samples: {n * 2048:12d} | elapsed time per iteration (ms): {4800 + rng.random() * 100:.1f} | throughput per GPU (TFLOP/s/GPU): {430 + rng.random():.1f} | learning rate: 1.500000E-04 | global batch size:  2048 | lm loss: {2 + rng.random() * 0.05:.6E} | loss scale: 1.0 | grad norm: {rng.random():.3f} | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
                )
            rows.append(
                f"saving checkpoint at iteration {n:8d} to /mnt/ckpt/iter_{n:07d} in torch_dist format\n[{moment:%Y-%m-%d %H:%M:%S}] WARNING metrics exporter: push to gateway failed (timeout 5s), will retry with next batch\n"
            )
            f.writelines(rows)
        f.write(
            '[rank3]: Traceback (most recent call last):\n[rank3]:   File "train.py", line 3, in main\n[rank3]:     x()\n[rank3]: RuntimeError: CUDA error: an illegal memory access was encountered\n'
        )


_CHILD = """
import json, resource, sys, time
sys.path.insert(0, {src!r})
from unbroken.diagnose import diagnose
from unbroken.diagnose.compress import compress
from unbroken.diagnose.read.prefixes import take_apart
from unbroken.diagnose.read.sources import expand
what, path = sys.argv[1:]
wall, start = time.monotonic(), time.process_time()
if what == "diagnose":
    v = diagnose([path]); extra = {{"reason": v.reason, "line": v.root.line}}
else:
    kept = []
    r = compress(expand([path]).logs, lambda s, n, raw: kept.append(n)); extra = r.as_json() | {{"rules": None, "learnt": len(r.learnt), "last_kept": kept[-1]}}
print(json.dumps({{"cpu_s": time.process_time() - start, "wall_s": time.monotonic() - wall, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, **extra}}))
"""
_DRAIN = r"""
import re, sys, time
from drain3 import TemplateMiner
from drain3.template_miner_config import TemplateMinerConfig
from drain3.masking import MaskingInstruction
c = TemplateMinerConfig(); c.masking_instructions = [MaskingInstruction(r"0x[0-9a-fA-F]+", "HEX"), MaskingInstruction(r"\d+\.\d+\.\d+\.\d+", "IP"), MaskingInstruction(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?", "NUM")]
m = TemplateMiner(config=c); n = 0; lines = open(sys.argv[1], errors="replace").read(int(sys.argv[2])).split("\n")
start = time.process_time()
for line in lines: m.add_log_message(line)
print(len(lines) / (time.process_time() - start))
"""


def speed(megabytes: int, drain3: str | None, scratch: Path) -> dict[str, Any]:
    """Speed, memory and shrinkage on one large log, and Drain3 on its first 20 MB in the same run."""
    path = scratch / "big.log"
    big_log(path, megabytes)
    size = path.stat().st_size
    src = str(Path(__file__).resolve().parents[1] / "src")
    out: dict[str, Any] = {"log_mb": round(size / 1e6, 1)}
    for what in ("diagnose", "compress"):
        done = subprocess.run(
            [sys.executable, "-c", _CHILD.format(src=src), what, str(path)],
            capture_output=True,
            text=True,
            check=True,
        )
        value = json.loads(done.stdout)
        value |= {"mb_per_cpu_s": round(size / 1e6 / value["cpu_s"], 1)}
        out[what] = value
    part = scratch / "part.log"
    with path.open("rb") as f:
        part.write_bytes(f.read(20_000_000))
    start = time.process_time()
    report = compress(expand([part]).logs, lambda s, n, raw: None)
    out["lines_per_s"] = round(report.lines_in / (time.process_time() - start))
    if drain3:
        done = subprocess.run(
            [drain3, "-c", _DRAIN, str(part), "20000000"], capture_output=True, text=True, check=True
        )
        out["drain3_lines_per_s"] = round(float(done.stdout))
        out["times_drain3"] = round(out["lines_per_s"] / out["drain3_lines_per_s"], 1)
    path.unlink()
    part.unlink()
    return out


def show_figures(folder: str, contenders: dict[str, Any]) -> None:
    """Prints one folder's table."""
    print(f"{folder:<18}" + "".join(f"{n:>20}" for n in contenders))
    for k in contenders["unbroken"]["figures"]:
        cells = [r["figures"].get(k) for r in contenders.values()]
        print(
            f"{k:<18}"
            + "".join(
                f"{c['right']}/{c['of']} = {c['share']:.1%}".rjust(20) if c else " " * 20 for c in cells
            )
        )
    print(f"{'MB per CPU s':<18}" + "".join(f"{r['mb_per_s'] or '':>20}" for r in contenders.values()))


def main() -> None:
    """The command line."""
    use_own_folders()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "folders", type=Path, nargs="*", help="labelled cases; without any, generated ones are used"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", action="store_true", help="print each case that is not all right")
    parser.add_argument("--only", help="a file with a JSON list of case names")
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument(
        "--redacted", action="store_true", help="also score ours on the logs as they would be sent"
    )
    parser.add_argument("--speed", type=int, metavar="MB", help="also measure speed on a log of so many MB")
    parser.add_argument(
        "--keep-speeds", type=Path, metavar="FILE", help="an earlier result whose speeds stay as they are"
    )
    parser.add_argument("--drain3", help="a Python that has drain3, for its speed in the same run")
    parser.add_argument(
        "--generated", type=int, default=300, help="how many cases to generate where no folder is given"
    )
    args = parser.parse_args()
    if args.speed and args.keep_speeds:
        parser.error(
            "--speed measures speeds, --keep-speeds keeps those of an earlier result: give one of them"
        )
    with tempfile.TemporaryDirectory() as scratch:
        folders = args.folders
        if not folders:
            sys.path.append(str(Path(__file__).resolve().parents[1]))
            from tests.support.failure_logs import generate

            folders = [Path(scratch) / "cases"]
            generate(folders[0], args.generated, 3)
        only = set(json.loads(Path(args.only).read_text())) if args.only else None
        result: dict[str, Any] = {
            "machine": describe_machine(),
            "folder": args.folders[0].name if args.folders else f"{args.generated} generated",
            "arms": {},
            "more": {},
        }
        contenders = CONTENDERS | ({"unbroken, on redacted logs": redacted} if args.redacted else {})
        answers: list[tuple[float, bool]] = []
        for folder in folders:
            scored: dict[str, Any] = {}
            for name, contender in contenders.items():
                if args.ours_only and name != "unbroken":
                    continue
                scored[name] = score(folder, contender, args.show and name == "unbroken", only)
                told = scored[name].pop("answers")
                scored[name]["calibration"] = calibration(told)
                answers += told if name == "unbroken" else []
            if folder is folders[0]:
                result["arms"] = scored
            else:
                result["more"][folder.name] = {"arms": scored}
        result["calibration"] = calibration(answers)
        if args.speed:
            result["speed"] = speed(args.speed, args.drain3, Path(scratch))
        if args.keep_speeds:
            keep_speeds(result, json.loads(args.keep_speeds.read_text()))
    show_figures(result["folder"], result["arms"])
    for name, more in result["more"].items():
        show_figures(name, more["arms"])
    print("stated confidence against the share that was right (unbroken, all folders)")
    for row in result["calibration"]["bins"]:
        print(f"  {row['from']:.1f} to {row['to']:.1f}: {row['right']}/{row['answers']} = {row['share']:.1%}, stated {row['stated']:.1%}")  # fmt: skip
    print(f"  at 0.9 and above: {result['calibration']['at_0.9']}; certain (0.8) and wrong: {result['calibration']['certain_and_wrong']}")  # fmt: skip
    if "speed" in result:
        print(json.dumps(result["speed"], indent=1))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
