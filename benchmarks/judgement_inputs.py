"""What happens to the simulated cluster of `judgement.py`: faults with their rates, logs and times, each with where it is from."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from unbroken.diagnose import Verdict, diagnose

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DATA = ROOT.parent / "shared" / "data"
DAY_S = 86_400.0


@dataclass(frozen=True)
class FaultClass:
    """A row of ByteRobust's table of incidents (SOSP'25, three months): `share` in percent; `reasons` of the log cases that stand
    for it; `node` the share with a node at fault; `seen` how it shows itself."""

    name: str
    share: float
    reasons: tuple[str, ...]
    node: float
    seen: str = "exit"


CLASSES = (
    FaultClass("CUDA error", 36.1, ("CUDAError", "ECCError", "NVLinkError"), 21 / 62),
    FaultClass("CPU overload", 11.0, ("DataloaderKilled", "ConnectionError"), 0.0),
    FaultClass("CPU out of memory", 10.1, ("DataloaderKilled", "OutOfMemoryError"), 0.0),
    FaultClass("hang", 9.9, ("NCCLTimeoutError",), 21 / 26, "hang"),
    FaultClass("disk full", 5.0, ("OSError", "S3StorageError"), 0.5),
    FaultClass("InfiniBand", 2.9, ("NetworkError", "NCCLRemoteError"), 1.0),
    FaultClass("mount of a file system", 2.1, ("S3StorageError", "ConnectionError"), 0.5),
    FaultClass("storage service", 2.0, ("S3StorageError",), 0.0),
    FaultClass("container", 1.4, ("NodeFailure",), 1.0, "lost"),
    FaultClass("kernel panic", 0.4, ("NodeFailure",), 1.0, "lost"),
    FaultClass("GPU memory", 0.3, ("ECCError",), 1.0),
    FaultClass("NaN", 0.3, ("LossSpike",), 0.75, "nan"),
    FaultClass("GPU gone", 0.1, ("CUDAError",), 1.0),
    FaultClass("disk fault", 0.1, ("NodeFailure",), 1.0, "lost"),
)
"""Shares with a node at fault: the paper's, of the same symptom with two causes (hang 21:5, illegal access 21:41, NaN 3:1); where it
gives none, what the name says, and half for a disk that is full and a mount that is gone."""
PUBLISHED_RATE = 175 / (1200 * 90)
"""Incidents for a node and day: ByteRobust's dense job, 175 in three months on 1,200 machines (9,600 GPUs), for which it published
0.97."""
META_RATE = 6.5e-3
"""Meta RSC, HPCA'25, four times as many."""
CODE_SHARE = 0.04
"""So many incidents come from code that fails again until somebody mends it: ByteRobust handled 96 % without a person."""
CODE_CHANGES = 17.3 / 82.7
"""By hand, for each incident: a planned restart."""
LASTING, PASSING = 0.6, 0.2
"""Of nodes at fault: those that fail again after about 20 minutes, and those that never do; the others after about a day. Assumed."""
LASTING_S, INTERMITTENT_S = 1200.0, DAY_S
LEMONS, LEMON_SHARE = 3 / 63, 0.5
"""Three of 63 nodes caused half of the exclusions (504 B200, published)."""
TOGETHER = 0.04
"""Hardware failures of two nodes at once: 3 to 5 % (Meta RSC)."""
SWITCH_NODES, SWITCH_S = 32, 1800.0
"""One switch with its nodes, once; back after half an hour. The interval is assumed."""


@dataclass(frozen=True)
class Case:
    """A labelled log of a failure, and what the product says of it. `named` and `cordons` count a node: whether it is named, and
    whether it is to be taken out of use; `right` whether it is the one of the label.
    `passes`: by its label a restart helps."""

    name: str
    reason: str
    verdict: Verdict
    named: bool
    cordons: bool
    right: bool
    passes: bool


def read_cases(folders: Sequence[Path], more: Sequence[str] = ()) -> list[Case]:
    """All labelled cases with a reason of `CLASSES`, or of these, each diagnosed once."""
    wanted = {r for c in CLASSES for r in c.reasons} | {*more}
    found = []
    for path in sorted(p for folder in folders for p in folder.glob("*/case.json")):
        label = json.loads(path.read_text())
        if label.get("reason") not in wanted:
            continue
        verdict = diagnose([path.parent])
        node = verdict.faulty.node if verdict.faulty else None
        true = (label.get("faulty") or {}).get("node")
        found.append(
            Case(
                path.parent.name,
                label["reason"],
                verdict,
                bool(node),
                bool(verdict.cordon),
                node is not None and node == true,
                bool(label.get("recoverable_by_restart")),
            )
        )
    return found


def read_repairs(folder: Path) -> list[float]:
    """How long each of 584 real node faults lasted, in seconds (InfiniteHBD trace)."""
    open_: dict[str, float] = {}
    lasted = []
    for e in json.loads((folder / "fault_trace.json").read_text()):
        if e["event_type"] == "fault_start":
            open_.setdefault(e["node_id"], e["event_time"])
        elif e["node_id"] in open_:
            lasted.append((e["event_time"] - open_.pop(e["node_id"])) * DAY_S)
    return [s for s in lasted if s > 0]


