"""What an agent says, checked before the supervisor acts on it.

An agent that shows the run's token is believed to mean well, not to be right. A message of another shape is passed
over with a line in the log: it must neither raise in the loop that keeps the run alive nor count as news.
"""

from __future__ import annotations

from typing import Any

from ....cluster.clocks import ClockOffset
from ....link.bounds import Malformed, Message, number, text, whole
from ....link.runs import unpack
from ....progress.page import Phase

_MOST = (1 << 63) - 1
_LATEST = 1e12
_MOST_RANKS = 1 << 20
_PHASES = {int(p) for p in Phase}
_KEEPER_NEEDS = {
    "host": ("attempt", "step"), "durable": ("attempt", "step"), "failed": ("attempt", "step"),
    "waiting": ("attempt", "step"), "restored": ("attempt",), "superseded": ("attempt", "step", "by"), "ahead": ("attempt", "step"), "replicas": ("attempt", "step"), "place": ("attempt",),
}  # fmt: skip
"""What the supervisor reads of each event of a keeper; the rest may be missing or null."""


def check(m: Message, world_size: int) -> Message:
    """The same message, if an agent of a run of this size can mean it. Raises Malformed.

    What is not known here is let through: it does nothing.
    """
    op = m.get("op")
    if op == "beat":
        whole(m.get("number"), "number", 0, _MOST)
    elif op == "progress":
        whole(m.get("attempt"), "attempt", 0, _MOST)
        number(m.get("sent"), "sent", 0.0, _LATEST)
        if "groups" in m:
            _groups(m, world_size)
        else:
            for rank, news in _table(m.get("ranks"), "ranks").items():
                _rank(rank, world_size)
                _news(_table(news, "news"))
    elif op == "exited":
        whole(m.get("attempt"), "attempt", 0, _MOST)
        whole(m.get("rank"), "rank", 0, world_size - 1)
        _ending(m)
    elif op == "clocks":
        for key in ("clock", "wall_clock"):
            clock_of(m.get(key))
    elif op == "warm":
        whole(m.get("local"), "local", 0, 1 << 20)
        text(m.get("why"), "why", most=4096)
        if type(m.get("ready")) is not bool:
            raise Malformed("'ready' is neither true nor false")
        for key in ("modules", "bytes"):
            whole(m.get(key), key, 0, _MOST)
        number(m.get("seconds"), "seconds", 0.0, _LATEST)
    elif op == "keeper":
        text(m.get("event"), "event", most=64)
        # A restore that found nothing has no step, and what went wrong on no rank in particular has rank -1.
        for key, least, most in (
            ("attempt", 0, _MOST), ("step", 0, _MOST), ("by", 0, _MOST), ("rank", -1, world_size - 1),
        ):  # fmt: skip
            if m.get(key) is not None or key in _KEEPER_NEEDS.get(m["event"], ()):
                whole(m.get(key), key, least, most)
        if m["event"] == "host":
            _host(m, world_size)
        elif m["event"] == "replicas":
            _replicas(m, world_size)
        elif m["event"] == "ahead":
            for key in ("fetched", "missed", "bytes"):
                whole(m.get(key), key, 0, _MOST)
            number(m.get("seconds"), "seconds", 0.0, _LATEST)
            text(m.get("why"), "why", most=4096)
    return m


def hello(m: Message) -> Message:
    """An agent's first message, if it can mean it. Raises Malformed. Which ranks there are depends on the attempt that it tells of,
    which may be one with more of them: its node was cut off as the run went on with fewer."""
    text(m.get("node"), "node", empty=False)
    text(m.get("host", ""), "host")
    whole(m.get("attempt"), "attempt", 0, _MOST)
    for key in ("clock", "wall_clock"):
        clock_of(m.get(key))
    if type(m.get("folder", True)) is not bool:
        raise Malformed("'folder' is neither true nor false")
    whole(m.get("protocol", 1), "protocol", 1, _MOST)
    whole(m.get("keeper_bytes", 0), "keeper_bytes", 0, _MOST)
    for rank, described in _table(m.get("ranks"), "ranks").items():
        _rank(rank, _MOST_RANKS)
        d = _table(described, "rank")
        whole(d.get("pid"), "pid", 0, 1 << 32)
        if type(d.get("running")) is not bool:
            raise Malformed("'running' is neither true nor false")
        if not d["running"]:
            _ending(d)
    return m


def clock_of(value: Any) -> ClockOffset:
    """How far a clock of the node's is off, as it says; not known where it says nothing. Raises Malformed."""
    if value is None:
        return ClockOffset()
    table = _table(value, "clock")
    return ClockOffset(
        number(table.get("offset_s"), "offset_s", -_LATEST, _LATEST),
        number(table.get("uncertainty_s"), "uncertainty_s", 0.0, _LATEST),
        number(table.get("measured"), "measured", -_LATEST, _LATEST),
    )


def _host(m: Message, world_size: int) -> None:
    """Of one rank, or of several."""
    if "ranks" not in m:
        whole(m.get("rank"), "rank", 0, world_size - 1)
        return
    if any(r >= world_size for r in unpack(m["ranks"], "ranks", world_size)):
        raise Malformed(f"'ranks' names a rank that there is not: there are {world_size}")


