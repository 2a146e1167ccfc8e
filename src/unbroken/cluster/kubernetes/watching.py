"""What becomes of a run's pods and of their nodes, as the contract's events.

The API tells of each change: of pods that end, or are asked to, of nodes that are not heard of or come back. That a pod's object is
gone proves nothing alone: somebody may have removed it from a node that is cut off. It is proven that nothing of it runs where
the kubelet has said so of each container, or where the node was started again since.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..clocks import Moment
from ..contract import EndingAt, Event, Lost, PreemptingAt, Returned, Unreachable
from ..hosts.reported import ReportedAgents
from ..stream import EventStream
from .conditions import (
    Object,
    find_boot,
    find_deadline,
    find_grace,
    find_index,
    find_killed_for_memory,
    find_node,
    has_ended_surely,
    has_never_run,
    is_leaving,
    is_over,
    is_silent,
    read_end,
    read_held,
    read_unready,
)

_log = logging.getLogger("unbroken.kubernetes")
_CHANGED_S = 1.0


@dataclass
class PodNodeView:
    """What was reported of a node. `ours`: the run has it. `lost` and `unreachable` say why, `announced` that it is to be left.
    `proven`: nothing of the run's last pod there can run. `boot` is the node's at the time of that pod."""

    ours: bool = False
    index: int = 0
    lost: str = ""
    unreachable: str = ""
    announced: bool = False
    held: bool = False
    proven: bool = True
    boot: str = ""


class PodWatching:
    """Follows the pods of one run. `name` is that of its allocation."""

    def __init__(
        self,
        name: str,
        stream: EventStream,
        agents: ReportedAgents,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._name, self._stream, self._agents = name, stream, agents
        self._clock, self._wall = clock, wall
        self.views: dict[str, PodNodeView] = {}
        self.ending: set[str] = set()
        """Pods that we have asked to end."""
        self.moved = asyncio.Event()
        """Set by each change."""
        self.nodes: Mapping[str, Object] = {}
        self.sees_nodes = False
        self._over: set[str] = set()
        self._ends: float | None = None

    def find_view(self, node: str) -> PodNodeView:
        return self.views.setdefault(node, PodNodeView())

    def list_events(self) -> list[Event]:
        """What a new reader is told beside the agents."""
        now = self._now()
        return [Unreachable(now, n, v.unreachable) for n, v in self.views.items() if v.ours and v.unreachable]

    def announce(self, node: str, in_s: float, why: str) -> None:
        """The node's pod has so much time left."""
        view = self.find_view(node)
        if view.ours and not view.announced:
            view.announced = True
            self._stream.publish(PreemptingAt(self._now(), node, self._clock() + in_s, why))

    @property
    def ends(self) -> float | None:
        """When the first of the pods ends by its own limit, on our clock."""
        return self._ends

    # --- pods

    def take_pod(self, kind: str, before: Object, pod: Object) -> None:
        """Takes in a change of a pod."""
        node, name = find_node(pod), str(pod["metadata"]["name"])
        if node:
            if kind == "DELETED" or is_over(pod):
                self._end_pod(node, name, pod)
            else:
                self._change_pod(node, name, before, pod)
        self.moved.set()

    def _change_pod(self, node: str, name: str, before: Object, pod: Object) -> None:
        view = self.find_view(node)
        if not is_leaving(pod) and name not in self.ending:
            view.ours, view.index = True, find_index(pod)
            view.proven = False  # from here on something may run there
            view.boot = view.boot or find_boot(self.nodes.get(node, {}))
        elif name not in self.ending:
            left = find_grace(pod)
            self.announce(node, left, read_end(pod))
        for container in find_killed_for_memory(before, pod):
            _log.warning(
                "%s: the kernel has ended the container %s for its memory (%s)", node, container, name
            )
        if not self.sees_nodes:
            self._note_reach(node, "the pod's node is not heard of" if is_silent(pod) else "")
        if (deadline := find_deadline(pod)) is not None:
            self._note_end(self._clock() + deadline - self._wall())

    def _note_end(self, at: float) -> None:
        if self._ends is None or at < self._ends - _CHANGED_S:
            self._ends = at
            self._stream.publish(EndingAt(self._now(), self._name, at))

    def _end_pod(self, node: str, name: str, pod: Object) -> None:
        uid = str(pod["metadata"].get("uid"))
        surely = has_ended_surely(pod)
        view = self.find_view(node)
        if uid in self._over:
            view.proven = view.proven or surely
            return
        self._over.add(uid)
        view.proven = surely or (has_never_run(pod) and not view.unreachable)
        self._agents.drop(node)
        if name in self.ending or not view.ours:
            return
        view.lost = read_end(pod)
        self._stream.publish(Lost(self._now(), node, view.lost, view.proven))
        self._look_for_return(node)

    # --- nodes

    def take_node(self, kind: str, before: Object, node: Object) -> None:
        """Takes in a change of a node."""
        name = str(node["metadata"]["name"])
        view = self.views.get(name)
        if view is not None and view.ours:
            gone = kind == "DELETED"
            self._note_boot(name, view, node)
            self._note_reach(name, "the cluster has the node no more" if gone else read_unready(node))
            self._note_held(name, view, "" if gone else read_held(node))
            self._look_for_return(name)
        self.moved.set()

    def _note_boot(self, name: str, view: PodNodeView, node: Object) -> None:
        boot = find_boot(node)
        if view.boot and boot and boot != view.boot:
            view.proven = True
            if not view.lost:
                view.lost = "the node was started again"
                self._agents.drop(name)
                self._stream.publish(Lost(self._now(), name, view.lost, True))
        view.boot = boot or view.boot

    def _note_reach(self, name: str, why: str) -> None:
        view = self.find_view(name)
        before, view.unreachable = view.unreachable, why
        if not view.ours or view.lost:
            return
        if why and not before:
            self._stream.publish(Unreachable(self._now(), name, why))
        elif before and not why:
            self._stream.publish(Returned(self._now(), name))

    def _note_held(self, name: str, view: PodNodeView, why: str) -> None:
        """Whoever cordons a node waits for what runs there: it is left when another is free."""
        before, view.held = view.held, bool(why)
        if view.lost or view.unreachable:
            return
        if why and not before:
            self._stream.publish(PreemptingAt(self._now(), name, math.inf, why))
        elif before and not why and not view.announced:
            self._stream.publish(Returned(self._now(), name))

    def _look_for_return(self, name: str) -> None:
        view, node = self.find_view(name), self.nodes.get(name)
        if view.ours and view.lost and node is not None and not read_unready(node) and not read_held(node):
            view.lost, view.unreachable, view.announced = "", "", False
            self._stream.publish(Returned(self._now(), name))

    def _now(self) -> Moment:
        return Moment.at(self._clock())
