"""Which event came first: the root, among everything that failed after it and because of it.

The earliest event that can start a chain is the root. What training overcame is none; what NCCL, launchers and
schedulers report is a consequence unless nothing earlier explains it; a kernel's XID explains the CUDA error
beside it, a lost node the connections that closed; of chained exceptions the innermost counts.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..match.events import FileScan, LogEvent, MetricLine, Topology
from ..match.rules import builtin_set
from .event_location import locate, of_another_job, order_key
from .peers import find_refusal
from .retries import weigh_retries

_LAUNCHERS = (
    "torch/distributed/run.py", "torch/distributed/launcher/", "bin/torchrun", "accelerate/commands/", "bin/accelerate",
    "deepspeed/launcher/", "bin/deepspeed", "torch/distributed/launch.py", "bin/composer", "composer/cli/", "bin/srun",
    "multiprocessing/spawn.py:join",
)  # fmt: skip
_SOFT = ("KeyError", "AttributeError", "StopIteration", "Empty", "ModuleNotFoundError", "ImportError", "IndexError", "LookupError", "ValueError", "TypeError")  # fmt: skip
_MACHINE = ("NVLinkError", "ECCError", "NodeFailure", "NetworkError")
_EXPLAINS_S = 180.0
_REJOINED = re.compile(r"(?i)re-?joined|training goes on|in-job restart")


@dataclass(frozen=True)
class Timeline:
    """The events of a job in order: what may have caused its end, what was overcome, how it ended."""

    candidates: tuple[LogEvent, ...]
    overcome: tuple[LogEvent, ...]
    endings: tuple[LogEvent, ...]
    context: tuple[LogEvent, ...]
    cascades: tuple[LogEvent, ...]
    progress: tuple[MetricLine, ...]
    root: LogEvent | None = None
    why: str = ""


def build_timeline(scans: Sequence[FileScan], topology: Topology) -> Timeline:
    """Puts all events in order and picks the root."""
    events = [locate(e, topology) for e in _one_clock([e for s in scans for e in s.events], scans)]
    events = [e for e in events if not of_another_job(e, topology)]
    events.sort(key=lambda e: order_key(e, scans))
    progress = merged_progress(scans)
    recoveries = [e for e in events if e.role == "recovery"]
    candidates: list[LogEvent] = []
    overcome: list[LogEvent] = []
    context: list[LogEvent] = []
    cascades: list[LogEvent] = []
    endings = [e for e in events if e.role == "ending" and not _taken_back(e, scans, progress)]
    for e in _settle_chains(events):
        if e.role in ("noise", "recovery", "ending"):
            continue
        if e.role == "context":
            context.append(e)
        elif went_on(e, scans, progress) or _handled(e, recoveries):
            overcome.append(e)
        elif e.role == "cascade" or _launcher(e):
            cascades.append(e)
        else:
            candidates.append(e)
    root, why = choose(candidates, scans)
    if root is None:
        root, why = (
            next((e for e in cascades if e.reason and e.weight >= 0.5 and not _launcher(e)), None),
            "only consequences were logged",
        )
    if root is None:
        root, why = _wrapped(cascades), "only what carried it was logged"
    root, why = _loader(root, why, candidates)
    root, why = weigh_retries(root, why, candidates, scans)
    hardware = _hardware_before(root, overcome)
    if hardware is not None:
        root, why = hardware, "the kernel reported the hardware some steps before the program saw it"
    flaps = _flapping(root, [e for e in overcome if not _came_back(e, context)])
    if flaps:
        root, why = flaps[0], f"the link failed {len(flaps)} times before it took the job down"
        candidates = sorted({*flaps, *candidates}, key=lambda e: order_key(e, scans))
    return Timeline(
        tuple(candidates),
        tuple(overcome),
        tuple(endings),
        tuple(context),
        tuple(cascades),
        tuple(progress),
        root,
        why,
    )


def _one_clock(events: list[LogEvent], scans: Sequence[FileScan]) -> list[LogEvent]:
    """The events with kernel logs of another time zone put on the job's clock.

    A log without steps whose kernel errors lie a whole number of half hours away from what a program reported, to
    within half a minute, and nowhere near it otherwise, was written in another zone."""
    programs = [
        e.time
        for e in events
        if e.xid is None
        and e.time is not None
        and e.reason in ("CUDAError", "NCCLRemoteError", "NCCLTimeoutError")
    ]
    shift: dict[int, float] = {}
    for s in scans:
        mine = [e.time for e in s.events if e.xid is not None and e.xid.role == "root" and e.time is not None]
        if (
            s.progress
            or not mine
            or not programs
            or any(abs(m - p) <= _EXPLAINS_S for m in mine for p in programs)
        ):
            continue
        offsets = [
            p - m
            for m in mine
            for p in programs
            if 1700 <= abs(p - m) <= 50_400 and abs((p - m + 900) % 1800 - 900) <= 30
        ]
        if offsets:
            shift[s.index] = round(min(offsets, key=abs) / 1800) * 1800.0
    return [
        replace(e, time=e.time + shift[e.file]) if e.file in shift and e.time is not None else e
        for e in events
    ]


def merged_progress(scans: Sequence[FileScan]) -> list[MetricLine]:
    """All progress lines; by line within one log, by time over several."""
    every = [p for s in scans for p in s.progress]
    if len([s for s in scans if s.progress]) > 1:
        every.sort(key=lambda p: (p.time or 0.0, p.file, p.line))
    return every


def went_on(event: LogEvent, scans: Sequence[FileScan], progress: Sequence[MetricLine]) -> bool:
    """Whether training made at least two more steps after the event."""
    own = scans[event.file].progress
    if own:
        cut = bisect.bisect_right(own, event.line, key=lambda p: p.line)
        before, after = own[max(0, cut - 3) : cut], own[cut:]
    elif event.time is not None:
        early = [p for p in progress if p.time is not None and p.time <= event.time]
        before, after = early[-3:], [p for p in progress if p.time is not None and p.time > event.time + 60.0]
    else:
        return False
    steps = {p.step for p in itertools.chain(after[:50], after[-50:]) if p.step is not None}
    if not steps:
        return len(after) >= 3
    known = [p.step for p in before if p.step is not None]
    base = max(known) if known else min(steps) - 1
    new = [s for s in steps if s > base]
    if len(new) >= 2:
        return True
    # A restart may have gone back to an earlier step.
    return not new and len(steps) >= 3


def _taken_back(ending: LogEvent, scans: Sequence[FileScan], progress: Sequence[MetricLine]) -> bool:
    """Whether training went on after somebody's interrupt, or after one stage of it was complete."""
    mild = ending.rule.outcome == "completed" or ending.rule.id.startswith("interrupted")
    return mild and went_on(ending, scans, progress)