def _replicas(m: Message, world_size: int) -> None:
    """What was compared, and of some tensors that differ which ranks have the same bits."""
    for key in ("compared", "alone", "differing"):
        whole(m.get(key), key, 0, _MOST)
    if not isinstance(m.get("differences"), list):
        raise Malformed("'differences' is no list")
    for d in m["differences"]:
        text(_table(d, "difference").get("name"), "name", most=4096)
        groups = d.get("groups")
        if not isinstance(groups, list) or not groups:
            raise Malformed("'groups' is no list")
        for group in groups:
            if not isinstance(group, list) or len(group) != 2 or not isinstance(group[0], list):
                raise Malformed("a group is no list of ranks and their number")
            for rank in group[0]:
                whole(rank, "rank", 0, world_size - 1)
            whole(group[1], "count", 1, world_size)


def _groups(m: Message, world_size: int) -> None:
    """Progress of ranks, those with the same news as one row `[runs, count, phase, source, total, step]`; the steps
    themselves of one rank of the node."""
    if not isinstance(m["groups"], list):
        raise Malformed("'groups' is no list")
    for row in m["groups"]:
        if not isinstance(row, list) or len(row) != 6:
            raise Malformed("a group is no list of six")
        if any(r >= world_size for r in unpack(row[0], "ranks", world_size)):
            raise Malformed(f"a group names a rank that there is not: there are {world_size}")
        _how_far(*row[1:5])
        whole(row[5], "step", -_MOST, _MOST)
    for rank, steps in _table(m.get("steps"), "steps").items():
        _rank(rank, world_size)
        _steps(steps)
    _work(m.get("work", []), world_size)
    _counted(m.get("counted", []), world_size)


def _work(rows: Any, world_size: int) -> None:
    """Rows `[rank, step, steps, wall, busy, peak]`, the last three in seconds; then, where they are known, `peers` and `data`, in seconds."""
    if not isinstance(rows, list):
        raise Malformed("'work' is no list")
    for row in rows:
        if not isinstance(row, list) or not 6 <= len(row) <= 8:
            raise Malformed("a row of 'work' is no list of six to eight")
        whole(row[0], "rank", 0, world_size - 1)
        whole(row[1], "step", -_MOST, _MOST)
        whole(row[2], "steps", 1, _MOST)
        for value in (*row[3:5], *([] if row[5] is None else [row[5]])):
            number(value, "seconds of work", 0.0, _LATEST)
        if len(row) > 6:
            whole(row[6], "peers", 0, _MOST)
        if len(row) > 7:
            number(row[7], "seconds of waiting for data", 0.0, _LATEST)


def _counted(rows: Any, world_size: int) -> None:
    """Rows `[rank, step, steps, wall, busy, tensor, peers, data]`: seconds, `tensor` a share, `data` seconds or null."""
    if not isinstance(rows, list):
        raise Malformed("'counted' is no list")
    for row in rows:
        if not isinstance(row, list) or len(row) != 8:
            raise Malformed("a row of 'counted' is no list of eight")
        number(row[5], "share of tensor cores", 0.0, 1.0)
        _work([[*row[:5], None, row[6], *([] if row[7] is None else [row[7]])]], world_size)


def _news(news: Message) -> None:
    _how_far(news.get("count"), news.get("phase"), news.get("source", "page"), news.get("total"))
    _steps(news.get("steps"))


def _how_far(count: Any, phase: Any, source: Any, total: Any) -> None:
    whole(count, "count", 0, _MOST)
    if whole(phase, "phase", 0, 255) not in _PHASES:
        raise Malformed(f"there is no phase {phase}")
    text(source, "source", most=16)
    if total is not None:
        whole(total, "total", 0, _MOST)


def _steps(steps: Any) -> None:
    if not isinstance(steps, list):
        raise Malformed("'steps' is no list")
    for step in steps:
        if not isinstance(step, list) or len(step) not in (4, 5):
            raise Malformed("a step is no list of four or five")
        whole(step[0], "step", -_MOST, _MOST)
        whole(step[1], "tokens", -_MOST, _MOST)
        try:
            for value in (step[2], *step[4:]):
                float.fromhex(text(value, "loss or norm", most=64))
        except (ValueError, OverflowError):
            raise Malformed("a loss or norm is no hexadecimal number") from None
        number(step[3], "time", 0.0, _LATEST)


def _ending(m: Message) -> None:
    for key in ("code", "signal"):
        if m.get(key) is not None:
            whole(m[key], key, -(1 << 31), 1 << 32)
    if m.get("code") is None and m.get("signal") is None:
        raise Malformed("an end with neither a code nor a signal")
    number(m.get("time"), "time", 0.0, _LATEST)
    if m.get("at") is not None:
        at = m["at"]
        if not isinstance(at, list) or len(at) != 2:
            raise Malformed("'at' is no list of two")
        if number(at[0], "at", -_LATEST, _LATEST) > number(at[1], "at", -_LATEST, _LATEST):
            raise Malformed("'at' ends before it begins")
    if type(m.get("ours")) is not bool:
        raise Malformed("'ours' is neither true nor false")
    if not (m.get("oom") is None or type(m["oom"]) is bool) or type(m.get("oom_counted", False)) is not bool:
        raise Malformed("'oom' is neither true nor false")


def _rank(key: Any, world_size: int) -> None:
    if (
        not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10)
        or int(key) >= world_size
    ):
        raise Malformed(f"there is no rank {key!r:.40}")


def _table(value: Any, what: str) -> Message:
    if not isinstance(value, dict):
        raise Malformed(f"'{what}' is no table")
    return value
