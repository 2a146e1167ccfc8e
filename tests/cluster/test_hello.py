"""What an agent says of its node: gathered there, sent, checked and read again."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.cluster.clocks import ClockOffset
from unbroken.cluster.hello import Gpu, Hello, NodeAddress
from unbroken.cluster.survey import describe_node, find_gpus, rank_addresses, read_boot_id
from unbroken.link.bounds import Malformed

from ..fuzzing import fuzz

HELLO = Hello(
    node="gpu-17", run_id="abc", host="gpu-17.site", boot_id="8f1c", interpreter="/opt/py/bin/python", version="0.1.0",
    cpus=96, memory=2 << 40, memory_free=1 << 40, scratch="/dev/shm/x", scratch_free=1 << 39,
    addresses=(NodeAddress("ib0", "10.0.0.17"), NodeAddress("lo", "127.0.0.1")),
    gpus=(Gpu("GPU-1", "NVIDIA H200", 141 << 30), Gpu("GPU-2")),
    clock=ClockOffset(-3.25, 0.0004, 17.5), wall_clock=ClockOffset(125.0, 0.001, 1.8e9),
)  # fmt: skip


def test_it_is_read_as_it_was_sent() -> None:
    assert Hello.from_message(json.loads(json.dumps(HELLO.as_message()))) == HELLO
    bare = Hello("n", "r", "", "", "", "", 1, 0, 0, "", 0)
    message = json.loads(json.dumps(bare.as_message(), allow_nan=False))
    assert Hello.from_message(message) == bare and message["clock"] is None
    assert Hello.from_message({**message, "of a later version": [1]}) == bare


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("node", ""),
        ("node", "a\nb"),
        ("node", None),
        ("run_id", 3),
        ("cpus", 0),
        ("cpus", True),
        ("memory", -1),
        ("memory", 1.5),
        ("memory_free", None),
        ("interpreter", "x" * 5000),
        ("addresses", {}),
        ("addresses", [["eth0"]]),
        ("addresses", [["eth0", ""]]),
        ("addresses", [["eth0", "10.0.0.1"]] * 1000),
        ("gpus", None),
        ("gpus", ["GPU-1"]),
        ("gpus", [{"model": "H200"}]),
        ("gpus", [{"uuid": "GPU-1", "memory": "141 GB"}]),
        ("clock", []),
        ("clock", {"offset_s": 1.0, "measured": 0.0}),
        ("clock", {"offset_s": float("nan"), "uncertainty_s": 0.1, "measured": 0.0}),
        ("wall_clock", {"offset_s": 1.0, "uncertainty_s": -0.1, "measured": 0.0}),
    ],
)
def test_what_no_agent_can_mean_is_malformed(key: str, value: Any) -> None:
    with pytest.raises(Malformed):
        Hello.from_message({**HELLO.as_message(), key: value})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@fuzz(20)
@given(st.dictionaries(st.sampled_from(sorted(HELLO.as_message())), JSON, max_size=3))
def test_whatever_comes_it_is_a_hello_or_malformed(changes: dict[str, Any]) -> None:
    try:
        found = Hello.from_message({**HELLO.as_message(), **changes})
    except Malformed:
        return
    assert Hello.from_message(json.loads(json.dumps(found.as_message()))) == found


def test_this_very_node(tmp_path: Path) -> None:
    found = describe_node("node-000", "run", tmp_path)
    assert found.interpreter == sys.executable and found.cpus >= 1
    assert 0 < found.memory_free <= found.memory and found.scratch_free > 0
    assert any(a.address == "127.0.0.1" for a in found.addresses)
    assert found.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert Hello.from_message(json.loads(json.dumps(found.as_message()))) == found
    with pytest.raises(OSError):
        describe_node("node-000", "run", tmp_path / "gone")


def test_addresses_that_others_can_reach_come_first() -> None:
    found = [
        NodeAddress("lo", "127.0.0.1"), NodeAddress("lo", "::1"), NodeAddress("eth0", "fe80::1%eth0"), NodeAddress("eth0", "2001:db8::1"),
        NodeAddress("ib0", "10.1.0.1"), NodeAddress("eth0", "10.0.0.1"),
    ]  # fmt: skip
    assert [a.address for a in rank_addresses(found)] == [
        "10.0.0.1", "10.1.0.1", "2001:db8::1", "fe80::1%eth0", "127.0.0.1", "::1",
    ]  # fmt: skip


def test_gpus_are_told_by_the_driver(tmp_path: Path) -> None:
    for bus, uuid in (("0000:3b:00.0", "GPU-b"), ("0000:1a:00.0", "GPU-a"), ("0000:5e:00.0", "")):
        (tmp_path / bus).mkdir()
        said = f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 16\n{f'GPU UUID: {chr(9)} {uuid}' if uuid else ''}\n"
        (tmp_path / bus / "information").write_text(said)
    (tmp_path / "0000:6f:00.0").mkdir()  # falls off the bus while we look
    assert find_gpus(tmp_path) == [Gpu("GPU-a", "NVIDIA H200"), Gpu("GPU-b", "NVIDIA H200")]
    assert find_gpus(tmp_path / "none") == []


def test_a_host_that_started_anew_is_another_boot(tmp_path: Path) -> None:
    again = Hello.from_message({**HELLO.as_message(), "boot_id": "77aa"})
    assert HELLO.is_same_boot(HELLO) and not again.is_same_boot(HELLO)
    silent = Hello.from_message({**HELLO.as_message(), "boot_id": ""})
    assert silent.is_same_boot(HELLO), "where nothing is told, what ran before may still run"
    assert read_boot_id(tmp_path / "none") == "" and os.path.exists("/proc/sys/kernel/random/boot_id")
