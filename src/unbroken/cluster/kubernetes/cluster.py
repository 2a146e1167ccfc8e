"""A pod for each node of a run, as a cluster of events.

A pod stays as long as the run has its node, whatever becomes of agents and ranks in it: its GPUs are nobody else's meanwhile.
All that a successor has to know lies in the cluster: the pods, by their labels, and cordons.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ...errors import RunError, UsageError
from ...journal.codec import decode
from ...waiting import wait_within
from ..clocks import Moment
from ..contract import AgentCommand, Allocation, Cordon, Event, Fenced, Pending, Request
from ..hosts.program import Message
from ..hosts.reported import ReportedAgents
from ..stream import EventStream
from .api import SEE_NODES, Api, ApiUnanswered, Refused, load_library
from .conditions import Object, find_index, find_node, is_leaving, is_over, is_running, read_waiting
from .cordons import Cordons
from .link import PodLink, explain_silence
from .manifest import AGENT, RUN, make_pod, name_pod, read_template
from .nodes import KubernetesNodes
from .options import KubernetesOptions
from .reflection import Reflection
from .rights import check_pod, check_rights, check_size, compare_size, explain, read_quota
from .watching import PodWatching

_AGAIN_S = 2.0
_QUOTA_EVERY_S = 5.0
_BACK_S = 90.0
_LINK_S = 20.0
_PROGRAM_S = 4.0
_END_GRACE_S = 2
_TIDY_S = 10.0


class KubernetesCluster:
    """The pods of one run in one namespace."""

    Options = KubernetesOptions

    def __init__(
        self,
        run_id: str,
        options: KubernetesOptions = KubernetesOptions(),
        *,
        log_of: Callable[[str], Path] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`log_of` is not used: what an agent prints comes over its own link."""
        self.run_id, self._options, self._clock = run_id, options, clock
        self._name = f"kubernetes-{run_id}"
        self._api = Api(options)
        self._stream = EventStream(self._list_current)
        self._agents = ReportedAgents(self._stream, clock)
        self._watching = PodWatching(self._name, self._stream, self._agents, clock=clock)
        self._cordons = Cordons(self._api, options.cordon)
        self._links: dict[str, PodLink] = {}
        self._pods: Reflection | None = None
        self._nodes: Reflection | None = None
        self._beginning: asyncio.Task[None] | None = None
        self._starting: dict[str, asyncio.Task[str]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._numbers: set[int] = set()
        """Of the pods that were asked for."""

    @staticmethod
    def open_nodes(options: KubernetesOptions) -> KubernetesNodes:
        """The nodes of the cluster, for `unbroken nodes`."""
        return KubernetesNodes(options)

    @property
    def socket_folder(self) -> Path | None:
        return None

    @property
    def door_address(self) -> str:
        return self._options.address

    def describe(self) -> str:
        o = self._options
        gpus = f", {o.gpus} {o.gpu_resource} each" if o.gpus else ", without GPUs"
        where = f"namespace {self._api.namespace or o.namespace or 'of the context'}"
        return f"pods in the {where}: agent and keeper in one container, ranks in another, of {o.image}{gpus}"

    def check(self, request: Request) -> None:
        """Asks the API too: what is not allowed, or would not be made, is said before training starts."""
        load_library()
        if not self._options.image:
            raise UsageError(
                "no image is named: agents and ranks run in pods", hint="--cluster kubernetes,image=NAME"
            )
        read_template(self._options.template)
        asyncio.run(KubernetesCluster(self.run_id, self._options)._try(request))

    async def _try(self, request: Request) -> None:
        try:
            await self._api.open()
            await check_rights(self._api)
            await check_pod(self._api, self._options, self.run_id, read_template(self._options.template))
            await check_size(self._api, self._options, request)
        except Refused as e:
            raise explain(e, self._api) from e
        finally:
            await self._api.close()

    # --- what is there

    async def _begin(self) -> None:
        """Follows the run's pods, and the nodes where they may be seen; again waits for that. Raises RunError."""
        if self._beginning is None or (self._beginning.done() and self._beginning.exception()):
            self._beginning = asyncio.create_task(self._follow())
        await asyncio.shield(self._beginning)

    async def _follow(self) -> None:
        api, watching = self._api, self._watching
        await api.open()
        if self._nodes is None and await api.may_all(SEE_NODES):
            self._nodes = Reflection(api, api.core.list_node, on_change=watching.take_node)
            watching.nodes, watching.sees_nodes = self._nodes.found, True
            self._nodes.start()
            await self._nodes.wait()
        if self._pods is None:
            self._pods = Reflection(
                api, api.core.list_namespaced_pod, api.namespace, on_change=self._take_pod,
                label_selector=f"{RUN}={self.run_id}",
            )  # fmt: skip
            self._pods.start()
        await self._pods.wait()

    def _take_pod(self, kind: str, before: Object, pod: Object) -> None:
        name = str(pod["metadata"]["name"])
        self._watching.take_pod(kind, before, pod)
        if kind == "DELETED" or is_over(pod):
            if (link := self._links.pop(name, None)) is not None:
                self._do(link.close())
            if kind != "DELETED":
                self._do(self._end_pod(name))
        elif is_running(pod) and name not in self._links:
            self._links[name] = link = PodLink(
                self._api, self.run_id, find_node(pod), name, python=self._options.python, image=self._options.image,
                on_up=self._note_up, on_down=self._note_down, on_event=self._note_event,
            )  # fmt: skip
            link.start()

    def _note_up(self, link: PodLink, report: Message) -> None:
        self._agents.compare(link.node, report["running"])
        self._watching.moved.set()

    def _note_down(self, link: PodLink) -> None:
        self._watching.moved.set()

    def _note_event(self, link: PodLink, message: Message) -> None:
        if message["event"] == "Leaving":
            self._watching.announce(link.node, float(message["in_s"]), "the kubelet ends the pod")
            return
        self._agents.apply(link.node, message)

    def _list_current(self) -> list[Event]:
        return [*self._agents.list_events(), *self._watching.list_events()]

    def events(self) -> AsyncIterator[Event]:
        if not self._stream.closed:
            self._do(self._keep_beginning())
        return self._stream.read()

    async def _keep_beginning(self) -> None:
        while True:
            with contextlib.suppress(Refused, ApiUnanswered):
                await self._begin()
                return
            await asyncio.sleep(_AGAIN_S)

    def _do(self, work: Any) -> None:
        self._tasks.add(task := asyncio.get_running_loop().create_task(work))
        task.add_done_callback(self._tasks.discard)

    def _living(self) -> dict[str, Object]:
        """The run's pods by name that have not ended, nor been asked to."""
        found = self._pods.found if self._pods is not None else {}
        return {
            n: p
            for n, p in found.items()
            if not is_over(p) and not is_leaving(p) and n not in self._watching.ending
        }

    def _find_pod(self, node: str) -> str | None:
        """The living pod on a node."""
        return next((n for n, p in self._living().items() if find_node(p) == node), None)

    def _list_given(self) -> list[str]:
        """The run's nodes, in order."""
        pods = sorted(self._living().values(), key=find_index)
        return [find_node(p) for p in pods if find_node(p)]

    # --- nodes

    async def acquire(self, request: Request) -> Allocation:
        """Raises DoesNotFit where the cluster will never have so much, RunError with what keeps a pod from running."""
        await self._begin()
        if self._nodes is not None:
            compare_size(self._options, request, list(self._nodes.found.values()))
        else:
            await check_size(self._api, self._options, request)
        out = {*await self._cordons.read(), *request.exclude, *request.replaces}
        for node in request.replaces:
            await self._let_go(node)
        wanted = request.nodes + request.spares
        held = [] if request.replaces else [n for n in self._list_given() if n not in out][:wanted]
        # A run that goes on does not wait for spares that it had before.
        fresh = (
            [] if held and len(held) >= request.nodes else await self._add(request, wanted - len(held), out)
        )
        found = [*held, *fresh]
        return Allocation(
            self._name, tuple(found[: request.nodes]), tuple(found[request.nodes :]), self._watching.ends
        )

    async def _add(self, request: Request, count: int, out: Collection[str]) -> list[str]:
        """Asks for more pods and waits until they run; where that fails, or is withdrawn, none of them is left."""
        names: list[str] = []
        say = _Saying(self._stream, request, self._clock)
        try:
            while len(names) < count:
                names.append(await self._create(out, say))
            return [await self._wait_for(name, say) for name in names]
        except BaseException:
            await asyncio.shield(asyncio.gather(*(self._end_pod(n) for n in names), return_exceptions=True))
            raise

    async def _create(self, out: Collection[str], say: _Saying, node: str = "") -> str:
        """Makes a pod; waits where a quota stands against it. Raises RunError, DoesNotFit."""
        template = read_template(self._options.template)
        indices = [find_index(p) for p in (self._pods.found.values() if self._pods else ())]
        index = self._watching.find_view(node).index if node else max([-1, *indices, *self._numbers]) + 1
        name = name_pod(self.run_id, index, secrets.token_hex(4))
        pod = make_pod(self._options, self.run_id, name, index, template=template, exclude=out, node=node)
        self._numbers.add(index)
        while True:
            try:
                await self._api.create_pod(pod)
                return name
            except Refused as e:
                quota = read_quota(e)
                if quota is None or quota.never:
                    raise explain(e, self._api) from e
                say(quota.message)
                await asyncio.sleep(_QUOTA_EVERY_S)

    async def _wait_for(self, name: str, say: _Saying) -> str:
        """Waits until a pod runs and answers; returns its node. Raises RunError where it never will."""
        seen = False
        while True:
            self._watching.moved.clear()
            pod = self._living().get(name)
            seen = seen or pod is not None
            if pod is None and seen:
                raise RunError(
                    "somebody has ended the pod before it ran", where=name, hint="Look at: kubectl get events"
                )
            if pod is not None:
                link = self._links.get(name)
                if link is not None and link.up:
                    return find_node(pod)
                await self._look_for_trouble(name, pod, link)
                if link is None:
                    say(read_waiting(pod).why)
                elif link.tried.is_set():
                    say(f"the pod on {find_node(pod)}: {link.why}")
            with contextlib.suppress(TimeoutError):
                await wait_within(self._watching.moved.wait(), _AGAIN_S)

    async def _look_for_trouble(self, name: str, pod: Object, link: PodLink | None) -> None:
        if link is not None and link.refused:
            raise RunError(link.why, where=find_node(pod), hint=link.hint)
        waiting = read_waiting(pod, was_running=link is not None)
        if not waiting.never:
            return
        if waiting.hint:
            raise RunError(waiting.why, where=name, hint=waiting.hint)
        log = await self._api.read_log(name, AGENT)
        raise explain_silence(
            self._options.image, find_node(pod), log.splitlines()[-1][:300] if log else waiting.why
        )

    async def _end_pod(self, name: str, *, grace_s: int | None = _END_GRACE_S) -> None:
        self._watching.ending.add(name)
        with contextlib.suppress(Refused, ApiUnanswered):
            await self._api.delete_pod(name, grace_s=grace_s)

    async def _let_go(self, node: str) -> None:
        """The node is the run's no more. What may still run there ends as soon as its kubelet hears of it; it is never said to
        have ended before."""
        name = self._find_pod(node)
        self._watching.find_view(node).ours = False
        if name is not None:
            await self._end_pod(name)

    async def give_back(self, nodes: Collection[str]) -> None:
        """Ends what is left there, and the pods."""
        ours = [n for n in nodes if n in self._watching.views and self._watching.views[n].ours]
        fenced = await asyncio.gather(*(self.fence(n, 10.0) for n in ours))
        bad = [
            (n, f)
            for n, f in zip(ours, fenced, strict=True)
            if not f.proven and not self._watching.views[n].lost
        ]
        for node in [n for n in ours if n not in dict(bad)]:
            await self._let_go(node)
        await self._wait_until_gone(_TIDY_S)
        if bad:
            raise RunError(f"the node is not given back: {bad[0][1].why}", where=bad[0][0])

    async def _wait_until_gone(self, within_s: float) -> None:
        """Waits a while for the pods that were asked to end."""
        deadline = self._clock() + within_s
        while self._pods is not None and self._clock() < deadline:
            if not any(n in self._watching.ending for n in self._pods.found):
                return
            self._watching.moved.clear()
            with contextlib.suppress(TimeoutError):
                await wait_within(self._watching.moved.wait(), 0.2)

    # --- agents

    async def start(self, node: str, command: AgentCommand) -> str:
        await self._begin()
        view = self._watching.views.get(node)
        if view is None or not view.ours:
            raise RunError("the node is none of this run's", where=node, hint="Ask for nodes first")
        if view.lost:
            raise RunError(f"the node is lost: {view.lost}", where=node)
        starting = self._starting.get(node)
        if starting is None:
            starting = self._starting[node] = asyncio.create_task(self._start(node, command))
            starting.add_done_callback(lambda _: self._starting.pop(node, None))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            if starting.cancelled():
                raise RunError("the node was fenced before its agent was started", where=node) from None
            raise

    async def _start(self, node: str, command: AgentCommand) -> str:
        link = await self._reach(node)
        answer = await link.order(
            "start", module=command.module, arguments=list(command.arguments),
            environment=dict(command.environment), secret=base64.b64encode(command.secret).decode(),
        )  # fmt: skip
        return str(answer["launch"])

    async def _reach(self, node: str) -> PodLink:
        """The link to the node's pod; to another pod there, where the one before has ended."""
        name = self._find_pod(node)
        try:
            if name is None:
                say = _Saying(self._stream, Request(1), self._clock)
                async with asyncio.timeout(_BACK_S):
                    name = await self._create((), say, node)
                    try:
                        await self._wait_for(name, say)
                    except BaseException:
                        await asyncio.shield(self._end_pod(name))
                        raise
            async with asyncio.timeout(_LINK_S):
                while (link := self._links.get(name)) is None or not link.up:
                    if link is not None and link.refused:
                        raise RunError(link.why, where=node, hint=link.hint)
                    await asyncio.sleep(0.05)
                return link
        except TimeoutError:
            pod = self._living().get(name or "")
            why = (
                read_waiting(pod).why
                if pod is not None and not is_running(pod)
                else "its pod does not answer"
            )
            raise RunError(f"no agent can be started: {why}", where=node) from None

    # --- fences

    async def fence(self, node: str, deadline_s: float) -> Fenced:
        why = "it is none of the run's nodes"
        if node not in self._watching.views:
            with contextlib.suppress(RunError):
                await self._begin()
        try:
            async with asyncio.timeout(max(0.0, deadline_s)):
                return await self._fence(node, self._clock() + deadline_s)
        except TimeoutError:
            view = self._watching.find_view(node)
            why = view.unreachable or view.lost or f"not proven within {deadline_s:g} s"
        except RunError as e:
            why = e.message
        return Fenced(False, f"{node}: {why}")

    async def _fence(self, node: str, deadline: float) -> Fenced:
        if (starting := self._starting.get(node)) is not None:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        name = self._find_pod(node)
        if name is None:
            await self._wait_for_end(node)
            return self._read_proof(node)
        fenced = await self._fence_inside(node, name, deadline)
        if fenced is not None and fenced.proven:
            return fenced
        view = self._watching.find_view(node)
        while view.unreachable:
            await asyncio.sleep(0.1)  # what its kubelet cannot hear now it would do at any time later
        await self._end_pod(name)
        await self._wait_for_end(node)
        return self._read_proof(node)

    async def _fence_inside(self, node: str, name: str, deadline: float) -> Fenced | None:
        """Ends all but the pod, by the program in it; None where that does not answer."""
        patience = min(deadline, self._clock() + _PROGRAM_S)
        while True:
            link = self._links.get(name)
            left = deadline - self._clock()
            if link is not None and link.up:
                within = max(0.5, left - 1.0 if left < _PROGRAM_S else 0.6 * left)
                with contextlib.suppress(RunError):
                    answer = await link.order("fence", deadline_s=within, within_s=within + 1.0)
                    return decode(Fenced, answer["fenced"])
                return None
            if self._clock() > patience:
                return None
            await asyncio.sleep(0.05)

    async def _wait_for_end(self, node: str) -> None:
        """Waits until no pod of the run is on a node, nor on its way out."""
        while self._pods is not None and any(
            find_node(p) == node and not is_over(p) for p in self._pods.found.values()
        ):
            self._watching.moved.clear()
            with contextlib.suppress(TimeoutError):
                await wait_within(self._watching.moved.wait(), 0.2)

    def _read_proof(self, node: str) -> Fenced:
        if self._watching.find_view(node).proven:
            return Fenced(True)
        return Fenced(
            False, "the pod is gone, and its kubelet has not said that its containers have ended: the object was removed by others"
        )  # fmt: skip

    async def forget(self, node: str) -> None:
        self._watching.find_view(node).proven = True
        link = self._links.get(self._find_pod(node) or "")
        if link is not None and link.up:
            await link.order("forget")

    # --- cordons

    async def cordon(self, cordon: Cordon) -> None:
        await self._api.open()
        await self._cordons.put(cordon)

    async def release(self, node: str, owner: str) -> None:
        await self._api.open()
        await self._cordons.lift(node, owner)

    async def cordons(self) -> Mapping[str, Cordon]:
        await self._api.open()
        return await self._cordons.read()

    async def close(self) -> None:
        self._stream.close()
        for task in [*self._tasks, *self._starting.values()]:
            task.cancel()
        if self._beginning is not None:
            self._beginning.cancel()
        for reflection in (self._pods, self._nodes):
            if reflection is not None:
                await reflection.stop()
        await asyncio.gather(*(x.close() for x in self._links.values()))
        self._links.clear()
        await self._api.close()


class _Saying:
    """Reports why a request waits, once for each reason."""

    def __init__(self, stream: EventStream, request: Request, clock: Callable[[], float]) -> None:
        self._stream, self._request, self._clock = stream, request, clock
        self._said = ""

    def __call__(self, why: str) -> None:
        if why != self._said:
            self._said = why
            self._stream.publish(Pending(Moment.at(self._clock()), self._request, why))
