"""What agents tell of where their ranks stand, and what of it is kept as evidence."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ....detect import ProcessInfo
from ....detect.stacks import ChildInfo
from ....link.bounds import Malformed, Message
from ....link.runs import unpack
from ....units import plural

_log = logging.getLogger("unbroken.supervisor")
MOST_TEXTS = 64
"""Of so many ranks all that was collected is kept; of the others in the same place it is the same."""
OVERVIEW = "stacks.txt"


def read_processes(answer: Message, ranks: Sequence[int]) -> dict[int, ProcessInfo]:
    """{rank: process} of an agent's answer, of any version, for the ranks that it was asked for; none where it makes no
    sense."""
    try:
        if "groups" not in answer:
            return {
                int(rank): ProcessInfo(k["pid"], k["state"], k["wchan"], tuple(k["frames"]), k["text"])
                for rank, k in answer["looks"].items()
                if int(rank) in ranks
            }
        found: dict[int, ProcessInfo] = {}
        for runs, state, wchan, frames in answer["groups"]:
            where = tuple(str(f) for f in frames)
            for rank in unpack(runs, "ranks", len(ranks)):
                found[rank] = ProcessInfo(0, str(state), str(wchan), where, "")
        pids = dict(zip(sorted(found), answer["pids"], strict=True))
        found = {r: replace(p, pid=int(pids[r])) for r, p in found.items() if r in ranks}
        for runs, detail in answer.get("details", ()):
            for rank in unpack(runs, "ranks", len(ranks)):
                if rank in found:
                    found[rank] = _add_details(found[rank], detail)
        return found
    except (Malformed, KeyError, TypeError, ValueError, AttributeError) as e:
        _log.warning("what an agent saw of its ranks was passed over: %s", e)
        return {}


def _add_details(process: ProcessInfo, detail: Message) -> ProcessInfo:
    children = tuple(
        ChildInfo(int(pid), str(name), str(state), tuple(str(f) for f in frames))
        for pid, name, state, frames in detail["children"]
    )
    busy = detail["busy"]
    return replace(
        process, site=str(detail["site"]), gil=tuple(str(f) for f in detail["gil"]), children=children,
        busy=None if busy is None else bool(busy),
    )  # fmt: skip


def group(processes: Mapping[int, ProcessInfo]) -> list[list[int]]:
    """The ranks that stand in the same place, the smallest group first: what is odd is what somebody looks for."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank, process in sorted(processes.items()):
        groups.setdefault((process.state, process.frames), []).append(rank)
    return sorted(groups.values(), key=lambda g: (len(g), g[0]))


def choose(processes: Mapping[int, ProcessInfo]) -> set[int]:
    """The ranks whose stacks are fetched whole: all of a few; of many one of each place, then more of the smallest groups."""
    groups = group(processes)
    chosen = {g[0] for g in groups[:MOST_TEXTS]}
    for rank in (r for g in groups for r in g):
        if len(chosen) >= MOST_TEXTS:
            break
        chosen.add(rank)
    return chosen


def write(processes: Mapping[int, ProcessInfo], folder: Path) -> None:
    """Writes `stacks-rank-N.txt` for each that was fetched, and an overview of all where that is not everyone."""
    texts = {f"stacks-rank-{rank}.txt": p.text for rank, p in processes.items() if p.text}
    if len(texts) < len(processes):
        texts[OVERVIEW] = describe(processes)
    for name, text in texts.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        except OSError as e:
            _log.warning("%s could not be written: %s", name, e)


def describe(processes: Mapping[int, ProcessInfo]) -> str:
    """Which ranks stand where, in words: the smallest group first."""
    parts = []
    for ranks in group(processes):
        process = processes[ranks[0]]
        where = "\n".join(f"    {frame}" for frame in process.frames) or "    no Python stack is known"
        parts.append(f"{plural(len(ranks), 'rank')}, state {process.state}: {_name(ranks)}\n{where}\n")
    return "\n".join(parts)


def _name(ranks: Sequence[int]) -> str:
    """`0-7, 16`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
