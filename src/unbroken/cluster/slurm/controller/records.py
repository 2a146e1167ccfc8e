"""What Slurm's commands print, as data. Every function here is pure: from a text to records.

Times are asked for as seconds since the Unix epoch (SLURM_TIME_FORMAT=%s). Only what the text forms of all versions have
in common is used: the JSON forms change from release to release, and 22.05 has them for some commands only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ....errors import RunError
from .hostlist import expand

JOB_FORMAT = "%A|%T|%N|%e|%r|%S|%D"
"""%A, not %i: each task of an array has a number of its own."""
STEP_FORMAT = "%i|%j|%N"
_KEY = re.compile(r"(?:^|\s)([A-Z][A-Za-z/:_]*)=")
_REASON = re.compile(r"(?:^|\s)Reason=(.*?)(?:\s*\[([^\]\s@]+)@([^\]]*)\])")
_SUFFIXES = {
    "*": "NOT_RESPONDING", "~": "POWERED_DOWN", "#": "POWERING_UP", "%": "POWERING_DOWN", "$": "MAINTENANCE", "!": "POWER_DOWN",
    "@": "REBOOT_REQUESTED", "^": "REBOOT_ISSUED", "-": "PLANNED",
}  # fmt: skip
_GONE = {"DOWN", "FAIL", "ERROR", "POWERED_DOWN", "POWERING_DOWN", "REBOOT_ISSUED"}
_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_RUNNING = {"RUNNING", "RESIZING", "SIGNALING", "SUSPENDED", "STOPPED"}
KILL_FAILED = "Kill task failed"
"""Why slurmd drains a node: processes of a step outlived kill -9."""


@dataclass(frozen=True)
class NodeRecord:
    """A node. `states` are its base state and its flags, in capitals; `by` is who gave the `reason`, `since` when (seconds
    since the Unix epoch, 0 where that is not told)."""

    name: str
    states: frozenset[str]
    reason: str = ""
    by: str = ""
    since: float = 0.0
    gres: str = ""
    version: str = ""
    cpus: int = 1

    @property
    def responds(self) -> bool:
        return "NOT_RESPONDING" not in self.states

    @property
    def down(self) -> bool:
        return bool(self.states & _GONE)

    @property
    def drained(self) -> bool:
        """Whether it takes no new jobs, by somebody's order: it may still run what it has."""
        return "DRAIN" in self.states or any(s.startswith("DRAIN") for s in self.states)

    def describe(self) -> str:
        """Its state, and why, in words."""
        state = "+".join(sorted(self.states, key=lambda s: (s not in _GONE, s))).lower()
        why = f": {self.reason}" if self.reason else ""
        return f"Slurm says {state}{why}" + (f" (by {self.by})" if self.by else "")


@dataclass(frozen=True)
class JobRecord:
    """A job. `nodes` are those that it has now, `ends` when it will be ended, `starts` when it starts or did (seconds since
    the Unix epoch, None where Slurm knows none); `reason` why it waits."""

    id: str
    state: str
    nodes: tuple[str, ...] = ()
    ends: float | None = None
    reason: str = ""
    starts: float | None = None
    wanted: int = 0

    @property
    def waits(self) -> bool:
        return self.state in _WAITING

    @property
    def runs(self) -> bool:
        return self.state in _RUNNING


@dataclass(frozen=True)
class QueueRecord:
    """What a job that runs may be told before others take its nodes: its partitions, its QOS, and since when it is preempted
    (seconds since the Unix epoch, None where it is not); and the node of its batch script, "" without one."""

    partitions: tuple[str, ...] = ()
    qos: str = ""
    preempted: float | None = None
    batch_host: str = ""


@dataclass(frozen=True)
class PartitionRecord:
    """How a partition takes nodes from jobs: `mode` is Slurm's PreemptMode, `grace_s` the notice that a job has."""

    name: str
    mode: str = "OFF"
    grace_s: float = 0.0

    @property
    def preempts(self) -> bool:
        """Whether its jobs can be ended for others. What is only suspended goes on."""
        return bool({"REQUEUE", "CANCEL"} & set(self.mode.split(",")))


@dataclass(frozen=True)
class SlurmStepRecord:
    """A step of a job, as `JOB.STEP`."""

    id: str
    name: str
    nodes: tuple[str, ...]


