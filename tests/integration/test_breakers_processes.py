"""The breaker's list on processes and promises: whatever happens to processes, the checkpoints' place restores the right step.

Much of it can only be under `unbroken run`, because torchrun and plain Python promise nothing about processes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest

import unbroken
from tests.support.keepers import keeper_pid
from unbroken.cluster.holding.cgroups import Cgroups
from unbroken.progress import read_journal
from unbroken.progress.records.incident import read_incidents
from unbroken.testing.http_faults import Fault

from .breakers import Stage, combinations

pytestmark = [pytest.mark.breakers, pytest.mark.integration]
RUN = ("run",)
PID = 'say("PID", os.getpid())\n'
STEP = '    say("STEP", step)\n'


def journal(stage: Stage, kind: str) -> list[dict[str, Any]]:
    return [r for r in read_journal(stage.run_dir).records if r["kind"] == kind]


def terminate(stage: Stage) -> None:
    assert stage.process is not None
    stage.process.send_signal(signal.SIGTERM)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


CHILDREN = """
import subprocess
for name in os.listdir("children"):
    if os.path.exists(f"/proc/{name}/stat") and open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[0] not in "ZX":
        say("BESIDE", name)
def note(pid):
    open(f"children/{pid}", "w").close()
def renamed():
    import ctypes
    stat = open("/proc/self/stat").read().rpartition(")")[2].split()
    note(os.getpid())
    ctypes.memset(int(stat[47]), 0, int(stat[48]) - int(stat[47]))
    time.sleep(300)
def daemon():
    os.setsid()
    if os.fork() == 0:
        note(os.getpid())
        os.execve("/bin/sleep", ["sleep", "300"], {})
    os._exit(0)
before = len(os.listdir("children"))
for child in (renamed, daemon):
    if os.fork() == 0:
        child()
note(subprocess.Popen(["env", "-i", "sleep", "300"]).pid)
while len(os.listdir("children")) < before + 3:
    time.sleep(0.01)
"""


@combinations(launchers=RUN)
@pytest.mark.parametrize("held", ["cgroup", "parent"])
@pytest.mark.parametrize("fault", ["rank", "agent"])
def test_children_without_marks_live_neither_beside_the_next_attempt_nor_after_the_end(
    stage: Stage, held: str, fault: str
) -> None:
    if held == "cgroup" and Cgroups.find("testnone")[0] is None:
        pytest.skip("this machine cannot hold processes by a cgroup")
    (stage.folder / "children").mkdir()
    stage.options = ["--ownership", held]
    stage.alter(PID, PID + CHILDREN)
    try:
        stage.start().until_durable(10)
        step = stage.step()
        if fault == "rank":
            stage.kill_ranks()
        else:
            stage.faults.kill_agent("node-000")
        stage.until(lambda: len(stage.restored()) > 1, "the next attempt")
        assert stage.restored()[1][0] >= step - 3, stage.story()
        stage.until_durable(step + 10)
        assert stage.stop() == 11, stage.story()
        left = [p for p in os.listdir(stage.folder / "children") if lives(int(p))]
        assert len(os.listdir(stage.folder / "children")) == 6 and left == [], stage.story()
        assert stage.said("BESIDE") == [] and "not proven" not in stage.output
        assert stage.faults.left_over() == []
        stage.goes_on(max(stage.durable()))
    finally:
        for name in os.listdir(stage.folder / "children"):
            if lives(int(name)) and os.readlink(f"/proc/{name}/cwd") == str(stage.folder):
                os.kill(int(name), signal.SIGKILL)


FLOOD = """    if step == 30 and restored is None:
        line = "WARNING: tokens beyond 4096 are cut, this message repeats for every sample 254\\n" * 12500
        for _ in range(150):
            sys.stdout.write(line)
        say("FLOODED")
