"""The trainer's side: outside a run nothing happens; inside, phases, lease, stop request, environment."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import unbroken
from unbroken.errors import ContractError, LeaseExpired, UsageError
from unbroken.progress import PageReader, Phase, holding_up
from unbroken.progress import page as layout
from unbroken.progress.attach import _attached


@contextmanager
def detached() -> Iterator[None]:
    """Forgets the attached run inside the block, so that a test can attach again."""
    saved = dict(_attached)
    _attached.clear()
    try:
        yield
    finally:
        _attached.clear()
        _attached.update(saved)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageReader]:
    path = tmp_path / "rank-2.page"
    layout.create(path, rank=2, attempt=4)
    for key, value in {
        "UNBROKEN_PAGE": str(path), "UNBROKEN_RUN_DIR": str(tmp_path), "UNBROKEN_RUN_ID": "abc",
        "UNBROKEN_NODE": "node-001", "UNBROKEN_ATTEMPT": "4", "RANK": "2",
    }.items():  # fmt: skip
        monkeypatch.setenv(key, value)
    reader = PageReader(path)
    with detached():
        yield reader
    reader.close()


def test_outside_a_run_every_call_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNBROKEN_PAGE", raising=False)
    with detached():
        run = unbroken.attach(total_steps=5)
        assert not run.active
        assert (run.run_dir, run.run_id, run.node, run.attempt) == (None, None, None, 0)
        run.step(1, loss=2.0, tokens=3)
        with run.phase("evaluating"):
            run.step(2)
        assert run.should_stop(10**9) is False
        with pytest.raises(UsageError, match="no phase 'training2'"):
            run.phase("training2")


def test_a_checkpoint_that_holds_up_says_so_only_where_the_script_attached(page: PageReader) -> None:
    with holding_up():
        assert page.read().phase is Phase.STARTING and page.read().pid == 0
    run = unbroken.attach()
    run.step(1)
    with holding_up():
        assert page.read().phase is Phase.CHECKPOINTING
    assert page.read().phase is Phase.TRAINING
    run.phase("stopping")
    with pytest.raises(RuntimeError), holding_up():
        raise RuntimeError
    assert page.read().phase is Phase.STOPPING


ENDS = """
import atexit, os, threading, unbroken
from pathlib import Path
from unbroken.progress import PageReader

run, page = unbroken.attach(), PageReader(Path(os.environ["UNBROKEN_PAGE"]))
atexit.register(lambda: print(page.read().phase.name))
threading.Thread(target=lambda: (threading.main_thread().join(), print(page.read().phase.name))).start()
run.step(1)
if os.fork() == 0:
    raise SystemExit
os.wait()
print(page.read().phase.name)
"""


def test_an_interpreter_that_ends_says_so_before_anything_else_of_its_end(page: PageReader) -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-3:] == ["TRAINING", "EXITING", "EXITING"]
    assert page.read().phase is Phase.EXITING


def test_an_empty_variable_is_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNBROKEN_PAGE", "")
    with detached():
        assert not unbroken.attach().active


def test_attached_knows_its_run(page: PageReader, tmp_path: Path) -> None:
    run = unbroken.attach(total_steps=100)
    assert run.active
    assert (run.run_dir, run.run_id, run.node, run.rank, run.attempt) == (tmp_path, "abc", "node-001", 2, 4)
    assert page.read().pid == os.getpid()
    assert page.read().total_steps == 100


def test_attach_again_is_the_same_object(page: PageReader) -> None:
    run = unbroken.attach()
    assert unbroken.attach(total_steps=7) is run
    assert page.read().total_steps == 7
    run.step(0)
    unbroken.attach().step(1)
    assert [r.step for r in page.take()] == [0, 1]


def test_a_forked_child_attaches_anew(page: PageReader) -> None:
    run = unbroken.attach()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if unbroken.attach() is not run else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_phases(page: PageReader) -> None:
    run = unbroken.attach()
    assert page.read().phase is Phase.STARTING
    run.phase("compiling")
    assert page.read().phase is Phase.COMPILING
    run.step(0)
    assert page.read().phase is Phase.TRAINING
    since = page.read().phase_since
    with run.phase("evaluating"):
        assert page.read().phase is Phase.EVALUATING
        assert page.read().phase_since >= since
        with run.phase("checkpointing"):
            assert page.read().phase is Phase.CHECKPOINTING
        assert page.read().phase is Phase.EVALUATING
    assert page.read().phase is Phase.TRAINING
    with pytest.raises(RuntimeError), run.phase("Checkpointing"):
        raise RuntimeError
    assert page.read().phase is Phase.TRAINING
    run.phase("stopping")
    run.step(1)
    assert page.read().phase is Phase.TRAINING


def test_a_lapsed_lease_ends_the_rank_and_a_renewed_one_does_not(page: PageReader) -> None:
    run = unbroken.attach()
    run.step(0)  # no lease was ever set: nothing to expire
    assert page.expired_at() is None
    page.set_lease(time.monotonic() + 100, term=1)
    run.step(1)
    page.set_lease(time.monotonic() - 0.001, term=1)
    with pytest.raises(LeaseExpired, match=r"node node-001, rank 2, step 2") as e:
        run.step(2)
    assert e.value.exit_code == 15
    # The step was complete when the lease was found expired: it is on the page.
    last = page.take()[-1]
    assert last.step == 2
    # The agent can tell why the rank ends, also when the lease is renewed before it has ended.
    page.set_lease(time.monotonic() + 100, term=2)
    assert page.expired_at() == last.time
    # A script that caught it and goes on is no longer ended by it.
    run.step(3)
    assert page.expired_at() is None


def test_stop_at_a_step_boundary(page: PageReader) -> None:
    run = unbroken.attach()
    assert not run.should_stop(0)
    page.set_stop(5)
    assert [run.should_stop(s) for s in (3, 4, 5, 6)] == [False, False, True, True]
    page.set_stop(0)
    assert run.should_stop(0)


def test_a_page_of_another_version_is_refused(page: PageReader) -> None:
    page.path.write_bytes(b"x" * layout.SIZE)
    with pytest.raises(ContractError, match="same version"):
        unbroken.attach()


def test_attach_costs_no_torch() -> None:
    code = "import unbroken, sys; r = unbroken.attach(); r.step(1); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
