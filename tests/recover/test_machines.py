"""What ranks are given of their machines comes from what the agents say, and another boot means that nothing is left."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from unbroken.cluster.hello import Gpu, Hello, NodeAddress
from unbroken.cluster.survey import find_visible
from unbroken.progress.records.state import RunState
from unbroken.recover.node.port import PortReservation
from unbroken.recover.supervise.nodes.machines import (
    describe_memory,
    find_meeting,
    name_interface,
    share_devices,
)
from unbroken.recover.supervise.nodes.node import Node
from unbroken.testing.fake_cluster.simulated_run import SimulatedRun

from .simulating import Simulate, reach


def node(
    name: str, boot: str, host: str = "h", gpus: int = 0, addresses: tuple[NodeAddress, ...] = ()
) -> Node:
    visible = tuple(f"GPU-{boot}-{i}" for i in range(gpus))
    facts = Hello(
        node=name, run_id="r", host=host, boot_id=boot, interpreter="python", version="1", cpus=1, memory=1, memory_free=1,
        scratch="/s", scratch_free=1, addresses=addresses, visible=visible,
    )  # fmt: skip
    return Node(name, facts=facts)


def test_gpus_are_each_machines_own() -> None:
    nodes = {
        n.name: n
        for n in (node("a", "1", gpus=4), node("b", "1", gpus=4), node("c", "2", gpus=2), node("d", "3"))
    }
    assert share_devices(nodes, ["a", "c", "b", "d"], 2) == [
        "GPU-1-0,GPU-1-1", "GPU-2-0,GPU-2-1", "GPU-1-2,GPU-1-3", None,
    ]  # fmt: skip
    assert share_devices(nodes, ["c", "c"], 2)[1] == "GPU-2-0,GPU-2-1", "too few are shared in turn"
    assert share_devices(nodes, ["c"], 3) == ["GPU-2-0,GPU-2-1"]


def test_ranks_of_one_machine_meet_on_loopback_and_others_do_not() -> None:
    near, far = (
        (NodeAddress("eth0", "10.0.0.1"), NodeAddress("lo", "127.0.0.1")),
        (NodeAddress("ib0", "10.0.0.2"),),
    )
    one = {n.name: n for n in (node("a", "1", addresses=near), node("b", "1", addresses=near))}
    assert find_meeting(one, ["a", "b"]) == "127.0.0.1" and name_interface(one["b"], "127.0.0.1") == ""
    two = one | {"b": node("b", "2", addresses=far)}
    assert find_meeting(two, ["a", "b"]) == "10.0.0.1" and find_meeting(two, ["b", "a"]) == "10.0.0.2"
    assert name_interface(two["b"], "10.0.0.1") == "ib0"
    containers = one | {"b": node("b", "1", host="other", addresses=far)}
    assert find_meeting(containers, ["a", "b"]) == "10.0.0.1", (
        "two containers of one host have networks of their own"
    )


@pytest.mark.parametrize(
    ("said", "gpus", "expected"), [("3,GPU-x", 8, ["3", "GPU-x"]), ("", 8, []), ("-1", 8, []), (None, 0, [])]
)
def test_a_node_tells_the_gpus_that_it_may_use(
    monkeypatch: pytest.MonkeyPatch, said: str | None, gpus: int, expected: list[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if said is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)
    assert find_visible([Gpu(f"GPU-{i}") for i in range(gpus)], devices="/nowhere/nvidia*") == expected


def test_gpus_are_named_by_uuid_where_each_has_one(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for i in (0, 2, 10):
        (tmp_path / f"nvidia{i}").touch()
    (tmp_path / "nvidiactl").touch()
    place = f"{tmp_path}/nvidia[0-9]*"
    assert find_visible([Gpu(f"GPU-{i}") for i in range(3)], devices=place) == ["GPU-0", "GPU-1", "GPU-2"]
    assert find_visible([Gpu("GPU-0")], devices=place) == ["0", "2", "10"]


def test_a_port_is_kept_for_rank_0_and_given_to_nobody_else() -> None:
    reservation = PortReservation()
    port = reservation.take()
    for _ in range(200):
        with socket.socket() as other:
            other.bind(("", 0))
            assert other.getsockname()[1] != port
    with socket.socket() as rank:
        rank.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rank.bind(("", port))
        rank.listen()
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    before = port
    assert reservation.take() != before
    reservation.release()
    reservation.release()


def test_the_boots_of_an_attempt_are_remembered() -> None:
    records = [
        {
            "kind": "attempt",
            "t": 1.0,
            "attempt": 1,
            "slots": ["a", "b", "c"],
            "boots": {"x": [[0, 2]], "y": [[2, 1]]},
        },
        {"kind": "attempt", "t": 2.0, "attempt": 2, "slots": ["a", "d"], "boots": {"z": [[1, 1]]}},
        {"kind": "attempt", "t": 3.0, "attempt": 3, "slots": ["a"]},
    ]
    assert RunState.of(records).boots == {"a": "x", "b": "x", "c": "y", "d": "z"}


def test_a_host_that_started_anew_before_it_was_missed_is_lost_with_its_memory(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.reboot("node-00003")
        began = run.loop.time()
        await run.until(lambda: run.journal("resumed"))
        assert run.loop.time() - began < 45, "no hang and no lease had to be waited for"
        (incident,) = run.incidents()
        assert incident["kind"] == "node_lost" and incident["nodes"] == {"node-00003": "gone"}
        assert run.journal("attempt")[1]["slots"][3] == "node-00008"
        assert not run.journal("unproven")

    simulate(act, 8, spares=1)


@pytest.mark.slow
def test_an_agent_that_was_restarted_before_it_was_missed_is_an_incident(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.restart_agent("node-00003")
        await run.until(lambda: run.journal("resumed"))
        (incident,) = run.incidents()
        assert incident["kind"] == "agent_lost" and incident["steps_lost"] <= 8
        assert run.journal("attempt")[1]["slots"][3] == "node-00003"

    simulate(act, 8, spares=1)


@pytest.mark.slow
def test_what_could_not_be_proven_is_by_another_boot(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.lose("node-00003", noticed_after_s=1.0, proven=False)
        await run.until(lambda: run.journal("resumed"))
        assert [r["node"] for r in run.journal("unproven")] == ["node-00003"]
        run.faults.return_node("node-00003")
        run.faults.restart_agent("node-00003")
        await asyncio.sleep(5)  # simulated: it is refused, but heard
        run.faults.fail_rank("node-00001", 3)
        await run.until(lambda: len(run.journal("attempt")) > 2)
        assert [r["node"] for r in run.journal("proven")] == ["node-00003"]
        assert "node-00003" not in run.journal("attempt")[2]["slots"]

    simulate(act, 8, spares=1)


def test_what_keepers_may_hold_is_what_their_own_nodes_say() -> None:
    nodes = [Node(name, hello={"keeper_bytes": size << 30}) for name, size in (("a", 4), ("b", 2), ("c", 4))]
    assert describe_memory([]) == describe_memory([Node("d")]) == ""
    assert describe_memory(nodes[::2]) == "snapshots may take up to 4 GiB of memory on each node"
    assert describe_memory(nodes) == "snapshots may take up to 2 GiB (b) to 4 GiB of memory on a node"


def test_an_agent_that_is_started_again_gives_its_keeper_what_the_one_before_had(simulate: Simulate) -> None:
    """Free memory is another by then: half of it would be less each time."""

    def given(run: SimulatedRun, option: str) -> str:
        command = run.hardware.nodes["node-00001"].command
        assert command is not None
        return command.arguments[command.arguments.index(option) + 1]

    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 5)
        assert (given(run, "--keeper-memory"), given(run, "--keeper-share")) == ("0", "1")
        assert "snapshots may take up to 512 GiB of memory on each node" in run.screen.lines
        run.faults.crash_agent("node-00001")
        await run.until(lambda: run.journal("resumed"))
        assert given(run, "--keeper-memory") == str(512 << 30)

    simulate(act, 3)