"""


@combinations(launchers=RUN)
@pytest.mark.parametrize("when", ["in the flood", "after it"])
def test_a_stop_in_a_flood_of_log_is_answered_and_saves(stage: Stage, when: str) -> None:
    stage.alter(STEP, STEP + FLOOD)
    stage.options = ["--stop-within", "30s"]
    stage.start()
    log = stage.run_dir.rank_log(1, "node-000", 0)
    if when == "in the flood":
        stage.until(lambda: log.exists() and log.stat().st_size > 20_000_000, "the flood")
    else:
        stage.until(lambda: stage.said("FLOODED"), "the end of the flood")
    terminate(stage)
    assert stage.until_said("stopping") < 5
    assert stage.wait(60) == 11, stage.story()
    last = stage.step()
    assert last >= 30 and max(stage.durable()) == last, (stage.durable(), last)
    stage.goes_on(last)


EXIT = """    if world > 1:
        torch.distributed.all_reduce(torch.ones(1))
    if step == 35 and rank == 1 and not os.path.exists("mended"):
        os._exit(0)
"""


@combinations(launchers=RUN)
def test_an_early_exit_with_code_0_twice_stops_the_run_and_loses_nothing(stage: Stage) -> None:
    stage.ranks = 2
    stage.alter(STEP, EXIT + STEP)
    stage.start()
    assert stage.wait() == 10, stage.story()
    first, second = read_incidents(stage.run_dir)
    for incident in (first, second):
        assert (
            incident["verdict"]["decided_by"] == "early-exit" and incident["verdict"]["faulty"]["rank"] == 1
        )
    assert (first["action"], second["action"]) == ("restart", "stop")
    assert max(stage.durable()) >= 32, stage.story()
    (stage.folder / "mended").touch()
    stage.goes_on(max(stage.durable()))


@combinations(launchers=RUN)
def test_a_stop_after_the_run_directory_was_deleted_saves_what_is_in_memory(stage: Stage) -> None:
    """SIGTERM comes before the supervisor has noticed, or just after."""
    stage.options = ["--stop-within", "15s"]
    stage.start().until_step(25)
    faults, step = stage.faults, stage.step()
    shutil.rmtree(stage.run_dir.path)
    told = len(stage.output)
    terminate(stage)
    assert stage.until_said("stopping", 10, after=told) < 5
    began = time.monotonic()
    assert stage.wait(60) == 17, stage.story()
    assert time.monotonic() - began < 25
    assert "was deleted" in stage.output and "Traceback" not in stage.output, stage.story()
    assert faults.left_over() == []
    durable = max(stage.durable())
    assert durable >= step, stage.story()
    saved = stage.output.partition("saved: ")[2].partition("\n")[0]
    assert saved.startswith(f"step-{durable:08d}") and f" in {stage.where} (" in saved, stage.story()
    if stage.place == "run":  # what is left of that run is a folder of checkpoints: another run takes it up
        (found,) = stage.run_dir.checkpoints.glob(f"step-{durable:08d}.*")
        stage.options += ["--from", str(found)]
        stage.run_name = "other"
    stage.goes_on(durable)


@combinations(launchers=RUN)
def test_a_stopped_supervisor_that_comes_back_after_a_takeover_does_no_harm(stage: Stage) -> None:
    stage.options = ["--lease", "30s"]
    stage.steps = 5000
    stage.start().until_durable(10)
    first = stage.process
    assert first is not None
    ranks = {p.pid for p in stage.faults.ranks().values()}
    os.kill(first.pid, signal.SIGSTOP)
    try:
        stage.start().until_said("took over attempt 1")
        assert {p.pid for p in stage.faults.ranks().values()} == ranks, "no rank was touched"
    finally:
        os.kill(first.pid, signal.SIGCONT)
    assert first.wait(30) == 13, stage.story()
    assert stage.output.count("another supervisor took over") == 1
    assert "Traceback" not in stage.output and "socket.send" not in stage.output
    stage.until_durable(stage.step() + 10)
    assert len(stage.restored()) == 1
    assert stage.stop() == 11, stage.story()
    assert max(stage.durable()) == stage.step()
    stage.goes_on(stage.step())


@combinations(launchers=RUN)
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_training_without_its_supervisor_goes_on_and_saves(stage: Stage, how: str) -> None:
    stage.options = ["--lease", "60s"]
    stage.steps = 5000
    stage.start().until_durable(10)
    supervisor = stage.process
    assert supervisor is not None
    before = stage.step()
    os.kill(supervisor.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    try:
        deadline = time.monotonic() + 40
        while (
            stage.step() < before + 80 or max(stage.durable()) < before + 40
        ) and time.monotonic() < deadline:
            time.sleep(0.05)
        reached, durable = stage.step(), max(stage.durable())
    finally:
        if how == "stopped":
            os.kill(supervisor.pid, signal.SIGCONT)
    assert reached >= before + 80 and durable >= before + 40, (before, reached, durable, stage.story())
    if how == "killed":
        supervisor.wait(10)
        stage.start().until_said("took over attempt 1")
    assert stage.stop() == 11, stage.story()
    assert len(stage.restored()) == 1 and max(stage.durable()) == stage.step(), stage.story()
    stage.goes_on(stage.step())


@combinations(launchers=RUN)
def test_with_checkpoints_of_ours_an_unproven_end_is_no_reason_to_wait(stage: Stage) -> None:
    stage.options = ["--ownership", "marks"]
    stage.start().until_durable(10)
    step = stage.step()
    stage.faults.kill_agent("node-000")
    stage.until(lambda: len(stage.restored()) > 1, "the next attempt")
    assert stage.restored()[1][0] >= step - 3 and journal(stage, "unproven") and not journal(stage, "waiting")
    assert stage.stop() == 11
    stage.goes_on(max(stage.durable()))


OWN = """
import os, sys, time
import torch, unbroken
run = unbroken.attach()
step = 0
if os.path.exists("model.pt"):
    step = torch.load("model.pt")["step"]
