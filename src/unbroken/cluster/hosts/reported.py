"""What programs on nodes report of their agents, as the contract's events."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ..clocks import Moment
from ..contract import Event, Exited, Lost, Returned, Started
from ..stream import EventStream
from .program import Message


class ReportedAgents:
    """The agents that run, by node, as far as was heard."""

    def __init__(self, stream: EventStream, clock: Callable[[], float]) -> None:
        self._stream, self._clock = stream, clock
        self._running: dict[str, str] = {}

    def list_events(self) -> list[Event]:
        """What a new reader is told."""
        now = Moment.at(self._clock())
        return [Started(now, node, launch) for node, launch in self._running.items()]

    def compare(self, node: str, running: Collection[str]) -> None:
        """Takes in what runs on a node that is reached again: what is not among it has ended, and nobody saw how."""
        launch = self._running.get(node)
        if launch is not None and launch not in running:
            self.drop(node)

    def drop(self, node: str) -> None:
        """What ran there has ended, and nobody saw how."""
        if (launch := self._running.pop(node, None)) is not None:
            self._stream.publish(Exited(Moment.at(self._clock()), node, launch))

    def apply(self, node: str, message: Message) -> None:
        """Takes in an event that a program reports."""
        now = self._clock()
        at = Moment(now - float(message.get("ago", 0.0)) - 1.0, now)
        match message["event"]:
            case "Started":
                launch = str(message["launch"])
                if self._running.get(node) != launch:
                    self._running[node] = launch
                    self._stream.publish(Started(Moment.at(now), node, launch))
            case "Exited":
                launch = str(message["launch"])
                if self._running.get(node) == launch:
                    del self._running[node]
                self._stream.publish(Exited(at, node, launch, message["code"], message["signal"]))
            case "Lost":
                self._running.pop(node, None)
                self._stream.publish(Lost(at, node, str(message["why"]), bool(message["proven"])))
            case "Returned":
                self._stream.publish(Returned(Moment.at(now), node))