def _handled(event: LogEvent, recoveries: Sequence[LogEvent]) -> bool:
    """Whether a line beside the event, or a restart of the whole job soon after it, says that it was overcome."""
    for r in recoveries:
        if (
            r.file == event.file
            and 0 <= r.line - event.line <= 3
            and (r.rank is None or event.rank is None or r.rank == event.rank)
        ):
            return True
        if (
            r.file != event.file
            and r.time is not None
            and event.time is not None
            and 0 <= r.time - event.time <= 120.0
            and _REJOINED.search(r.text)
        ):
            return True
    return False


def _launcher(event: LogEvent) -> bool:
    """Whether an exception is only a launcher's report that its child failed."""
    if event.role == "root" and event.rule.priority >= 50:
        return False  # the launcher's own failure: a port that is taken, a service that is away
    return bool(event.frames) and any(part in f for f in event.frames[-4:] for part in _LAUNCHERS)


def _settle_chains(events: Sequence[LogEvent]) -> list[LogEvent]:
    """Of exceptions chained in one traceback keeps one as the origin; the others follow from it."""
    out: list[LogEvent] = []
    last: dict[tuple[int, int | None, str | None], int] = {}
    for e in events:
        key = (e.file, e.rank, e.node)
        if e.chain and e.chained and key in last:
            origin = out[last[key]]
            if _better(origin, e):
                out[last[key]] = _demote(origin)
                last[key] = len(out)
                out.append(e)
            else:
                out.append(_demote(e))
            continue
        if e.exception is not None:
            last[key] = len(out)
        out.append(e)
    return out


