"""What every cluster has to keep: the tests of `cluster.contract`, run against each backend by a class of a few lines.

A backend's module makes a `Bench`, which says how its nodes are broken and looked into, and a subclass of
`ClusterContract` with a fixture `bench`. What a backend cannot have happen to it (a machine without a queue) its bench
refuses in words, and the test is skipped with them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import pytest

from unbroken.cluster.contract import (
    AgentCommand,
    Cluster,
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
from unbroken.errors import DoesNotFit, RunError

E = TypeVar("E", bound=Event)
Scenario = Callable[[], Coroutine[Any, Any, None]]
WITHIN_S = 30.0


class Bench:
    """One backend under test, with nothing running at first."""

    fence_s = 20.0
    """So long a fence of a healthy node may take."""

    def run(self, scenario: Scenario) -> None:
        """Runs it to its end, in the backend's kind of time."""
        asyncio.run(scenario())

    def wall(self) -> float:
        """Seconds since the Unix epoch, in that kind of time."""
        raise NotImplementedError

    def open(self) -> Cluster:
        """The cluster as a supervisor of the run sees it; called again, as a successor does."""
        raise NotImplementedError

    def command(self) -> AgentCommand:
        """An agent that runs until it is ended."""
        raise NotImplementedError

    async def seen_by(self, node: str) -> AgentCommand:
        """What the agent there was given, as it says itself: its own arguments, all of its environment, its input."""
        raise NotImplementedError

    def end(self, node: str, code: int) -> None:
        """Makes the agent there end by itself, with this code."""
        raise NotImplementedError

    def kill(self, node: str) -> None:
        """Kills the agent there, and nothing else."""
        raise NotImplementedError

    def left(self, node: str) -> bool:
        """Whether anything of the run is on the node."""
        raise NotImplementedError

    tells_how_it_ended = True
    """Whether it knows code and signal; else it says that it does not."""

    impossible: Mapping[str, str] = {
        "hold": "it has no queue: nodes are given at once",
        "lose": "its nodes cannot be lost without this machine",
        "isolate": "its nodes can always be reached",
        "preempt": "nobody takes its nodes away",
        "end_allocation": "its allocations have no end",
    }
    """What below cannot happen to this backend, and why not: those of a machine of one's own, unless said otherwise."""

    def hold(self) -> None:
        """No request is granted until `grant`."""
        raise NotImplementedError

    def grant(self) -> None:
        raise NotImplementedError

    def lose(self, node: str) -> None:
        """The node is gone, and the cluster cannot prove it."""
        raise NotImplementedError

    def isolate(self, node: str) -> None:
        """The node cannot be reached, and runs on."""
        raise NotImplementedError

    def return_node(self, node: str) -> None:
        """A node that was lost or isolated is there again."""
        raise NotImplementedError

    def preempt(self, node: str, in_s: float) -> None:
        """The node is taken away after so long a notice."""
        raise NotImplementedError

    def end_allocation(self, in_s: float) -> None:
        """The allocation ends after so long a notice."""
        raise NotImplementedError


class Watch:
    """Reads all events of a cluster; waits for one without missing those before."""

    def __init__(self, cluster: Cluster) -> None:
        self.seen: list[Event] = []
        self._taken: set[int] = set()
        self._more = asyncio.Event()
        self.ended = False
        self._task = asyncio.get_running_loop().create_task(self._read(cluster.events()), name="watch")

    async def _read(self, events: AsyncIterator[Event]) -> None:
        async for event in events:
            self.seen.append(event)
            self._more.set()
        self.ended = True
        self._more.set()

    async def next(self, kind: type[E], node: str | None = None) -> E:
        """The oldest such event that was not returned before. Fails where none comes."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + WITHIN_S
        while True:
            self._more.clear()
            for i, event in enumerate(self.seen):
                if i in self._taken or not isinstance(event, kind):
                    continue
                if node is None or (isinstance(event, NodeEvent) and event.node == node):
                    self._taken.add(i)
                    return event
            try:
                await asyncio.wait_for(self._more.wait(), deadline - loop.time())
            except TimeoutError:
                raise AssertionError(f"no {kind.__name__} of {node} came; seen: {self.seen}") from None

    def all(self, kind: type[E], node: str | None = None) -> list[E]:
        return [
            e for e in self.seen if isinstance(e, kind) and (node is None or getattr(e, "node", "") == node)
        ]

    async def end(self) -> None:
        """Waits until the cluster's events end."""
        await asyncio.wait_for(self._task, WITHIN_S)


