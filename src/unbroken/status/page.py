"""The report of a run as one self-contained HTML page: what `run.html` is filled with."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from urllib.parse import quote

from ..page.shell import render
from ..progress.records.incident import Incident
from ..progress.records.verdict import Root
from ..units import Bytes, plural
from ..version import __version__
from .curve import thin
from .data import PHASES, AttemptRecord, RunReport, describe_goes_on, has_stacks, same_command, seconds_text
from .figures import curve_figure, timeline_figure
from .profile import profile_section
from .waiting import read_waiting

_MAX_INCIDENTS = 200
_MAX_ATTEMPTS = 150
_MAX_CHECKPOINTS = 15
_CURVE_POINTS = 1600

STATUS_TEXT = {
    "new": "not started", "running": "running", "completed": "completed", "stopped": "stopped",
    "interrupted": "stopped on request", "abandoned": "supervisor is gone",
}  # fmt: skip
KIND_TEXT = {
    "failed": "a rank ended with an error", "hung": "the steps stopped coming", "node_lost": "a node was lost",
    "agent_lost": "a node's agent died", "preempted": "a node was taken away, as announced", "slow": "it was slow: a node was left, or all were tested",
    "supervisor_lost": "the supervisor died and the ranks ended with it",
    "lease": "a node lost its supervisor", "loss_spike": "the loss diverged", "corrupted": "replicas differed",
}  # fmt: skip
ACTION_TEXT = {
    "restart": "restarted", "restart_elsewhere": "restarted elsewhere", "rollback_skip": "taken back before it",
    "stop": "stopped the run", "none": "nothing to do",
}  # fmt: skip
PHASE_TEXT = {
    "detect": "detect", "stop": "stop", "diagnose": "diagnose", "schedule": "schedule", "start": "start",
    "restore_and_first_step": "restore and first step", "replay": "replay",
}  # fmt: skip
_HOW = {
    "completed": "completed", "interrupted": "stopped on request", "failed": "a rank failed", "hung": "hang",
    "node_lost": "node lost", "agent_lost": "agent lost", "preempted": "node taken away", "slow": "slow",
    "supervisor_lost": "supervisor lost", "amended": "stopped to be amended",
    "resized": "stopped for more nodes",
    "lease": "a lease expired", "loss_spike": "loss diverged", "corrupted": "replicas differed", "cut off": "cut off", "running": "still running",
}  # fmt: skip
PHASE_KINDS = {
    "detect": "unnoticed", "stop": "fault", "diagnose": "down", "schedule": "finishing", "start": "starting",
    "restore_and_first_step": "restoring", "replay": "replayed",
}  # fmt: skip
"""The kind of window whose colour a phase of a recovery has."""
STRETCH_TEXT = {
    "training": "training", "starting": "starting and restoring", "replayed": "doing steps again",
    "unnoticed": "not yet noticed", "fault": "the rank or node at fault", "down": "down",
    "finishing": "setting up, ending", "spare": "spare",
}  # fmt: skip
MOODS = {"completed": "good", "running": "now", "stopped": "bad", "abandoned": "bad"}


def page(report: RunReport, *, base: str = "") -> str:
    """The HTML text. `base` leads from the page's folder to the run directory ('' where it lies in it)."""
    curve = curve_figure(report, thin(report.executions.last, _CURVE_POINTS))
    timeline = timeline_figure(report)
    incidents = report.incidents[-_MAX_INCIDENTS:]
    longest = max((sum(i.phases.values()) for i in incidents), default=0.0) or 1.0
    split = [(k, t, s) for k, t, s in time_split(report) if s > 0] if report.attempts else []
    whole = sum(s for _, _, s in split)
    saved = any(c.counts for c in report.checkpoints)
    kinds = timeline.kinds | ({"finishing"} if "setup" in timeline.kinds else set())
    return render(
        "status/run.html",
        data={"curve": curve.data, "timeline": timeline.data},
        report=report,
        status=STATUS_TEXT.get(report.status, report.status),
        mood=MOODS.get(report.status, "warn"),
        size=_size(report),
        origin=describe_goes_on(report, saved),
        command=same_command(report),
        cards=_cards(report),
        split=split,
        whole=whole,
        split_shares=[(k, 100 * s / whole, f"{t}: {seconds_text(s)}") for k, t, s in split],
        curve=curve,
        timeline=timeline,
        kinds=[(k, t) for k, t in STRETCH_TEXT.items() if k in kinds],
        profile=profile_section(report.run_dir),
        incidents=incidents,
        phases=[(PHASE_KINDS[k], PHASE_TEXT[k]) for k in PHASES],
        phase_shares=lambda i: [
            (PHASE_KINDS[k], 100 * i.phases[k] / longest, f"{PHASE_TEXT[k]}: {seconds_text(i.phases[k])}")
            for k in PHASES
            if i.phases.get(k, 0.0) > 0
        ],
        attempts=report.attempts[-_MAX_ATTEMPTS:],
        checkpoints=report.checkpoints[:_MAX_CHECKPOINTS],
        checkpoints_say=_checkpoints(report),
        logs=_logs(report),
        version=__version__,
        actions=ACTION_TEXT,
        how=_HOW,
        what=what_text,
        when=when_text,
        places=_places,
        since=lambda when: since_text(report, when),
        resumed=lambda i: seconds_text(i.resumed_s) if i.resumed_s is not None else _not_resumed(i, report),
        details=_details,
        waiting=lambda i: read_waiting(i, report.run_dir),
        has_stacks=lambda i: has_stacks(i, report.run_dir),
        in_run=lambda file: _in_run(file, report),
        origin_of=_origin,
        node_list=node_list,
        state=_checkpoint_state,
        bytes=Bytes,
        clock=clock,
        seconds=seconds_text,
        href=lambda path: quote(f"{base}/{path}" if base else path),
    )


