"""What Slurm prints, as data: the lines of 22.05 were recorded on the testbed; those of later versions have their fields."""

from __future__ import annotations

import pytest

from unbroken.cluster.contract import Cordon
from unbroken.cluster.slurm.controller.cordons import as_reason, find_expired, is_ours, read_cordon
from unbroken.cluster.slurm.controller.hostlist import expand
from unbroken.cluster.slurm.controller.records import (
    JobRecord,
    NodeRecord,
    PartitionRecord,
    QueueRecord,
    SlurmStepRecord,
    parse_config,
    parse_duration,
    parse_jobs,
    parse_nodes,
    parse_partitions,
    parse_queue,
    parse_states,
    parse_steps,
)
from unbroken.errors import InputError, RunError

NODE_22_05 = (
    "NodeName=n2 Arch=x86_64 CoresPerSocket=4  CPUAlloc=0 CPUEfctv=4 CPUTot=4 CPULoad=1.78 AvailableFeatures=(null) "
    "ActiveFeatures=(null) Gres=gpu:4 NodeAddr=127.0.0.1 NodeHostName=vm Port=17002 Version=22.05.8 OS=Linux 6.1 #1 SMP "
    "PREEMPT_DYNAMIC @0  RealMemory=4000 AllocMem=0 FreeMem=17904 Sockets=1 Boards=1 State=DOWN+NOT_RESPONDING ThreadsPerCore=1 "
    "TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=main  BootTime=1795946906 SlurmdStartTime=1795983917 CfgTRES=cpu=4,"
    "mem=4000M,billing=4 AllocTRES= CapWatts=n/a Reason=Not responding [slurm@1795984053]"
)
NODE_LATER = (
    "NodeName=gpu-017 Arch=x86_64 CoresPerSocket=56 CPUAlloc=224 CPUEfctv=224 CPUTot=224 CPULoad=3.10 AvailableFeatures=h100 "
    "ActiveFeatures=h100 Gres=gpu:h100:8(S:0-1) NodeAddr=gpu-017 NodeHostName=gpu-017 Version=24.05.4 OS=Linux 6.8 "
    "RealMemory=2000000 AllocMem=0 FreeMem=1 Sockets=2 Boards=1 State=ALLOCATED+DRAIN+PLANNED ThreadsPerCore=2 TmpDisk=0 "
    "Weight=1 Owner=N/A MCS_label=N/A Partitions=a,b BootTime=1795946906 SlurmdStartTime=1 LastBusyTime=Unknown "
    "ResumeAfterTime=None CfgTRES=cpu=224,gres/gpu=8 AllocTRES=cpu=224 CurrentWatts=0 AveWatts=0 "
    "Reason=XID 79: Rack=12 fell off the bus [alice@1795984000] Comment=see ticket [7] Extra=x"
)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("gpu[008-011],login", ["gpu008", "gpu009", "gpu010", "gpu011", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a-b.c", ["a-b.c"]),
        ("", []),
        ("(null)", []),
    ],
)
def test_a_list_of_nodes_stands_for_names(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize("text", ["n[1-", "n[1-x]", "n[1-99999999]", "a,,b", "r[1-2000]n[1-2000]"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        expand(text)


def test_nodes_have_states_and_a_reason() -> None:
    nodes = parse_nodes(f"{NODE_22_05}\n{NODE_LATER}\n")
    assert nodes["n2"] == NodeRecord(
        "n2",
        frozenset({"DOWN", "NOT_RESPONDING"}),
        "Not responding",
        "slurm",
        1795984053.0,
        "gpu:4",
        "22.05.8",
        4,
    )
    assert nodes["n2"].down and not nodes["n2"].responds and not nodes["n2"].drained
    later = nodes["gpu-017"]
    assert later.reason == "XID 79: Rack=12 fell off the bus" and later.by == "alice" and later.cpus == 224
    assert later.drained and later.responds and not later.down and later.gres == "gpu:h100:8(S:0-1)"
    assert "down+not_responding: Not responding (by slurm)" in nodes["n2"].describe()


@pytest.mark.parametrize(
    ("text", "states"),
    [
        ("down*", {"DOWN", "NOT_RESPONDING"}),
        ("IDLE+CLOUD+POWERED_DOWN", {"IDLE", "CLOUD", "POWERED_DOWN"}),
        ("mixed-", {"MIXED", "PLANNED"}),
        ("draining@", {"DRAINING", "REBOOT_REQUESTED"}),
    ],
)
def test_flags_are_words_or_signs(text: str, states: set[str]) -> None:
    assert parse_states(text) == states


def test_jobs_steps_and_settings() -> None:
    text = "4|RUNNING|n[1-2]|1795984388|None|1795984208|2\n5|PENDING||N/A|JobHeldUser|N/A|4\n"
    running, pending = parse_jobs(text)
    assert running == JobRecord("4", "RUNNING", ("n1", "n2"), 1795984388.0, "None", 1795984208.0, 2)
    assert running.runs and pending.waits and pending.ends is None and pending.nodes == ()
    assert parse_steps("3.0|ub-n1|n1\n3.batch|batch|n1\n") == [
        SlurmStepRecord("3.0", "ub-n1", ("n1",)), SlurmStepRecord("3.batch", "batch", ("n1",)),
    ]  # fmt: skip
    assert (
        parse_config("KillWait                = 5 sec\nProctrackType = proctrack/cgroup\n\n")["KillWait"]
        == "5 sec"
    )
    with pytest.raises(RunError, match="cannot be read"):
        parse_jobs("slurm_load_jobs error: something")


def test_a_preempted_task_of_an_array_its_partition_and_durations() -> None:
    tasks = (
        "JobId=9 ArrayJobId=8 Priority=1 Account=(null) QOS=(null) PreemptEligibleTime=1795984000 PreemptTime=None Partition=main BatchFlag=0 BatchHost=n9 Power=\n"
        "JobId=8 ArrayJobId=8 Priority=1 QOS=high PreemptTime=1795984100 SuspendTime=None Partition=main,urgent AllocNode:Sid=l:1 BatchFlag=1 BatchHost=n3\n"
    )
    assert parse_queue(tasks, "8") == QueueRecord(("main", "urgent"), "high", 1795984100.0, "n3")
    assert parse_queue(tasks, "9") == QueueRecord(("main",))
    assert parse_queue("", "9") == QueueRecord()
    line = "PartitionName=main Default=YES GraceTime=20 Hidden=NO PreemptMode=GANG,REQUEUE State=UP"
    assert parse_partitions(f"{line}\n") == {"main": PartitionRecord("main", "GANG,REQUEUE", 20.0)}
    assert parse_partitions(line)["main"].preempts and not PartitionRecord("x", "SUSPEND").preempts
    durations = ("20", "01:30", "1-00:00:10", "UNLIMITED", "")
    assert [parse_duration(t) for t in durations] == [20.0, 90.0, 86410.0, 0.0, 0.0]


def _drained(reason: str, by: str = "root") -> NodeRecord:
    line = f"NodeName=n1 State=IDLE+DRAIN Reason={reason} [{by}@1795984000]"
    return parse_nodes(line)["n1"]


def test_a_drain_carries_owner_reason_and_expiry() -> None:
    mine = Cordon("n1", "unbroken", "XID 79 twice", 1795984000.25)
    assert read_cordon(_drained(as_reason(mine))) == mine
    forever = Cordon("n1", "alice", 'a=b [c] "d"\n e', None)
    assert read_cordon(_drained(as_reason(forever))) == Cordon("n1", "alice", "a=b c d e", None)
    theirs = _drained("new cables", by="bob")
    assert read_cordon(theirs) == Cordon("n1", "bob", "new cables") and not is_ours(theirs)
    assert read_cordon(NodeRecord("n1", frozenset({"IDLE"}))) is None
    drained = {"n1": _drained(as_reason(mine))}
    assert find_expired(drained, 1795984001) == ["n1"] and find_expired(drained, 1795983999) == []
    assert find_expired({"n1": theirs}, 1e12) == []
