"""A set of Slurm's commands without Slurm: one job on nodes that a test breaks. `srun` runs its program on this machine."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.cluster.slurm.controller.commands import Slurm, SlurmRefused
from unbroken.version import __version__

_SRUN = """#!/bin/sh
# Drops srun's own options, notes the step, and is the program.
for word in "$@"; do
  case $word in
    --job-name=*) name=${word#*=};;
    --nodelist=*) export SLURMD_NODENAME=${word#*=};;
    --*) ;;
    *) break;;
  esac
  shift
done
echo "$SLURMD_NODENAME $$" >"@FOLDER@/$name"
exec "$@"
"""


@dataclass
class FakeNode:
    states: str = "MIXED"
    reason: str = ""
    gpus: int = 0
    version: str = __version__


@dataclass
class FakeSlurm(Slurm):
    """Answers as Slurm 22.05 does, from what a test sets. `operator` is whether this user may drain nodes."""

    folder: Path
    nodes: dict[str, FakeNode]
    job: str = "7"
    job_nodes: list[str] | None = None
    state: str = "RUNNING"
    ends: str = "N/A"
    preempted: str = "None"
    grace: int = 20
    operator: bool = True
    contained: bool = True
    calls: list[tuple[str, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        (self.folder / "bin").mkdir()
        (self.folder / "steps").mkdir()
        srun = self.folder / "bin" / "srun"
        srun.write_text(_SRUN.replace("@FOLDER@", str(self.folder / "steps")))
        srun.chmod(0o755)

    async def call(
        self, *argv: str, within_s: float | None = None, env: Mapping[str, str] | None = None
    ) -> str:
        self.calls.append(argv)
        match argv:
            case ("squeue", "-s", *_):
                return "\n".join(
                    f"{self.job}.{i}|{name}|{node}" for i, (name, node, _) in enumerate(self.steps())
                )
            case ("squeue", *_):
                names = ",".join(self.job_nodes if self.job_nodes is not None else self.nodes)
                return f"{self.job}|{self.state}|{names}|{self.ends}|None|1700000000|{len(self.nodes)}"
            case ("scontrol", "show", "config"):
                held = "cgroup" if self.contained else "linuxproc"
                accounting = "AccountingStorageType = accounting_storage/none\nSlurmUser = slurm(64030)"
                return f"PreemptType = preempt/partition_prio\nProctrackType           = proctrack/{held}\n{accounting}"
            case ("scontrol", "-o", "show", "job", job):
                return f"JobId={job} QOS=(null) EndTime=Unknown PreemptTime={self.preempted} Partition=main Power="
            case ("scontrol", "-o", "show", "partition"):
                return f"PartitionName=main GraceTime={self.grace} PreemptMode=REQUEUE State=UP"
            case ("scontrol", "-o", "show", "node", *_):
                return "\n".join(self._show(name, node) for name, node in self.nodes.items())
            case ("scontrol", "update", node, state, *reason):
                return self._update(node, state, reason)
            case ("scancel", "--signal=KILL", step):
                self.kill(self.steps()[int(step.partition(".")[2])][2])
                return ""
            case ("srun", *words):
                listed = next(w for w in words if w.startswith("--nodelist=")).partition("=")[2]
                return "\n".join(self._survey(n) for n in listed.split(","))
        raise AssertionError(f"unknown command {argv}")

    def _show(self, name: str, node: FakeNode) -> str:
        reason = f" Reason={node.reason} [root@1700000000]" if node.reason else ""
        return f"NodeName={name} CPUTot=4 Gres=gpu:4 Version=22.05.8 State={node.states} Partitions=main {reason}"

    def _update(self, node: str, state: str, reason: list[str]) -> str:
        if not self.operator:
            raise SlurmRefused("scontrol update", "slurm_update error: Invalid user id")
        found = self.nodes[node.removeprefix("nodename=")]
        found.states = found.states.replace("+DRAIN", "") + ("+DRAIN" if state == "state=drain" else "")
        found.reason = reason[0].removeprefix("reason=") if reason else ""
        return ""

    def _survey(self, name: str) -> str:
        node = self.nodes[name]
        return json.dumps({
            "kind": "survey", "node": name, "version": node.version, "gpus": node.gpus, "python": "python3",
            "missing": "", "more": "of a later version",
        })  # fmt: skip

    def steps(self) -> list[tuple[str, str, int]]:
        """Name, node and process of each step that runs."""
        found = []
        for path in sorted((self.folder / "steps").iterdir()):
            node, pid = path.read_text().split()
            if _children(int(pid)):
                found.append((path.name, node, int(pid)))
        return found

    def kill(self, pid: int) -> None:
        """All processes of a step, as a cgroup would."""
        for child in _children(pid):
            subprocess.run(["kill", "-9", str(child)], check=False, capture_output=True)


def _children(pid: int) -> list[int]:
    """A process that lives and all below it."""
    try:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
            return []
        below = [c for p in Path(f"/proc/{pid}/task").glob("*/children") for c in p.read_text().split()]
    except OSError:
        return []
    return [pid, *(c for b in below for c in _children(int(b)))]


def on_path(slurm: FakeSlurm) -> str:
    """The PATH with its srun in front."""
    return f"{slurm.folder / 'bin'}:{os.environ['PATH']}"