def _size(report: RunReport) -> str:
    spec = report.spec
    if spec is None:
        return ""
    spares = f", {plural(spec.spares, 'spare')}" if spec.spares else ""
    return f"{plural(spec.world_size, 'rank')} on {plural(spec.nodes, 'node')}{spares} · run {spec.run_id} · "


def _cards(report: RunReport) -> list[tuple[str, str]]:
    loss, total = report.loss, report.total_steps
    return [
        ("–" if report.ettr is None else f"{report.ettr:.1%}", "effective training time (ETTR)"),
        (
            "–" if report.step < 0 else f"{report.step:,}" + (f" / {total - 1:,}" if total else ""),
            "last step",
        ),
        ("–" if loss is None else f"{loss:.5g}", "last loss"),
        (seconds_text(report.wall_s), "wall time" + (" without pauses" if report.paused_s else "")),
        (str(len(report.incidents)), "incident" + "s" * (len(report.incidents) != 1)),
        (str(len(report.attempts)), "attempt" + "s" * (len(report.attempts) != 1)),
    ]


def time_split(report: RunReport) -> list[tuple[str, str, float]]:
    """(kind, text, seconds): where the wall time went, without pauses."""
    of = {k: sum(s.seconds for s in report.spans if s.kind == k) for k in ("starting", "unnoticed", "down")}
    parts = [
        ("training", "training that counts", report.executions.productive_s),
        ("replayed", "steps done again", report.executions.replayed_s),
        ("starting", "starting and restoring", max(0.0, of["starting"] - report.executions.first_s)),
        ("unnoticed", "not yet noticed", of["unnoticed"]),
        ("down", "down", of["down"]),
    ]
    rest = max(0.0, report.wall_s - sum(s for _, _, s in parts))
    return [*parts, ("finishing", "the rest: setting up, saving, ending", rest)]


def what_text(i: Incident) -> str:
    """What happened, in words."""
    if not i.ended_attempt:
        return "the supervisor died; the ranks went on and its successor took over"
    return KIND_TEXT.get(i.kind, i.kind)


def when_text(i: Incident) -> str:
    """After which step it happened."""
    return f"after step {i.step:,}" if i.step >= 0 else "before the first step"


