"""Nodes are checked before they train: what the card says puts a node out of use where there is another, the rest is told."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from unbroken.progress import Policy
from unbroken.progress.records.decision import PastIncident
from unbroken.progress.records.state import RunState
from unbroken.recover.node.checks.health import check_health
from unbroken.recover.supervise.launch.health import HealthCheck

GOOD = {
    "checks": [{"name": "gpu", "state": "good", "text": "fine", "device": "gpu 0"}],
    "versions": {"torch": "2"},
}
BROKEN = {
    "checks": [{"name": "rows", "state": "bad", "text": "replace it", "device": "gpu 0"}],
    "versions": {"torch": "2"},
}
FULL = {
    "checks": [{"name": "shared memory", "state": "bad", "text": "full", "device": "/dev/shm"}],
    "versions": {"torch": "2"},
}


class Site:
    """A fleet of three nodes and a spare."""

    def __init__(self, answers: dict[str, Any], policy: Policy = Policy(), free: int = 1) -> None:
        self.answers, self.free, self.asked = answers, free, list[str]()
        self.cordoned, self.said = list[str](), list[str]()
        self.state = RunState()
        fencing = SimpleNamespace(cordon=self.cordon)
        recorder = SimpleNamespace(state=self.state)
        clock = SimpleNamespace(wall=lambda: 1000.0)
        self.check = HealthCheck(self, fencing, recorder, self.said.append, clock, policy)  # type: ignore[arg-type]

    async def ask_all(self, names: list[str], op: str, **_: Any) -> dict[str, Any]:
        self.asked += names
        return {n: self.answers[n] for n in names if n in self.answers}

    def find_free(self, slots: Any, out: Any) -> list[str]:
        return ["spare"] * self.free

    async def cordon(self, name: str, reason: str, confidence: float) -> None:
        self.cordoned.append(name)

    def run(self) -> bool:
        return asyncio.run(self.check.put_out_bad(["a", "b", "c"]))


def test_a_broken_card_puts_its_node_out_and_each_node_is_asked_once() -> None:
    site = Site({"a": GOOD, "b": BROKEN, "c": GOOD})
    assert site.run() and site.cordoned == ["b"] and "replace it" in site.said[0]
    assert not site.run() and site.asked == ["a", "b", "c"]
    site.state.incident, site.state.history = 1, [PastIncident("failure", "x", 5)]
    site.answers["b"] = GOOD
    assert not site.run() and site.asked[3:] == ["a", "b", "c"], "after an infrastructure incident all again"


def test_what_the_node_cannot_help_or_nobody_can_replace_is_told_only() -> None:
    site = Site({"a": FULL, "b": BROKEN}, free=0)
    assert not site.run() and site.cordoned == []
    assert any("full" in s for s in site.said) and any("no spare is left" in s for s in site.said)


def test_a_detector_gone_mad_and_a_policy_that_says_no_take_no_node() -> None:
    mad = Site({"a": BROKEN})
    mad.state.cordons = [(999.0, "x")] * 8
    assert not mad.run() and mad.cordoned == []
    off = Site({"a": BROKEN}, Policy(check_nodes="off"))
    assert not off.run() and off.asked == []


def test_other_versions_than_most_nodes_have_are_told() -> None:
    """But for those of what ranks import: the launch stops on these, and says so itself."""
    usual = {**GOOD, "versions": {"torch": "2", "driver": "580"}}
    site = Site({"a": usual, "b": usual, "c": {**GOOD, "versions": {"torch": "1", "driver": "570"}}})
    assert not site.run() and site.said == ["c: driver is 570; 2 of 3 nodes have 580"]


def test_this_node_answers_in_the_form_that_is_read() -> None:
    answer = check_health()
    assert answer["versions"]["python"] and all(
        {"name", "state", "text", "device"} == c.keys() for c in answer["checks"]
    )
