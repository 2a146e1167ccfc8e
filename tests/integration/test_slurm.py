"""Runs inside jobs of a real Slurm: what happens to nodes, steps and supervisors, and what becomes of the run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.slurm import Testbed, testbed, wait_for
from unbroken.cluster.holding.processes import marked
from unbroken.cluster.local import find_root
from unbroken.progress import RunDir, read_journal, read_spec

from .conftest import SCRIPT, RunUnderTest

pytestmark = [pytest.mark.integration, pytest.mark.slow]
NewRun = Callable[..., RunUnderTest]


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    with testbed() as found:
        yield found


class BatchRun(RunUnderTest):
    """`unbroken run` as the script of a batch job."""

    def __init__(self, bed: Testbed, folder: Path, *options: str, steps: int = 100) -> None:
        (folder / "script.py").write_text(SCRIPT)
        super().__init__(folder, ["script.py", str(steps), "0.05"], list(options))
        self.bed, self.job = bed, ""

    def submit(self, *options: str, cluster: str = "slurm,poll=500ms") -> BatchRun:
        job = self.folder / "job.sh"
        command = " ".join([
            sys.executable, "-m", "unbroken", "run", "--run-dir", str(self.run_dir.path), "--cluster", cluster, *self.options,
            "--", *self.command,
        ])  # fmt: skip
        job.write_text(f"#!/bin/bash\nexec {command}\n")
        out = str(self.folder / "job.out")
        self.job = self.bed.call(
            "sbatch",
            "--parsable",
            "--no-kill",
            "--open-mode=append",
            "-o",
            out,
            "-D",
            str(self.folder),
            *options,
            str(job),
        )
        return self

    def said(self) -> str:
        out = self.folder / "job.out"
        return out.read_text(errors="replace") if out.exists() else ""

    def until(self, condition: Callable[[], object], what: str, within: float = 90) -> None:
        def ended() -> bool:
            assert self.bed.state(self.job) in ("PENDING", "CONFIGURING", "RUNNING"), (
                f"ended early\n{self.story()}"
            )
            return bool(condition())

        try:
            wait_for(ended, what, within)
        except AssertionError as e:
            raise AssertionError(f"{e}\n{self.said()}\n{self.story()}") from None

    def at_step(self, step: int, attempt: int = 1) -> None:
        file = self.run_dir.steps(attempt)
        self.until(
            lambda: file.exists() and len(file.read_text().splitlines()) >= step,
            f"step {step} of attempt {attempt}",
        )

    def wait_for_end(self) -> None:
        wait_for(
            lambda: self.bed.state(self.job) in ("", "COMPLETED", "FAILED", "CANCELLED"), "the job to end", 90
        )


@pytest.fixture
def submit(
    bed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., BatchRun]]:
    monkeypatch.setenv("SLURM_CONF", bed.environment["SLURM_CONF"])
    made: list[BatchRun] = []

    def make(*options: str, steps: int = 100) -> BatchRun:
        made.append(BatchRun(bed, tmp_path, *options, steps=steps))
        return made[-1]

    yield make
    bed.clear()
    for run in made:
        if run.run_dir.spec.exists():
            run_id = read_spec(run.run_dir.spec).run_id
            wait_for(lambda i=run_id: not marked(i), "nothing of the run to be left")
            for root in (find_root(run_id), find_root(f"{run_id}-slurm")):
                shutil.rmtree(root, ignore_errors=True)


def test_a_lost_node_is_replaced_in_the_same_job(submit: Callable[..., BatchRun], bed: Testbed) -> None:
    run = submit("--nodes", "2", "--spares", "1", "--lease", "60s").submit("-N3")
    run.at_step(5)
    lost = run.journal("attempt")[0]["slots"][1]
    bed.set_down(lost)
    run.at_step(5, attempt=2)
    assert lost not in run.journal("attempt")[1]["slots"]
    (incident,) = run.incidents()
    assert incident["kind"] == "node_lost" and incident["nodes"] == {lost: "gone"}
    if bed.contained:
        # Slurm proves it: nobody waits for the lease of a minute.
        assert incident["phases"]["detect"] + incident["phases"]["stop"] < 20
        assert "not proven" not in run.said()
    assert "Restarts=0" in bed.call("scontrol", "-o", "show", "job", run.job)
    run.wait_for_end()
    assert "the run is completed at step 100" in run.said(), run.said()


def test_a_drained_node_is_left_at_a_step_and_a_cancelled_step_takes_no_agent_with_it(
    submit: Callable[..., BatchRun], bed: Testbed
) -> None:
    run = submit("--nodes", "2", "--spares", "1", steps=300).submit("-N3")
    run.at_step(5)
    first, second = run.journal("attempt")[0]["slots"]
    ranks = [
        line.split()[0]
        for line in bed.call("squeue", "-s", "-h", "-o", "%i %j %N").splitlines()
        if ".ranks" in line and line.endswith(second)
    ]
    agents = {p.pid for p in marked(read_spec(run.run_dir.spec).run_id) if p.role in ("agent", "keeper")}
    bed.call("scancel", *ranks)
    run.at_step(5, attempt=2)
    assert run.journal("attempt")[1]["slots"] == [first, second]
    assert agents == {
        p.pid for p in marked(read_spec(run.run_dir.spec).run_id) if p.role in ("agent", "keeper")
    }
    if bed.contained:
        assert "not proven" not in run.said()
    bed.call("scontrol", "update", f"nodename={second}", "state=drain", "reason=new cables")
    run.at_step(5, attempt=3)
    assert second not in run.journal("attempt")[2]["slots"]
    kinds = [i["kind"] for i in run.incidents()]
    assert kinds == ["failed", "preempted"] and "new cables" in run.said()
    bed.call("scancel", run.job)
    run.wait_for_end()


def test_a_supervisor_elsewhere_is_succeeded_and_an_agent_that_is_killed_is_replaced(
    new_run: NewRun, bed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor need not run inside the job: an allocation may be had first, by salloc."""
    monkeypatch.setenv("SLURM_CONF", bed.environment["SLURM_CONF"])
    job = bed.share_job()
    run = new_run(
        "--nodes", "2", "--lease", "60s", "--cluster", f"slurm,job={job},poll=500ms", steps=2000
    ).start()
    run.until_step(5)
    assert run.process is not None
    run_id = read_spec(run.run_dir.spec).run_id
    before = {p.pid for p in marked(run_id) if p.role == "rank"}
    run.process.send_signal(signal.SIGKILL)
    run.process.wait(10)
    run.start()
    wait_for(lambda: run.journal("adopted") or run.attempts() > 1, "the takeover")
    assert {p.pid for p in marked(run_id) if p.role == "rank"} == before and run.attempts() == 1
    agent = next(p for p in marked(run_id) if p.role == "agent")
    os.kill(agent.pid, signal.SIGKILL)
    wait_for(lambda: run.attempts() == 2, "another attempt")
    assert run.incidents()[-1]["kind"] == "agent_lost"
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 11, run.output
    assert not marked(run_id)
    assert not find_root(f"{run_id}-slurm").exists()


