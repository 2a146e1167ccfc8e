"""From replicas that differ to the end of the attempt, where a checkpoint is left at which they were equal; else it is told."""

from __future__ import annotations

from collections.abc import Callable

from ....detect.corruption import ReplicaFinding, ReplicaWatch
from ....diagnose import CorruptionFact
from ....link.bounds import Message
from ....progress import Policy
from ..accept.accepting import Accepting
from ..attempt.attempt import Attempt
from ..record.recorder import Recorder

_UNCOVERED = "no two ranks hold the same tensor (sharded only): silent corruption of parameters is not covered by comparing replicas"


class CorruptionJudge:
    """Decides what a comparison of replicas means for an attempt."""

    def __init__(
        self, accepting: Accepting, recorder: Recorder, say: Callable[[str], None], policy: Policy
    ) -> None:
        self._accepting, self._recorder, self._say, self._policy = accepting, recorder, say, policy
        self._watch: ReplicaWatch | None = None
        self._told: set[tuple[int, str]] = set()

    async def judge(self, attempt: Attempt) -> CorruptionFact | None:
        """The fact that ends the attempt; None where it goes on."""
        while attempt.replicas:
            message = attempt.replicas.pop(0)
            if (fact := await self._judge(attempt, message)) is not None:
                return fact
        return None

    async def _judge(self, attempt: Attempt, message: Message) -> CorruptionFact | None:
        self._watch = self._watch or ReplicaWatch(self._recorder.state.equal)
        if not message["compared"]:
            if self._is_new(0, "uncovered"):
                self._say(_UNCOVERED)
                await self._note(attempt, message, equal=False)
            return None
        finding = self._watch.take(attempt.number, message)
        await self._note(attempt, message, equal=self._watch.equal == (attempt.number, message["step"]))
        return None if finding is None else await self._act(attempt, finding)

    async def _act(self, attempt: Attempt, finding: ReplicaFinding) -> CorruptionFact | None:
        nodes = tuple(sorted({attempt.ranks[r].node for r in finding.ranks if r in attempt.ranks}))
        if why_not := await self._why_only_told(attempt, finding, nodes):
            if self._is_new(attempt.number, "differs"):
                self._say(f"{finding.why}; {why_not}")
            return None
        await self._recorder.record(
            "corruption", attempt=attempt.number, step=finding.step, ranks=list(finding.ranks), nodes=list(nodes),
            tensors=list(finding.tensors), why=finding.why, confidence=finding.confidence,
        )  # fmt: skip
        return CorruptionFact(finding.step, finding.why, finding.ranks, finding.confidence, finding.equal[1])

    async def _why_only_told(self, attempt: Attempt, finding: ReplicaFinding, nodes: tuple[str, ...]) -> str:
        """Why the run goes on all the same; "" where it is taken back."""
        if finding.scattered:
            return "so the run goes on"
        if self._policy.on_corruption == "tell":
            return "the run goes on, as the policy says (on_corruption)"
        state = self._recorder.state
        # A card that is out of use cannot do it again: then the program is the cause, and going back does not help.
        if any(not before or set(before) != set(nodes) for before in state.corrupted):
            return "it came again on other nodes, so the program is the likely cause, and the run goes on"
        if len(state.corrupted) > 1:
            return "going back did not help twice, so the run goes on"
        _at, step = finding.equal
        found = await self._accepting.list_found()
        if not any(
            f.committed and f.step <= step and not state.is_rolled_back(f.attempt, f.step)
            and (f.attempt == attempt.number or f.name in state.seals.get(f.attempt, ()))
            for f in found
        ):  # fmt: skip
            return f"no checkpoint from step {step} or before is left to go back to, so the run goes on"
        return ""

    async def _note(self, attempt: Attempt, message: Message, *, equal: bool) -> None:
        await self._recorder.record_soft(
            "replicas", attempt=attempt.number, step=message["step"], equal=equal, compared=message["compared"],
            alone=message["alone"], differing=message["differing"],
        )  # fmt: skip

    def _is_new(self, attempt: int, what: str) -> bool:
        key = (attempt, what)
        if key in self._told:
            return False
        self._told.add(key)
        return True