async def eventually(condition: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + WITHIN_S
    while not condition():
        assert loop.time() < deadline, "did not come true"
        await asyncio.sleep(0.02)


def needs(bench: Bench, what: str) -> None:
    """Skips the test, with the reason, where this cannot happen to the backend."""
    if why := bench.impossible.get(what):
        pytest.skip(why)


class ClusterContract:
    """Each test is one promise of `cluster.contract.Cluster`."""

    # --- nodes

    def test_nodes_are_given_in_order_with_spares_beside_them(self, bench: Bench) -> None:
        async def scenario() -> None:
            a = await bench.open().acquire(Request(2, 1))
            assert len(a.nodes) == 2 and len(a.spares) == 1
            assert len(set(a.everything)) == 3 and a.name

        bench.run(scenario)

    def test_asked_again_it_gives_the_same_to_a_successor_too(self, bench: Bench) -> None:
        async def scenario() -> None:
            first = bench.open()
            a = await first.acquire(Request(2, 1))
            assert await first.acquire(Request(2, 1)) == a
            await first.close()
            assert await bench.open().acquire(Request(2, 1)) == a

        bench.run(scenario)

    def test_what_is_excluded_or_cordoned_is_not_given(self, bench: Bench) -> None:
        async def scenario() -> None:
            cluster = bench.open()
            one, two = (await cluster.acquire(Request(2))).nodes
            await cluster.cordon(Cordon(two, "unbroken", "it fails too often"))
            a = await cluster.acquire(Request(2, exclude=frozenset({one})))
            assert not {one, two} & set(a.everything) and len(set(a.nodes)) == 2

        bench.run(scenario)

    def test_a_replacement_is_a_node_that_the_run_has_not_had(self, bench: Bench) -> None:
        async def scenario() -> None:
            cluster = bench.open()
            a = await cluster.acquire(Request(2, 1))
            b = await cluster.acquire(Request(1, replaces=(a.nodes[0],)))
            assert len(b.nodes) == 1 and b.nodes[0] not in a.everything
            await cluster.start(b.nodes[0], bench.command())
            with pytest.raises(RunError):
                await cluster.start(a.nodes[0], bench.command())

        bench.run(scenario)

    def test_what_can_never_be_given_is_refused_at_once(self, bench: Bench) -> None:
        async def scenario() -> None:
            with pytest.raises(DoesNotFit) as e:
                await bench.open().acquire(Request(2, ranks_per_node=1_000_000))
            assert e.value.hint

        bench.run(scenario)

    def test_a_request_may_wait_is_shown_and_can_be_withdrawn(self, bench: Bench) -> None:
        needs(bench, "hold")

        async def scenario() -> None:
            cluster = bench.open()
            watch = Watch(cluster)
            bench.hold()
            asking = asyncio.ensure_future(cluster.acquire(Request(2, 1)))
            pending = await watch.next(Pending)
            assert pending.request == Request(2, 1) and pending.why and not asking.done()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            bench.grant()
            a = await cluster.acquire(Request(1))
            assert len(a.everything) == 1, "the withdrawn request left nothing"

        bench.run(scenario)

    def test_a_request_that_waited_is_granted(self, bench: Bench) -> None:
        needs(bench, "hold")

        async def scenario() -> None:
            cluster = bench.open()
            watch = Watch(cluster)
            bench.hold()
            asking = asyncio.ensure_future(cluster.acquire(Request(1)))
            await watch.next(Pending)
            bench.grant()
            assert len((await asyncio.wait_for(asking, WITHIN_S)).nodes) == 1

        bench.run(scenario)

    def test_what_is_given_back_is_ended_and_none_of_the_runs_any_more(self, bench: Bench) -> None:
        async def scenario() -> None:
            cluster = bench.open()
            (node,) = (await cluster.acquire(Request(1))).nodes
            watch = Watch(cluster)
            await cluster.start(node, bench.command())
            await watch.next(Started, node)
            await cluster.give_back([node, "no-such-node"])
            await watch.next(Exited, node)
            assert not bench.left(node)
            with pytest.raises(RunError):
                await cluster.start(node, bench.command())

        bench.run(scenario)

    # --- agents

    def test_an_agent_starts_and_ends_and_both_are_reported_once(self, bench: Bench) -> None:
        async def scenario() -> None:
            cluster = bench.open()
            (node,) = (await cluster.acquire(Request(1))).nodes
            watch = Watch(cluster)
            launch = await cluster.start(node, bench.command())
            started = await watch.next(Started, node)
            assert started.launch == launch and started.at.earliest <= started.at.latest
            await bench.seen_by(node)
            bench.end(node, 3)
            exited = await watch.next(Exited, node)
            assert exited.launch == launch
            assert (exited.code, exited.signal) == ((3, None) if bench.tells_how_it_ended else (None, None))
            assert not exited.at.is_before(started.at)
            await cluster.close()
            await watch.end()
            assert len(watch.all(Started)) == len(watch.all(Exited)) == 1

        bench.run(scenario)

    def test_a_killed_agent_is_reported_with_its_signal(self, bench: Bench) -> None:
        async def scenario() -> None:
            cluster = bench.open()
            (node,) = (await cluster.acquire(Request(1))).nodes
            watch = Watch(cluster)
            await cluster.start(node, bench.command())
            await bench.seen_by(node)
            bench.kill(node)
            exited = await watch.next(Exited, node)
            assert (exited.code, exited.signal) == ((None, 9) if bench.tells_how_it_ended else (None, None))

        bench.run(scenario)

    def test_a_second_launch_has_a_name_and_an_end_of_its_own(self, bench: Bench) -> None:
        async def scenario() -> None:
            cluster = bench.open()
            (node,) = (await cluster.acquire(Request(1))).nodes
            watch = Watch(cluster)
            launches = []
            for _ in range(2):
                launches.append(await cluster.start(node, bench.command()))
                assert (await watch.next(Started, node)).launch == launches[-1]
                await bench.seen_by(node)
                bench.kill(node)
                assert (await watch.next(Exited, node)).launch == launches[-1]
            assert launches[0] != launches[1]

        bench.run(scenario)

    def test_nothing_is_started_on_a_node_that_is_not_the_runs(self, bench: Bench) -> None:
        async def scenario() -> None:
            cluster = bench.open()
            await cluster.acquire(Request(1))
            with pytest.raises(RunError) as e:
                await cluster.start("no-such-node", bench.command())
            assert "no-such-node" in str(e.value)

        bench.run(scenario)

    def test_an_agent_gets_its_arguments_its_environment_and_its_secret_apart(self, bench: Bench) -> None:
        async def scenario() -> None:
            cluster = bench.open()
            (node,) = (await cluster.acquire(Request(1))).nodes
            base = bench.command()
            command = AgentCommand(
                base.module, (*base.arguments, "--word", "two words"), {**base.environment, "SITE": "here=1"},
                b"s3cr3t-of-this-run",
            )  # fmt: skip
            assert "s3cr3t" not in repr(command), "a log that shows a command shows no secret"
            await cluster.start(node, command)
            seen = await bench.seen_by(node)
            assert "two words" in seen.arguments and seen.environment["SITE"] == "here=1"
            assert seen.secret == b"s3cr3t-of-this-run"
            assert "s3cr3t" not in f"{seen.arguments}{dict(seen.environment)}"

        bench.run(scenario)

    # --- events

    def test_a_successor_is_told_of_what_runs_and_hears_of_its_end(self, bench: Bench) -> None:
        async def scenario() -> None:
            first = bench.open()
            one, two = (await first.acquire(Request(2))).nodes
            before = Watch(first)
            launches = {n: await first.start(n, bench.command()) for n in (one, two)}
            for n in (one, two):
                await before.next(Started, n)
                await bench.seen_by(n)
            await first.close()
            await before.end()
            assert bench.left(one) and bench.left(two), "whoever lets go of a cluster ends nothing"
            second = bench.open()
            watch = Watch(second)
            for n in (one, two):
                assert (await watch.next(Started, n)).launch == launches[n]
            bench.kill(one)
            assert (await watch.next(Exited, one)).launch == launches[one]
            assert not watch.all(Exited, two)

        bench.run(scenario)

    def test_every_reader_hears_everything_however_late_it_reads(self, bench: Bench) -> None:
        async def scenario() -> None:
            cluster = bench.open()
            (node,) = (await cluster.acquire(Request(1))).nodes
            late = cluster.events()  # asked for, and not read
            quick = Watch(cluster)
            launch = await cluster.start(node, bench.command())
            await bench.seen_by(node)
            bench.kill(node)
            await quick.next(Exited, node)
            await cluster.close()
            heard = [e async for e in late]
            assert [type(e) for e in heard] == [Started, Exited]
            assert all(isinstance(e, Started | Exited) and e.launch == launch for e in heard)
            assert [e async for e in cluster.events()][len(heard) :] == [], "a closed cluster has no news"

        bench.run(scenario)

    # --- fences

    def test_a_fence_proves_that_nothing_of_the_run_is_left_on_that_node_alone(self, bench: Bench) -> None:
        async def scenario() -> None:
            cluster = bench.open()
            one, two = (await cluster.acquire(Request(2))).nodes
            watch = Watch(cluster)
            for n in (one, two):
                await cluster.start(n, bench.command())
                await bench.seen_by(n)
            fenced = await cluster.fence(one, bench.fence_s)
            assert fenced.proven and not fenced.survivors and not fenced.why
            assert not bench.left(one) and bench.left(two)
            await watch.next(Exited, one)
            assert (await cluster.fence(one, bench.fence_s)).proven, "again is no error"
            assert not watch.all(Exited, two)

        bench.run(scenario)

    def test_a_fence_ends_what_a_dead_agent_has_left(self, bench: Bench) -> None:
        async def scenario() -> None:
            cluster = bench.open()
            (node,) = (await cluster.acquire(Request(1))).nodes
            watch = Watch(cluster)
            await cluster.start(node, bench.command())
            await bench.seen_by(node)
            bench.kill(node)
            await watch.next(Exited, node)
            fenced = await cluster.fence(node, bench.fence_s)
            assert fenced.proven and not bench.left(node)

        bench.run(scenario)

    def test_a_node_where_nothing_ran_is_fenced_and_can_be_used(self, bench: Bench) -> None:
        async def scenario() -> None:
            cluster = bench.open()
            (node,) = (await cluster.acquire(Request(1))).nodes
            assert (await cluster.fence(node, bench.fence_s)).proven
            watch = Watch(cluster)
            launch = await cluster.start(node, bench.command())
            assert (await watch.next(Started, node)).launch == launch

        bench.run(scenario)

    def test_an_order_that_is_on_its_way_is_not_carried_out_after_a_fence(self, bench: Bench) -> None:
        async def scenario() -> None:
            cluster = bench.open()
            (node,) = (await cluster.acquire(Request(1))).nodes
            await cluster.start(node, bench.command())
            assert (await cluster.fence(node, bench.fence_s)).proven
            await asyncio.sleep(0.3)
            assert not bench.left(node)

        bench.run(scenario)

    # --- cordons

    def test_a_cordon_has_an_owner_a_reason_and_an_expiry(self, bench: Bench) -> None:
        async def scenario() -> None:
            cluster = bench.open()
            (node,) = (await cluster.acquire(Request(1))).nodes
            with pytest.raises(ValueError, match="owner and a reason"):
                Cordon(node, "unbroken", "")
            until = bench.wall() + 3600
            mine = Cordon(node, "unbroken", "XID 79 twice", until)
            await cluster.cordon(mine)
            assert dict(await cluster.cordons()) == {node: mine}
            await cluster.cordon(longer := Cordon(node, "unbroken", "XID 79 three times", until + 1))
            assert dict(await cluster.cordons()) == {node: longer}
            assert dict(await bench.open().cordons()) == {node: longer}, "a successor knows of it"
            await cluster.release(node, "unbroken")
            assert not await cluster.cordons()
            await cluster.release(node, "unbroken")

        bench.run(scenario)

    def test_nobody_undoes_another_owners_cordon(self, bench: Bench) -> None:
        async def scenario() -> None:
            cluster = bench.open()
            (node,) = (await cluster.acquire(Request(1))).nodes
            theirs = Cordon(node, "admin", "new cables")
            await cluster.cordon(theirs)
            with pytest.raises(RunError, match="admin"):
                await cluster.cordon(Cordon(node, "unbroken", "slow"))
            with pytest.raises(RunError, match="admin"):
                await cluster.release(node, "unbroken")
            assert dict(await cluster.cordons()) == {node: theirs}

        bench.run(scenario)

    def test_a_cordon_ends_by_itself(self, bench: Bench) -> None:
        async def scenario() -> None:
            cluster = bench.open()
            (node,) = (await cluster.acquire(Request(1))).nodes
            await cluster.cordon(Cordon(node, "unbroken", "a test", bench.wall() + 3600))
            assert node in await cluster.cordons()
            await cluster.cordon(Cordon(node, "unbroken", "a test", bench.wall() + 0.05))
            await asyncio.sleep(0.1)
            assert not await cluster.cordons()
            assert node in (await cluster.acquire(Request(1))).nodes

        bench.run(scenario)

    # --- what goes wrong with nodes

    def test_a_lost_node_is_reported_and_takes_no_order(self, bench: Bench) -> None:
        needs(bench, "lose")

        async def scenario() -> None:
            cluster = bench.open()
            (node,) = (await cluster.acquire(Request(1))).nodes
            watch = Watch(cluster)
            await cluster.start(node, bench.command())
            await bench.seen_by(node)
            bench.lose(node)
            lost = await watch.next(Lost, node)
            assert lost.why and not lost.proven
            with pytest.raises(RunError):
                await cluster.start(node, bench.command())
            fenced = await cluster.fence(node, 5.0)
            assert not fenced.proven and fenced.why, "what is not known to be gone is not called gone"
            bench.return_node(node)
            await watch.next(Returned, node)
            assert (await cluster.fence(node, bench.fence_s)).proven
            await cluster.start(node, bench.command())
            await watch.next(Started, node)

        bench.run(scenario)

    def test_a_fence_of_a_node_out_of_reach_answers_by_its_deadline(self, bench: Bench) -> None:
        needs(bench, "isolate")

        async def scenario() -> None:
            cluster, loop = bench.open(), asyncio.get_running_loop()
            (node,) = (await cluster.acquire(Request(1))).nodes
            watch = Watch(cluster)
            await cluster.start(node, bench.command())
            await bench.seen_by(node)
            bench.isolate(node)
            assert (await watch.next(Unreachable, node)).why
            began = loop.time()
            fenced = await cluster.fence(node, 3.0)
            assert loop.time() - began < 5.0
            assert not fenced.proven and fenced.why and bench.left(node)
            bench.return_node(node)
            await watch.next(Returned, node)
            assert bench.left(node), "it had gone on all the time"
            assert (await cluster.fence(node, bench.fence_s)).proven

        bench.run(scenario)

    def test_preemption_is_told_before_it_happens(self, bench: Bench) -> None:
        needs(bench, "preempt")

        async def scenario() -> None:
            cluster, loop = bench.open(), asyncio.get_running_loop()
            (node,) = (await cluster.acquire(Request(1))).nodes
            watch = Watch(cluster)
            await cluster.start(node, bench.command())
            await bench.seen_by(node)
            bench.preempt(node, 10.0)
            told = await watch.next(PreemptingAt, node)
            assert loop.time() < told.deadline <= loop.time() + 11
            assert bench.left(node)
            lost = await watch.next(Lost, node)
            assert lost.at.latest >= told.deadline - 1 and not bench.left(node)

        bench.run(scenario)

    def test_the_end_of_an_allocation_is_told_before_it_comes(self, bench: Bench) -> None:
        needs(bench, "end_allocation")

        async def scenario() -> None:
            cluster, loop = bench.open(), asyncio.get_running_loop()
            a = await cluster.acquire(Request(1))
            (node,) = a.nodes
            watch = Watch(cluster)
            await cluster.start(node, bench.command())
            await bench.seen_by(node)
            bench.end_allocation(10.0)
            ending = await watch.next(EndingAt)
            assert ending.allocation == a.name and loop.time() < ending.deadline <= loop.time() + 11
            again = await cluster.acquire(Request(1))
            assert again.ends == ending.deadline
            await watch.next(Exited, node)
            assert not bench.left(node)

        bench.run(scenario)
