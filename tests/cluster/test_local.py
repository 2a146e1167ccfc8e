"""Virtual nodes: what fits, which GPUs a slot gets, launching, watching and clearing."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unbroken.cluster import LocalBackend, NodeState
from unbroken.cluster import local as module
from unbroken.cluster.holding.processes import end, marked
from unbroken.errors import DoesNotFit


@pytest.fixture
def backend() -> Iterator[LocalBackend]:
    made = LocalBackend(f"test{secrets.token_hex(6)}")
    yield made
    assert end(lambda: marked(made.run_id)) == []
    for i in range(3):
        made.clear(f"node-{i:03d}")
    assert not made.scratch("x").parent.exists()


def memory(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    monkeypatch.setattr(module, "available_memory", lambda: int(gib * 2**30))


def test_what_fits(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    memory(monkeypatch, 16)
    backend.check_fits(2, 4, 1)
    with pytest.raises(DoesNotFit, match=r"100 ranks on 10 nodes need at least .* 16 GiB is free") as e:
        backend.check_fits(10, 10, 0)
    assert e.value.exit_code == 14
    memory(monkeypatch, 1e6)
    monkeypatch.setattr(module.os, "cpu_count", lambda: 2)
    with pytest.raises(DoesNotFit, match="2 cores"):
        backend.check_fits(129, 1, 0)


def test_keepers_share_half_of_what_is_free(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    memory(monkeypatch, 12)
    assert backend.keeper_memory(3) == 2 * 2**30
    assert backend.keeper_memory(0) == 6 * 2**30


def test_allocation_is_the_same_each_time(backend: LocalBackend) -> None:
    a = backend.allocate(2, 1)
    assert (a.nodes, a.spares) == (("node-000", "node-001"), ("node-002",))
    assert backend.allocate(2, 1) == a
    assert len({backend.scratch(n) for n in (*a.nodes, *a.spares)}) == 3


@pytest.mark.parametrize(
    ("visible", "slot", "nproc", "slots", "devices"),
    [
        ("", 0, 2, 2, None),
        ("-1", 0, 2, 2, None),
        ("0,1,2,3", 0, 2, 2, "0,1"),
        ("0,1,2,3", 1, 2, 2, "2,3"),
        ("4,5", 1, 1, 2, "5"),
        ("GPU-a,GPU-b", 1, 1, 2, "GPU-b"),
        ("0", 1, 1, 2, "0"),
        ("0,1", 1, 2, 2, "0,1"),
        ("0,1,2", 1, 2, 2, "2,0"),
    ],
)
def test_gpus_belong_to_the_slot(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, visible: str, slot: int, nproc: int, slots: int,
    devices: str | None,
) -> None:  # fmt: skip
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert backend.devices(slot, nproc, slots) == devices


def agent(
    backend: LocalBackend, node: str, tmp_path: Path, code: str = "import time; time.sleep(300)"
) -> int:
    env = {"UNBROKEN_RUN_ID": backend.run_id, "UNBROKEN_NODE": node, "UNBROKEN_ROLE": "agent"}
    argv = [sys.executable, "-c", textwrap.dedent(code)]
    return backend.launch(node, argv, env, tmp_path / "logs" / f"{node}.log").pid


KEEPER = """
    import os, subprocess, time
    print("says", flush=True)
    subprocess.Popen(["sleep", "300"], env={**os.environ, "UNBROKEN_ROLE": "keeper"})
    time.sleep(300)
"""


def test_a_node_from_launch_to_gone(
    backend: LocalBackend, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    assert backend.state("node-000") is NodeState.GONE
    pid = agent(backend, "node-000", tmp_path, KEEPER)
    eventually(lambda: len(marked(backend.run_id)) == 2)
    assert backend.state("node-000") is NodeState.ALIVE
    assert backend.state("node-001") is NodeState.GONE
    assert os.getsid(pid) == pid, "Ctrl-C in the terminal must not reach it"
    assert (tmp_path / "logs" / "node-000.log").read_text() == "says\n"
    (backend.scratch("node-000") / "page").write_text("x")
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: backend.state("node-000") is NodeState.AGENT_LOST)
    assert backend.scratch("node-000").exists()
    assert backend.clear("node-000").gone
    assert backend.state("node-000") is NodeState.GONE
    assert not backend.scratch("node-000").exists()
    assert backend.clear("node-000").gone, "clearing twice is no error"


def test_clearing_one_node_leaves_the_others(backend: LocalBackend, tmp_path: Path) -> None:
    agent(backend, "node-000", tmp_path)
    agent(backend, "node-001", tmp_path)
    assert backend.clear("node-000").gone
    assert backend.state("node-001") is NodeState.ALIVE
    assert backend.scratch("node-001").exists() and not backend.scratch("node-000").exists()


def test_a_log_is_appended_to(backend: LocalBackend, tmp_path: Path, eventually: Callable[..., None]) -> None:
    for n in (1, 2):
        agent(backend, "node-000", tmp_path, "print('again', flush=True)")
        log = tmp_path / "logs" / "node-000.log"
        eventually(lambda n=n, log=log: log.read_text().count("again") == n)
