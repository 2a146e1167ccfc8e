"""Hosts of a list, reached over ssh, as a cluster of events.

Nothing of a run is kept on the supervisor's host: each host remembers to which runs it was given and who cordoned it, and its
program finds the agent that runs. So a standby supervisor anywhere sees the same. A host that does not answer is
unreachable, never lost: only it can say that nothing is left there, or that it was started again.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...errors import DoesNotFit, RunError
from ...journal.codec import decode
from ...link.address import own_address
from ...units import plural
from ...waiting import wait_within
from ..at_once import fence_all, for_each
from ..clocks import Moment
from ..contract import (
    AgentCommand,
    Allocation,
    ClusterAway,
    Cordon,
    Event,
    Fenced,
    Lost,
    NodeRefuses,
    Pending,
    Request,
    Returned,
    Unreachable,
)
from ..stream import EventStream
from ..survey import find_address
from .connection import Connection, load_asyncssh
from .options import Host, HostsOptions, list_hosts
from .program import Message
from .reported import ReportedAgents

_log = logging.getLogger("unbroken.supervisor")
_RETURN_S = 30.0
"""Hosts that were given up and can be reached are taken back by whoever asks, who hears of them within so much."""
_ASK_AGAIN_S = 2.0
_FENCE_MARGIN_S = 2.0
_RANKS_PER_CPU = 64


class HostsCluster:
    """The hosts of one list, for one run."""

    Options = HostsOptions

    def __init__(
        self,
        run_id: str,
        options: HostsOptions,
        *,
        log_of: Callable[[str], Path] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`log_of` is not used: what an agent prints comes over its own link."""
        self.run_id, self._options, self._clock = run_id, options, clock
        self._links: dict[str, Connection] = {}
        self._boots: dict[str, str] = {}
        self._unreachable: dict[str, str] = {}
        self._given: set[str] = set()
        self._replaced: set[str] = set()
        self._others: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._moved = asyncio.Event()
        self._stream = EventStream(self._current)
        self._agents = ReportedAgents(self._stream, clock)

    @functools.cached_property
    def _hosts(self) -> list[Host]:
        return list_hosts(self._options)

    @property
    def socket_folder(self) -> Path | None:
        return None

    @property
    def door_address(self) -> str:
        if self._options.interface:
            return find_address(self._options.interface)
        return own_address(self._hosts[0].address or self._hosts[0].name)

    def describe(self) -> str:
        held = {c.report["holding"] for c in self._links.values() if c.report}
        how = f"; processes are held by {' or '.join(sorted(held))}" if held else ""
        how += f"; they reach this host by {self._options.interface}" if self._options.interface else ""
        return (
            f"{plural(len(self._hosts), 'host')} {'that wait' if self._options.identity else 'over ssh'}{how}"
        )

    def check(self, request: Request) -> None:
        """Reaches for the hosts too: a key that is not known, or a Python without unbroken, is said before training starts."""
        if not self._options.identity:
            load_asyncssh()
        if len(self._hosts) < request.nodes + request.spares:
            raise DoesNotFit(
                f"{plural(request.nodes, 'node')} and {plural(request.spares, 'spare')} are more than the {plural(len(self._hosts), 'host')} of the list",
                hint="Ask for fewer --nodes or --spares, or add hosts",
            )
        asyncio.run(HostsCluster(self.run_id, self._options)._try(request))

    async def _try(self, request: Request) -> None:
        try:
            await self._reach_all()
            while not any(c.up for c in self._links.values()) and any(c.slow for c in self._links.values()):
                self._moved.clear()
                await self._moved.wait()
            self._check_size(request)
            bad = [c for c in self._links.values() if not c.up]
            refused = [c for c in bad if c.refused]
            none_up = len(self._links) == len(bad)
            if refused and not (none_up and len(refused) < len(bad)):
                more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
                # Where all refuse, nobody goes on: whoever claimed the run then would keep it from those who can.
                kind = RunError if none_up else NodeRefuses
                raise kind(f"{refused[0].why}{more}", where=refused[0].host.name, hint=refused[0].hint)
            if none_up:
                first = next(c for c in bad if not c.refused)
                also = f", and {refused[0].host.name}: {refused[0].why}" if refused else ""
                raise ClusterAway(f"no host can be reached: {first.why}{also}", where=first.host.name,
                               hint=first.hint or "See whether you can log in there with ssh")  # fmt: skip
        finally:
            await self.close()

    # --- connections

    async def _reach_all(self) -> None:
        """Connects to every host, and waits until each was reached or not."""
        for host in self._hosts:
            if host.name not in self._links:
                link = Connection(
                    self.run_id, host, self._options, on_up=self._note_up, on_down=self._note_down,
                    on_event=self._note_event,
                )  # fmt: skip
                self._links[host.name] = link
                link.start()
        await asyncio.gather(*(c.tried.wait() for c in self._links.values()))

    def _note_up(self, link: Connection, report: Message) -> None:
        name = link.host.name
        if name in self._replaced:
            self._begin(self._let_go(name))
        elif report["given"]:
            self._given.add(name)
        before, self._boots[name] = self._boots.get(name), report["boot"]
        self._agents.compare(name, report["running"])
        if before and report["boot"] and before != report["boot"]:
            self._stream.publish(Lost(self._now(), name, "the host was started again", True))
            self._unreachable[name] = ""
        if self._unreachable.pop(name, None) is not None:
            self._stream.publish(Returned(self._now(), name))
        self._moved.set()

    def _note_down(self, link: Connection) -> None:
        name = link.host.name
        if name in self._given and name not in self._unreachable:
            self._unreachable[name] = link.why
            self._stream.publish(Unreachable(self._now(), name, link.why))
        self._moved.set()

    def _note_event(self, link: Connection, message: Message) -> None:
        self._agents.apply(link.host.name, message)

    def _current(self) -> list[Event]:
        now = self._now()
        away = [Unreachable(now, n, why) for n, why in self._unreachable.items()]
        return [*self._agents.list_events(), *away]

    def events(self) -> AsyncIterator[Event]:
        if not self._stream.closed:
            self._begin(self._reach_all())
        return self._stream.read()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(task := asyncio.get_running_loop().create_task(work))
        task.add_done_callback(self._tasks.discard)

    async def _let_go(self, node: str) -> None:
        """Has a host that was replaced know it, as soon as it is reached."""
        with contextlib.suppress(RunError):
            await self._links[node].order("give", given=False)

    def _now(self) -> Moment:
        return Moment.at(self._clock())

    # --- nodes

    async def acquire(self, request: Request) -> Allocation:
        """Hosts in the order of the list: those that the run has been given, then others that are reached and not cordoned.

        In place of a lost one it waits as long as a host of the list cannot be reached, be it that one: links come back.
        """
        wanted = request.nodes + request.spares
        if len(self._hosts) < wanted:
            raise DoesNotFit(
                f"the list has {plural(len(self._hosts), 'host')}, and no other", hint="Add hosts to the list"
            )
        told, until = "", self._clock()
        if {*request.replaces, *request.exclude} - {*await self.cordons()}:
            until += _RETURN_S
        while True:
            self._moved.clear()
            await self._reach_all()
            self._check_size(request)
            cordoned = set(await self.cordons())
            out = {*cordoned, *request.exclude, *request.replaces}
            names = [h.name for h in self._hosts if h.name not in out]
            held = [] if request.replaces else [n for n in names if n in self._given][:wanted]
            idle = await self._find_idle([n for n in names if n not in self._given])
            free = idle[: wanted - len(held)]
            taken = [*held, *free]
            enough = len(taken) >= wanted or (
                not request.replaces and len(taken) >= request.nodes and self._are_lost(names)
            )
            if enough and await self._give(free):
                self._given -= set(request.replaces)
                self._replaced |= set(request.replaces)
                for name in request.replaces:
                    self._begin(self._let_go(name))
                order = [n for n in names if n in taken]
                return Allocation("hosts", tuple(order[: request.nodes]), tuple(order[request.nodes :]))
            away = [h.name for h in self._hosts if not self._links[h.name].up]
            others = [n for n in names if n not in self._given]
            useless = not set(away) - cordoned and len(others) < wanted
            if request.replaces and useless and self._clock() > until:
                raise DoesNotFit(
                    "every host of the list is in use, or out of use", hint="Add hosts to the list"
                )
            missing = [f"{n} ({self._links[n].why})" for n in away]
            missing += [
                f"{n} (run {run} has an agent there)" for n, run in self._others.items() if n in names
            ]
            lacking = wanted - len(taken)
            why = f"{plural(lacking, 'more host')} {'is' if lacking == 1 else 'are'} needed; not to be had: {', '.join(missing[:3]) or 'none'}"
            if why != told:
                told = why
                self._stream.publish(Pending(self._now(), request, why))
            try:
                await wait_within(self._moved.wait(), _ASK_AGAIN_S)
            except TimeoutError:
                continue

    async def _give(self, names: Collection[str]) -> bool:
        """Lets hosts know that they are the run's; False where one was lost just now, and others are to be found."""
        for name in names:
            try:
                await self._links[name].order("give", given=True)
            except RunError as e:
                _log.warning("%s cannot be taken: %s", name, e)
                return False
            self._given.add(name)
        return True

    async def _find_idle(self, names: Collection[str]) -> list[str]:
        """Those that are reached and have no agent of another run; what the others have is noted in `_others`."""
        idle = []
        for name in (n for n in names if self._links[n].up):
            with contextlib.suppress(RunError):
                if others := (await self._links[name].order("others"))["others"]:
                    self._others[name] = str(others[0])
                else:
                    self._others.pop(name, None)
                    idle.append(name)
        return idle

    def _check_size(self, request: Request) -> None:
        """Raises DoesNotFit where no host that was reached can take so many ranks."""
        cpus = [int(c.report["cpus"]) for c in self._links.values() if c.report]
        if cpus and request.ranks_per_node > _RANKS_PER_CPU * max(cpus):
            raise DoesNotFit(
                f"{plural(request.ranks_per_node, 'rank')} on a host with {plural(max(cpus), 'core')} would not train but wait",
                hint="Use fewer --nproc",
            )

    def _are_lost(self, names: Collection[str]) -> bool:
        """Whether all other hosts were tried and cannot be reached: then nobody waits for spares."""
        return all(self._links[n].up or self._links[n].tried.is_set() for n in names)

    async def give_back(self, nodes: Collection[str]) -> None:
        proven, error = await fence_all(self.fence, [n for n in nodes if n in self._given])

        async def give(name: str) -> None:
            await self._links[name].order("give", given=False)
            self._given.discard(name)

        await for_each(proven, give)
        if error is not None:
            raise error

    # --- agents

    async def start(self, node: str, command: AgentCommand) -> str:
        link = self._find(node)
        answer = await link.order(
            "start", module=command.module, arguments=list(command.arguments),
            environment=dict(command.environment), secret=base64.b64encode(command.secret).decode(),
        )  # fmt: skip
        return str(answer["launch"])

    def _find(self, node: str) -> Connection:
        if node not in self._given or node not in self._links:
            raise RunError("the node is none of this run's", where=node, hint="Ask for nodes first")
        return self._links[node]

    async def fence(self, node: str, deadline_s: float) -> Fenced:
        link = self._links.get(node)
        if link is None:
            return Fenced(False, "it is none of the hosts in the list")
        deadline = self._clock() + deadline_s
        why = link.why
        while (left := deadline - self._clock()) > 0:
            if link.up:
                try:
                    answer = await link.order("fence", deadline_s=left, within_s=left + _FENCE_MARGIN_S)
                    return decode(Fenced, answer["fenced"])
                except RunError as e:
                    why = e.message
            await asyncio.sleep(min(0.2, left))
        return Fenced(False, f"{node} is not reached: {link.why or why}")

    async def forget(self, node: str) -> None:
        if (link := self._links.get(node)) is not None and link.up:
            await link.order("forget")

    # --- cordons, which lie on the hosts themselves: whoever uses the list sees them

    async def cordon(self, cordon: Cordon) -> None:
        await self._order_on(cordon.node, "cordon", cordon=asdict(cordon))

    async def release(self, node: str, owner: str) -> None:
        await self._order_on(node, "release", owner=owner)

    async def _order_on(self, node: str, op: str, **fields: Any) -> None:
        await self._reach_all()
        if node not in self._links:
            raise RunError("it is none of the hosts in the list", where=node)
        await self._links[node].order(op, **fields)

    async def cordons(self) -> Mapping[str, Cordon]:
        await self._reach_all()

        async def ask(name: str, link: Connection) -> tuple[str, Message | None]:
            try:
                return name, (await link.order("notes"))["cordon"]
            except RunError:
                return name, None

        answers = await asyncio.gather(*(ask(n, c) for n, c in self._links.items() if c.up))
        return {n: Cordon(**c) for n, c in answers if c}

    async def close(self) -> None:
        self._stream.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(c.close() for c in self._links.values()))
