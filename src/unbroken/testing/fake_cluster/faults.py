"""What goes wrong in a fake cluster, on command. Each takes effect at once, in simulated time."""

from __future__ import annotations

from ...cluster.clocks import Moment
from ...cluster.contract import EndingAt, Lost, PreemptingAt, Returned, Unreachable
from ...detect import ProcessInfo
from .agent import FakeNode, VirtualAgent
from .cluster import FakeCluster
from .training import Gang


class Faults:
    """Breaks the hardware under a `FakeCluster`, and every other one that shares it."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster, self._hardware = cluster, cluster.hardware
        self._loop, self._network = cluster.loop, cluster.network

    def _node(self, name: str) -> FakeNode:
        return self._hardware.nodes[name]

    def _agent(self, name: str) -> VirtualAgent:
        agent = self._node(name).agent
        if agent is None:
            raise ValueError(f"no agent runs on {name}")
        return agent

    # --- nodes

    def lose(
        self, name: str, *, noticed_after_s: float = 0.0, proven: bool = False, why: str = "power lost"
    ) -> None:
        """A node dies. The cluster reports it so much later, since when is not known more exactly; `proven` where it
        can be sure that nothing runs there."""
        node, since = self._node(name), self._loop.time()
        if node.agent is not None:
            node.agent.vanish()
        node.wipe()
        node.state, node.unfenceable = "lost", not proven

        def notice() -> None:
            self._hardware.publish(Lost(Moment(since, self._loop.time()), name, why, proven))

        self._loop.call_later(noticed_after_s, notice) if noticed_after_s else notice()

    def slow_rank(self, name: str, rank: int, factor: float) -> None:
        """From now on a rank of a node takes so many times as long for its own work."""
        self._agent(name).slowness[rank] = factor

    def isolate(self, name: str, *, noticed_after_s: float = 0.0) -> None:
        """A node loses all its links, and goes on. Collectives with it stand."""
        node, since = self._node(name), self._loop.time()
        self._network.cut(name)
        node.state = "unreachable"
        if node.agent is not None:
            node.agent._stand()

        def notice() -> None:
            if node.state == "unreachable":
                self._hardware.publish(Unreachable(Moment(since, self._loop.time()), name, "no answer"))

        self._loop.call_later(noticed_after_s, notice) if noticed_after_s else notice()

    def cut(self, name: str, *, to_supervisor: bool = True, to_node: bool = True) -> None:
        """Cuts the link between a node and the supervisor alone, in one direction or both; training goes on."""
        self._network.cut(name, to_supervisor=to_supervisor, to_node=to_node)

    def return_node(self, name: str) -> None:
        """A lost node is back, booted again and empty; one that could not be reached is back as it is."""
        node = self._node(name)
        if node.state == "lost":
            node.boot += 1
            node.booted = self._loop.time()
            node.wipe()
        node.state, node.unfenceable = "up", False
        self._network.heal(name)
        self._hardware.publish(Returned(self._cluster.now(), name))
        self._hardware.change()

    def heal(self, name: str) -> None:
        """Repairs the link to the supervisor."""
        self._network.heal(name)

    def preempt(self, name: str, in_s: float, why: str = "a job of higher rank") -> None:
        """A node is taken away after so many seconds' notice."""
        self._hardware.publish(PreemptingAt(self._cluster.now(), name, self._loop.time() + in_s, why))

        def take() -> None:
            self._hardware.given.pop(name, None)
            self.lose(name, proven=True, why=f"preempted: {why}")

        self._loop.call_later(in_s, take)

    def end_allocation(self, in_s: float) -> None:
        """The allocation ends after so many seconds: every agent is killed, and the nodes are others'."""
        self._hardware.ends = self._loop.time() + in_s
        self._hardware.publish(EndingAt(self._cluster.now(), "job-1", self._hardware.ends))

        def end() -> None:
            self._hardware.ends = None
            for name in list(self._hardware.given):
                node = self._node(name)
                if node.agent is not None:
                    self._cluster.agent_ended(node.agent, None, 9)
                node.wipe()
            self._hardware.given.clear()
            self._hardware.change()

        self._loop.call_later(in_s, end)

    def reboot(self, name: str) -> None:
        """Its host starts anew, and what watches over agents there starts this one again, before anybody has missed it."""
        node = self._node(name)
        if node.agent is not None:
            node.agent.vanish()
        node.wipe()
        node.boot += 1
        node.booted = self._loop.time()
        self._cluster.restart_agent(node)

    def restart_agent(self, name: str) -> None:
        """Its agent dies, if there is one, and the ranks with it; what watches over agents there starts it again."""
        node = self._node(name)
        if node.agent is not None:
            node.agent.end()
            node.agent = None
        self._cluster.restart_agent(node)

    def hold(self, why: str = "Priority", expected: float | None = None) -> None:
        """No request is granted until `grant`, for the reason that the cluster gives."""
        self._hardware.held_up, self._hardware.expected = why, expected
        self._hardware.change()

    def grant(self) -> None:
        """Grants what waits."""
        self._hardware.held_up, self._hardware.expected = "", None
        self._hardware.change()

    def slow_start(self, name: str, seconds: float) -> None:
        """Its agent takes so long to come up, image and all."""
        self._node(name).start_s = seconds

    def skew(self, name: str, seconds: float) -> None:
        """Its time of day is ahead by so much; its monotonic clock is not touched, as on a real host."""
        self._node(name).skew_s = seconds

    def unfenceable(self, name: str) -> None:
        """Nothing can be proven of it: a process in D state, a management network that is down."""
        self._node(name).unfenceable = True

    def fill_disk(self, name: str, *, full: bool = True) -> None:
        """The folder of its logs is full, or has room again."""
        self._node(name).full = full

    def refuse_storage(self, why: str = "No space left on device") -> None:
        """What the run's checkpoints are written to takes nothing, for this reason; "" and it does again."""
        self._hardware.storage.refuses = why

    def silence_keeper(self, name: str, *, silent: bool = True) -> None:
        """Its keeper answers nothing, or does again."""
        self._node(name).silent_keeper = silent

    # --- processes

    def crash_agent(self, name: str, signal: int = 9) -> None:
        """Its agent dies, and the ranks with it; its keeper lives."""
        self._cluster.agent_ended(self._agent(name), None, signal)

    def fail_rank(
        self,
        name: str,
        rank: int,
        *,
        code: int | None = 1,
        signal: int | None = None,
        oom: bool | None = None,
    ) -> None:
        """A rank's process ends by itself, or is ended by a signal; `oom`: whether the kernel says that memory ran out."""
        self._agent(name).end_rank(rank, code, signal, oom=oom)

    def hang_rank(self, name: str, rank: int, look: ProcessInfo | None = None) -> None:
        """A rank goes on for ever without a step; the others wait for it. `look` is what its process shows then."""
        agent = self._agent(name)
        if look is not None:
            agent.looks[rank] = look
        agent.hang(rank)

    def stall(self, name: str) -> None:
        """Nothing comes from a node any more, or reaches it, but for the supervisor's messages: all ranks wait in the collective."""
        self._agent(name)._stand()

    def delay_rank(self, name: str, rank: int, share: float, seconds: float) -> None:
        """From now on a rank is late by so many seconds in such a share of its steps, and all wait for it."""
        self._agent(name).delays[rank] = (share, seconds)
        self.slow_steps(1 + share * seconds / self._gang().script.step_s)

    def slow_steps(self, factor: float) -> None:
        """From now on each step of the newest attempt takes so many times as long, and nobody works longer."""
        self._gang().slow_down(factor)

    def slow_pairs(self, name: str, share: float) -> None:
        """From now on tests of two nodes reach such a share of the usual rate where this node is part of them."""
        self._node(name).pair_rate = share

    def fail_pairs(self, name: str, share: float) -> None:
        """From now on so many of the tests of two nodes fail that this node is part of."""
        self._node(name).pair_fails = share

    def fail_link(self, a: str, b: str) -> None:
        """From now on nothing passes between two nodes."""
        self._node(a).bad_links.add(b)
        self._node(b).bad_links.add(a)

    def _gang(self) -> Gang:
        gangs = self._hardware.gangs
        return gangs[max(gangs)]

    def kill_supervisor(self) -> None:
        """Every link breaks and no door is open. (End its tasks, too.)"""
        self._network.drop_all()
