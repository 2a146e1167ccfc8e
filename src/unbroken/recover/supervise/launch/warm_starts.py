"""Warm processes as the supervisor sees them: which ranks started from one, spares that get theirs, and a start that failed."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ....errors import RunError
from ....progress import RunSpec
from ...node.ranks.process import LaunchOrder
from ...node.warm.caches import is_compiled
from ...node.warm.pool import NOT_TOLD
from ...wire import Message
from ..attempt.attempt import Attempt
from ..nodes.fleet import Fleet
from ..nodes.machines import share_machine
from ..record.background import Background
from ..record.recorder import Recorder

_log = logging.getLogger("unbroken.supervisor")
_LOOK_S = 0.5
_ASK_S = 60.0
_REASONS = 10


class WarmStarts:
    """Whether attempts start from warm processes, and what came of it."""

    def __init__(
        self, spec: RunSpec, fleet: Fleet, recorder: Recorder, background: Background, say: Callable[[str], None],
        is_current: Callable[[Attempt], bool],
    ) -> None:  # fmt: skip
        self._spec, self._fleet, self._recorder = spec, fleet, recorder
        self._background, self._say, self._is_current = background, say, is_current
        self._carried: dict[str, tuple[int, object]] = {}
        """The size of what was carried to each spare, and to which agent there."""
        self._is_first = True
        """Nothing was launched yet. Where its agents are new too, as after a stop, that ranks start cold is no news."""
        self._failed = False
        """The last start from warm processes ended before its first step."""

    def settings(self) -> dict[str, Any]:
        """The fields of a launch order that say how ranks are started."""
        wanted = self._spec.warm != "off"
        return {"warm_after": float(self._spec.warm_after) if wanted else None, "cold": self._failed}

    def note_launch(self, attempt: Attempt, order: LaunchOrder, answers: Mapping[str, Message]) -> None:
        """Takes the answers of the agents that launched it, by node; `order` is that of its first node."""
        cold: dict[int, str] = {}
        for name, answer in answers.items():
            node = self._fleet.nodes[name]
            new = (
                f" ({name} has a new agent: the one before {node.agent_before})" if node.agent_before else ""
            )
            cold |= {int(r): f"{why}{new}" for r, why in (answer.get("cold") or {}).items()}
            node.agent_before = ""
        if order.restarts > 0 and self._spec.warm != "off" and all("cold" in a for a in answers.values()):
            attempt.warm = len(attempt.ranks) - len(cold)
            reasons = Counter(cold.values()).most_common()
            attempt.cold_why = reasons[0][0] if reasons else ""
            if not (self._is_first and set(cold.values()) == {NOT_TOLD}):
                self._say(_describe(attempt.warm, len(attempt.ranks), attempt.cold_why))
            self._background.start(
                self._recorder.record_soft(
                    "launched", attempt=attempt.number, warm=attempt.warm, cold=dict(reasons[:_REASONS])
                )
            )
        self._is_first = False
        if self._spec.warm != "off":
            self._background.start(self._prepare_spares(attempt, order))

    def note_end(self, attempt: Attempt) -> None:
        """An attempt ended by a failure: where that was before its first step, and it had warm ranks, the next starts cold."""
        self._failed = bool(attempt.warm) and attempt.first_step is None

    async def _prepare_spares(self, attempt: Attempt, order: LaunchOrder) -> None:
        """Once the attempt trains: hands what its first node's ranks have imported to the nodes that wait."""
        while attempt.first_step is None:
            await asyncio.sleep(_LOOK_S)
            if not self._is_current(attempt):
                return
        await asyncio.sleep(float(self._spec.warm_after))
        state = self._recorder.state
        free = self._fleet.find_free(state.slots, {*state.lost, *state.cordoned})
        if not free or not self._is_current(attempt):
            return
        try:
            known = await self._fleet.ask(attempt.slots[0], "imports", timeout=_ASK_S)
        except RunError as e:
            _log.info("what ranks import is not known: %s", e)
            return
        imports = known.get("imports") or {}
        await self._fleet.ask_all(free, "warm", order=order.as_message(), imports=imports, timeout=_ASK_S)
        if is_compiled(imports):
            await self._carry_caches(attempt.slots[0], free)

    async def _carry_caches(self, source: str, spares: Sequence[str]) -> None:
        """Brings what one node's ranks have compiled to spares on other machines, which compile it no more then."""
        nodes = self._fleet.nodes
        far = [n for n in spares if not share_machine(nodes, [source, n])]
        offset = total = 0
        while far and offset <= total:
            try:
                piece = await self._fleet.ask(source, "caches", offset=offset, timeout=_ASK_S)
                total, size = int(piece["total"]), int(piece["size"])
            except (RunError, KeyError, TypeError, ValueError) as e:
                _log.info("what %s has compiled is not carried to spares: %s", source, e)
                return
            if offset == 0:
                far = [n for n in far if self._carried.get(n) != (total, nodes[n].hello.get("pid"))]
            if not size or not far:
                return
            answers = await self._fleet.ask_all(
                far, "take_caches", offset=offset, total=total, data=piece["data"], timeout=_ASK_S
            )
            far = [n for n in far if n in answers]
            offset += size
            if offset >= total:
                self._carried |= {n: (total, nodes[n].hello.get("pid")) for n in far}
                _log.info("%s: %d bytes that were compiled on %s", ", ".join(far), total, source)
                await self._recorder.record_soft("caches", of=source, nodes=far, bytes=total)
                return


def _describe(warm: int, ranks: int, why: str) -> str:
    if warm == ranks:
        return (
            f"all {ranks} ranks start from warm processes"
            if ranks > 1
            else "its rank starts from a warm process"
        )
    return f"{ranks - warm} of {ranks} ranks start cold: {why}" if warm else f"all ranks start cold: {why}"
