"""From the end of one attempt to the start of the next: what was before is sealed, nodes are chosen, ranks are launched."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from ....checkpoint.catalogue.announcement import pack
from ....errors import RunError, RunInterrupted, RunInUse, RunStopped
from ....progress import RunDir, RunSpec
from ....progress.records.candidate import CandidateMessage
from ....progress.records.state import RunState
from ....units import plural
from ....waiting import wait_within
from ...decide.resizing import choose_size
from ...node.ranks.process import LaunchOrder
from ...wire import Message
from ..accept.accepting import Accepting
from ..accept.placing import CheckpointPlace, told
from ..attempt.attempt import Attempt
from ..attempt.code import keep_code
from ..attempt.outcome import AttemptOutcome
from ..attempt.own_checkpoints import OwnCheckpoints, add_argument
from ..fence.fencing import Fencing
from ..nodes.alike import find_odd
from ..nodes.fleet import Fleet
from ..nodes.keepers import Keepers
from ..nodes.machines import find_meeting, name_interface, share_devices
from ..record.clock import Clock
from ..record.recorder import CannotRecord, Recorder
from ..record.stop_request import StopRequest
from ..record.term import TermWatch
from ..screen.view import View
from ..suspects.suspects import Suspects
from .amending import Amending
from .health import HealthCheck
from .preserving import Preserving
from .replacing import Replacing
from .resizing import Resizing
from .room import check_room
from .warm_starts import WarmStarts

_LAUNCH_S = 60.0
_CODE_S = 5.0
_SETTLE_S = 0.5
_CANDIDATES_RECORDED = 20


class StartFailed(Exception):
    """An attempt could not be launched: a node was lost meanwhile, or the disk is full. `attempt` is None where that came
    before it was written down."""

    def __init__(self, error: RunError, attempt: Attempt | None) -> None:
        super().__init__(str(error))
        self.error, self.attempt = error, attempt


def _note_for_journal(candidate: CandidateMessage) -> CandidateMessage:
    """A candidate without the table of who holds which rank: `in_memory` is of how many ranks it is in memory."""
    rest = {k: v for k, v in candidate.items() if k != "memory"}
    return {**rest, "in_memory": len(candidate["memory"])}


def _find_holders(attempt: Attempt, candidates: list[CandidateMessage]) -> dict[str, set[str]]:
    """Of each node which others have in memory what its ranks will most likely restore, and it has not."""
    memory = candidates[0]["memory"] if candidates else {}
    found = {n: {memory.get(str(r), n) for r in attempt.node_ranks(n)} - {n} for n in attempt.nodes}
    return {n: others for n, others in found.items() if others}


class Launching:
    """Starts attempts."""

    def __init__(
        self,
        run_dir: RunDir,
        spec: RunSpec,
        cwd: str,
        fleet: Fleet,
        keepers: Keepers,
        place: CheckpointPlace,
        accepting: Accepting,
        fencing: Fencing,
        recorder: Recorder,
        term: TermWatch,
        stop: StopRequest,
        view: View,
        clock: Clock,
        amending: Amending,
        warm_starts: WarmStarts,
        suspects: Suspects,
        replacing: Replacing,
        resizing: Resizing,
        preserving: Preserving,
        own: OwnCheckpoints,
        *,
        make_attempt: Callable[[int, tuple[str, ...]], Attempt],
        follow: Callable[[Attempt], None],
        note_schedule: Callable[[int, float, str], None],
    ) -> None:
        """`follow` is called with the attempt before anything can be heard of it, `note_schedule` with its number, how long all
        took until then, and with how many nodes it runs where that is another number than before."""
        self._run_dir, self._spec, self._cwd = run_dir, spec, cwd
        self._fleet, self._keepers, self._place = fleet, keepers, place
        self._accepting, self._fencing, self._recorder = accepting, fencing, recorder
        self._term, self._stop, self._view, self._clock = term, stop, view, clock
        self._amending, self._warm_starts, self._suspects = amending, warm_starts, suspects
        self._replacing, self._resizing, self._preserving = replacing, resizing, preserving
        self._own = own
        self._make_attempt, self._follow, self._note_schedule = make_attempt, follow, note_schedule
        self._health = HealthCheck(fleet, fencing, recorder, view.say, clock, spec.policy)
        self._is_new = True
        """Whether this supervisor has launched nothing yet."""
        self._checked: set[tuple[str, tuple[str, ...]]] = set()
        """Nodes, each with a command that it can run."""
        self._versions: dict[str, dict[str, str]] = {}
        """What each node said that its ranks would import."""

    @property
    def _state(self) -> RunState:
        return self._recorder.state

    async def start(self) -> Attempt | None:
        """Launches the next attempt; None where it is not ready for that, or a stop came before. Raises StartFailed, RunStopped,
        CannotRecord, Superseded."""
        began = self._clock.monotonic()
        attempt: Attempt | None = None
        try:
            prepared = await self._prepare()
            if prepared is None:
                return None
            slots, number, candidates = prepared
            await self._amending.settle()
            resized = await self._resizing.settle(slots)
            async with self._fleet.watching(slots):
                port = (await self._fleet.ask(slots[0], "port"))["port"]
                await self._recorder.record(
                    "attempt", attempt=number, slots=list(slots),
                    candidates=[_note_for_journal(c) for c in candidates[:_CANDIDATES_RECORDED]],
                    place=await self._place.shorten(self._place.current()), held=self._fleet.held,
                    boots=self._fleet.list_boots(slots),
                )  # fmt: skip
                await self._keep_code(number)
                self._fleet.begin(slots)
                attempt = self._make_attempt(number, slots)
                self._follow(attempt)
                await self._announce(attempt, candidates)
                self._note_schedule(number, self._clock.monotonic() - began, resized)
                attempt.started = self._clock.wall()
                own = await self._find_own(number)
                await self._launch(attempt, int(port), own)
        except RunInterrupted as e:
            self._view.say(str(e.message))
            return None
        except (RunStopped, RunInUse, CannotRecord):
            raise
        except RunError as e:
            raise StartFailed(e, attempt) from e
        best = candidates[0] if candidates else None
        durable = max((c["step"] for c in candidates if c["name"]), default=-1)
        self._view.attempt(number, len(attempt.ranks), slots, best, durable, self._own.describe(number, own))
        if best is not None and own is not None:
            self._view.say(f"the script's own newest checkpoint is {own}")
        return attempt

    async def _keep_code(self, number: int) -> None:
        """Notes what the attempt is launched with; a file system that hangs holds no start up."""
        work = asyncio.to_thread(keep_code, self._run_dir, number, self._state.command, Path(self._cwd))
        with contextlib.suppress(TimeoutError):
            await wait_within(work, _CODE_S)

    async def _prepare(self) -> tuple[tuple[str, ...], int, list[CandidateMessage]] | None:
        """Nodes, number, and what may be restored; None where a stop was asked for, or nodes came or went while it waited."""
        self._term.check(at_once=True)
        slots = await self._fill_slots()
        if slots is None:
            return None
        await self._check_command(slots)
        while await self._health.put_out_bad(slots):
            slots = await self._fill_slots()
            if slots is None:
                return None
            await self._check_command(slots)
        if await self._suspects.test_all(slots):
            slots = await self._fill_slots()
            if slots is None:
                return None
            await self._check_command(slots)
        await self._fencing.check_cleared(slots)
        await self._accepting.seal_before()
        if self._stop:
            return None
        number = await self._place.take()
        held = await self._preserving.settle(slots)
        if held is None:
            return None
        candidates = await self._accepting.list_candidates(slots, held)
        if not await self._fencing.wait_for_proof(accepted=bool(candidates)):
            return None
        await self._accepting.count_offered(candidates)
        return slots, number, candidates

    async def _check_command(self, slots: tuple[str, ...]) -> None:
        """Asks each node once whether the command can be run there. Raises RunStopped where it cannot: no restart helps."""
        command = self._amending.command
        fresh = [n for n in slots if (n, command) not in self._checked]
        if not self._state.attempt:  # spares too, while there is time to do something about them
            training = set(slots)
            fresh += [n for n in self._fleet.up() if n not in training]
        for name, answer in (
            await self._fleet.ask_all(fresh, "check", command=list(command), cwd=self._cwd)
        ).items():
            self._versions[name] = {str(k): str(v) for k, v in (answer.get("versions") or {}).items()}
            if refused := answer.get("refused"):
                why = RunStopped(str(refused), where=f"node {name}, in {self._cwd}", hint=answer.get("hint"))
                await self._recorder.record(
                    "status", status="stopped", step=self._state.step, why=why.message
                )
                raise why
            self._checked.add((name, command))
        if fresh:
            await self._check_alike()
        if apart := [n for n in fresh if not self._fleet.nodes[n].has_folder]:
            await self._note_apart(apart)

    async def _check_alike(self) -> None:
        """Raises RunStopped where nodes are not alike before anything was trained; later it is said only."""
        facts = {n: self._fleet.nodes[n].facts for n in self._versions}
        odd = find_odd(self._versions, {n: len(f.visible) for n, f in facts.items() if f is not None})
        if odd is None:
            return
        shown = ", ".join(odd.nodes[:6])
        if self._state.attempt:
            self._view.say(f"{shown}: {odd.what}. {odd.hint}")
            return
        await self._recorder.record("status", status="stopped", step=self._state.step, why=odd.what)
        raise RunStopped(odd.what, where=shown, hint=odd.hint)

    async def _note_apart(self, names: list[str]) -> None:
        """Says what it means that nodes have not got the run directory. Raises RunStopped where they were said to have it."""
        shown = f"{', '.join(names[:4])}{' ...' if len(names) > 4 else ''}"
        where = str(self._run_dir.path)
        if self._spec.record == "shared":
            why = f"--record shared says that every host has the run directory, and {shown} has not"
            await self._recorder.record("status", status="stopped", step=self._state.step, why=why)
            raise RunStopped(
                why, where=where, hint="Give a --run-dir that all have, or --record own-disk or s3://..."
            )
        self._view.say(
            f"{shown} has not got the run directory: its logs come over the link, and checkpoints need a place that all have"
        )

    async def _announce(self, attempt: Attempt, candidates: list[CandidateMessage]) -> None:
        """Tells every keeper of the attempt. Raises RunError where one does not answer."""
        requests = await self._make_announcements(attempt, candidates)
        await self._keepers.add_ring(requests, _find_holders(attempt, candidates))
        asked = {n: self._keepers.phrase(n, r) for n, r in requests.items()}
        await asyncio.gather(*(self._fleet.ask(n, "keeper", request=r) for n, r in asked.items()))

    async def _make_announcements(
        self, attempt: Attempt, candidates: list[CandidateMessage]
    ) -> dict[str, Message]:
        place = await self._place.message(attempt.number)
        return {
            node: {
                "op": "attempt", "attempt": attempt.number, "world_size": len(attempt.ranks),
                "place": place, **pack(attempt.node_ranks(node), candidates),
            }
            for node in attempt.nodes
        }  # fmt: skip

    async def _launch(self, attempt: Attempt, port: int, own: Path | None) -> None:
        spec, slots = self._spec, attempt.slots
        address = find_meeting(self._fleet.nodes, slots)
        devices = share_devices(self._fleet.nodes, slots, spec.nproc)
        command = add_argument(self._state.command, spec.resume_arg, own)

        def order(slot: int) -> LaunchOrder:
            return LaunchOrder(
                world_sizes=",".join(str(n * spec.nproc) for n in spec.node_counts) if spec.min_nodes else "",
                attempt=attempt.number, run_id=spec.run_id, command=command, cwd=self._cwd,
                ranks={slot * spec.nproc + i: i for i in range(spec.nproc)}, world_size=len(attempt.ranks),
                slot=slot, slots=len(slots), nproc=spec.nproc, master_addr=address,
                master_port=port, restarts=self._state.restarts,
                devices=devices[slot], interface=name_interface(self._fleet.nodes[slots[slot]], address),
                resume_from=str(own or ""), skips=",".join(f"{a}:{b}" for a, b in self._state.skips),
                **self._warm_starts.settings(),
            )  # fmt: skip

        answers = await asyncio.gather(
            *(
                self._fleet.ask(n, "launch", timeout=_LAUNCH_S, **order(i).as_message())
                for i, n in enumerate(slots)
            )
        )
        answered = dict(zip(slots, answers, strict=True))
        check_room(answered)
        self._warm_starts.note_launch(attempt, order(0), answered)

    async def _find_own(self, attempt: int) -> Path | None:
        """The script's own newest checkpoint, where it is told of one."""
        found = await self._own.find(attempt)
        if found is None and attempt > 1 and self._own.asked:
            self._view.say(
                f"no whole checkpoint of the script is in {self._own.asked}: it is started as at first"
            )
        return found

    # --- nodes

    async def bring_up(self) -> None:
        """Brings up the agents of all nodes that may be used; those that do not come are lost."""
        state = self._state
        self._fleet.remember(state.slots)
        for name in state.lost & set(self._fleet.nodes):
            given = (
                self._fleet.nodes[name].state != "lost"
            )  # a supervisor before this one gave it up, and the cluster gives it again
            self._fleet.give_up(name)
            self._fleet.nodes[name].returned |= given
        usable = [n for n in self._fleet.nodes if n not in state.lost and n not in state.cordoned]
        gone = [n for n in usable if not self._fleet.nodes[n].usable]
        coming = [n for n in usable if self._fleet.nodes[n].usable]
        missing = await self._fleet.bring_up(coming, self._replacing.is_hurried)
        for name in [*gone, *missing]:
            await self._fencing.lose(name, self._fleet.nodes[name].gone or "its agent did not come up")

    async def _fill_slots(self) -> tuple[str, ...] | None:
        """Keeps each living node in its slot and fills empty slots with spares, then with nodes that are brought back or
        newly given. Where the run may go on with fewer it waits for those a short while only. None where a stop was asked for
        while the cluster had none. Raises RunStopped where it never will have enough."""
        state = self._state
        before = state.slots or self._fleet.first_slots
        if state.attempt:
            self._fleet.needed = self._spec.node_counts[-1]
        await self.bring_up()
        if self._is_new and len(before) < self._spec.nodes:
            await self._replacing.take_back(self._spec.policy.shrink_after)
        self._is_new = False
        free = self._fleet.find_free(before, {*state.lost, *state.cordoned})
        found: list[str | None] = [old if self._is_fit(old) else None for old in before]
        until: float | None = None
        empty = [slot for slot, node in enumerate(found) if node is None]
        # Those that may have their own node again come first: others may have to wait for long.
        for slot in sorted(empty, key=lambda s: not self._replacing.can_return(before[s])):
            old = before[slot]
            if self._is_fit(old):  # it has come meanwhile
                found[slot] = old
                continue
            if free:
                new: str | None = free.pop(0)
            else:
                left = sum(n is not None for n in found)
                enough = choose_size(left, self._spec.node_counts) > 0
                if not enough and self._spec.min_nodes:
                    self._view.say(
                        f"the run needs {plural(self._spec.min_nodes, 'node')} at least, and {left} {'is' if left == 1 else 'are'} left: "
                        "waiting for another one"
                    )
                if until is None:
                    until = self._clock.monotonic() + self._spec.policy.shrink_after
                new = await self._replacing.find(old, before, until if enough else None)
                if new is None:
                    return None
                if not new and self._stop:
                    return None  # who hurries waits for no node that is slow to come
                if not new and not enough:
                    raise RunStopped(
                        f"no node is left to take the place of {old}", where=str(self._run_dir.path),
                        hint="Give the run more --spares, or wait until the node is repaired, and use the same command",
                    )  # fmt: skip
            found[slot] = new or None
            if new and new != old:
                await self._recorder.record("replaced", slot=slot, old=old, new=new)
                self._view.say(f"{new} takes the place of {old}")
        return self._resizing.choose(before, found, free)

    def _is_fit(self, name: str) -> bool:
        """Whether the node can train."""
        node, state = self._fleet.nodes[name], self._state
        return node.up and node.preempted is None and name not in state.lost and name not in state.cordoned

    # --- the place of its checkpoints

    async def settle_place(self, attempt: Attempt, url: str, is_current: Callable[[Attempt], bool]) -> None:
        """The script names where its checkpoints go; its ranks wait until every keeper knows whether they may."""
        before = self._place.of(attempt.number)
        agreed = await self._place.named(attempt.number, url)
        if not is_current(attempt):
            return
        if not agreed and self._place.refusal is None:
            return  # started again under a number that is free there
        candidates = await self._accepting.list_candidates(
            attempt.slots, await self._keepers.list_snapshots(attempt.nodes)
        )
        requests = await self._make_announcements(attempt, candidates)
        if self._place.refusal is not None:
            for request in requests.values():
                request["place"] = {"refused": told(self._place.refusal)}
        await self._keepers.announce(requests)
        if agreed and self._place.of(attempt.number) != before:
            origin = f"it goes on from step {candidates[0]['step']}" if candidates else "none is there yet"
            self._view.say(f"checkpoints go to {url}, as the script says; {origin}")

    async def end_amended(self, attempt: Attempt, outcome: AttemptOutcome) -> None:
        """Ends an attempt whose ranks have stopped, so that the next one runs with other arguments."""
        await self._fencing.end_attempt(attempt, outcome)
        await self._recorder.record("ended", attempt=attempt.number, how=outcome.kind, step=attempt.step)

    async def end_misplaced(self, attempt: Attempt, outcome: AttemptOutcome) -> None:
        """Ends an attempt that could not have its place, before it did a step; raises RunStopped where none can."""
        refusal = self._place.refusal
        if refusal is not None:
            await asyncio.sleep(_SETTLE_S)  # the ranks say it in their logs too
        await self._fencing.end_attempt(attempt, outcome)
        await self._recorder.record("ended", attempt=attempt.number, how=outcome.kind, step=self._state.step)
        if refusal is None:
            self._view.say(
                f"the script keeps its checkpoints in {self._place.current()}, where attempt {attempt.number} has "
                "been before: it is started again under a new number"
            )
            return
        await self._recorder.record("status", status="stopped", step=self._state.step, why=refusal.message)
        raise RunStopped(refusal.message, where=refusal.where, hint=refusal.hint)