def _better(origin: LogEvent, later: LogEvent) -> bool:
    """Whether of two chained exceptions the later one says more: it is known by a specific rule where the origin
    is not, or the origin was only a failed look-up that the program had provided for."""
    if later.rule.priority >= 50 > origin.rule.priority and later.reason in ("ModelLoadingError", "DatasetLoadingError", "S3StorageError", "ConnectionError"):  # fmt: skip
        return True
    if origin.reason == "NetworkError" and later.reason == "ConnectionError":
        return True  # a name that does not resolve, seen by the library that asked for it
    soft = (origin.exception or "").rsplit(".", 1)[-1] in _SOFT
    return later.chained == "context" and soft and later.rule.id != "py-other"


def _demote(event: LogEvent) -> LogEvent:
    return replace(event, rule=replace(event.rule, role="cascade"))


def choose(candidates: Sequence[LogEvent], scans: Sequence[FileScan]) -> tuple[LogEvent | None, str]:
    """The root among candidates in order, and why."""
    strong = [e for e in candidates if e.weight >= 0.5] or list(candidates)
    if not strong:
        return None, ""
    first = strong[0]
    refusal = find_refusal(first, strong)
    if refusal is not None and not any(e.role == "root" and _machine(e) for e in strong):
        return refusal, "a rank refused to train, and its peers lost it"
    if first.role == "either" or _peer_error(first):
        machine = [e for e in strong if e.role == "root" and _machine(e)]
        if machine:
            return machine[0], f"explains the {first.reason} before it in the log"
        peers = first.reason in ("NCCLRemoteError", "ConnectionError", "NetworkError")
        for e in strong[1:]:
            if e.role != "root" or e.reason == first.reason or _peer_error(e):
                continue
            close = e.time is None or first.time is None or e.time - first.time <= 60.0
            if peers and close and (e.rank is None or e.rank != first.rank):
                return e, "a rank's own failure explains the connections that its peers lost"
        if first.reason == "NCCLTimeoutError":
            waiting = {e.rank for e in candidates if e.reason == first.reason}
            for e in strong:
                # Logs of single ranks without times have no order: who failed by itself cannot have waited.
                if e.rule.id == "collective-mismatch":
                    return e, "ranks were in different collectives, which explains the time-out"
                loose = e.file != first.file and (e.time is None or first.time is None)
                if loose and e.role == "root" and e.rank is not None and e.rank not in waiting:
                    return e, "a rank's own failure explains why the others waited"
        if first.reason in ("NCCLTimeoutError", "NCCLRemoteError", "ConnectionError", "NetworkError"):
            for e in strong:
                if e.role == "either" and e.reason in ("NodeFailure", "OutOfMemoryError"):
                    return e, f"explains the {first.reason} before it in the log"
        return first, "nothing earlier explains it"
    if first.reason in ("CUDAError", "RuntimeError", "NCCLRemoteError") and not first.xid:
        for e in strong:
            if (e.xid or _machine(e)) and e.role == "root" and _beside(first, e) and e is not first:
                return e, "the kernel's report explains the error that the program saw"
    if (
        first.exception is not None
        and first.rule.priority < 50
        and first.text.rstrip().endswith((":", "Error"))
    ):
        # An exception whose text begins on a later line: what stands there says more.
        for e in candidates:
            near = e.file == first.file and e.rank == first.rank and 0 < e.line - first.line <= 40
            if near and e.role == "root" and e.rule.priority >= 50:
                return e, "the text of the exception above it"
    return first, "it came first"


_INSIDE = re.compile(
    r"Caught (\w+) in |RayTaskError\((\w+)\)|raised (\w+)[>\]]|(?:caused by|because of|cause:)\s+(?:[\w.]+\.)?([A-Z]\w+(?:Error|Exception))\b"
)
_OPEN_CAUSES = ("OSError", "RuntimeError", "ConnectionError", "S3StorageError", "PermissionError")


def _wrapped(cascades: Sequence[LogEvent]) -> LogEvent | None:
    """The root where only a wrapper was logged: the class that it names, with little certainty, and no stop for a
    class that may be the machine's."""
    for e in cascades:
        m = _INSIDE.search(e.text) if e.exception is not None else None
        if m is None:
            continue
        inside = builtin_set().best(f"{next(g for g in m.groups() if g)}: ", exception=True, noise=False)
        if inside is None or inside.reason is None:
            continue
        open_ = inside.reason in _OPEN_CAUSES
        rule = replace(
            inside, id=e.rule.id, role="cascade", confidence=0.5,
            action="restart" if open_ else inside.action, recoverable=True if open_ else inside.recoverable,
        )  # fmt: skip
        return replace(e, rule=rule)
    return None


