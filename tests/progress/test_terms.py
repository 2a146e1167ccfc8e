"""Epochs: one winner per number, whatever races; a supervisor is gone only when that is proven."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from unbroken.errors import ContractError
from unbroken.progress import RunDir, Term, claim, newest_term, read_terms

pytestmark = pytest.mark.made_up

RACERS = 20


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


def claimed(run_dir: RunDir, number: int) -> Term | None:
    return claim(run_dir, number, run_id="r", address=("127.0.0.1", 4000 + number), sealed={})


def test_claim_and_read(run_dir: RunDir) -> None:
    assert read_terms(run_dir) == [] and newest_term(run_dir) == 0
    term = claim(run_dir, 1, run_id="r", address=("127.0.0.1", 5), sealed={"0": 3})
    assert term is not None
    assert read_terms(run_dir) == [term]
    assert (term.host, term.pid, term.address, term.sealed) == (
        socket.gethostname(), os.getpid(), ("127.0.0.1", 5), {"0": 3},
    )  # fmt: skip
    assert claimed(run_dir, 1) is None
    assert claimed(run_dir, 2) is not None
    assert [e.number for e in read_terms(run_dir)] == [1, 2]
    assert newest_term(run_dir) == 2


def _race(path: str, barrier: object, results: object) -> None:
    run_dir = RunDir(path)
    barrier.wait()  # type: ignore[attr-defined]
    won = [n for n in range(1, 6) if claimed(run_dir, n) is not None]
    results.put((os.getpid(), won))  # type: ignore[attr-defined]


def test_twenty_processes_race_and_one_wins_each_number(run_dir: RunDir) -> None:
    ctx = multiprocessing.get_context("fork")
    barrier, results = ctx.Barrier(RACERS), ctx.SimpleQueue()
    racers = [ctx.Process(target=_race, args=(str(run_dir.path), barrier, results)) for _ in range(RACERS)]
    for r in racers:
        r.start()
    told = dict(results.get() for _ in racers)
    for r in racers:
        r.join()
        assert r.exitcode == 0
    winners = {n: pid for pid, numbers in told.items() for n in numbers}
    assert sorted(n for numbers in told.values() for n in numbers) == [1, 2, 3, 4, 5]
    # What the winner was told is what the file says.
    assert {e.number: e.pid for e in read_terms(run_dir)} == winners
    assert [p.name for p in run_dir.terms.iterdir() if p.name.endswith(".aside")] == []


def test_names_that_are_no_epochs_are_passed_over(run_dir: RunDir) -> None:
    claimed(run_dir, 3)
    for name in ("notes.txt", "1.json", "0000001.json.swp", ".000009.json.1.aside"):
        (run_dir.terms / name).write_text("x")
    assert [e.number for e in read_terms(run_dir)] == [3]
    assert newest_term(run_dir) == 3


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"schema": 1}', '{"schema": 1, "address": 4}'])
def test_what_cannot_be_read_is_a_contract_error(run_dir: RunDir, text: str) -> None:
    run_dir.term(1).write_text(text)
    with pytest.raises(ContractError, match="epoch 1"):
        read_terms(run_dir)


def test_a_newer_schema_names_the_way_out(run_dir: RunDir) -> None:
    claimed(run_dir, 1)
    value = json.loads(run_dir.term(1).read_text())
    run_dir.term(1).write_text(json.dumps(value | {"schema": 3}))
    with pytest.raises(ContractError, match="version of unbroken that wrote it"):
        read_terms(run_dir)


def test_gone_only_when_proven(run_dir: RunDir) -> None:
    me = claimed(run_dir, 1)
    assert me is not None and not me.supervisor_is_gone()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = psutil.Process(child.pid).create_time()

    def term(**change: object) -> Term:
        fields = {
            "number": 1, "run_id": "r", "host": socket.gethostname(), "pid": child.pid, "pid_started": started,
            "address": ("h", 1), "claimed": 0.0,
        }  # fmt: skip
        return Term(**(fields | change))  # type: ignore[arg-type]

    assert not term().supervisor_is_gone()
    assert term(pid_started=started - 100).supervisor_is_gone(), (
        "the number belongs to another process by now"
    )
    assert not term(host="far-away", pid=1, pid_started=0.0).supervisor_is_gone(), (
        "another host proves nothing"
    )
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert term().supervisor_is_gone(), "a zombie supervises nothing"
    child.wait()
    assert term().supervisor_is_gone()


def test_an_address_is_one_text_now_and_what_was_written_before_is_still_read(run_dir: RunDir) -> None:
    claimed(run_dir, 1)
    assert json.loads(run_dir.term(1).read_text())["schema"] == 1, "as an earlier version wrote it"
    assert claim(run_dir, 2, run_id="r", address="unix:/dev/shm/x.sock", sealed={}) is not None
    assert json.loads(run_dir.term(2).read_text())["schema"] == 2
    assert [t.address for t in read_terms(run_dir)] == [("127.0.0.1", 4001), "unix:/dev/shm/x.sock"]


def test_whether_an_earlier_versions_supervisor_runs_is_seen_without_asking_it(run_dir: RunDir) -> None:
    term = claimed(run_dir, 1)
    assert term is not None and term.supervisor_runs_here()
    child = subprocess.Popen(["sleep", "60"])
    try:
        other = replace(term, pid=child.pid, pid_started=psutil.Process(child.pid).create_time())
        assert other.supervisor_runs_here()
        child.send_signal(signal.SIGSTOP)
        while psutil.Process(child.pid).status() != psutil.STATUS_STOPPED:
            pass
        assert not other.supervisor_runs_here() and not other.supervisor_is_gone()
    finally:
        child.kill()
        child.wait()
    assert not other.supervisor_runs_here()
    assert not replace(term, host="elsewhere").supervisor_runs_here()