def parse_states(text: str) -> frozenset[str]:
    """`MIXED+DRAIN+NOT_RESPONDING`, `IDLE*` or `down*`: base state and flags."""
    found = set()
    for word in text.strip().upper().split("+"):
        while word and word[-1] in _SUFFIXES:
            found.add(_SUFFIXES[word[-1]])
            word = word[:-1]
        if word:
            found.add(word)
    return frozenset(found)


def parse_nodes(text: str) -> dict[str, NodeRecord]:
    """The output of `scontrol -o show node`."""
    nodes = {}
    for line in text.splitlines():
        reason = _REASON.search(line)
        values = _read_pairs(line)
        if "NodeName" not in values:
            continue
        name = values["NodeName"]
        nodes[name] = NodeRecord(
            name,
            parse_states(values.get("State", "UNKNOWN")),
            reason[1] if reason else values.get("Reason", ""),
            reason[2] if reason else "",
            _seconds(reason[3]) or 0.0 if reason else 0.0,
            values.get("Gres", "").replace("(null)", ""),
            values.get("Version", ""),
            int(cpus) if (cpus := values.get("CPUTot", "")).isdigit() else 1,
        )
    return nodes


def parse_jobs(text: str) -> list[JobRecord]:
    """The output of `squeue -h -o JOB_FORMAT`. Raises RunError for a line that has another form."""
    return [
        JobRecord(
            id, state, tuple(expand(nodes)), _seconds(ends), reason, _seconds(starts),
            int(count) if count.isdigit() else 0,
        )
        for id, state, nodes, ends, reason, starts, count in _rows(text, 7, "squeue")
    ]  # fmt: skip


def parse_queue(text: str, job: str) -> QueueRecord:
    """The output of `scontrol -o show job JOB`: of an array it lists all tasks, of which one has the number of the whole."""
    found = [_read_pairs(line) for line in text.splitlines()]
    values = next((v for v in found if v.get("JobId") == job), found[0] if found else {})
    partitions, qos = values.get("Partition", ""), values.get("QOS", "")
    return QueueRecord(
        tuple(p for p in partitions.split(",") if p), "" if qos == "(null)" else qos,
        _seconds(values.get("PreemptTime", "")),
        values.get("BatchHost", "") if values.get("BatchFlag", "0") != "0" else "",
    )  # fmt: skip


def parse_partitions(text: str) -> dict[str, PartitionRecord]:
    """The output of `scontrol -o show partition`."""
    found = [_read_pairs(line) for line in text.splitlines()]
    return {
        v["PartitionName"]: PartitionRecord(
            v["PartitionName"], v.get("PreemptMode", "OFF"), parse_duration(v.get("GraceTime", ""))
        )
        for v in found
        if "PartitionName" in v
    }


def parse_duration(text: str) -> float:
    """Seconds of `20`, `01:30` or `1-00:00:00`, as Slurm prints them; 0 for what is none."""
    days, _, clock = text.strip().rpartition("-")
    words = clock.split(":")
    if not all(w.isdigit() for w in [*words, days or "0"]):
        return 0.0
    seconds = 0
    for word in words:
        seconds = 60 * seconds + int(word)
    return float(86400 * int(days or 0) + seconds)


def parse_steps(text: str) -> list[SlurmStepRecord]:
    """The output of `squeue -s -h -o STEP_FORMAT`. Raises RunError for a line that has another form."""
    return [
        SlurmStepRecord(id, name, tuple(expand(nodes))) for id, name, nodes in _rows(text, 3, "squeue -s")
    ]


def parse_config(text: str) -> Mapping[str, str]:
    """The output of `scontrol show config`."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def _rows(text: str, columns: int, command: str) -> list[list[str]]:
    rows = [line.strip().split("|") for line in text.splitlines() if line.strip()]
    for row in rows:
        if len(row) != columns:
            raise RunError(f"{command} printed a line that cannot be read: {'|'.join(row)[:200]!r}")
    return rows


def _read_pairs(line: str) -> dict[str, str]:
    found = list(_KEY.finditer(line))
    ends = [m.start() for m in found[1:]] + [len(line)]
    return {m[1]: line[m.end() : end].strip() for m, end in zip(found, ends, strict=True)}


def _seconds(text: str) -> float | None:
    return float(text) if text.strip().isdigit() else None
