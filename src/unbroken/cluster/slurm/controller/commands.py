"""Slurm's own commands, each with a deadline; what they say when they refuse comes back in words."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from functools import cached_property

from ....errors import RunError
from ...contract import ClusterAway
from .hostlist import join
from .records import (
    JOB_FORMAT,
    STEP_FORMAT,
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
    parse_steps,
)

NEEDED = ("srun", "squeue", "scontrol", "scancel")
_WITHIN_S = 30.0
_AWAY = re.compile(
    r"Unable to contact slurm controller|Socket timed out on send/recv|Communication (?:connection|shutdown) failure"
    r"|Slurm backup controller in standby mode|Zero Bytes were transmitted or received|Message (?:send|receive) failure"
    r"|Transport endpoint is not connected|Could not establish a configuration source"
)
"""What its commands say where the controller, or the host that it is on, does not answer (slurm_errno.c; the last one where the
controller has the configuration too)."""
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER")
_OF_A_STEP = ("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SALLOC_", "SCONTROL_", "PMI_", "PMIX_")


class SlurmRefused(RunError):
    """A command of Slurm that failed; `said` is what it said of that, `printed` its output."""

    def __init__(self, command: str, said: str, printed: str = "") -> None:
        super().__init__(f"{command} failed: {said or 'it said nothing'}")
        self.said, self.printed = said, printed


class NoAnswer(ClusterAway):
    """A command of Slurm that did not end within its deadline: its controller is busy or gone."""


class NotReached(SlurmRefused, ClusterAway):
    """A command of Slurm that found no controller."""


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without what Slurm has set for the step that we run in: a step that is started from it would take its
    node list, its tasks and its binding for its own defaults."""
    return {k: v for k, v in environ.items() if k in _KEPT or not k.startswith(_OF_A_STEP)}


def is_contained(config: Mapping[str, str]) -> bool:
    """Whether Slurm holds all processes of a step by a cgroup: the end of a step is the end of all of them then."""
    return config.get("ProctrackType") == "proctrack/cgroup"


def find_missing() -> list[str]:
    """Those of Slurm's commands that are not on the PATH."""
    return [name for name in NEEDED if shutil.which(name) is None]


class Slurm:
    """Asks and orders. Raises Refused and NoAnswer."""

    def __init__(self, *, within_s: float = _WITHIN_S) -> None:
        self._within_s = within_s

    @cached_property
    def environment(self) -> dict[str, str]:
        """What the commands are run with. Times come as seconds since the Unix epoch."""
        return clean_environment(os.environ) | {"SLURM_TIME_FORMAT": "%s"}

    async def call(
        self,
        *argv: str,
        within_s: float | None = None,
        env: Mapping[str, str] | None = None,
        text: str | None = None,
    ) -> str:
        """Runs a command with `text` as its input; returns what it printed."""
        within_s = within_s or self._within_s
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL if text is None else asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=dict(env) if env is not None else self.environment,
            )
        except OSError as e:
            raise RunError(
                f"{argv[0]} cannot be run: {e.strerror}", hint="Is this a host of a Slurm cluster?"
            ) from e
        try:
            async with asyncio.timeout(within_s):
                out, err = await process.communicate(None if text is None else text.encode())
        except TimeoutError:
            raise NoAnswer(f"no answer from {' '.join(argv[:3])} within {within_s:g} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode:
            printed = out.decode(errors="replace")
            said = " ".join(err.decode(errors="replace").split()) or printed.strip()
            kind = NotReached if _AWAY.search(said) else SlurmRefused
            raise kind(" ".join(argv[:2]), said, printed)
        return out.decode(errors="replace")

    async def find_job(self, job: str) -> JobRecord | None:
        """A job that waits or runs, or a task of an array; None where the controller has it no more."""
        try:
            jobs = parse_jobs(await self.call("squeue", "-h", "-j", job, "-o", JOB_FORMAT))
        except SlurmRefused as e:
            if "nvalid job id" in e.said:
                return None
            raise
        # Of an array one task has the number of the whole, by which all of them are listed.
        return next((j for j in jobs if j.id == job), jobs[0] if "_" in job and jobs else None)

    async def list_nodes(self, names: Iterable[str] = ()) -> dict[str, NodeRecord]:
        """Nodes as the controller sees them; all without names."""
        wanted = join(names)
        return parse_nodes(await self.call("scontrol", "-o", "show", "node", *([wanted] if wanted else [])))

    async def list_steps(self, job: str) -> list[SlurmStepRecord]:
        """The steps of a job of which the controller has not heard the end."""
        try:
            return parse_steps(await self.call("squeue", "-s", "-h", "-j", job, "-o", STEP_FORMAT))
        except SlurmRefused as e:
            if "nvalid job id" in e.said:
                return []
            raise

    async def read_config(self) -> Mapping[str, str]:
        """What the site has set."""
        return parse_config(await self.call("scontrol", "show", "config"))

    async def read_queue(self, job: str) -> QueueRecord:
        """Partitions and QOS of a job, and whether it is preempted."""
        return parse_queue(await self.call("scontrol", "-o", "show", "job", job), job)

    async def list_partitions(self) -> Mapping[str, PartitionRecord]:
        """All partitions."""
        return parse_partitions(await self.call("scontrol", "-o", "show", "partition"))

    async def read_grace(self, queue: QueueRecord) -> float | None:
        """Seconds from the moment when such a job is preempted to its end, the shortest of its partitions; None where that is
        for its QOS to say, and cannot be read here."""
        if (await self.read_config()).get("PreemptType") == "preempt/qos":
            try:
                said = await self.call(
                    "sacctmgr", "-nP", "show", "qos", f"name={queue.qos}", "format=gracetime"
                )
            except RunError:
                return None
            return parse_duration(said.strip() or "0")
        known = await self.list_partitions()
        return min((known[p].grace_s for p in queue.partitions if p in known), default=0.0)

    async def kill_step(self, step: str) -> None:
        """Kills all processes of a step; does nothing where it has ended."""
        with contextlib.suppress(SlurmRefused):
            await self.call("scancel", "--signal=KILL", step)
