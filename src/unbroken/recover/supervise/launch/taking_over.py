"""An attempt that a supervisor before this one has started: its ranks are taken over, or their end is an incident."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ....progress import RunDir
from ....progress.records.steps import read_steps
from ....units import plural
from ...wire import Message
from ..attempt.attempt import Attempt
from ..nodes.desk import Inbox
from ..nodes.fleet import Fleet
from ..nodes.keepers import Keepers
from ..record.recorder import Recorder


class TakingOver:
    """Takes over what runs."""

    def __init__(
        self,
        run_dir: RunDir,
        fleet: Fleet,
        keepers: Keepers,
        inbox: Inbox,
        recorder: Recorder,
        say: Callable[[str], None],
        *,
        make_attempt: Callable[[int, tuple[str, ...]], Attempt],
        follow: Callable[[Attempt], None],
        read: Callable[..., None],
        note_takeover: Callable[[Attempt], Awaitable[None]],
    ) -> None:
        """`follow` is called with the attempt before anything is heard of it, `read` reads what agents report of it."""
        self._run_dir, self._fleet, self._keepers, self._inbox = run_dir, fleet, keepers, inbox
        self._recorder, self._say = recorder, say
        self._make_attempt, self._follow, self._read = make_attempt, follow, read
        self._note_takeover = note_takeover

    async def take_over(self) -> tuple[Attempt | None, bool]:
        """The attempt that was open when this supervisor came, if any, and whether all of its ranks are there."""
        state = self._recorder.state
        if not state.attempt_open:
            self._inbox.open(self._read)
            return None, False
        # Steps are not journalled one by one; what was received before is in steps.jsonl.
        kept = read_steps(self._run_dir.steps(state.attempt))[-1:]
        state.step = max([state.step, *(s.step for s in kept)])
        attempt = self._make_attempt(state.attempt, state.slots)
        ranks = self._find_ranks(attempt)
        # Ranks that have ended meanwhile, well or badly, are judged like any others once they are taken over.
        whole = len(ranks) == len(attempt.ranks) and not any(d.get("ours") for d in ranks.values())
        whole = whole and attempt.number not in state.seals  # what it saves since then would not count
        for rank, described in ranks.items():
            attempt.ranks[rank].pid = described["pid"]
            if not described["running"]:
                node = self._fleet.nodes[attempt.ranks[rank].node]
                attempt.note_exit(rank, described, node.translate(described.get("at")))
        self._follow(attempt)
        if not whole:
            self._say(f"attempt {attempt.number} did not survive its supervisor")
            self._inbox.open(self._read)
            return attempt, False
        await self._note_takeover(attempt)
        await self._recorder.record("adopted", attempt=attempt.number)
        running = sum(d["running"] for d in ranks.values())
        how = f"{plural(running, 'rank')} never stopped" if running else "its ranks have ended meanwhile"
        self._say(f"took over attempt {attempt.number}: {how}")
        self._inbox.open(self._read)
        await self._keepers.reconcile(attempt)
        return attempt, True

    def _find_ranks(self, attempt: Attempt) -> dict[int, Message]:
        """What the agents say of the attempt's ranks, up to the first node that says nothing of them."""
        ranks: dict[int, Message] = {}
        for name in attempt.slots:
            node = self._fleet.nodes.get(name)
            if node is None or not node.up or node.hello.get("attempt") != attempt.number:
                break
            told = {int(r): described for r, described in node.hello.get("ranks", {}).items()}
            ranks.update({r: described for r, described in told.items() if r in attempt.ranks})
        return ranks