def test_the_tasks_of_an_array_are_runs_of_their_own(bed: Testbed, tmp_path: Path) -> None:
    """One of them has the number of the whole array: what is asked of that concerns all. A node of one is lost: its run alone ends."""
    bed.clear()
    (tmp_path / "script.py").write_text(SCRIPT)
    runs = tmp_path / "runs"
    command = f"{sys.executable} -m unbroken run --run-dir {runs}/$SLURM_ARRAY_TASK_ID --cluster slurm,poll=500ms --nodes 2 -- script.py"
    job = tmp_path / "job.sh"
    job.write_text(f"#!/bin/bash\nexec {command} $((40 + 260 * ($SLURM_ARRAY_TASK_ID - 1))) 0.05\n")
    options = (
        "--parsable",
        "--array=1-2",
        "-N2",
        "--exclusive",
        "--no-kill",
        "-D",
        str(tmp_path),
        "-o",
        f"{tmp_path}/out.%a",
    )
    array = bed.call("sbatch", *options, str(job))
    first, second = (RunDir(runs / str(n)) for n in (1, 2))

    def said(n: int) -> str:
        out = tmp_path / f"out.{n}"
        return out.read_text(errors="replace") if out.exists() else ""

    def steps(run: RunDir) -> int:
        return len(run.steps(1).read_text().splitlines()) if run.steps(1).exists() else 0

    try:
        wait_for(lambda: steps(second) >= 5, "the second task to train", 120)
        wait_for(lambda: "completed at step 40" in said(1), "the first task to end", 120)
        nodes = [
            {slot for r in read_journal(run).records if r["kind"] == "attempt" for slot in r["slots"]}
            for run in (first, second)
        ]
        assert len(nodes[0]) == len(nodes[1]) == 2 and not nodes[0] & nodes[1]
        assert steps(second) < 300 and "completed" not in said(2)
        before = steps(second)
        wait_for(lambda: steps(second) > before + 5, "the second task to go on", 30)
    except AssertionError as e:
        raise AssertionError(f"{e}\n{said(1)}\n{said(2)}") from None
    finally:
        bed.call("scancel", array, check=False)
        bed.clear()
        for run in (first, second):
            if run.spec.exists():
                shutil.rmtree(find_root(f"{read_spec(run.spec).run_id}-slurm"), ignore_errors=True)


