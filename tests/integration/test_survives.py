"""A run on virtual nodes survives each fault: real processes, real signals, no mercy."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from .conftest import SCRIPT, RunUnderTest

pytestmark = pytest.mark.integration
NewRun = Callable[..., RunUnderTest]
TWO = ("--nodes", "2", "--nproc", "1")


def test_undisturbed_run_completes_and_leaves_nothing(new_run: NewRun) -> None:
    run = new_run(*TWO, steps=10, seconds=0.01).start()
    faults = None
    assert run.wait() == 0, run.output
    faults = run.faults
    assert faults.left_over() == []
    assert [r["status"] for r in run.journal("status")] == ["completed"]
    assert run.incidents() == []
    log = run.run_dir.rank_log(1, "node-001", 1).read_text()
    assert "rank 1 is done" in log
    # The same command again says so and does nothing.
    again = run.start()
    assert again.wait() == 0
    assert run.attempts() == 1


def test_killed_rank_is_restarted(new_run: NewRun) -> None:
    run = new_run(*TWO).start()
    run.until_step(5)
    run.faults.kill_rank(1)
    assert run.wait() == 0, run.output
    (incident,) = run.incidents()
    assert incident["kind"] == "failed" and incident["action"] == "restart"
    assert incident["verdict"]["faulty"]["rank"] == 1
    assert "SIGKILL" in incident["verdict"]["root"]["text"]
    assert incident["resumed"] > incident["detected"]
    assert run.attempts() == 2
    assert run.faults.left_over() == []


@pytest.mark.slow
def test_stopped_rank_is_named_and_restarted(new_run: NewRun) -> None:
    script = """
import os, sys, time
import torch.distributed as dist, torch
import unbroken
run = unbroken.attach()
dist.init_process_group("gloo")
x = torch.zeros(1)
for step in range(1, 61):
    time.sleep(0.05)
    dist.all_reduce(x)
    run.step(step)
dist.destroy_process_group()  # torch may abort a rank that ends without it
"""
    run = new_run(*TWO, "--hang-after", "8s", "--suspect-after", "3s", script=script, args=[]).start()
    run.until_step(5)
    run.faults.stop_rank(1)
    assert run.wait() == 0, run.output
    (incident,) = run.incidents()
    assert incident["kind"] == "hung"
    assert incident["verdict"]["reason"] == "Hang"
    assert incident["verdict"]["faulty"]["rank"] == 1
    stacks = run.run_dir.evidence(1) / "stacks-rank-1.txt"
    assert "stopped by a signal" in stacks.read_text()
    assert run.attempts() == 2


@pytest.mark.slow
def test_a_rank_that_stops_inside_a_save_is_found_as_fast_as_in_a_step(new_run: NewRun) -> None:
    """A save holds nothing up, so its hang must not wait for the deadline of minutes of the phase checkpointing."""
    script = """
import os, signal, sys
from unbroken.checkpoint.device.staging import CpuStager
from unbroken.train.__main__ import main

copy = CpuStager.copy

def stop_once(self, *arguments):
    if os.environ["UNBROKEN_ATTEMPT"] == "1" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    copy(self, *arguments)

