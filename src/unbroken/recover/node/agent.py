"""The agent of one node: starts its keeper and ranks, reads their progress pages, obeys the highest term.

It outlives its supervisor: when the link breaks it goes on until its lease expires, then ends its ranks, keeps the keeper (and so the
snapshots), and waits for a successor. When nobody comes it lets the keeper make the newest snapshot durable and leaves nothing behind.

Its command line is in arguments.py; the run's secret comes on its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...checkpoint.keeper.wire import PROTOCOL
from ...cluster import EndedProcesses, Ownership
from ...cluster.holding.choice import from_text, hold_itself
from ...cluster.local import share_memory
from ...cluster.local_folder import forget_run
from ...cluster.survey import describe_node
from ...errors import RunError, UnsafeFile
from ...link.address import Address
from ...link.secret import Secret, take_from_input
from ...private import private_folder
from ...progress import RunDir
from ...waiting import run_beside, wait_within
from ..record.base import Record
from ..record.choice import open_record
from ..record.folder import FolderRecord
from ..wire import Link, Message, list_doors, read_token
from .arguments import parse_arguments
from .census import take_censuses
from .checks.alone import claim_node
from .checks.command import find_refusal
from .checks.health import check_health
from .checks.place import check_place
from .checks.versions import read_needed
from .keeper_process import KeeperProcess
from .logs.folder import find_folder
from .logs.shipping import LogShipper
from .port import PortReservation
from .ranks.pair_side import probe_pair
from .ranks.process import LaunchOrder, RankProcess, ask_to_stop, end_by
from .ranks.starting import Starting
from .signals import pass_over_signals
from .supervision.beats import Beats
from .supervision.clocks import NodeClocks
from .supervision.reporting import KeeperReport, Looks, ProgressReport
from .supervision.supervisors import Supervisors

_log = logging.getLogger("unbroken.agent")
_POLL_S = 0.05
_REPORT_S = 0.2
"""Progress is told so often at most."""
_UNSENT_MAX = 20_000
_NEWER_EVERY_S = 0.5
_LAST_LOGS_S = 10.0


class Agent:
    """One node's agent; `main` returns when it was told to quit or gave up waiting."""

    def __init__(
        self,
        run_dir: RunDir,
        run_id: str,
        node: str,
        scratch: Path,
        orphan_grace_s: float,
        keeper_bytes: int,
        owner: Ownership,
        room_s: float = 600.0,
        elsewhere: str = "",
        held_before: Sequence[Ownership] = (),
        secret: Secret | None = None,
        record: Record | None = None,
        door: Address | None = None,
    ) -> None:
        """`held_before` are other ways in which an earlier supervisor held processes of this node. `secret` is what it was
        handed; None where it is to read the run's token itself. `record` is where terms are found besides the run directory,
        `door` where the run's first supervisor was met, off its machine."""
        self._secret = secret
        self._apart = secret is not None and secret.identity is not None
        self._folder = find_folder(run_dir, run_id, scratch, door, apart=self._apart)
        found = record or (FolderRecord(run_dir, shared=True) if self._folder.shared else None)
        self._supervisors = Supervisors(found, list_doors(door) if door else [])
        # What the agent itself prints may lie here even where the node has the run directory.
        self._shipper = LogShipper(RunDir(scratch / "run"), node) if self._apart else None
        self.run_dir, self.run_id, self.node, self.scratch = run_dir, run_id, node, scratch
        self._owner, self._held_before = owner, tuple(held_before)
        self._cleared = EndedProcesses()
        self.orphan_grace_s = orphan_grace_s
        self.room_s = room_s
        self.keeper = KeeperProcess(
            self._folder, run_id, node, scratch, keeper_bytes, self._on_keeper, room_s=room_s,
            elsewhere=elsewhere, secret=secret,
        )  # fmt: skip
        self._leaving: asyncio.Task[Message] | None = None
        self.attempt = 0
        self.term = 0
        self.ranks: dict[int, RankProcess] = {}
        self._expired: dict[int, Message] = {}
        self.lease_until: float | None = None
        self._link: Link | None = None
        self._beats = Beats(NodeClocks())
        self._refused = ""
        self._quit = asyncio.Event()
        self._unsent: list[Message] = []
        self._port, self._pair_port = PortReservation(), PortReservation()
        self._progress = ProgressReport()
        self._keeper_report = KeeperReport(lambda event: self._tell(op="keeper", **event))
        self._starting = Starting(node, scratch, self._folder, self.keeper.socket, owner, self._tell)
        self._changing = asyncio.Lock()
        """Ranks are being launched, or ended."""
        self._hurry = asyncio.Event()  # somebody waits to end them, and gives no grace
        self._looks = Looks()

    async def main(self) -> None:
        """Runs until told to quit, or until no supervisor came for the grace time."""
        self._cleared = await asyncio.to_thread(self._end_what_was_before)
        await self.keeper.start()
        census = asyncio.create_task(take_censuses(self._owner, self.node))
        try:
            # An agent that cannot watch ends, and another takes its place: its supervisor would take silence for a hang.
            await run_beside(self._follow_supervisors(), self._watch_ranks(), self._watch_lease())
        finally:
            census.cancel()
            self._starting.end()
            self._end_ranks()

    async def _follow_supervisors(self) -> None:
        alone_since = time.monotonic()
        while not self._quit.is_set():
            if await self._serve_newest():
                alone_since = time.monotonic()
            if time.monotonic() - alone_since > self.orphan_grace_s and not any(
                p.running for p in self.ranks.values()
            ):
                if self._leaving is None or self._leaving.done():
                    _log.warning("no supervisor for %.0f s: leaving", self.orphan_grace_s)
                # Looked after by itself: it ends this loop, unless a supervisor comes meanwhile, which is served.
                self._leave({"room_s": self.room_s})
            with contextlib.suppress(TimeoutError):
                await wait_within(self._quit.wait(), 0.2)

    async def _serve_newest(self) -> bool:
        """Connects to the newest term's supervisor and serves it; True if it was there."""
        for address, number in await self._supervisors.find(self.term):
            if await self._serve(address, number):
                return True
        return False

    async def _serve(self, address: Address, number: int) -> bool:
        """Serves the supervisor that listens there, if it is one; `number` is its term, 0 where only it can tell."""
        try:
            secret = self._secret or Secret(read_token(self.run_dir))
            link = await Link.connect(address, self._on_message, secret.identity)
        except (OSError, TimeoutError):
            return False
        except UnsafeFile as e:
            _log.error("%s", e)
            return False
        serving = asyncio.create_task(link.serve())
        try:
            answer = await link.introduce(secret.token, address, timeout=10)
            number = number or int(answer.get("epoch", 0))
            if number < max(1, self.term):
                raise RunError(f"it has term {number}, and {self.term} is known")
            clocks = NodeClocks()
            await clocks.ask(link)
            hello = await asyncio.to_thread(self._hello, number)
            await link.call("hello", timeout=10, **(hello | clocks.as_message()))
        except (RunError, TimeoutError) as e:
            if (said := str(e)) != self._refused:
                self._refused = said
                _log.warning("the supervisor at %s did not take us: %s", address, said)
            link.close()
            await serving
            return False
        self.term, self._link, self._beats = number, link, Beats(clocks, self._beats.lease_s)
        _log.info("connected to the supervisor of term %d at %s", number, address)
        for message in self._unsent:
            link.tell(**message, sent=time.monotonic())
        self._unsent.clear()
        self._keeper_report.repeat(self.attempt)
        beside = [asyncio.create_task(self._beats.send(link, lambda: self.keeper.alive))]
        if self._shipper is not None:
            beside.append(asyncio.create_task(self._shipper.run(link)))
        quits = asyncio.create_task(self._quit.wait())
        newer = asyncio.create_task(self._newer_than(number))
        await asyncio.wait({serving, quits, newer}, return_when=asyncio.FIRST_COMPLETED)
        for task in (*beside, quits, newer):
            task.cancel()
        if self._quit.is_set():
            await asyncio.sleep(0.05)  # lets the last answer leave
        link.close()
        await serving
        self._link = None
        _log.info("the link to the supervisor of term %d is closed", number)
        return True

    async def _newer_than(self, term: int) -> None:
        """Returns when the supervisor of `term` is silent and a higher one was claimed: it may be stopped, and its
        connection open for as long as it is."""
        while True:
            await asyncio.sleep(_NEWER_EVERY_S)
            silent = self._beats.unanswered > self._supervisors.patience
            if silent and await self._supervisors.has_newer(term):
                _log.warning("the supervisor of term %d does not answer, and may have a successor", term)
                return

    def _hello(self, term: int) -> Message:
        """What the node is, and what runs on it."""
        ranks = {r: p.describe() for r, p in self.ranks.items()}
        facts = describe_node(self.node, self.run_id, self.scratch)
        return facts.as_message() | {
            "pid": os.getpid(),
            "epoch": term,
            "attempt": self.attempt,
            "ranks": {str(r): d for r, d in (self._expired | ranks).items()},
            "cleared": self._cleared.as_message(),
            "held": self._owner.kind.value,
            "folder": self._folder.shared,
            "protocol": min(PROTOCOL, self.keeper.protocol),
            "keeper_bytes": self.keeper.budget,
            "leased": self.lease_until is not None and time.monotonic() < self.lease_until,
        }

    # --- towards the supervisor

    def _tell(self, **message: Any) -> None:
        if self._link is not None and not self._link.closed.is_set():
            self._link.tell(**message, sent=time.monotonic())
        elif message.get("op") in ("exited", "keeper", "progress"):
            self._unsent.append(message)
            del self._unsent[:-_UNSENT_MAX]

    def _tell_end(self, rank: int, process: RankProcess) -> None:
        """Reports a rank's end, with what the clocks are by now where that was not said yet."""
        if self._link is not None and (clocks := self._beats.clocks.news()):
            self._tell(op="clocks", **clocks)
        self._tell(op="exited", attempt=self.attempt, rank=rank, **process.ending())

    def _take_lease(self, message: Message) -> None:
        until = self._beats.take(message)
        if until is None:
            return
        self.lease_until = until
        for process in self.ranks.values():
            process.set_lease(self.lease_until, self.term)
        self.keeper.lease(self.lease_until)

    async def _on_message(self, message: Message) -> Message | None:
        op = message.get("op")
        if op == "lease":
            self._take_lease(message)
            return None
        if op == "ping":
            return {}
        if op in ("port", "pair_port"):
            return {"port": (self._port if op == "port" else self._pair_port).take()}
        if op == "check":
            return find_refusal(message["command"], Path(message["cwd"])) | {"versions": read_needed()}
        if op in ("health", "pair"):
            return await (asyncio.to_thread(check_health) if op == "health" else probe_pair(message))
        if op == "launch":
            return await self._launch(LaunchOrder.from_message(message))
        if op in Starting.OPS:
            return await self._starting.answer(op, message)
        if op == "freeze":
            return self._freeze(message["attempt"])
        if op == "stop":
            return await self._stop(message["attempt"], message.get("signal"), message.get("grace_s", 0.0))
        if op == "stop_at":
            return ask_to_stop(self.ranks.values(), message["step"])
        if op in ("look", "stacks"):
            return await (self._looks.collect if op == "look" else self._looks.tell)(message, self.ranks)
        if op == "ship":
            return {"shipped": await self._ship(message["within_s"])}
        if op == "keeper":
            request: Message = message["request"]
            if self._apart:
                request = await check_place(request, self.run_id, self.node)
            return await self.keeper.call(request, timeout=message.get("timeout", 60.0))
        if op == "wake":
            return {"woken": self.keeper.wake()}
        if op == "quit":
            return await asyncio.shield(self._leave(message))
        raise RunError(f"the agent knows no '{op}'", where=f"node {self.node}")

    async def _ship(self, within_s: float) -> bool:
        """Whether the supervisor has all that was printed here until now."""
        if self._shipper is None:
            return True
        return self._link is not None and await self._shipper.catch_up(within_s)

    def _leave(self, message: Message) -> asyncio.Task[Message]:
        """The task that ends this node, begun once: it goes on where whoever asked for it is gone."""
        if self._leaving is None or self._leaving.done():
            self._leaving = asyncio.create_task(self._save_and_end(message))
        return self._leaving

    async def _save_and_end(self, message: Message) -> Message:
        """Ends ranks and keeper, after the keeper has saved what it holds; not if another supervisor comes meanwhile."""
        term, closed = self.term, {}
        await self._stop(self.attempt, None, 0.0)
        self._starting.end()
        if message.get("flush", True):
            what: Message = {k: message[k] for k in ("mark", "ranks") if message.get("mark") is not None}
            deadline_s, room_s = message.get("deadline_s", 60.0), message.get("room_s", 0.0)
            closed = await self.keeper.flush(deadline_s, room_s, **what)
        if self.term != term:
            raise RunError("another supervisor took over meanwhile", where=f"node {self.node}")
        ended = await self.keeper.close()
        await self._ship(_LAST_LOGS_S)
        self._quit.set()
        return {"closed": {k: v for k, v in (ended | closed).items() if k != "ok"}}

    # --- ranks

    async def _launch(self, order: LaunchOrder) -> Message:
        async with self._changing:
            if order.attempt <= self.attempt:
                raise RunError(
                    f"attempt {order.attempt} is not newer than {self.attempt}", where=f"node {self.node}"
                )
            if self.ranks:
                raise RunError("ranks of an earlier attempt are still here", where=f"node {self.node}")
            self.attempt, self._expired = order.attempt, {}
            self._progress, self._looks = ProgressReport(), Looks()
            answer = await self._starting.launch(order, self._take_rank)
            return {**answer, "pids": {str(r): p.pid for r, p in self.ranks.items()}}

    def _take_rank(self, process: RankProcess) -> None:
        if self.lease_until is not None:
            process.set_lease(self.lease_until, self.term)
        self.ranks[process.rank] = process

    async def _watch_ranks(self) -> None:
        """Tells the supervisor of exits at once, and of steps and phases where there is news of them."""
        sent = 0.0
        while True:
            now = time.monotonic()
            for rank, process in self.ranks.items():
                ended = process.just_ended()
                fresh = process.sample(now, final=ended)
                if fresh is not None:
                    self._progress.add(rank, fresh, self.ranks)
                    if fresh["steps"]:
                        self._starting.note_steps()
                if process.work is not None:
                    self._progress.add_work(rank, process.work)
                    process.work = None
                if ended:
                    self._report_progress()  # its last steps first: what comes after its end is no longer heard
                    self._tell_end(rank, process)
            if now - sent > _REPORT_S and self._report_progress():
                sent = now
            if self.ranks:
                self._starting.make_ready(now)
            await asyncio.sleep(_POLL_S)

    def _report_progress(self) -> bool:
        """Whether there was any."""
        news = self._progress.take()
        if news is not None:
            self._tell(op="progress", attempt=self.attempt, **news)
        return news is not None

    async def _watch_lease(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            running = any(p.running for p in self.ranks.values()) and not self._expired
            if running and self.lease_until is not None and time.monotonic() > self.lease_until:
                self._expire(self.lease_until)

    def _expire(self, since: float) -> None:
        """Ends the ranks for the lease that expired; how each ended is told now or to whoever supervises next."""
        _log.error("the lease expired: ending the ranks of attempt %d", self.attempt)
        for process in self.ranks.values():
            if process.running:
                process.expire(since)
        left = self._end_ranks()
        for rank, process in self.ranks.items():
            self._expired[rank] = process.describe()
            if process.just_ended():
                self._tell_end(rank, process)
        if left.survivors:
            _log.error("processes %s survived kill -9; %s", left.survivors, left.why)
            return  # whoever supervises next asks for a stop and is told of them
        self._cleared |= left  # what is not proven is said with the next hello
        for process in self.ranks.values():
            process.close()
        self.ranks = {}

    def _freeze(self, attempt: int) -> Message:
        """Stops the ranks of an attempt where they are, until they are ended."""
        for process in self.ranks.values() if attempt == self.attempt else ():
            process.killed_by_agent = True
            process.send(signal.SIGSTOP)
        return {}

    async def _stop(self, attempt: int, sig: int | None, grace_s: float) -> Message:
        """Ends the ranks of an attempt, first by `sig` with a grace, then by kill; proves that they are gone."""
        if not grace_s and attempt == self.attempt:
            self._hurry.set()  # a stop under way that still gives a grace ends now
        async with self._changing:
            self._hurry.clear()
            return await self._end_attempt(attempt, sig, grace_s)

    async def _end_attempt(self, attempt: int, sig: int | None, grace_s: float) -> Message:
        if self.ranks and attempt < self.attempt:
            # They are of a newer one: launching it has shown that the old one was gone. Those of an older one are ended: whoever
            # asks has launched another since, or tried to.
            return EndedProcesses().as_message()
        if not self.ranks:
            return (await asyncio.to_thread(self._end_ranks)).as_message()
        if sig is not None:
            await end_by(sig, self.ranks.values(), grace_s, self._hurry)
        for process in self.ranks.values():
            if process.running:
                process.killed_by_agent = True
        left = await asyncio.to_thread(self._end_ranks)
        for rank, process in self.ranks.items():
            process.sample(time.monotonic())
            if process.just_ended():
                self._tell_end(rank, process)
            process.close()
        self.ranks = {}
        return left.as_message()

    def _end_what_was_before(self) -> EndedProcesses:
        ended = EndedProcesses()
        for owner in self._held_before:
            ended |= owner.end_ranks(self.node)
        return ended | self._end_ranks()

    def _end_ranks(self) -> EndedProcesses:
        """Ends the ranks and all that they started; agent and keeper stay, and what waits to be a rank."""
        for process in self.ranks.values():
            process.send(signal.SIGKILL)
        return self._starting.end_ranks()

    async def _on_keeper(self, event: Message) -> None:
        self._keeper_report.add(event, len(self.ranks))


def main() -> None:
    """Entry point of the agent's process."""
    args = parse_arguments(__doc__)
    if args.ownership is None:
        hold_itself(__spec__.name, sys.argv[1:], args.run_id, args.node, args.scratch, args.hold)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(levelname)s %(message)s", force=True
    )
    pass_over_signals()
    private_folder(args.scratch)
    claim_node(args.scratch, args.node)
    owner = from_text(args.ownership, args.run_id, args.scratch.parent)
    agent = Agent(
        RunDir(args.run_dir),
        args.run_id,
        args.node,
        args.scratch,
        args.orphan_grace,
        args.keeper_memory or share_memory(args.keeper_share),
        owner,
        args.wait_for_room,
        args.room_elsewhere,
        [from_text(text, args.run_id, args.scratch.parent) for text in args.held_before],
        take_from_input(),
        open_record(RunDir(args.run_dir), args.record) if "://" in args.record else None,
        args.supervisor,
    )
    asyncio.run(agent.main())
    shutil.rmtree(args.scratch, ignore_errors=True)
    owner.leave(args.node)
    forget_run(args.scratch.parent)


if __name__ == "__main__":
    main()