def _places(i: Incident) -> list[str]:
    """Where an incident began: rank, node, GPU."""
    gpu = i.verdict.faulty.gpu if i.verdict is not None and i.verdict.faulty is not None else None
    found = [f"rank {i.rank}"] if i.rank is not None else []
    return found + ([i.node] if i.node else []) + ([f"GPU {gpu}"] if gpu is not None else [])


def _not_resumed(i: Incident, report: RunReport) -> str:
    if i.action == "stop":
        return "–"
    later = next((o for o in report.incidents if o.number > i.number), None)
    if later is not None:
        return f"cut off by {later.number}"
    return "not yet" if report.status == "running" else "–"


def _in_run(file: str, report: RunReport) -> str:
    """A file's path inside the run directory; '' where it does not lie there."""
    inside = file.removeprefix(f"{report.run_dir.path}/")
    if inside.startswith("/"):
        return ""
    # Logs of older attempts are compressed.
    return next((f for f in (inside, f"{inside}.gz") if (report.run_dir.path / f).is_file()), "")


def _details(i: Incident) -> list[tuple[str, str]]:
    v = i.verdict
    phases = ", ".join(f"{PHASE_TEXT[k]} {seconds_text(i.phases[k])}" for k in PHASES if k in i.phases)
    of_verdict = [] if v is None else [
        ("category", v.category or ""),
        ("decided by", v.decided_by),
        ("advice", v.mitigation),
        ("why this action", i.why),
        ("what it caused", ", ".join(f"{c.count} × {c.reason}" for c in v.cascade[:8])),
        *(("seen too", _quote(e)) for e in v.evidence[:8]),
        *(("note", note) for note in v.notes[:6]),
    ]  # fmt: skip
    went_on = [("next attempt", str(i.next_attempt or "")), ("went on", i.resized)]
    return [*of_verdict, *went_on, ("phases", phases or "–")]


def _quote(root: Root) -> str:
    """A quoted line with where it stands."""
    at = root.file or (f"rank {root.rank}" if root.rank is not None else "")
    line = f", line {root.line}" if root.file and root.line else ""
    return f"{at}{line}: {root.text.strip()[:300]}" if at else root.text.strip()[:300]


def _origin(a: AttemptRecord) -> str:
    if a.first_step < 0 or a.origin != "the beginning":
        return a.origin
    return "the beginning" if a.first_step <= 1 else "what the script saved itself"


def _checkpoints(report: RunReport) -> str:
    found = report.checkpoints
    counted = [c for c in found if c.counts]
    bad = len(found) - len(counted)
    rest = f"; {bad} unfinished, damaged or not accepted" if bad else ""
    more = f" The newest {_MAX_CHECKPOINTS} of {len(found)}:" if len(found) > _MAX_CHECKPOINTS else ""
    return f"{len(counted)} on disk that count, {Bytes(sum(c.bytes for c in counted))}{rest}.{more}"


def _checkpoint_state(status: str, why: str) -> str:
    text = "not accepted: written after its attempt was sealed" if status == "committed" else status
    return f"{text}: {why}" if why else text


def _logs(report: RunReport) -> list[tuple[str, str]]:
    """(path inside the run directory, rank) of the first logs of the last attempt."""
    if not report.attempts or report.spec is None:
        return []
    last, nproc = report.attempts[-1], report.spec.nproc
    found: list[tuple[str, str]] = []
    for rank in range(len(last.slots) * nproc):
        path = report.run_dir.rank_log(last.number, last.slots[rank // nproc], rank)
        if len(found) < 16 and path.exists():
            found.append((str(path.relative_to(report.run_dir.path)), f"rank {rank}"))
    return found


def clock(when: float) -> str:
    """A time of day with its date, UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(when)) if math.isfinite(when) else "–"


def since_text(report: RunReport, when: float) -> str:
    """How long after the start of the run, in its own time."""
    return seconds_text(report.own_time(when))


def node_list(names: Iterable[str]) -> str:
    """Node names, shortened where they are many."""
    unique = list(dict.fromkeys(names))
    return ", ".join(unique) if len(unique) <= 6 else f"{', '.join(unique[:3])} and {len(unique) - 3} more"
