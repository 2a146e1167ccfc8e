"""What agents report, taken into account: progress and ends of ranks, and what keepers say of snapshots."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ....link.runs import unpack
from ....units import Duration
from ...wire import Message
from ..attempt.attempt import Attempt
from ..nodes.keepers import Keepers
from ..nodes.node import Node
from ..record.background import Background
from ..record.recorder import Recorder
from ..screen.view import View


class News:
    """Reads messages for one attempt at a time, the one that `follow` was last called with."""

    def __init__(
        self,
        keepers: Keepers,
        recorder: Recorder,
        background: Background,
        view: View,
        changed: asyncio.Event,
        *,
        on_step: Callable[[Attempt], None],
        on_place: Callable[[Attempt, str], None],
    ) -> None:
        """`on_step` is called when the leading rank has made steps, `on_place` when a script names the place of its
        checkpoints; `changed` is set by what the watch over an attempt has to look at."""
        self._keepers, self._recorder, self._background = keepers, recorder, background
        self._view, self._changed = view, changed
        self._on_step, self._on_place = on_step, on_place
        self._attempt: Attempt | None = None
        self._start_seen = False
        """Whether its first step is still to be noted, with how long it took."""
        self._stepped_seen = False
        """Whether it was noted that one which was taken over makes steps."""
        self._cold_whys: set[str] = set()

    def follow(self, attempt: Attempt, *, start_seen: bool = True) -> None:
        """From now on messages are this attempt's. `start_seen` is False for one that was taken over: how long its first
        step took is not known."""
        self._attempt, self._start_seen, self._stepped_seen = attempt, start_seen, False

    def is_current(self, attempt: Attempt) -> bool:
        """Whether messages are still this one's."""
        return self._attempt is attempt

    def read(self, node: Node, message: Message) -> None:
        """Takes one message of an agent, which was checked before."""
        attempt, op = self._attempt, message.get("op")
        if attempt is None:
            return
        if op == "keeper":
            self._read_keeper(attempt, node, message)
        elif op == "warm":
            self._read_warm(node, message)
        elif op == "progress" and message["attempt"] == attempt.number:
            if "groups" in message:
                steps = attempt.take_groups(message["sent"], message["groups"], message["steps"])
                attempt.work.take(message.get("work", []), message.get("counted", []))
            else:
                steps = attempt.take(message["sent"], message["ranks"])
            if steps:
                self._view.steps(attempt, steps)
                self._note_first_step(attempt)
                self._on_step(attempt)
                self._changed.set()
        elif op == "exited" and message["attempt"] == attempt.number:
            attempt.note_exit(message["rank"], message, node.translate(message.get("at")))
            self._changed.set()

    def _read_warm(self, node: Node, m: Message) -> None:
        """What became of a warm process; what is said of one is not said again of the next."""
        if not m["ready"] and m["why"] not in self._cold_whys:
            self._cold_whys.add(m["why"])
            self._view.say(f"{node.name}: the next attempt would start cold: {m['why']}")
        self._note(
            "warm", node=node.name, local=m["local"], ready=m["ready"], why=m["why"], modules=m["modules"], bytes=m["bytes"],
            seconds=round(m["seconds"], 3),
        )  # fmt: skip

    def _note_first_step(self, attempt: Attempt) -> None:
        first = attempt.first_step
        if first is not None and self._start_seen:
            self._start_seen = False
            seconds = round(first.time - attempt.started, 3)
            self._note("first_step", attempt=attempt.number, step=first.step, seconds=seconds)
        elif attempt.taken_over and not self._stepped_seen:
            self._stepped_seen = True
            self._note("stepped", attempt=attempt.number, step=attempt.step)

    def _note(self, kind: str, **fields: Any) -> None:
        self._background.start(self._recorder.record_soft(kind, **fields))

    # --- keepers

    def _read_keeper(self, attempt: Attempt, node: Node, event: Message) -> None:
        match event.get("event"):
            case "keeper_lost":
                self._view.say(f"{node.name}: its keeper died; another is starting")
                self._note("keeper_lost", node=node.name)
            case "keeper_back":
                self._view.say(f"{node.name}: its keeper is back")
                self._note("keeper_back", node=node.name)
                self._background.start(self._keepers.reconcile(attempt))
            case "waiting":
                node.waits = event
                self._view.say(
                    f"{node.name}: step {event['step']} cannot be saved yet: {event.get('why')}; tried again for up to "
                    f"{Duration(event.get('seconds', 0.0))} (--wait-for-room)"
                )
                self._changed.set()
            case "ahead" if event["attempt"] == attempt.number:
                self._note_ahead(attempt, node, event)
            case kind if event.get("attempt") == attempt.number:
                self._read_snapshot(attempt, str(kind), event)

    def _note_ahead(self, attempt: Attempt, node: Node, event: Message) -> None:
        """What a keeper fetched beside the start of its ranks: written down alone, since a restore fetches whatever is missing."""
        self._note(
            "ahead", attempt=attempt.number, node=node.name, step=event["step"], fetched=event["fetched"], missed=event["missed"],
            why=event["why"], bytes=event["bytes"], seconds=event["seconds"],
        )  # fmt: skip

    def _read_snapshot(self, attempt: Attempt, kind: str, event: Message) -> None:
        """What becomes of the attempt's own snapshots."""
        number, step = attempt.number, event.get("step")
        match kind:
            case "place":
                self._on_place(attempt, str(event["place"]))
            case "host":
                ranks = event["ranks"] if "ranks" in event else [event["rank"]]
                if attempt.tracker.on_host(event["step"], unpack(ranks, "ranks", len(attempt.ranks))):
                    self._keepers.tell_complete(number, event["step"])
            case "durable":
                if attempt.tracker.on_durable(event["step"]):
                    self._note("durable", attempt=number, step=step, seconds=event.get("seconds"))
            case "replicas":
                attempt.replicas.append(event)
                self._changed.set()
            case "restored" if not attempt.take_restored(event, self._recorder.state.restored):
                pass  # told by each node, and to every supervisor that takes over
            case "restored":
                self._view.restored(event)
                if (event.get("of"), step) in self._recorder.state.brought_offers:
                    # What was trained after it does not count any more, so it is nothing that has to be caught up with.
                    attempt.floor = min(attempt.floor, int(event["step"]))
                self._note(
                    "restored",
                    attempt=number,
                    step=step,
                    of=event.get("of"),
                    skipped=event.get("skipped", []),
                )
            case "superseded":
                total = attempt.tracker.on_superseded(event["step"])
                if total.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ... are told
                    self._view.say(
                        f"checkpoints are asked for faster than the storage takes them: step {step} is left out for step "
                        f"{event['by']} ({total} so far)"
                    )
                    self._note("superseded", attempt=number, step=step, by=event["by"], total=total)
            case "failed":
                rank, why = event.get("rank"), event.get("why")
                attempt.tracker.failed[event["step"]] = event.get("why", "")
                self._view.say(f"checkpoint of step {step} failed on rank {rank}: {why}")
                self._note("checkpoint_failed", attempt=number, step=step, rank=rank, why=why)