@dataclass(frozen=True)
class Times:
    """Seconds. `source` says of each where it is from."""

    detect_exit: float
    detect_lost: float
    detect_hang: float
    detect_nan: float
    stop_to_step: float
    join: float
    step: float
    check: float
    full_check: float
    pairwise: float
    block: float
    person: float
    amend: float
    source: Mapping[str, str]

    def scale(self, factor: float) -> Times:
        """All that recovery takes, times so much."""
        names = ("detect_exit", "detect_lost", "detect_hang", "detect_nan", "stop_to_step", "join", "check", "full_check", "pairwise", "person", "amend")  # fmt: skip
        return replace(self, **{n: getattr(self, n) * factor for n in names})


def read_times(step_s: float = 5.0) -> Times:
    """From the benchmark results beside this script where there are any."""
    survive = json.loads((RESULTS / "survive-1gpu.json").read_text())
    killed = [i for i in survive["incidents"] if i["kind"] in ("kill_rank", "kill_node")]
    saves = json.loads((RESULTS / "checkpoint-fsdp2-7b-2xh200.json").read_text())["blocks"]["unbroken"][
        "saves"
    ]
    return Times(
        detect_exit=max(i["detected_s"] for i in killed),
        detect_lost=15.0,
        detect_hang=max(60.0, 4 * step_s),
        detect_nan=3 * step_s,
        stop_to_step=mean(i["resumed_s"] for i in killed),
        join=30.0,
        step=step_s,
        check=5.0,
        full_check=60.0,
        pairwise=300.0,
        block=mean(s["excess_s"] for s in saves),
        person=1800.0,
        amend=30.0,
        source={
            "detect_exit": "results/survive-1gpu.json, kill_rank and kill_node",
            "detect_lost": "the lease, by default",
            "detect_hang": "--hang-after, by default, and never below four steps",
            "detect_nan": "the third step without a number is declared (docs/loss.md)",
            "stop_to_step": "results/survive-1gpu.json: from noticed to the first new step (stop, diagnose, start, imports, restore), one H100",
            "join": "MegaScale, NSDI'24: groups of 10,000 GPUs are up within 30 s; added to the above",
            "step": "assumed",
            "check": "docs/check.md: the bound of a quick check",
            "full_check": "the bound of a full check (not built yet)",
            "pairwise": "docs/pairwise.md: its deadline",
            "block": "results/checkpoint-fsdp2-7b-2xh200.json, blocking time of a save",
            "person": "assumed: half an hour until somebody has woken up and acted",
            "amend": "stop at a step boundary and start: as stop_to_step plus join, without detection",
        },
    )  # fmt: skip


@dataclass(frozen=True)
class FaultEvent:
    """At `at` seconds something of a kind happens. `nodes` are at fault, by their numbers; `lasts` is until each fails again (inf:
    never); `code` says that it comes back until it is mended; `repair_s` how long a node is away for it."""

    at: float
    kind: FaultClass
    nodes: tuple[int, ...] = ()
    lasts: float = math.inf
    code: bool = False
    repair_s: float = 0.0


def draw_faults(
    nodes: int, days: float, rate: float, repairs: Sequence[float], seed: int
) -> list[FaultEvent]:
    """Incidents over that time: `rate` for a node and day, nodes at fault mostly lemons."""
    draw = random.Random(seed)
    lemons = draw.sample(range(nodes), max(1, round(nodes * LEMONS)))
    total = sum(c.share for c in CLASSES)
    events, at = [], 0.0
    while (at := at + draw.expovariate(nodes * rate / DAY_S)) < days * DAY_S:
        kind = draw.choices(CLASSES, [c.share / total for c in CLASSES])[0]
        if draw.random() < CODE_SHARE and kind.seen == "exit":
            events.append(FaultEvent(at, kind, code=True))
            continue
        if draw.random() >= kind.node:
            events.append(FaultEvent(at, kind))
            continue
        count = 2 if draw.random() < TOGETHER else 1
        bad = tuple(
            draw.choice(lemons) if draw.random() < LEMON_SHARE else draw.randrange(nodes)
            for _ in range(count)
        )
        how = draw.random()
        mean_s = LASTING_S if how < LASTING else math.inf if how < LASTING + PASSING else INTERMITTENT_S
        lasts = draw.expovariate(1 / mean_s) if math.isfinite(mean_s) else math.inf
        events.append(FaultEvent(at, kind, bad, lasts, repair_s=draw.choice(repairs)))
    lost = next(c for c in CLASSES if c.name == "kernel panic")
    first = draw.randrange(nodes - SWITCH_NODES)
    switch = tuple(range(first, first + SWITCH_NODES))
    events.append(FaultEvent(days / 2 * DAY_S, lost, switch, math.inf, repair_s=SWITCH_S))
    return sorted(events, key=lambda e: e.at)


def describe(value: Any) -> Any:
    """Rounded for the result file."""
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, Mapping):
        return {k: describe(v) for k, v in value.items()}
    return value
