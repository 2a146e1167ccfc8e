"""Who waits for whom when a run hangs: which ranks never joined, which have joined and are stuck, which have finished.

Pure. Ranks that wait in a collective wait for the others, so those that hold them up are found first by what keeps a process
from ever joining, then by who is not in a collective, then by who is in another one than the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...progress import Phase
from .process import ProcessInfo
from .standing import Doing, Standing, find_standing

NEVER_JOINED, JOINED, FINISHED = "never joined", "joined", "finished"
_STUCK = (Doing.KERNEL, Doing.STOPPED, Doing.DEAD, Doing.LOCK_HELD)


@dataclass(frozen=True)
class RankStep:
    """How far a rank is: its newest completed step (-1 for none), its phase, whether it ended with exit code 0."""

    step: int = -1
    phase: Phase = Phase.TRAINING
    finished: bool = False


@dataclass(frozen=True)
class Culprit:
    """A rank that holds the others up: what it was `doing`, in words with its place (`text`), and the collective that it
    `missed` ("" where that is not known)."""

    rank: int
    doing: str
    text: str
    missed: str = ""
    relation: str = NEVER_JOINED

    def describe(self) -> str:
        """`rank 3 waits for its data loader ...; it missed all_reduce at train (train.py:22)`."""
        missed = f"; it missed {self.missed}" if self.missed else ""
        return f"rank {self.rank} {self.text}{missed}"


@dataclass(frozen=True)
class StackGroup:
    """Ranks that stand in the same place; `odd` where they hold the others up."""

    ranks: tuple[int, ...]
    relation: str
    text: str
    frames: tuple[str, ...]
    odd: bool = False


@dataclass(frozen=True)
class HangPicture:
    """All that is known of a hang. `why` says how the culprits were found, or why nobody is named."""

    culprits: tuple[Culprit, ...] = ()
    groups: tuple[StackGroup, ...] = ()
    why: str = ""
    flight: tuple[str, ...] = field(default=())


def explain_hang(
    processes: Mapping[int, ProcessInfo],
    steps: Mapping[int, RankStep],
    missing: Mapping[int, str] | None = None,
) -> HangPicture:
    """Who holds the others up, and where all stand. `missing` are the ranks that flight recorders show to be missing, with
    the collective that each missed: where they name any, they are right and stacks only say what these do."""
    ranks = sorted({*processes, *(r for r, s in steps.items() if s.finished)})
    at = {r: steps.get(r, RankStep()) for r in ranks}
    standing = _find_standings(ranks, processes, at)
    odd, why = _find_odd(standing, at, missing or {})
    named = set(odd)
    others = [standing[r] for r in ranks if r not in named and standing[r].doing is Doing.COLLECTIVE]
    missed = _name_missed(others)
    recorded = missing or {}
    culprits = tuple(
        Culprit(
            r, str(standing[r].doing), standing[r].describe(), recorded.get(r) or missed, _relate(standing[r])
        )
        for r in odd
    )
    return HangPicture(culprits, _group(standing, processes, at, named), why)


def _find_standings(
    ranks: Sequence[int], processes: Mapping[int, ProcessInfo], at: Mapping[int, RankStep]
) -> dict[int, Standing]:
    """What each rank is doing. Most of tens of thousands stand in the same place: what is the same is found once."""
    known: dict[tuple[object, ...], Standing] = {}
    found = {}
    for rank in ranks:
        process, step = processes.get(rank), at[rank]
        if process is None:
            found[rank] = find_standing(rank, None, step.phase, step.finished)
            continue
        place = (
            process.state, process.wchan, process.frames, process.site, process.gil, process.busy, process.children,
            step.phase, step.finished,
        )  # fmt: skip
        same = known.get(place)
        if same is None:
            same = known[place] = find_standing(rank, process, step.phase, step.finished)
        found[rank] = Standing(rank, same.doing, same.op, same.site, same.detail)
    return found


def _find_odd(
    standing: Mapping[int, Standing], at: Mapping[int, RankStep], missing: Mapping[int, str]
) -> tuple[tuple[int, ...], str]:
    """(ranks that hold the others up, how that is known)."""
    if named := tuple(sorted(r for r in missing if r in standing)):
        return named, "flight recorders show who never entered the collective"
    joined = [r for r, s in standing.items() if s.doing is Doing.COLLECTIVE]
    stuck = [r for r, s in standing.items() if s.doing in _STUCK]
    known = [r for r, s in standing.items() if s.doing not in (Doing.UNKNOWN, Doing.FINISHED)]
    away = [r for r in known if standing[r].doing is not Doing.COLLECTIVE]
    if joined and away:
        return tuple(away), f"{len(joined)} ranks wait in a collective, and these have not joined it"
    if stuck:
        return tuple(stuck), "these cannot run"
    gone = [r for r, s in standing.items() if s.doing is Doing.FINISHED]
    if joined and gone:
        return tuple(gone), "these have finished, and the others wait in a collective"
    furthest = max((at[r].step for r in known), default=-1)
    behind = tuple(r for r in known if at[r].step < furthest)
    places = {r: (standing[r].op, standing[r].site, at[r].step) for r in known if standing[r].site}
    if joined:
        odd = _find_minority(places)
        if odd:
            return odd, "all wait in collectives, and these in another one than the rest"
        if len(set(places.values())) > 1:
            return (), "all wait in collectives, in different ones, and no majority is in one"
        return (), "all have joined the same collective: see the network, or a device"
    if behind:
        return behind, "these are behind"
    odd = _find_minority(
        {r: (str(standing[r].doing), standing[r].site, 0) for r in known if standing[r].site}
    )
    return (
        odd,
        "these stand elsewhere than the rest" if odd else "nobody is in a collective, and nobody stands out",
    )


def _find_minority(places: Mapping[int, tuple[object, ...]]) -> tuple[int, ...]:
    """The ranks that are not where most are; none where most are nowhere."""
    if not places:
        return ()
    (common, n), *_ = Counter(places.values()).most_common(1)
    odd = tuple(sorted(r for r, place in places.items() if place != common))
    return odd if len(odd) < n else ()


def _name_missed(waiting: list[Standing]) -> str:
    """The collective that most of these wait in."""
    if not waiting:
        return ""
    (op, site), _ = Counter((s.op, s.site) for s in waiting).most_common(1)[0]
    return f"{op}{f' at {site}' if site else ''}"


def _relate(standing: Standing) -> str:
    if standing.doing is Doing.FINISHED:
        return FINISHED
    return JOINED if standing.doing is Doing.COLLECTIVE else NEVER_JOINED


def _group(
    standing: Mapping[int, Standing],
    processes: Mapping[int, ProcessInfo],
    at: Mapping[int, RankStep],
    odd: set[int],
) -> tuple[StackGroup, ...]:
    """The odd ones first, then the smallest group."""
    found: dict[tuple[object, ...], list[int]] = {}
    for r, s in standing.items():
        detail = "" if s.doing is Doing.COLLECTIVE else s.detail
        found.setdefault((r in odd, s.doing, s.op, s.site, detail, at[r].step), []).append(r)
    groups = []
    for (is_odd, *_), ranks in found.items():
        first = standing[ranks[0]]
        process = processes.get(ranks[0])
        step = at[ranks[0]].step
        text = first.describe() + (f", after step {step}" if step >= 0 else "")
        frames = process.frames if process is not None else ()
        groups.append(StackGroup(tuple(ranks), _relate(first), text, frames, bool(is_odd)))
    return tuple(sorted(groups, key=lambda g: (not g.odd, len(g.ranks), g.ranks)))


def name_place(processes: Mapping[int, ProcessInfo]) -> str:
    """Where the ranks stand, in a form that compares equal when they hang in the same place again; "" if unknown.

    A process that a signal has stopped stands nowhere of its own.
    """
    if not processes or any(process.cannot_run or not process.frames for process in processes.values()):
        return ""
    each = [
        f"{r}:" + "<".join(f.split(" (")[0] for f in process.frames[:3])
        for r, process in sorted(processes.items())
    ]
    return " ".join(each)[:1000]