def test_a_live_run_is_amended_from_the_login_node_that_submitted_it(
    new_run: NewRun, bed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The live supervisor in the job is asked: no other job is submitted."""
    bed.clear()
    monkeypatch.setenv("SLURM_CONF", bed.environment["SLURM_CONF"])
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    run = new_run("--nodes", "2", "--cluster", "slurm,poll=500ms", steps=2000).start()
    wait_for(lambda: run.run_dir.spec.exists() and run.run_dir.steps(1).exists(), "the first step", 120)
    argv = [
        sys.executable,
        "-m",
        "unbroken",
        "run",
        "--run-dir",
        str(run.run_dir.path),
        "--amend",
        "--cluster",
        "slurm,poll=500ms",
    ]
    amended = subprocess.run(
        [*argv, "--", "script.py", "200", "0.05"],
        cwd=run.folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert amended.returncode == 0, amended.stderr + amended.stdout
    assert len(bed.call("squeue", "-h", "-o", "%i").splitlines()) == 1
    assert run.wait(120) == 0, run.output
    assert run.attempts() == 2 and "completed at step 200" in run.story()


def test_an_allocation_that_is_too_small_is_refused_before_anything_starts(
    new_run: NewRun, bed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", bed.environment["SLURM_CONF"])
    job = bed.share_job()
    run = new_run("--nodes", "4", "--spares", "1", "--cluster", f"slurm,job={job}").start()
    assert run.wait() == 14
    assert "the job has 4 nodes that can be used, the run asks for 4 nodes and 1 spare" in run.output
    assert "sbatch -N 5 --no-kill" in run.output and run.attempts() == 0


def test_a_run_submits_itself_is_preempted_requeued_and_goes_on(
    new_run: NewRun, bed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of a higher partition takes its nodes, with 20 s of notice. It has no time limit: Slurm shows no end of it. Later the node
    of its batch script is set down, which ends the job, and nothing but the run that submitted it would have it go on."""
    bed.clear()
    monkeypatch.setenv("SLURM_CONF", bed.environment["SLURM_CONF"])
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    run = new_run("--nodes", "2", "--spares", "1", "--cluster", "slurm,poll=500ms", steps=300).start()
    wait_for(lambda: run.run_dir.spec.exists() and run.run_dir.steps(1).exists(), "the first step", 90)
    job = bed.call("squeue", "-h", "-p", "main", "-o", "%i")
    nodes = f"-N{len(bed.nodes)}"
    bed.call("sbatch", "-p", "urgent", nodes, "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1")

    def trained() -> int:
        file = run.run_dir.steps(2)
        return len(file.read_text().splitlines()) if file.exists() else 0

    wait_for(lambda: trained() > 20, "steps after the preemption", 90)
    shown = bed.call("scontrol", "-o", "show", "job", job)
    first = next(w.partition("=")[2] for w in shown.split() if w.startswith("BatchHost="))
    bed.set_down(first)
    assert run.wait(150) == 0, run.output
    assert [r["how"] for r in run.journal("ended")][::2] == ["interrupted", "completed"]
    for said in (
        f"submitted as job {job}",
        f"job {job} is requeued and goes on",
        f"the run is supervised on {first}, in the job's batch script",
        f"job {job} ended with {first}, the node of its batch script",
        "the run is completed at step 300",
    ):
        assert said in run.output, run.output
    assert "Restarts=2" in bed.call("scontrol", "-o", "show", "job", job)
