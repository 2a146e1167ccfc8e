"""The nodes of a run: their agents are started, their leases granted, and those that are lost noticed.

Nothing is polled: the cluster reports what becomes of agents and nodes, the desk who comes and who is silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ....cluster import EndedProcesses
from ....cluster.at_once import for_each
from ....cluster.contract import (
    AgentCommand,
    Allocation,
    Cluster,
    ClusterAway,
    Cordon,
    EndingAt,
    Event,
    Exited,
    Lost,
    NodeEvent,
    Pending,
    PreemptingAt,
    Request,
    Returned,
    Started,
    Unreachable,
)
from ....cluster.hello import Hello
from ....errors import DoesNotFit, RunError
from ....link.runs import pack
from ....waiting import keep_following, wait_within
from ...wire import Link, Message
from ..attempt.outcome import NodeEnd
from ..record.clock import Clock
from .away import wait_while_away
from .coming_up import bring_up
from .node import LEASE_MARGIN_S, Node

_log = logging.getLogger("unbroken.supervisor")
_LAST_WORDS_S = 1.0
"""What an agent has sent may arrive so long after its end."""
_SCAN_S = 0.5
_FENCE_S, _FENCE_LEAST_S = 10.0, 5.0
_LOGS_S = 10.0


class Fleet:
    """What the supervisor knows of its nodes, and all that it does with the cluster. There are none before `acquire`."""

    def __init__(
        self,
        run_id: str,
        cluster: Cluster,
        request: Request,
        command: Callable[[str], AgentCommand],
        *,
        lease_s: float,
        say: Callable[[str], None],
        clock: Clock,
        changed: asyncio.Event,
    ) -> None:
        """`command` starts the agent of a node; `changed` is set when a node comes or goes."""
        self.run_id, self._cluster = run_id, cluster
        self.request, self._command, self.lease_s = request, command, lease_s
        self._say, self._clock, self._changed = say, clock, changed
        self._began = clock.monotonic()
        self.nodes: dict[str, Node] = {}
        self.needed = request.nodes
        """With so many it can go on: nobody waits for slow ones beyond that."""
        self.ends: float | None = None
        """When the allocation ends, on the monotonic clock."""
        self.held = ""
        """How agents hold processes: cgroup, parent or marks; "" before one has said."""
        self.notices = 0
        """How many nodes were announced to be taken away."""
        self._moved = asyncio.Event()
        self._disturbed = True
        self._scan_at = 0.0
        self._pending = ""

    # --- what the cluster reports

    async def follow_events(self) -> None:
        """Takes each event of the cluster into account, until that is closed."""
        await keep_following(self._follow, _SCAN_S, _log, "what the cluster reports")

    async def _follow(self) -> None:
        async for event in self._cluster.events():
            self._apply(event)
            self._note_change()

    def _note_change(self) -> None:
        self._disturbed = True
        self._moved.set()
        self._changed.set()

    def _apply(self, event: Event) -> None:
        match event:
            case Pending(why=why):
                if why != self._pending:
                    self._pending = why
                    self._say(f"waiting for nodes: {why}")
                return
            case EndingAt(deadline=deadline):
                self.ends = deadline
                return
            case NodeEvent(node=name):
                node = self.nodes.setdefault(name, Node(name))
            case _:
                return
        match event:
            case Started(launch=launch):
                node.launch, node.exited = launch, None
            case Exited(launch=launch, code=code, signal=sig) if node.launch in (launch, None):
                node.launch, node.exited = None, self._clock.monotonic()
                node.how_ended = (
                    f"was ended by signal {sig}" if sig else f"ended with code {code}" if code else "ended"
                )
            case Lost(why=why):
                node.how_ended = f"was lost: {why}"
                node.launch, node.gone, node.usable = None, why, False
                if node.link is not None:
                    node.link.close()  # it may stand open for ever; where the node lives, it says hello again
            case Unreachable(why=why):
                node.unreachable = why
            case Returned():
                node.usable, node.unreachable = True, ""
                node.returned = node.state == "lost" or bool(node.gone)
                node.preempted, node.preempted_for = None, ""
            case PreemptingAt(deadline=deadline, why=why):
                node.preempted, node.preempted_for = deadline, why
                self.notices += 1

    # --- what the desk reports

    def welcome(self, hello: Message, link: Link) -> Node:
        """Takes an agent in, in place of the one that was there before. Raises RunError for one that does not belong here."""
        node = self.nodes.get(hello["node"])
        if node is None or hello.get("run_id") != self.run_id:
            raise RunError("this agent belongs to another run", where=str(hello.get("node")))
        before, node.facts = node.facts, Hello.from_message(hello) if "boot_id" in hello else None
        if node.state == "lost":
            node.returned = True  # it can be reached again, which no cluster may ever say
            self._note_change()
            raise RunError("this node was given up", where=node.name)
        if node.link is not None and node.link is not link:
            node.link.close()
        if node.hello and node.hello.get("pid") != hello.get("pid"):
            same = before is None or node.facts is None or node.facts.is_same_boot(before)
            node.restarted = NodeEnd.AGENT_LOST if same else NodeEnd.GONE
            node.agent_before, node.how_ended = node.how_ended or "ended unseen", ""
        node.link, node.hello, node.state = link, hello, "up"
        node.take_clocks(hello)
        node.heard = node.granted = self._clock.monotonic()
        node.exited, node.gone, node.unreachable = None, "", ""
        self.held = str(hello.get("held", self.held))
        self._note_change()
        return node

    def read_clocks(self) -> Message:
        """What the supervisor's clocks show, for an agent that measures how far its own are off."""
        return {"monotonic": self._clock.monotonic(), "wall": self._clock.wall()}

    def note_sign(self, node: Node) -> None:
        """Something came from this node's agent: one that ended a while ago was another, started beside it."""
        node.heard = self._clock.monotonic()
        if node.exited is not None and node.heard - node.exited > _LAST_WORDS_S:
            node.exited = None

    def grant(self, node: Node) -> float:
        """Renews a node's lease; for how many seconds."""
        node.granted = self._clock.monotonic()
        return self.lease_s

    def note_closed(self, node: Node, link: Link) -> None:
        """A link to a node ended."""
        if node.link is link:
            _log.info("the link to %s is closed", node.name)
            self._note_change()

    def hang_up(self) -> None:
        """Closes the links to all agents, which go on."""
        for node in self.nodes.values():
            if node.link is not None:
                node.link.close()

    # --- nodes and their agents

    @property
    def first_slots(self) -> tuple[str, ...]:
        """The nodes that train in the first attempt."""
        return tuple(self.nodes)[: self.request.nodes]

    def up(self) -> list[str]:
        """The nodes whose agent answers: one that is silent is not asked, since all would wait for it."""
        return [n for n, node in self.nodes.items() if self._answers(node)]

    def _answers(self, node: Node) -> bool:
        return node.up and not node.is_silent(self._clock.monotonic(), self.lease_s)

    async def acquire(self) -> None:
        """Asks the cluster for the run's nodes, and waits until they are granted."""
        allocation = await self._ask_cluster()
        for note in allocation.notes:
            self._say(note)
        self.ends = allocation.ends if allocation.ends is not None else self.ends
        given = {n: self.nodes.get(n) or Node(n) for n in allocation.everything}
        for node in given.values():
            node.usable = node.usable or not node.gone
        self.nodes = given | {n: node for n, node in self.nodes.items() if n not in given}
        self._note_change()

    async def _ask_cluster(self) -> Allocation:
        """The run's nodes, without those to avoid where the cluster has others."""
        try:
            return await self._cluster.acquire(self.request)
        except DoesNotFit:
            if not self.request.exclude:
                raise
            self._say(
                f"there are no others than {', '.join(sorted(self.request.exclude))}, which have a history: they are used"
            )
            self.request = replace(self.request, exclude=frozenset())
            return await self._cluster.acquire(self.request)

    def avoid(self, names: Collection[str]) -> None:
        """Nodes that are not to be asked for, as far as there are others."""
        self.request = replace(self.request, exclude=frozenset(names))

    def remember(self, names: Iterable[str], *, given: bool = False) -> None:
        """Nodes that the run had: those that the cluster does not give it any more are lost, unless they are `given`."""
        for name in names:
            if name not in self.nodes:
                gone = "" if given else "the cluster gives it to the run no more"
                self.nodes[name] = Node(name, gone=gone, usable=given)

    def runs_on(self, names: Collection[str]) -> bool:
        """Whether the cluster says that agents run on any of these."""
        return any(n in self.nodes and self.nodes[n].launch is not None for n in names)

    async def replace(self, lost: str, exclude: Iterable[str]) -> str | None:
        """Asks for a node in place of a lost one, and waits until it is granted; None where there never will be one."""
        request = Request(
            1, ranks_per_node=self.request.ranks_per_node, exclude=frozenset(exclude), replaces=(lost,)
        )
        try:
            name = (await wait_while_away(lambda: self._cluster.acquire(request), self._say)).nodes[0]
        except DoesNotFit:
            return None
        self.nodes.setdefault(name, Node(name))
        return name

    async def bring_up(self, names: Collection[str], hurried: Callable[[], bool] = bool) -> list[str]:
        """Starts agents where none runs, waits for all to come; returns those that did not. `hurried`: nobody wants to wait
        for slow ones any more."""

        def needs_them() -> bool:
            return not hurried() and len(self.up()) < self.needed

        return await bring_up(
            self.nodes, names, self._start_all, self._moved, self._clock, self._say, needs_them, self.lease_s
        )

    async def _start_all(self, names: Collection[str]) -> dict[str, ClusterAway]:
        async def start(name: str) -> RunError | None:
            try:
                self.nodes[name].launch = await self._cluster.start(name, self._command(name))
            except RunError as e:
                _log.warning("the agent of %s is not started: %s", name, e)
                return e
            return None

        failed = await for_each(names, start)
        return {n: e for n, e in failed.items() if isinstance(e, ClusterAway)}

    async def return_node(self, name: str, hurried: Callable[[], bool] = bool) -> bool:
        """Starts a lost node again, empty; whether it came."""
        node = self.nodes[name]
        node.state, node.gone, node.exited, node.returned, node.link = "down", "", None, False, None
        return not await self.bring_up([name], hurried)

    # --- who is lost

    def find_lost(self, names: Iterable[str]) -> dict[str, NodeEnd]:
        """Those of these nodes whose agent is gone for good, with what is left of them.

        Cheap where nothing was heard of a node: silence is looked for twice a second.
        """
        now = self._clock.monotonic()
        if not self._disturbed and now < self._scan_at:
            return {}
        self._scan_at = now + _SCAN_S
        lost: dict[str, NodeEnd] = {}
        in_doubt = False
        for name in names:
            node = self.nodes[name]
            if self._answers(node) and node.restarted is None:
                continue
            end = node.judge(now, self.lease_s)
            in_doubt |= end is None
            if end is not None:
                lost[name] = end
        self._disturbed = in_doubt or bool(lost)
        return lost

    def is_in_doubt(self, names: Iterable[str]) -> bool:
        """Whether the link to any of these has closed, or the cluster cannot reach it, and nobody has said yet what that means."""
        now = self._clock.monotonic()
        nodes = (self.nodes[name] for name in names)
        # One that beats, and that the cluster alone does not reach, has nothing to do with it: beats come eight times in a lease.
        doubtful = [n for n in nodes if n.link is not None and (not n.up or (n.unreachable and now - n.heard > self.lease_s / 5))]  # fmt: skip
        return any(node.judge(now, self.lease_s) is None for node in doubtful)

    def read_end(self, name: str) -> NodeEnd | None:
        """What is left of a node that did not answer; None where all of it may still be there."""
        node = self.nodes[name]
        return NodeEnd.GONE if node.gone else NodeEnd.AGENT_LOST if node.exited is not None else None

    def find_preempted(self, names: Iterable[str]) -> dict[str, float]:
        """Those of these nodes that will be taken away, and when (monotonic)."""
        if not self.notices:
            return {}
        return {n: at for n in names if (at := self.nodes[n].preempted) is not None}

    def lease_ends(self, name: str) -> float:
        """The monotonic time from which the node's processes have stopped by themselves."""
        # A supervisor before this one may have granted one up to its end, which was before this one began.
        return max(self.nodes[name].granted, self._began) + self.lease_s + LEASE_MARGIN_S

    def give_up(self, name: str) -> None:
        """Marks a node as lost: its agent is refused from now on."""
        node = self.nodes[name]
        node.state = "lost"
        if node.link is not None:
            node.link.close()

    def find_free(self, slots: Collection[str], gone: Collection[str]) -> list[str]:
        """Nodes that could take another one's place now: none that trains, and none that is `gone` or out of use."""
        taken = frozenset(slots)
        return [
            n for n, node in self.nodes.items()
            if n not in taken and n not in gone and self._answers(node) and not node.unreachable and node.preempted is None
        ]  # fmt: skip

    def find_returned(self, slots: Collection[str]) -> list[str]:
        """Nodes that were given up, and of which the cluster has said since that they can be used again."""
        taken = frozenset(slots)
        return [
            n for n, node in self.nodes.items()
            if n not in taken and node.returned and node.usable and not node.unreachable and node.preempted is None
        ]  # fmt: skip

    async def wait_for_returned(self, slots: Collection[str], out: Collection[str]) -> str:
        """The first of them that is not `out` of use, whenever it comes."""
        while not (found := [n for n in self.find_returned(slots) if n not in out]):
            await asyncio.sleep(_SCAN_S)
        return found[0]

    # --- ending nodes

    async def fence(self, name: str, deadline_s: float = _FENCE_S) -> tuple[EndedProcesses, str]:
        """Ends all that the run has on a node; whether that is proven, and what its agent was found to do before, if known."""
        fenced = await self._cluster.fence(name, max(_FENCE_LEAST_S, deadline_s))
        survivors = tuple(int(s) for s in fenced.survivors if s.isdigit())
        node = self.nodes.get(name)
        if node is not None and fenced.proven:
            node.launch = None
            # A node that answers a fence can take an agent again; one that is lost first has to return.
            node.usable = node.usable or not node.gone
            node.state = "lost" if node.state == "lost" else "down"
        return EndedProcesses(
            survivors, fenced.proven or bool(survivors), "" if survivors else fenced.why
        ), fenced.found

    async def wait_until_gone(self, name: str, within_s: float) -> None:
        """Waits until an agent that was told to leave has left."""
        deadline = self._clock.monotonic() + within_s
        node = self.nodes[name]
        while node.launch is not None and (left := deadline - self._clock.monotonic()) > 0:
            self._moved.clear()
            try:
                await wait_within(self._moved.wait(), min(left, 0.1))
            except TimeoutError:
                continue

    async def forget(self, name: str) -> None:
        """A person has made sure that nothing is left on a node whose end could not be proven."""
        await self._cluster.forget(name)

    async def give_back(self, names: Collection[str]) -> None:
        """Returns nodes to the cluster; one of which that cannot be proven stays the run's."""
        try:
            await self._cluster.give_back(names)
        except RunError as e:
            _log.warning("nodes are not given back: %s", e)

    def describe(self) -> str:
        """What the cluster is, and how it holds processes, in words. Raises RunError where nothing works."""
        return self._cluster.describe()

    async def gather_logs(self, names: Iterable[str], within_s: float = _LOGS_S) -> None:
        """Waits, for a while, until all that was printed on these nodes until now is in the run directory."""
        here = {n: self.nodes[n] for n in names if n in self.nodes}
        far = [n for n, node in here.items() if not node.has_folder and self._answers(node)]
        if far:
            await self.ask_all(far, "ship", within_s=within_s, timeout=within_s + 2)

    def begin(self, names: Iterable[str]) -> None:
        """An attempt begins on these nodes, with the agents that are there now."""
        for name in names:
            self.nodes[name].restarted = None

    def list_boots(self, slots: Sequence[str]) -> dict[str, list[list[int]]]:
        """The boots that are known of the machines below these slots, each with the runs of its slots."""
        found: dict[str, list[int]] = {}
        for i, name in enumerate(slots):
            facts = self.nodes[name].facts
            if facts is not None and facts.boot_id:
                found.setdefault(facts.boot_id, []).append(i)
        return {boot: pack(indexes) for boot, indexes in found.items()}

    def has_rebooted(self, name: str, boot: str) -> bool:
        """Whether the machine was booted again since this boot: nothing that ran there then is left."""
        node = self.nodes.get(name)
        return bool(boot and node and node.facts and node.facts.boot_id and node.facts.boot_id != boot)

    async def cordon(self, cordon: Cordon) -> str:
        """Takes a node out of use for others too; why that was refused, in words, else nothing."""
        try:
            await self._cluster.cordon(cordon)
        except RunError as e:
            return str(e)
        return ""

    # --- asking agents

    async def ask(self, name: str, op: str, *, timeout: float = 30.0, **fields: Any) -> Message:
        """Asks one node's agent. Raises RunError, also when it is gone or late."""
        link = self.nodes[name].link
        if link is None:
            raise RunError("there is no link to the node", where=name)
        try:
            return await link.call(op, timeout=timeout, **fields)
        except TimeoutError:
            raise RunError(f"no answer to '{op}' within {timeout:.0f} s", where=name) from None

    async def ask_each(
        self, requests: Mapping[str, Mapping[str, Any]], op: str, *, timeout: float = 30.0
    ) -> dict[str, Message]:
        """Asks each node its own question; those that fail are left out (their loss shows elsewhere).

        A node that is lost meanwhile is waited for no longer.
        """

        async def one(name: str) -> Message | None:
            try:
                return await self.ask(name, op, timeout=timeout, **requests[name])
            except RunError as e:
                _log.warning("%s did not answer '%s': %s", name, op, e)
                return None

        async with self.watching(requests):
            answers = await for_each(requests, one)
        return {n: a for n, a in answers.items() if a is not None}

    @contextlib.asynccontextmanager
    async def watching(self, names: Iterable[str]) -> AsyncIterator[None]:
        """Of these nodes, one that is found to be lost meanwhile fails at once what it was asked: its link is closed."""

        async def hang_up_on_lost() -> None:
            while True:
                await asyncio.sleep(_SCAN_S)
                for node in map(self.nodes.__getitem__, names):
                    lost = not self._answers(node) and node.judge(self._clock.monotonic(), self.lease_s)
                    if lost and node.up and node.link is not None:
                        node.link.close()
                        self._disturbed = True

        watching = asyncio.create_task(hang_up_on_lost())
        try:
            yield
        finally:
            watching.cancel()

    async def ask_all(
        self, names: Iterable[str], op: str, *, timeout: float = 30.0, **fields: Any
    ) -> dict[str, Message]:
        """Asks many the same; those that fail are left out."""
        return await self.ask_each(dict.fromkeys(names, fields), op, timeout=timeout)
