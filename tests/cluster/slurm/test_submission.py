"""A run as a batch job: the script that is submitted, what is said of the job, and how the run goes on in another one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from unbroken.cluster.contract import Request
from unbroken.cluster.slurm.cluster import SlurmCluster
from unbroken.cluster.slurm.controller.commands import Slurm, SlurmRefused
from unbroken.cluster.slurm.controller.records import JobRecord
from unbroken.cluster.slurm.jobs import batch
from unbroken.cluster.slurm.jobs.submission import (
    Output,
    Submission,
    describe,
    find_preemption_risk,
    make_script,
    rebuild_arguments,
)
from unbroken.cluster.slurm.options import SlurmOptions
from unbroken.errors import UsageError


def submission(options: SlurmOptions, request: Request = Request(2, 1)) -> Submission:
    words = ("--cluster", "slurm", "--run-dir", "/shared/run", "--", "train.py", "--lr", "3e-4 x")
    return Submission(
        options,
        request,
        words,
        "unbroken-run",
        Path("/shared/run.slurm.log"),
        Path("/shared/run"),
        Path("/work dir"),
    )


def test_the_script_asks_for_nodes_and_spares_and_becomes_the_run(tmp_path: Path) -> None:
    options = SlurmOptions(
        partition="gpu",
        account="a1",
        time="12:00:00",
        gpus=8,
        sbatch=("--qos=high",),
        setup=tmp_path / "env.sh",
    )
    lines = make_script(submission(options, Request(2, 1, exclude=frozenset({"n7", "n3"})))).splitlines()
    assert lines[0] == "#!/bin/bash"
    for asked in (
        "--nodes=3", "--no-kill", "--requeue", "--open-mode=append", "--partition=gpu", "--account=a1", "--time=12:00:00",
        "--gpus-per-node=8", "--exclude=n3,n7", "--qos=high", "--output=/shared/run.slurm.log", "--chdir=/work dir",
    ):  # fmt: skip
        assert f"#SBATCH {asked}" in lines
    assert lines[-2] == f". {tmp_path / 'env.sh'}"
    assert lines[-1].startswith("exec ") and lines[-1].endswith(
        "-m unbroken.cluster.slurm.jobs.batch --requeue auto -- --cluster slurm --run-dir /shared/run -- train.py --lr '3e-4 x'"
    )
    assert "#SBATCH --requeue" not in make_script(submission(SlurmOptions(requeue="successor")))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--nodes", "2", "--", "t.py", "--run-dir", "x"], ("--nodes", "2", "--run-dir", "/r", "--", "t.py", "--run-dir", "x")),
        (["--run-dir", "a", "--", "t.py"], ("--run-dir", "/r", "--", "t.py")),
        (["--run-dir=a", "t.py"], ("--run-dir=/r", "t.py")),
    ],
)  # fmt: skip
def test_the_run_in_the_job_has_the_same_arguments(words: list[str], expected: tuple[str, ...]) -> None:
    assert rebuild_arguments(words, Path("/r")) == expected
    assert batch.find_run_dir(expected) == Path("/r")


def test_what_a_job_does_is_said() -> None:
    waits = describe(JobRecord("7", "PENDING", reason="Priority", starts=1795984208.0))
    assert waits.startswith("waits: Priority, expected to start ")
    assert "will not start as it is" in describe(JobRecord("7", "PENDING", reason="PartitionNodeLimit"))
    assert describe(JobRecord("7", "RUNNING", ("n1", "n2"))) == "runs on 2 nodes (n1, n2)"


def test_the_output_is_shown_as_it_grows(tmp_path: Path) -> None:
    log, said = tmp_path / "log", []
    log.write_text("of an earlier job\n")
    output = Output(log)
    with open(log, "a") as f:
        f.write("one\ntw")
        f.flush()
        output.show(said.append)
        f.write("o\n")
        f.flush()
        output.show(said.append)
    assert said == ["  one", "  two"]


def test_inside_an_allocation_nothing_is_submitted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(UsageError, match="sbatch and squeue are not on the PATH"):
        SlurmCluster.plan_submission(SlurmOptions(), Request(1), [], tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert SlurmCluster.plan_submission(SlurmOptions(), Request(1), [], tmp_path) is None


@pytest.mark.parametrize(
    ("mode", "grace", "qos", "says"),
    [
        (
            "REQUEUE",
            "0",
            None,
            r"job 7 can be preempted in partition main \(PreemptMode=REQUEUE\), without any notice",
        ),
        ("CANCEL", "3", None, "with 3 s of notice .*, of which up to 5 s pass before it is seen"),
        ("REQUEUE", "60", None, ""),
        ("OFF", "0", None, ""),
        ("GANG,SUSPEND", "0", None, ""),
        ("REQUEUE", "0", "00:01:00", ""),
        ("REQUEUE", "60", "", r"the notice of its QOS \(normal\) cannot be read"),
    ],
)
def test_a_job_that_can_be_preempted_without_notice_is_told_so(
    mode: str, grace: str, qos: str | None, says: str
) -> None:
    class Preempting(Slurm):
        async def call(self, *argv: str, **_: object) -> str:
            match argv:
                case ("scontrol", "show", "config"):
                    return f"PreemptType = preempt/{'partition_prio' if qos is None else 'qos'}"
                case ("scontrol", "-o", "show", "job", "7"):
                    return "JobId=7 QOS=normal PreemptTime=None Partition=main Power="
                case ("scontrol", "-o", "show", "partition"):
                    return f"PartitionName=main GraceTime={grace} PreemptMode={mode}"
            if not qos:
                raise SlurmRefused("sacctmgr", "no accounting here")
            return f"{qos}\n"

    said = asyncio.run(find_preemption_risk(Preempting(), "7", 5.0))
    assert re.search(says, said) if says else said == ""


class Site(Slurm):
    """One that may forbid a requeue."""

    def __init__(self, *, forbids: bool = False, state: str = "RUNNING") -> None:
        super().__init__()
        self._forbids, self._state, self.calls = forbids, state, []

    async def call(
        self,
        *argv: str,
        within_s: float | None = None,
        env: Mapping[str, str] | None = None,
        text: str | None = None,
    ) -> str:
        self.calls.append(argv)
        if argv[0] == "squeue":
            return f"7|{self._state}|n1|N/A|None|N/A|1"
        if argv[:2] == ("scontrol", "requeue") and self._forbids:
            raise SlurmRefused("scontrol requeue", "Requested operation is presently disabled")
        return "8;cluster" if argv[0] == "sbatch" else ""


def test_a_task_of_an_array_asks_for_itself_alone() -> None:
    """One of them has the number of the whole array as its own."""
    assert batch.name_job({"SLURM_JOB_ID": "9"}) == "9"
    assert (
        batch.name_job({"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}) == "7_2"
    )


class LosesFirstNode(Slurm):
    """Job 7 has ended; the node of its batch script is in the state that a test gives."""

    def __init__(self, states: str, *, job_state: str = "FAILED", forbids: bool = False) -> None:
        super().__init__()
        self._states, self._job_state, self._forbids = states, job_state, forbids
        """The states are "" where the controller does not know the node any more."""
        self.calls: list[str] = []

    async def call(self, *argv: str, text: str | None = None, **_: object) -> str:
        self.calls.append(" ".join(argv[:3]))
        match argv:
            case ("squeue", *_):
                going_on = {"scontrol requeue 7", "sbatch --parsable"} & set(self.calls)
                return f"7|{'COMPLETED' if going_on else self._job_state}|n1|N/A|None|N/A|1"
            case ("scontrol", "-o", "show", "job", _):
                return f"JobId=7 JobState={self._job_state} BatchHost=n1 ExitCode=137:0"
            case ("scontrol", "-o", "show", "node", *_):
                if not self._states:
                    raise SlurmRefused("scontrol show node", "Node n1 not found")
                return f"NodeName=n1 CPUTot=4 State={self._states} Partitions=main"
            case ("scontrol", "requeue", "7"):
                if self._forbids:
                    raise SlurmRefused("scontrol requeue", "Requested operation is presently disabled")
                self._job_state = "COMPLETED"
                return ""
            case ("sbatch", *_):
                self._job_state = "COMPLETED"
                return "8"
        raise AssertionError(argv)


@pytest.mark.parametrize(
    ("slurm", "requeue", "does", "says"),
    [
        (LosesFirstNode("DOWN"), "auto", "scontrol requeue 7", "job 7 ended with n1, the node of its batch script"),
        (LosesFirstNode("DOWN", forbids=True), "auto", "sbatch --parsable", "cannot be requeued .*: job 8 goes on"),
        (LosesFirstNode("DOWN*"), "successor", "sbatch --parsable", "job 8 goes on from the newest checkpoint"),
        (LosesFirstNode("DOWN", forbids=True), "requeue", "scontrol requeue 7", "cannot be requeued .*The same command goes on"),
        (LosesFirstNode(""), "auto", "", "job 7 is over: failed"),
        (LosesFirstNode("DOWN"), "no", "", "job 7 is over: failed"),
        (LosesFirstNode("IDLE"), "auto", "", "job 7 is over: failed"),
        (LosesFirstNode("DOWN", job_state="CANCELLED"), "auto", "", "job 7 is over: cancelled"),
    ],
)  # fmt: skip
def test_a_job_that_ended_with_its_first_node_goes_on(
    slurm: LosesFirstNode, requeue: str, does: str, says: str, tmp_path: Path
) -> None:
    said: list[str] = []
    followed = replace(
        submission(SlurmOptions(requeue=requeue)), run_dir=tmp_path / "run", output=tmp_path / "log"
    )
    asyncio.run(followed.follow(slurm, "7", said.append))
    assert any(re.search(says, line) for line in said), said
    went_on = [c for c in slurm.calls if c.startswith(("scontrol requeue", "sbatch"))]
    assert went_on[-1:] == ([does] if does else []), slurm.calls


@pytest.mark.parametrize(
    ("site", "mode", "says", "does"),
    [
        (Site(), "auto", r"job 7 is requeued and goes on, without n3", ("scontrol", "update", "jobid=7", "ExcNodeList=n3")),
        (Site(forbids=True), "auto", r"job 8 goes on when this one is over: it cannot be requeued .*disabled",
         ("sbatch", "--parsable", "--dependency=afterany:7", "--exclude=n3")),
        (Site(forbids=True), "requeue", r"it cannot be requeued.*The same command goes on", ("scontrol", "requeue", "7")),
        (Site(), "successor", r"job 8 goes on when", ("sbatch", "--parsable", "--dependency=afterany:7", "--exclude=n3")),
        (Site(state="COMPLETING"), "auto", r"the job is completing: it is not requeued", None),
    ],
)  # fmt: skip
def test_a_run_goes_on_in_another_job(
    site: Site, mode: str, says: str, does: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import re

    monkeypatch.setattr(batch, "Slurm", lambda: site)
    assert re.search(says, asyncio.run(batch.go_on("7", mode, ["n3"], "#!/bin/bash\n")))
    assert site.calls[-1] == does or (does is None and len(site.calls) == 1)