CpuStager.copy = stop_once
sys.exit(main())
"""
    run = new_run(
        *TWO,
        "--hang-after",
        "8s",
        "--suspect-after",
        "3s",
        script=script,
        args=["--steps", "30", "--snapshot-every", "10"],
    ).start()
    assert run.wait() == 0, run.output
    (incident,) = run.incidents()
    assert incident["verdict"]["reason"] == "Hang"
    assert incident["verdict"]["faulty"]["rank"] == 1
    assert run.attempts() == 2


@pytest.mark.slow
def test_an_interpreter_that_takes_long_to_end_does_not_hang(new_run: NewRun) -> None:
    script = "import atexit, time\n" + SCRIPT + "\natexit.register(time.sleep, 5)\n"
    run = new_run("--hang-after", "2s", "--suspect-after", "1s", steps=5, script=script).start()
    assert run.wait() == 0, run.output
    assert run.incidents() == [] and run.attempts() == 1


def test_lost_node_is_replaced_by_the_spare(new_run: NewRun) -> None:
    run = new_run(*TWO, "--spares", "1").start()
    run.until_step(5)
    run.faults.kill_node("node-001")
    assert run.wait() == 0, run.output
    (incident,) = run.incidents()
    assert incident["kind"] == "node_lost"
    assert incident["verdict"]["reason"] == "NodeFailure"
    assert run.journal("attempt")[-1]["slots"] == ["node-000", "node-002"]
    assert run.faults.left_over() == []


@pytest.mark.slow
def test_lost_node_returns_where_there_is_no_spare(new_run: NewRun) -> None:
    run = new_run(*TWO).start()
    run.until_step(5)
    run.faults.kill_node("node-000")
    assert run.wait() == 0, run.output
    assert run.journal("attempt")[-1]["slots"] == ["node-000", "node-001"]
    assert [r["node"] for r in run.journal("returned")] == ["node-000"]


@pytest.mark.slow
def test_killed_agent_restarts_on_its_node(new_run: NewRun) -> None:
    run = new_run(*TWO).start()
    run.until_step(5)
    run.faults.kill_agent("node-001")
    assert run.wait() == 0, run.output
    (incident,) = run.incidents()
    assert incident["kind"] == "agent_lost"
    assert run.journal("attempt")[-1]["slots"] == ["node-000", "node-001"]
    assert run.faults.left_over() == []


@pytest.mark.slow
def test_killed_keeper_does_not_disturb_training(new_run: NewRun) -> None:
    run = new_run(*TWO).start()
    run.until_step(5)
    run.faults.kill_keeper("node-001")
    assert run.wait() == 0, run.output
    assert run.incidents() == [] and run.attempts() == 1
    assert [r["node"] for r in run.journal("keeper_back")] == ["node-001"]


def test_killed_supervisor_is_succeeded_and_the_ranks_never_stop(
    new_run: NewRun, eventually: Callable[..., None]
) -> None:
    run = new_run(*TWO, steps=80).start()
    run.until_step(5)
    # That is in the file of steps; the journal's record of the first one follows by itself.
    eventually(lambda: run.journal("first_step"))
    pids = {r: p.pid for r, p in run.faults.ranks().items()}
    run.faults.kill_supervisor()
    assert run.wait() == -signal.SIGKILL
    # A loaded machine may need long to start the successor: even ranks that have ended by then are adopted.
    run.start()
    assert run.wait() == 0, run.output
    assert run.attempts() == 1
    (incident,) = run.incidents()
    assert incident["kind"] == "supervisor_lost" and incident["steps_lost"] == 0
    assert set(pids) == {0, 1}
    assert [r["attempt"] for r in run.journal("adopted")] == [1]
    # The successor did not see the start, and does not say how long it took.
    (first,) = run.journal("first_step")
    assert first["step"] == 1 and first["seconds"] > 0


@pytest.mark.parametrize(
    "by",
    [
        "one of each",
        pytest.param("agents that wake late", marks=pytest.mark.slow),
        *(pytest.param(by, marks=[pytest.mark.slow, pytest.mark.soak]) for by in ("agents", "ranks")),
    ],
)
def test_ranks_without_a_supervisor_stop_when_the_lease_lapses(
    new_run: NewRun, eventually: Callable[..., None], by: str
) -> None:
    """A rank and its agent both watch the lease; whoever finds it expired first, the same command goes on."""
    run = new_run(*TWO, "--lease", "2s", steps=2000).start()
    run.until_step(5)
    agents = [p.pid for p in sorted(run.faults.processes("agent"), key=lambda p: p.node)]
    ranks = [p.pid for _, p in sorted(run.faults.ranks().items())]
    assert len(agents) == len(ranks) == 2
    # Who is stopped finds nothing: a rank that hangs is left to its agent, an agent that hangs to its ranks.
    late = by == "agents that wake late"
    agents_asleep = {"agents": [], "one of each": agents[1:]}.get(by, agents)
    ranks_asleep = {"ranks": [], "one of each": ranks[:1]}.get(by, ranks)
    run.faults.kill_supervisor()
    run.wait()
    for pid in agents_asleep + ranks_asleep:
        os.kill(pid, signal.SIGSTOP)
    if late:
        time.sleep(2.5)  # the lease has expired, and old ranks are there when the successor comes
        run.start()
        eventually(lambda: len(run.journal("epoch")) == 2, within=30)
    else:
        eventually(lambda: not run.faults.ranks(), within=15)
    for pid in agents_asleep:
        os.kill(pid, signal.SIGCONT)
    # Agents and keepers wait for a successor, which starts the next attempt.
    assert sorted(p.pid for p in run.faults.processes("agent")) == sorted(agents)
    assert len(run.faults.processes("keeper")) == 2
    if not late:
        run.start()
    process = run.process
    assert process is not None
    eventually(lambda: run.attempts() == 2 or process.poll() is not None, within=30)
    assert not [p for p in run.faults.processes("rank") if p.attempt == 1], "old ranks live beside new ones"
    assert run.attempts() == 2
    eventually(lambda: run.faults.step() >= (2, 1) or process.poll() is not None, within=30)
    assert {r: p.attempt for r, p in run.faults.ranks().items()} == {0: 2, 1: 2}
    assert [(r["attempt"], r["how"]) for r in run.journal("ended")] == [(1, "supervisor_lost")]
    (incident,) = run.incidents()
    assert (incident["kind"], incident["action"]) == ("supervisor_lost", "restart")
    assert incident["verdict"]["decided_by"] == "lapsed-lease"


@pytest.mark.slow
def test_a_rank_that_failed_before_the_lease_lapsed_is_the_story(
    new_run: NewRun, eventually: Callable[..., None]
) -> None:
    """What a script did wrong while nobody supervised stays its own fault, though a lease ended the others later."""
    script = """
