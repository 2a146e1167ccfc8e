"""From a loss that does not come back to the end of the attempt, where the run may be taken back; else it is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ....checkpoint.catalogue.contents import Found, read_committed
from ....checkpoint.storage import open_storage
from ....data.position import Position, normalize
from ....detect import Level, LossFinding
from ....diagnose import LossFact
from ....errors import UnbrokenError
from ..accept.accepting import Accepting
from ..accept.placing import CheckpointPlace
from ..attempt.attempt import Attempt
from ..record.recorder import Recorder

_log = logging.getLogger("unbroken.supervisor")
_ANCHORS = 8
"""So many checkpoints from before are looked at."""


class LossJudge:
    """Decides once an attempt what a finding means for it."""

    def __init__(
        self,
        accepting: Accepting,
        place: CheckpointPlace,
        recorder: Recorder,
        say: Callable[[str], None],
        mode: str,
    ) -> None:
        """`mode` is `RunSpec.on_divergence`."""
        self._accepting, self._place, self._recorder = accepting, place, recorder
        self._say, self._mode = say, mode
        self._told: set[tuple[int, str, int]] = set()

    async def judge(self, attempt: Attempt) -> LossFact | None:
        """The fact that ends the attempt; None where it goes on."""
        finding = attempt.loss.finding
        if finding is None:
            return None
        attempt.loss.finding = None
        if finding.level is not Level.DECLARED:
            await self._tell(attempt, finding, "")
            return None
        if (attempt.number, finding.kind, -1) in self._told:
            return None  # said before, and the training goes on
        if self._mode == "tell":
            await self._tell(attempt, finding, "the run goes on, as on_divergence says; stop it if you would")
            return None
        anchors = await self._find_anchors(attempt, finding.since)
        if not anchors:
            what = "no checkpoint from before it that tells its data position is there (unbroken.data does), so the run goes on"
            await self._tell(attempt, finding, what)
            return None
        skips = normalize(self._recorder.state.skips)
        return LossFact(str(finding.kind), finding.step, finding.since, finding.why, anchors, skips)

    async def _tell(self, attempt: Attempt, finding: LossFinding, then: str) -> None:
        """Says it, once for each trouble."""
        key = (attempt.number, finding.kind, finding.since if finding.level is not Level.DECLARED else -1)
        if key in self._told:
            return
        self._told.add(key)
        self._say(f"step {finding.step}: {finding.why}{f'; {then}' if then else ''}")
        await self._recorder.record_soft(
            "loss", attempt=attempt.number, step=finding.step, since=finding.since, what=str(finding.kind),
            declared=finding.level is Level.DECLARED, why=finding.why,
        )  # fmt: skip

    async def _find_anchors(self, attempt: Attempt, since: int) -> tuple[tuple[int, Position], ...]:
        """The newest checkpoints from before a step that may be restored and tell their position."""
        state = self._recorder.state

        def counts(f: Found) -> bool:
            if not f.committed or f.step >= since or state.is_rolled_back(f.attempt, f.step):
                return False
            return f.attempt == attempt.number or f.name in state.seals.get(f.attempt, ())

        found = [f for f in await self._accepting.list_found() if counts(f)]
        found.sort(key=lambda f: (f.step, f.attempt), reverse=True)
        return tuple(await asyncio.to_thread(self._read, found[:_ANCHORS]))

    def _read(self, found: list[Found]) -> list[tuple[int, Position]]:
        anchors: list[tuple[int, Position]] = []
        for f in found:
            try:
                position = read_committed(open_storage(self._place.of(f.attempt)), f.name).position
            except (UnbrokenError, OSError) as e:
                _log.warning("%s cannot be read: %s", f.name, e)
                continue
            if position.samples:
                anchors.append((f.step, position))
        return anchors
