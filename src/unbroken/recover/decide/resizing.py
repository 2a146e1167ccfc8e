"""With how many nodes a run goes on where some are lost, and when it takes one back: pure, from numbers and times alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ...progress import Policy
from ...units import plural

_HOUR_S = 3600.0


@dataclass(frozen=True)
class Growth:
    """The nodes that come in now; where none does, `why` says what is waited for, in words ("" for a node)."""

    nodes: tuple[str, ...] = ()
    why: str = ""


def choose_size(available: int, sizes: Collection[int]) -> int:
    """The largest legal number of nodes of which there are enough; 0 where there are too few."""
    return max((n for n in sizes if n <= available), default=0)


def choose_slots(found: Sequence[str | None], sizes: Collection[int], per_replica: int) -> tuple[str, ...]:
    """The nodes to go on with, of those that were found for each place (None: nobody). Replicas that are whole come first and
    stay together, so that no copy of the model is spread over nodes that were not neighbours unless it has to be."""
    size = choose_size(sum(n is not None for n in found), sizes)
    groups = [found[i : i + per_replica] for i in range(0, len(found), per_replica)]
    whole = [n for g in groups if None not in g for n in g]
    rest = [n for g in groups if None in g for n in g]
    return tuple([n for n in (*whole, *rest) if n is not None][:size])


def decide_growth(
    size: int,
    sizes: Collection[int],
    since: Mapping[str, float],
    grown: Sequence[float],
    now: float,
    policy: Policy,
    *,
    restarts: bool = False,
    by_hand: bool = False,
) -> Growth:
    """Which of the nodes that wait come in. `since`: since when each has answered, `grown`: when the run grew before, `now`: all in
    seconds on one clock. `restarts`: the run is started again anyway, so that a node need not have been there for long. `by_hand`: by
    a person, who wants all of its nodes, however often it has grown by itself."""
    steady = [
        n for n, at in sorted(since.items(), key=lambda s: s[1]) if restarts or now - at >= policy.grow_after
    ]
    more = choose_size(size + len(steady), sizes) - size
    if more <= 0:
        wait = choose_size(size + len(since), sizes) > size
        return Growth(why=f"a node is back, and has to answer for {policy.grow_after} first" if wait else "")
    lately = sorted(at for at in grown if now - at < _HOUR_S)
    if len(lately) >= policy.grows_per_hour and not by_hand:
        if not policy.grows_per_hour:
            return Growth(why="the policy does not let it grow by itself (grows_per_hour = 0)")
        minutes = (lately[-policy.grows_per_hour] + _HOUR_S - now) / 60
        return Growth(
            why=f"a node is back, and the run grew {plural(len(lately), 'time')} within the hour, as often as the policy lets it: "
            f"not for {plural(math.ceil(minutes), 'minute')}"
        )
    return Growth(tuple(steady[:more]))