import os, time
import unbroken
run = unbroken.attach()
for step in range(1, 2000):
    time.sleep(0.05)
    run.step(step)
    if os.environ["RANK"] == "1" and os.path.exists("go"):
        print({}["missing"])
"""
    run = new_run(*TWO, "--lease", "6s", script=script, args=[]).start()
    run.until_step(5)
    run.faults.kill_supervisor()
    run.wait()
    (run.folder / "go").touch()
    eventually(lambda: not run.faults.ranks(), within=20)
    run.start()
    assert run.wait() == 10
    (incident,) = run.incidents()
    assert (incident["verdict"]["reason"], incident["verdict"]["faulty"]["rank"]) == ("KeyError", 1)


@pytest.mark.slow
def test_a_supervisor_that_was_stopped_for_longer_than_the_lease_goes_on(
    new_run: NewRun, eventually: Callable[..., None]
) -> None:
    run = new_run(*TWO, "--lease", "4s", steps=200).start()
    run.until_step(5)
    supervisor = run.faults.supervisor()
    os.kill(supervisor, signal.SIGSTOP)
    eventually(lambda: not run.faults.ranks(), within=20)
    os.kill(supervisor, signal.SIGCONT)
    assert run.wait() == 0
    # On a machine so slow that it sleeps much longer than the lease, it rightly takes the nodes for lost.
    (incident,) = run.incidents()
    assert incident["kind"] in ("lease", "node_lost") and incident["action"].startswith("restart")
    assert run.attempts() == 2
    assert run.faults.left_over() == []


def test_stop_request_ends_all_ranks_at_one_step_and_the_same_command_goes_on(new_run: NewRun) -> None:
    run = new_run(*TWO, steps=100).start()
    run.until_step(5)
    assert run.process is not None
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 11, run.output
    assert "same command" in run.output
    assert [r["how"] for r in run.journal("ended")] == ["interrupted"]
    assert run.faults.left_over() == []
    ended = run.journal("ended")[0]["step"]
    assert ended < 100
    run.start()
    assert run.wait() == 0, run.output
    assert run.attempts() == 2


@pytest.mark.parametrize("times", [1, 2])
def test_a_script_that_knows_nothing_of_us_ends_by_sigterm_or_when_asked_twice(
    new_run: NewRun, times: int
) -> None:
    """The first Ctrl-C ends an ordinary script, the second one also a script that ignores it: no grace is waited for."""
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if times == 2 else ""
    script = f"{deaf}import time\nfor i in range(10**6):\n    print(f'step {{i}} loss 1.0')\n    time.sleep(0.05)\n"
    run = new_run(*TWO, "--stop-within", "10m", script=script, args=[]).start()
    assert run.process is not None and run.process.stdout is not None
    for said in ("its steps are read", "it gets SIGTERM")[:times]:
        run.output += next(line for line in run.process.stdout if said in line)
        run.process.send_signal(signal.SIGINT)
    assert run.wait(within=25) == 11, run.output
    assert ("killing the ranks" in run.output) is (times == 2)
    assert run.faults.left_over() == []


def test_script_error_stops_at_once_with_its_reason(new_run: NewRun) -> None:
    script = "import unbroken\nrun = unbroken.attach()\nrun.step(1)\nconfig = {'lr': 1}\nprint(config['learning_rate'])\n"
    run = new_run(*TWO, script=script, args=[]).start()
    began = time.monotonic()
    assert run.wait() == 10, run.output
    assert time.monotonic() - began < 60
    (incident,) = run.incidents()
    assert incident["verdict"]["reason"] == "KeyError" and incident["action"] == "stop"
    assert incident["verdict"]["root"]["line"] is not None
    assert run.attempts() == 1
    assert run.faults.left_over() == []


def test_same_failure_at_the_same_step_twice_stops(new_run: NewRun) -> None:
    script = """
