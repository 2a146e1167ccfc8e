"""Ranks in a container of their own: started there, known by their codes, ended with it; here a container is a plain process."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unbroken.cluster.holding.apart import Apart, Container, HeldProcess
from unbroken.cluster.holding.choice import from_text
from unbroken.cluster.holding.processes import end, marked
from unbroken.cluster.local import find_root
from unbroken.private import private_folder


@pytest.fixture
def owner() -> Iterator[Apart]:
    run_id = f"test{secrets.token_hex(6)}"
    root = find_root(run_id)
    private_folder(root)
    owner = Apart(run_id, root, Container(("/usr/bin/env", "IN_CONTAINER=1"), ("true",)))
    yield owner
    assert owner.end_ranks("n1").gone
    assert end(lambda: marked(run_id)) == []
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    root.rmdir()


def spawn(owner: Apart, script: str, out: Path, attempt: int = 1) -> HeldProcess:
    start = owner.start_rank("n1", attempt, ["/bin/sh", "-c", script])
    env = {**os.environ, "UNBROKEN_RUN_ID": owner.run_id, "UNBROKEN_NODE": "n1", "UNBROKEN_ROLE": "rank"}
    assert start.spawn is not None
    with open(out, "ab", buffering=0) as f:
        process = start.spawn(start.argv, cwd="/", env=env, stdout=f, stdin=None, preexec_fn=None)
    assert isinstance(process, HeldProcess)
    return process


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_ranks_run_in_it_and_their_ends_are_known(owner: Apart, tmp_path: Path) -> None:
    one = spawn(owner, "echo $IN_CONTAINER $UNBROKEN_ROLE; exit 3", tmp_path / "log")
    two = spawn(owner, "kill -9 $$", tmp_path / "log")
    three = spawn(owner, "sleep 300", tmp_path / "log")
    until(lambda: one.poll() is not None and two.poll() is not None)
    assert (one.poll(), two.poll(), three.poll()) == (3, -9, None)
    assert (tmp_path / "log").read_text() == "rank\n", (
        "its environment is the one that was given, not the container's"
    )
    os.kill(three.pid, signal.SIGTERM)
    until(lambda: three.poll() == -15)
    start = owner.start_rank("n1", 1, [])
    with open(os.devnull, "wb") as nowhere, pytest.raises(OSError, match="No such file"):
        assert start.spawn is not None
        start.spawn(["/no/such/program"], cwd="/", env={}, stdout=nowhere)


def test_all_of_an_attempt_is_ended_whoever_left_its_rank_too(owner: Apart, tmp_path: Path) -> None:
    rank = spawn(owner, "setsid sleep 300 & env -i setsid sleep 301 & sleep 302", tmp_path / "log")
    until(lambda: len(owner.left("n1")) >= 4)
    held = owner.left("n1")
    assert owner.end_ranks("n1").gone
    assert rank.poll() == -9
    until(lambda: owner.left("n1") == [])  # their small parent ends after them, by itself
    # One that has left its cgroup is over, and for a moment not yet a zombie.
    until(lambda: not any(lives(p) for p in held))
    assert spawn(owner, "exit 0", tmp_path / "log", attempt=2).pid


@pytest.mark.parametrize("known", [True, False])
def test_a_container_that_somebody_else_killed_is_proven_gone_where_that_is_known(
    owner: Apart, tmp_path: Path, known: bool
) -> None:
    if not known:
        owner._container = Container(owner._container.start)
    rank = spawn(owner, "sleep 300", tmp_path / "log")
    for path, (pid, _) in owner._records("n1"):
        assert path.name.startswith("parent-ranks-")
        os.kill(pid, signal.SIGKILL)
    os.kill(rank.pid, signal.SIGKILL)
    ended = owner.end_ranks("n1", within=1.0)
    assert rank.poll() == -9
    assert ended.gone is known and (known or "was killed" in ended.why)
    owner.forget("n1")


def spawn_warm(owner: Apart, out: Path) -> HeldProcess:
    owner.prepare_warm("n1")
    start = owner.start_warm("n1", ["/bin/sh", "-c", "echo $SLURM_STEP_ID; sleep 300"])
    assert start is not None and start.spawn is not None
    env = {**os.environ, "UNBROKEN_RUN_ID": owner.run_id, "UNBROKEN_NODE": "n1", "UNBROKEN_ROLE": "warm"}
    with open(out, "ab", buffering=0) as f:
        process = start.spawn(start.argv, cwd="/", env=env, stdout=f, stdin=None, preexec_fn=None)
    assert isinstance(process, HeldProcess)
    return process


def test_warm_processes_wait_in_the_next_attempts_container(owner: Apart, tmp_path: Path) -> None:
    owner.prepare_warm("n1")
    assert owner.start_warm("n1", ["true"]) is None, "there is one container only"
    owner._container = Container(("/usr/bin/env", "SLURM_STEP_ID=7"), ("true",), several=True)
    first = spawn(owner, "setsid sleep 300 & sleep 301", tmp_path / "log")
    warm = [spawn_warm(owner, tmp_path / "warm") for _ in range(2)]
    assert owner.end_ranks("n1", keep=[w.pid for w in warm]).gone
    assert first.poll() == -9 and [w.poll() for w in warm] == [None, None]
    assert (tmp_path / "warm").read_text() == "7\n" * 2
    for w in warm:
        owner.move_warm("n1", 2, w.pid)
    cold = spawn(owner, "sleep 302", tmp_path / "log", attempt=2)
    assert len(owner._records("n1")) == 1, "all of an attempt are in one container"
    third = spawn_warm(owner, tmp_path / "warm")
    assert owner.end_ranks("n1", keep=[third.pid]).gone
    until(lambda: [*(w.poll() for w in warm), cold.poll()] == [-9, -9, -9])
    os.kill(owner._next["n1"].pid, signal.SIGKILL)
    until(lambda: third.poll() == -9)
    with pytest.raises(OSError, match="is gone"):
        owner.move_warm("n1", 3, third.pid)
    assert spawn(owner, "exit 0", tmp_path / "log", attempt=3).pid
    fourth = spawn_warm(owner, tmp_path / "warm")
    assert owner.end_ranks("n1").gone
    until(lambda: fourth.poll() == -9 and owner.left("n1") == [])


def test_another_process_makes_the_same_of_its_text(owner: Apart) -> None:
    again = from_text(owner.as_text(), owner.run_id, find_root(owner.run_id))
    assert isinstance(again, Apart) and again.as_text() == owner.as_text()