with open("said.txt", "a") as f:
    print("PID", os.getpid(), file=f)
    print("RESTORED", step, "own", file=f)
while step < 2000:
    step += 1
    torch.save({"step": step}, "model.pt.new")
    os.replace("model.pt.new", "model.pt")
    with open("said.txt", "a") as f:
        print("STEP", step, file=f)
    run.step(step, loss=1.0)
    time.sleep(0.05)
    if run.should_stop(step):
        sys.exit(unbroken.EXIT_STOPPED)
"""


@combinations(places=("own",), launchers=RUN)
@pytest.mark.parametrize("then", ["supervisor killed", "stopped", "other holding"])
def test_a_takeover_does_not_forget_that_an_own_save_is_in_danger(stage: Stage, then: str) -> None:
    """An unmodified script's own torch.save after an unproven end: the run waits, and so does every successor."""
    (stage.folder / "train.py").write_text(OWN)
    stage.options = ["--ownership", "marks"]
    stage.start().until_step(10)
    stage.faults.kill_agent("node-000")
    stage.until_said("the next attempt waits for a person")
    assert stage.process is not None
    if then == "supervisor killed":
        stage.faults.kill_supervisor()
        stage.wait()
    else:
        assert stage.stop() == 11, stage.story()
    if then == "other holding":
        stage.options = ["--ownership", "parent"]
    told = len(stage.output)
    stage.start().until_said("the next attempt waits for a person", after=told)
    assert len(stage.restored()) == 1
    (sure,) = {w.rstrip(".") for w in stage.output[told:].split() if w.endswith("/gone")}
    Path(stage.folder / sure).touch()
    stage.until(lambda: len(stage.restored()) > 1, "the next attempt")
    assert stage.restored()[1][0] >= 9
    assert stage.stop() == 11, stage.story()