import unbroken, sys
run = unbroken.attach()
for step in range(1, 4):
    run.step(step)
raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
"""
    run = new_run(*TWO, script=script, args=[]).start()
    assert run.wait() == 10, run.output
    assert 1 <= run.attempts() <= 2


@pytest.mark.slow
def test_unmodified_script_is_followed_by_its_log(new_run: NewRun) -> None:
    script = """
import os, time
for step in range(1, 31):
    time.sleep(0.03)
    if os.environ["RANK"] == "0":
        print(f"step {step} loss {3.0 / step:.3f}")
"""
    run = new_run(*TWO, script=script, args=[]).start()
    assert run.wait() == 0, run.output
    from unbroken.progress.records.steps import read_steps

    steps = read_steps(run.run_dir.steps(1))
    assert steps[-1].step == 30 and steps[-1].loss == pytest.approx(0.1)


@pytest.mark.slow
def test_two_supervisors_cannot_share_a_run(new_run: NewRun) -> None:
    run = new_run(*TWO, steps=200).start()
    run.until_step(3)
    other = RunUnderTest(run.folder, run.command, run.options)
    other.start()
    assert other.wait() == 13
    assert "live supervisor" in other.output


@pytest.mark.slow
def test_logs_of_older_attempts_are_compressed_while_the_run_goes_on(
    new_run: NewRun, eventually: Callable[..., None]
) -> None:
    script = SCRIPT.replace("for step", 'print("a line of a log\\n" * 1000, flush=True)\nfor step', 1)
    run = new_run("--nodes", "1", "--nproc", "1", steps=200, script=script).start()
    run.until_step(3)
    for attempt in (1, 2):
        eventually(lambda a=attempt: run.faults.step() >= (a, 3), within=60)
        run.faults.kill_rank(0)
    logs = [run.run_dir.rank_log(a, "node-000", 0) for a in (1, 2, 3)]
    eventually(lambda: logs[0].with_name("rank-0.log.gz").exists() and not logs[0].exists(), within=60)
    assert logs[1].exists() and logs[2].exists()
    assert run.wait() == 0, run.output
    shown = run.incidents()[0]["verdict"]["root"]
    assert shown["text"], "what was diagnosed of it stays"
