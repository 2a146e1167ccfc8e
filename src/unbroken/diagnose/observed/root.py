"""The root of a verdict, where no line of a log is one: what the supervisor saw."""

from __future__ import annotations

from dataclasses import replace

from ...progress.records.verdict import KILLED, Root, Verdict
from ..judge.facts import Facts
from .kills import describe_end, first_end


def with_root(verdict: Verdict, facts: Facts) -> Verdict:
    """The verdict with what the supervisor itself saw as its root, where no line of a log is one."""
    first = first_end(facts, verdict)
    if verdict.root is not None and verdict.root.text:
        if first is None or verdict.root.rank is None or verdict.decided_by not in ("exit-code", KILLED):
            return verdict
        # The last line of a rank that was killed tells how far it was, not what happened to it.
        text = f"{describe_end(first)}; the last line of its log: {verdict.root.text.strip()}"
        return replace(verdict, root=replace(verdict.root, text=text))
    nodes = dict(facts.nodes)
    if facts.hang is not None:
        late = facts.hang.late[0] if facts.hang.late else None
        at = f"after step {facts.hang.step}" if facts.hang.step >= 0 else "before the first step"
        text = f"no step for {facts.hang.idle_s:.0f} s {at}"
        place = facts.places.get(late) if late is not None else None
        if place is not None and place.doing:
            text += f"; rank {late} on {nodes.get(late) if late is not None else None}: {place.doing}"
            if place.frames:
                text += f", in {place.frames[0]}"
        return replace(
            verdict, root=Root(text=text, rank=late, node=nodes.get(late) if late is not None else None)
        )
    if facts.lost_nodes:
        text = f"nothing is left of {', '.join(facts.lost_nodes)}: agent, keeper and ranks are gone"
        if why := facts.silent.get(facts.lost_nodes[0]):
            text = f"{facts.lost_nodes[0]} did not answer: {why}"
        return replace(verdict, root=Root(text=text, node=facts.lost_nodes[0]))
    if first is not None:
        text = f"{describe_end(first)}, without a word in its log"
        return replace(verdict, root=Root(text=text, rank=first.rank, node=first.node, time=first.time))
    return verdict
