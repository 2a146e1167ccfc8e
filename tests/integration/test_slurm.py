"""Runs inside jobs of a real Slurm: what happens to nodes, steps and supervisors, and what becomes of the run."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.slurm import Testbed, testbed, wait_for
from unbroken.cluster.holding.processes import marked
from unbroken.cluster.local import find_root
from unbroken.progress import read_spec

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


def test_an_allocation_that_is_too_small_is_refused_before_anything_starts(
    new_run: NewRun, bed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", bed.environment["SLURM_CONF"])
    job = bed.share_job()
    run = new_run("--nodes", "4", "--spares", "1", "--cluster", f"slurm,job={job}").start()
    assert run.wait() == 14
    assert "the job has 4 nodes that can be used, the run asks for 4 nodes and 1 spares" in run.output
    assert "sbatch -N 5 --no-kill" in run.output and run.attempts() == 0


def test_a_run_submits_itself_is_preempted_requeued_and_goes_on(
    new_run: NewRun, bed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of a higher partition takes its nodes, with 20 s of notice."""
    bed.clear()
    monkeypatch.setenv("SLURM_CONF", bed.environment["SLURM_CONF"])
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    run = new_run("--nodes", "2", "--spares", "1", "--cluster", "slurm,poll=500ms", steps=300).start()
    wait_for(lambda: run.run_dir.spec.exists() and run.run_dir.steps(1).exists(), "the first step", 90)
    job = bed.call("squeue", "-h", "-p", "main", "-o", "%i")
    nodes = f"-N{len(bed.nodes)}"
    bed.call("sbatch", "-p", "urgent", nodes, "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1")
    assert run.wait(150) == 0, run.output
    assert [r["how"] for r in run.journal("ended")] == ["interrupted", "completed"]
    for said in (
        f"submitted as job {job}",
        f"job {job} is requeued and goes on",
        "the run is completed at step 300",
    ):
        assert said in run.output, run.output
    assert "Restarts=1" in bed.call("scontrol", "-o", "show", "job", job)
