"""Nodes are checked before they train: at the first start, when they come (back), and all of them after an infrastructure incident."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....detect.node.result import State
from ....detect.node.versions import compare_versions
from ....link.bounds import Message
from ....progress import Policy
from ....units import plural
from ...node.checks.versions import SAME
from ..fence.fencing import Fencing
from ..nodes.fleet import Fleet
from ..record.clock import Clock
from ..record.recorder import Recorder

_ASK_S = 10.0
_HOUR_S = 3600.0
_HARDWARE = frozenset({"gpu", "ecc", "rows"})
"""Checks that put a node out of use by themselves: the card itself says that it is broken. All else that is bad is told."""
_AFTER = frozenset({"failure", "node_loss", "hang"})
"""Causes after which all nodes are checked again."""


class HealthCheck:
    """Asks agents, tells, and puts out of use where there are others."""

    def __init__(
        self,
        fleet: Fleet,
        fencing: Fencing,
        recorder: Recorder,
        say: Callable[[str], None],
        clock: Clock,
        policy: Policy,
    ) -> None:
        self._fleet, self._fencing, self._recorder = fleet, fencing, recorder
        self._say, self._clock, self._policy = say, clock, policy
        self._checked: set[str] = set()
        self._incident = 0
        self._told: set[str] = set()

    async def put_out_bad(self, slots: Sequence[str]) -> bool:
        """Checks those of these nodes that are to be; True where one of them is out of use now, and another is to be found. What
        cannot be read, and a node that does not answer, is no fault."""
        if self._policy.check_nodes == "off":
            return False
        state = self._recorder.state
        if state.incident != self._incident and state.history and state.history[-1].cause in _AFTER:
            self._checked.clear()
        self._incident = state.incident
        fresh = [n for n in slots if n not in self._checked]
        if not fresh:
            return False
        answers = await self._fleet.ask_all(fresh, "health", timeout=_ASK_S)
        self._checked |= {*fresh}
        self._tell_versions(answers)
        gone = False
        for name, answer in answers.items():
            gone |= await self._judge(slots, name, answer)
        return gone

    async def _judge(self, slots: Sequence[str], name: str, answer: Message) -> bool:
        bad = [c for c in answer.get("checks") or () if isinstance(c, dict) and c.get("state") == State.BAD]
        for check in bad:
            text = f"{name}: {check.get('name')} {check.get('device')}: {check.get('text')}"
            self._tell(text)
        broken = [c for c in bad if c.get("name") in _HARDWARE]
        if not broken:
            return False
        state = self._recorder.state
        lately = sum(self._clock.wall() - at < _HOUR_S for at, _ in state.cordons)
        if not self._fleet.find_free(tuple(slots), {*state.lost, *state.cordoned}):
            self._tell(f"{name} stays in use: no spare is left")
            return False
        if lately >= self._policy.cordons_per_hour:
            self._tell(
                f"{name} stays in use: {plural(lately, 'node')} {'was' if lately == 1 else 'were'} taken out of use within the hour"
            )
            return False
        await self._fencing.cordon(name, f"its check found: {broken[0].get('text')}"[:200], 0.99)
        return True

    def _tell_versions(self, answers: dict[str, Message]) -> None:
        """What is installed otherwise than on most nodes; of what has to be the same the launch itself speaks."""
        versions = {
            n: {k: x for k, x in v.items() if k not in SAME}
            for n, a in answers.items()
            if isinstance(v := a.get("versions"), dict)
        }
        for name, found in compare_versions(versions).items():
            for c in found:
                self._tell(f"{name}: {c.text}")

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._say(text)