@combinations()
def test_the_keeper_starts_where_only_sys_path_was_changed(stage: Stage) -> None:
    base = getattr(sys, "_base_executable", sys.executable)
    bare = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    tried = subprocess.run(
        [base, "-c", "import unbroken"], env=bare, capture_output=True, check=False, cwd="/"
    )
    if tried.returncode == 0:
        pytest.skip("every interpreter here can import us")
    paths = [str(Path(unbroken.__file__).parents[1]), sysconfig.get_path("purelib")]
    starts = stage.folder / "starts.py"
    starts.write_text(
        f"import runpy, sys\nsys.path[:0] = {paths!r}\ndel sys.argv[0]\n"
        "if sys.argv[0] == '-m':\n    del sys.argv[0]\n"
        "    runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)\n"
        "else:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    stage.interpreter = [base, str(starts)]
    if stage.launcher == "torchrun":  # it starts the ranks without any of this
        stage.alter("import torch, unbroken", f"sys.path[:0] = {paths!r}\nimport torch, unbroken")
    stage.start().until_durable(10)
    stage.kill_ranks()
    if stage.launcher != "run":
        stage.wait()
        stage.start()
    stage.until(lambda: len(stage.restored()) > 1, "another start")
    assert stage.restored()[1][0] >= 10
    stage.until_durable(stage.restored()[1][0] + 5)
    assert "Traceback" not in stage.output.replace("torch.distributed", "") or stage.launcher == "torchrun"
    assert stage.stop() == (11 if stage.launcher == "run" else 0), stage.story()


# --- the same without a supervisor, where processes are the user's to look after and checkpoints are still ours


@combinations(launchers=("torchrun", "alone"))
def test_a_flood_of_log_without_a_supervisor_holds_no_checkpoint_up(stage: Stage) -> None:
    stage.alter(STEP, STEP + FLOOD)
    stage.start().until(lambda: stage.said("FLOODED"), "the flood")
    assert stage.stop() == 0, stage.story()
    assert max(stage.durable()) == stage.step() >= 30, (stage.durable(), stage.step())
    stage.goes_on(stage.step())


@combinations(launchers=("torchrun",))
def test_a_rank_that_leaves_early_under_torchrun_loses_nothing(stage: Stage) -> None:
    stage.ranks = 2
    stage.alter(STEP, EXIT + STEP)
    stage.start()
    assert stage.wait() != 0, stage.story()
    (stage.folder / "mended").touch()
    stage.goes_on(32)


@combinations()
def test_a_killed_keeper_loses_nothing(stage: Stage) -> None:
    stage.steps = 2000
    stage.start().until_durable(10)
    pid = stage.faults.processes("keeper")[0].pid if stage.launcher == "run" else keeper_pid(stage.scratch)
    os.kill(pid, signal.SIGKILL)
    stage.until_durable(stage.step() + 15)
    assert len(stage.restored()) == 1, "no rank had to be started again"
    assert stage.stop() == (11 if stage.launcher == "run" else 0), stage.story()
    assert max(stage.durable()) == stage.step(), (stage.durable(), stage.step())
    stage.goes_on(stage.step())


@combinations(places=("own",))
def test_a_folder_of_checkpoints_that_is_deleted_is_made_again(stage: Stage) -> None:
    stage.steps = 2000
    stage.start().until_durable(10)
    shutil.rmtree(stage.folder / "checkpoints", ignore_errors=True)
    stage.until_durable(stage.step() + 15)
    assert stage.stop() == (11 if stage.launcher == "run" else 0), stage.story()
    assert max(stage.durable()) == stage.step(), (stage.durable(), stage.step())
    stage.goes_on(stage.step())


@combinations(places=("store",), launchers=("alone",))
def test_a_keeper_killed_over_commits_on_a_slow_storage_leaves_nobody_waiting(stage: Stage) -> None:
    """What it had written and not committed is in no buffer any more: a newer checkpoint makes up for it."""
    stage.steps, stage.seconds = 2000, 0.01
    stage.server.fault = lambda r: Fault(delay=0.05) if r.method in ("PUT", "POST") else None
    stage.start().until_durable(10)
    os.kill(keeper_pid(stage.scratch), signal.SIGKILL)
    stage.until_durable(stage.step() + 15)
    assert stage.stop(40) == 0, stage.story()
    assert max(stage.durable()) == stage.step(), (stage.durable(), stage.step())