def _flapping(root: LogEvent | None, overcome: Sequence[LogEvent]) -> list[LogEvent]:
    """Link errors that training still survived but that kept coming until one ended it."""
    if root is None or root.reason not in ("NetworkError", "NCCLRemoteError", "NCCLTimeoutError"):
        return []
    ports = [e for e in overcome if e.rule.id in ("ib-port-event", "link-down", "ib-completion-error")]
    if root.reason == "NetworkError" and root.node:
        ports = [e for e in ports if e.node == root.node]
    streak: list[LogEvent] = []
    end = root
    for e in reversed(ports):
        if e.node != (streak[-1].node if streak else e.node) or not _soon(e, end):
            break
        streak.append(e)
        end = e
    return streak[::-1] if len(streak) >= 3 else []


def _hardware_before(root: LogEvent | None, overcome: Sequence[LogEvent]) -> LogEvent | None:
    """A hardware XID of the same GPU within a quarter of an hour before a CUDA error, though a few steps lay between."""
    if root is None or root.reason != "CUDAError" or root.xid is not None or root.time is None:
        return None
    for e in overcome:
        if (
            e.xid is None
            or e.xid.role != "root"
            or e.reason not in ("ECCError", "NVLinkError", "NodeFailure")
            or e.time is None
        ):
            continue
        same = (
            e.rank == root.rank
            if e.rank is not None and root.rank is not None
            else e.node == root.node and e.node is not None
        )
        if same and 0 <= root.time - e.time <= 900.0:
            return e
    return None


def _came_back(port: LogEvent, context: Sequence[LogEvent]) -> bool:
    """Whether a port's error was followed at once by its being active again."""
    return any(
        c.rule.id == "link-up" and c.file == port.file and c.node == port.node and 0 < c.line - port.line <= 5
        for c in context
    )


def _loader(root: LogEvent | None, why: str, candidates: Sequence[LogEvent]) -> tuple[LogEvent | None, str]:
    """A DataLoader's death, where the kernel's OOM killer before it killed that loader's worker."""
    if root is None or root.rule.id not in ("kernel-oom-kill", "slurm-oom-kill"):
        return root, why
    for e in candidates:
        if (
            e.reason == "DataloaderKilled"
            and (e.node is None or root.node is None or e.node == root.node)
            and _soon(root, e)
        ):
            return e, "the kernel's OOM killer ended a loader's worker"
    return root, why


def _soon(first: LogEvent, then: LogEvent) -> bool:
    """Whether two events lie within half an hour (or, without times, within 2,000 lines) of each other."""
    if first.time is not None and then.time is not None:
        return then.time - first.time <= 1800.0
    return first.file == then.file and then.line - first.line <= 2000


def _peer_error(event: LogEvent) -> bool:
    """A connection error inside the collective library: some peer went away."""
    return event.reason in ("ConnectionError", "NetworkError") and any(
        "torch/distributed" in f for f in event.frames[-6:]
    )


def _machine(event: LogEvent) -> bool:
    return event.xid is not None or event.reason in _MACHINE or event.rule.id == "kernel-oom-kill"


def _beside(program: LogEvent, kernel: LogEvent) -> bool:
    """Whether a kernel event lies on the same node and about the same time as what a program reported."""
    if program.node and kernel.node and program.node != kernel.node:
        return False
    if (
        program.rank is not None
        and kernel.rank is not None
        and kernel.xid
        and program.rank != kernel.rank
        and kernel.reason == "CUDAError"
    ):
        return False
    if program.time is None or kernel.time is None:
        return True
    return abs(program.time - kernel.time) <= _EXPLAINS_S or _hour_off(program.time - kernel.time)


def _hour_off(seconds: float) -> bool:
    """Whether two clocks differ by a time zone: a multiple of half an hour, within two minutes, below a day."""
    rest = abs(seconds) % 1800.0
    return 1700.0 <= abs(seconds) <= 50_400.0 and min(rest, 1800.0 - rest) <= 120.0


def same_kind(root: LogEvent, events: Sequence[LogEvent], within: float = 120.0) -> list[LogEvent]:
    """The events of the root's reason that happened with it."""
    out = []
    for e in events:
        if e.reason != root.reason:
            continue
        if e.time is not None and root.time is not None and abs(e.time - root.time) > within:
            continue
        out.append(e)
    return out
